"""Train draft heads: the same as `python -m hf_specheads.trainer --config recipe.yaml key=value ...`.

Several processes: `accelerate launch -m hf_specheads.trainer --config recipe.yaml`.
"""

from __future__ import annotations

import argparse
import runpy
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after `train` is the trainer's; this only makes the command show in the overview."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the trainer")


def run(args: argparse.Namespace) -> int:
    """As [`hand_over`]."""
    return hand_over(args.arguments)


def hand_over(arguments: list[str], command: str = "train", module: str = "hf_specheads.trainer") -> int:
    """Runs the entry point of a module of the trainer with these arguments; returns its exit code."""
    saved, sys.argv = sys.argv, [f"specheads {command}", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = saved
    return 0
