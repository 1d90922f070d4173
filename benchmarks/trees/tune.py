"""Tuned draft trees against the default, the published one and the best of an exhaustive grid, with the same heads.

    python -m benchmarks tune --heads model_cards/poss3 model_cards/eagle model_cards/eagle3 model_cards/medusa

`heads.tune` sees every other prompt only, or other sets (`--tuning`): a tree suits the texts it was tuned on. The grid
runs on the prompts that are left, in stages: every stage measures the trees still there on more prompts and keeps the
fastest. In the end its best, the tuned tree, the tree saved with the heads, the default of the device and the method's
published tree run against each other in alternation.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftHead, DraftTreeConfig
from hf_specheads.tree.default import default_tree
from hf_specheads.tree.published import EAGLE_CHOICES

from ..results import Result, column_table, draft_tree, footnote, number, same_text
from ..setup import Inputs, add_generation_arguments, load_all_heads, load_prompts, load_target, settings
from .grid import add_grid_arguments, compare_trees, fastest, grid

# Trees to keep, prompts and repeats of the grid's stages.
STAGES = ((12, 1, 1), (4, 4, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair, prompts to compare and to tune on, and trees."""
    add_generation_arguments(parser, heads=["poss3"], prompts=["chats"])
    parser.set_defaults(limit=10, max_new_tokens=64)
    parser.add_argument("--tuning", nargs="+", help="prompt sets to tune on; default every other one of --prompts")
    parser.add_argument("--tuning_limit", type=int, default=12)
    add_grid_arguments(parser, [1, 2, 3, 4, 6, 8], [2, 3, 6], [6, 10, 16, 32], chains=[1, 2, 3, 4, 6, 8])


def published_static(deepest: int | None) -> DraftTreeConfig:
    """EAGLE-1's static tree, no deeper than the heads draft."""
    choices = tuple(path for path in EAGLE_CHOICES if deepest is None or len(path) <= deepest)
    return DraftTreeConfig(kind="static", choices=choices)


def measure_heads(
    target: PreTrainedModel, heads: DraftHead, prompts: list[Inputs], tuning: list[Inputs], args: argparse.Namespace
) -> dict[str, Any]:
    """One head: what tuning promised and took, and the final comparison."""
    saved, deepest = heads.tree_config, heads.max_draft_positions
    ids = [inputs["input_ids"] for inputs in tuning]
    tuned = heads.tune(target, ids, max_new_tokens=args.max_new_tokens, repeats=args.repeats)
    print(tuned, file=sys.stderr, flush=True)
    candidates = [*grid(args, deepest), published_static(deepest)]
    best = fastest(target, heads, candidates, prompts, args.max_new_tokens, STAGES)[0]
    trees = {
        "tuned": tuned.tree,
        "best of the grid": DraftTreeConfig(**best["tree"]),
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


def spread(prompts: list[Inputs], most: int | None) -> list[Inputs]:
    """At most so many prompts, from all parts of the list."""
    count = min(most or len(prompts), len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All heads."""
    target, tokenizer = load_target(args)
    prompts = load_prompts(args.prompts, tokenizer)
    tuning = load_prompts(args.tuning or (), tokenizer)
    if not tuning:
        tuning, prompts = prompts[::2], prompts[1::2] or prompts
    tuning, prompts = spread(tuning, args.tuning_limit), spread(prompts, args.limit)
    heads = load_all_heads(target, args.heads, every_round=True)
    return {
        **settings(args, prompts),
        "heads": {name: measure_heads(target, one, prompts, tuning, args) for name, one in heads.items()},
    }


def table(result: Result) -> str:
    """Tuned, grid's best, saved, default and published trees of each head."""
    columns = {
        "": lambda row: draft_tree(row["tree"]), "tau": ("acceptance_length", 2),
        "tokens/s": ("tokens_per_second", 1), "speed-up": ("speed_up", 2, "x"), "same text": same_text,
    }  # fmt: skip
    trees = {head: found["trees"] for head, found in result["heads"].items()}
    notes = [
        f"{head}: tuned / best of {found['grid_size']} = {number(found['tuned_over_grid'], 3)}, "
        f"{found['candidates']} trees considered in {number(found['tuning_seconds'], 0)} s"
        for head, found in result["heads"].items()
    ]
    return column_table(columns, trees, "heads", "tree") + footnote(result, *notes, "{num_prompts} prompts, {dtype}")
