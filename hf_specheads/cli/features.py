"""Write the target's features of a data set to disk, for training that does not run the target.

The same as `python -m hf_specheads.trainer.features ...`.
"""

from __future__ import annotations

import argparse

from .train import hand_over

MODULE = "hf_specheads.trainer.features"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after `features` is the trainer's; this only makes the command show in the overview."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")


def run(args: argparse.Namespace) -> int:
    """As [`hand_over`]."""
    return hand_over(args.arguments, "features", MODULE)
