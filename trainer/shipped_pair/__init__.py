"""The project's own trained pair: one command each rebuilds corpus, target, right answers and draft heads.

    python -m hf_specheads.trainer.shipped_pair.corpus        --output runs/held_out.jsonl --held_out
    python -m hf_specheads.trainer.shipped_pair.target        --output_dir runs/target
    python -m hf_specheads.trainer.shipped_pair.right_answers --target runs/target/final
    python -m hf_specheads.trainer.shipped_pair.heads         --target runs/target/final --output_dir runs/heads

All training data are chats written by programs that know the right answers (`tasks/`), and the source of the standard
library, which every Python installation contains.
"""
