"""Tuned draft trees against the default, the published tree and the best of an exhaustive grid, with the same heads.

    python -m benchmarks tune --heads model_cards/poss3 model_cards/eagle model_cards/eagle3 model_cards/medusa

`heads.tune` sees prompts of the same kind (`--tuning`), but none of those that the trees are compared on. The grid
runs on the latter in stages: every stage measures the remaining trees on more prompts and keeps the fastest. Finally
the grid's best tree, the tuned tree, the tree saved with the heads, the default of the device and the method's
published tree are compared in alternation.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import DraftHead
from hf_specheads.tree.default import default_tree

from ..results import Result, column_table, draft_tree, footnote, number, same_text
from ..setup import Inputs, add_generation_arguments
from . import grid
from .grid import compare_trees, fastest, of_all_heads, published_static

# (trees to keep, prompts, repeats) of each stage of the grid.
STAGES = ((12, 1, 1), (4, 4, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, the prompts to compare and to tune on, and the trees."""
    add_generation_arguments(parser, heads=["poss3"], prompts=["chats"])
    parser.set_defaults(limit=10, max_new_tokens=64)
    grid.add_tuning_arguments(parser, limit=12)
    depths = [1, 2, 3, 4, 6, 8]
    grid.add_grid_arguments(parser, depths=depths, top_k=[2, 3, 6], total_tokens=[6, 10, 16, 32], chains=depths)


@of_all_heads
def measure(
    target: PreTrainedModel, heads: DraftHead, prompts: list[Inputs], tuning: list[torch.Tensor],
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Measures one head: the result and cost of tuning, and the final comparison."""
    saved, deepest = heads.tree_config, heads.max_draft_positions
    tuned = heads.tune(target, tuning, max_new_tokens=args.max_new_tokens, repeats=args.repeats)
    print(tuned, file=sys.stderr, flush=True)
    candidates = [*grid.grid(args, deepest), published_static(deepest)]
    trees = {
        "tuned": tuned.tree,
        "best of the grid": fastest(target, heads, candidates, prompts, args.max_new_tokens, STAGES),
        "saved": saved,
        "default of the device": default_tree(heads.device, heads.published_tree, deepest),
        "published": heads.published_tree,
    }
    found = compare_trees(target, heads, trees, prompts, args.max_new_tokens, args.repeats)
    return {
        "trees": found,
        "grid_size": len(candidates),
        "candidates": tuned.candidates,
        "tuning_seconds": tuned.seconds,
        "predicted": tuned.trees[0].predicted,
        "tuned_over_grid": found["tuned"]["speed_up"] / found["best of the grid"]["speed_up"],
    }


def table(result: Result) -> str:
    """One row per head and tree: tuned, best of the grid, saved, default and published."""
    columns = {
        "": lambda row: draft_tree(row["tree"]), "tau": ("acceptance_length", 2),
        "tokens/s": ("tokens_per_second", 1), "speed-up": ("speed_up", 2, "x"), "same text": same_text,
    }  # fmt: skip
    trees = {head: found["trees"] for head, found in result["heads"].items()}
    notes = [
        f"{head}: speed-up of tuned / best of {found['grid_size']} trees = {number(found['tuned_over_grid'], 3)}, "
        f"tuning considered {found['candidates']} trees in {number(found['tuning_seconds'], 0)} s"
        for head, found in result["heads"].items()
    ]
    return column_table(columns, trees, "heads", "tree") + footnote(result, *notes, "{num_prompts} prompts, {dtype}")
