"""The project's own trained pair: corpus, tokenizer, target and heads, rebuilt by one command each.

    python -m hf_specheads.trainer.shipped_pair.target   --output_dir runs/target
    python -m hf_specheads.trainer.shipped_pair.heads    --target runs/target --output_dir runs/heads

Everything is trained from text that every Python installation carries: the standard library's own source.
"""
