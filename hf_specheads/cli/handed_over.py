"""Commands that pass all their arguments, `--help` included, to a module of the trainer."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

TRAIN = """\
Train draft heads: the same as `python -m hf_specheads.trainer --config recipe.yaml key=value ...`.

Several processes: `accelerate launch -m hf_specheads.trainer --config recipe.yaml`."""
REGENERATE = """\
Let the target answer the prompts of a data set: what draft heads should learn from.

The same as `python -m hf_specheads.trainer.regenerate ...`."""
FEATURES = """\
Write the target's features of a data set to disk, for training that does not run the target.

The same as `python -m hf_specheads.trainer.features ...`."""


class HandedOver:
    """A command that runs a module of the trainer. It has the same interface as the modules of other commands.

    Args:
        name: Name of the command.
        module: Module that is run.
        doc: Description of the command for the overview of commands.
    """

    def __init__(self, name: str, module: str, doc: str):
        self.name, self.module, self.__doc__ = name, module, doc

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds a placeholder, so that the command appears in the overview."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")

    def run(self, args: argparse.Namespace) -> int:
        return self.hand_over(args.arguments)

    def hand_over(self, arguments: Sequence[str]) -> int:
        """Runs the module as a program with these arguments; returns its exit code."""
        saved, sys.argv = sys.argv, [f"specheads {self.name}", *arguments]
        try:
            runpy.run_module(self.module, run_name="__main__", alter_sys=False)
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            sys.argv = saved
        return 0


HANDED_OVER = {
    "train": HandedOver("train", "hf_specheads.trainer", TRAIN),
    "regenerate": HandedOver("regenerate", "hf_specheads.trainer.regenerate", REGENERATE),
    "features": HandedOver("features", "hf_specheads.trainer.features", FEATURES),
}
