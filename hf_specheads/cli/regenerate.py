"""Let the target answer the prompts of a data set: what draft heads should learn from.

The same as `python -m hf_specheads.trainer.regenerate ...`.
"""

from __future__ import annotations

import argparse

from .train import hand_over

MODULE = "hf_specheads.trainer.regenerate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after `regenerate` is the trainer's; this only makes the command show in the overview."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")


def run(args: argparse.Namespace) -> int:
    """As [`hand_over`]."""
    return hand_over(args.arguments, "regenerate", MODULE)
