"""The project's own trained pair: corpus, tokenizer, target and heads, rebuilt by one command each.

    python -m hf_specheads.trainer.shipped_pair.corpus        --output runs/held_out.jsonl --held_out
    python -m hf_specheads.trainer.shipped_pair.target        --output_dir runs/target
    python -m hf_specheads.trainer.shipped_pair.right_answers --target runs/target/final
    python -m hf_specheads.trainer.shipped_pair.heads         --target runs/target/final --output_dir runs/heads

Everything is trained from chats that programs write (`tasks/`), whose right answers they know, and from text that
every Python installation carries: the standard library's own source.
"""
