"""Which draft tree is fastest here: tries a grid of trees and prints the best for these heads on this machine.

    python -m benchmarks choose --heads model_cards/poss3

Runs in stages: every stage measures the trees that are left on more prompts and repeats and keeps the fastest. Uses
`chats_tuning.jsonl`, so that numbers reported on the other prompts are not the ones the tree was chosen by.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..results import Result, column_table, draft_tree, footnote
from ..setup import add_generation_arguments, load_pair, settings
from .grid import add_grid_arguments, fastest, grid

# Trees to keep, prompts, repeats; the last stage measures what is left.
STAGES = ((16, 3, 1), (5, 6, 2), (5, None, 3))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair, prompts, and trees."""
    add_generation_arguments(parser, heads=["poss3"], prompts=["chats_tuning"], repeats=None)
    add_grid_arguments(parser, [3, 4, 5, 6], [2, 3, 4, 6], [6, 8, 12, 16, 24, 32], chains=[2, 3, 4, 5, 6])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The first heads."""
    target, loaded, prompts = load_pair(args, every_round=True)
    name, heads = next(iter(loaded.items()))
    trees = grid(args, heads.max_draft_positions)
    ranking = fastest(target, heads, trees, prompts, args.max_new_tokens, STAGES)
    return {"heads": name, **settings(args, prompts), "candidates": len(trees), "ranking": ranking}


def table(result: Result) -> str:
    """The fastest trees."""
    columns = {
        "draft tree": lambda row: draft_tree(row["tree"]), "tokens/s": ("tokens_per_second", 0),
        "speed-up": ("speed_up", 2, "x"), "tau": ("acceptance_length", 2),
    }  # fmt: skip
    prompts = ", ".join(result["prompts"])
    note = f"{{heads}}, the best of {{candidates}} trees, prompts: {prompts}"
    return column_table(columns, result["ranking"]) + footnote(result, note)
