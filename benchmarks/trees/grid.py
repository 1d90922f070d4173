"""Tools to compare many trees: a grid, stages that keep the fastest trees, and prompts to tune on."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from hf_specheads import DraftHead, DraftTreeConfig
from hf_specheads.tree.published import EAGLE_CHOICES

from ..results import Result
from ..setup import Inputs, load_pair, load_prompts
from ..sides import compare, plain_and

TOGETHER = 6  # number of trees measured next to the same plain generations


def add_grid_arguments(parser: argparse.ArgumentParser, **sizes: Sequence[int]) -> None:
    """Adds arguments for the trees of the grid, with their defaults: `depths`, `top_k` and `total_tokens` of dynamic
    trees, and the depths of `chains`."""
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, nargs="*", default=default, help="values for the trees of the grid")


def add_tuning_arguments(parser: argparse.ArgumentParser, limit: int) -> None:
    """Adds arguments for the prompts that trees are made on. They differ from the prompts that trees are compared
    on."""
    parser.add_argument("--tuning", nargs="+", default=["chats_tuning"], help="prompt sets that trees are tuned on")
    parser.add_argument("--tuning_limit", type=int, default=limit, help="use only the first N prompts of these sets")


def of_all_heads(measure_heads: Callable[..., Result]) -> Callable[[argparse.Namespace], Result]:
    """Turns `measure_heads(target, heads, prompts, tuning, args)` into a measurement of all heads by name. `tuning`
    holds the token ids of the prompts to make trees on, int64 [1, T] each."""

    def measure(args: argparse.Namespace) -> Result:
        target, heads, prompts = load_pair(args, every_round=True)
        others = load_prompts(args.tuning, AutoTokenizer.from_pretrained(args.target), args.tuning_limit)
        common = (prompts, [inputs["input_ids"] for inputs in others], args)
        return {"heads": {name: measure_heads(target, one, *common) for name, one in heads.items()}}

    return measure


def published_static(deepest: int | None) -> DraftTreeConfig:
    """Returns EAGLE-1's static tree, cut to the depth that the heads can draft (`None`: any depth)."""
    choices = tuple(path for path in EAGLE_CHOICES if deepest is None or len(path) <= deepest)
    return DraftTreeConfig(kind="static", choices=choices)


def grid(args: argparse.Namespace, deepest: int | None, lookup: Sequence[int] = (0,)) -> list[DraftTreeConfig]:
    """Returns chains and dynamic trees, each with all numbers of copied nodes (`lookup`). Leaves out trees that are
    deeper than the heads can draft, have more nodes than their levels hold, or have fewer nodes than a full path
    needs."""
    trees = [DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1) for depth in args.chains]
    trees += [
        DraftTreeConfig(depth=depth, top_k=top_k, total_tokens=total)
        for depth, top_k, total in itertools.product(args.depths, args.top_k, args.total_tokens)
        if depth < total <= 1 + top_k + (depth - 1) * top_k * top_k
    ]
    fitting = [tree for tree in trees if deepest is None or tree.depth <= deepest]
    return [tree.replace(lookup=copied) for copied in lookup for tree in fitting]


def compare_trees(
    target: PreTrainedModel, heads: DraftHead, trees: dict[str, DraftTreeConfig], prompts: list[Inputs],
    max_new_tokens: int, repeats: int, **sampling: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compares named trees and plain generation, taking turns. Returns every tree with its measurements."""
    sides = plain_and({name: heads.with_tree(**tree.to_dict()) for name, tree in trees.items()}, **sampling)
    found = compare(target, sides, prompts, max_new_tokens, repeats)
    return {name: {"tree": tree.to_dict(), **found[name]} for name, tree in trees.items()}


def fastest(
    target: PreTrainedModel, heads: DraftHead, trees: list[DraftTreeConfig], prompts: list[Inputs],
    max_new_tokens: int, stages: Sequence[tuple[int, int, int]], **sampling: Any,
) -> DraftTreeConfig:  # fmt: skip
    """Returns the tree that remains after all stages.

    Args:
        target: The target.
        heads: Its draft heads.
        trees: The trees to start with. Groups of a few trees run next to plain generations.
        prompts: Prompts.
        max_new_tokens: Tokens per prompt.
        stages: For every stage: trees to keep, number of prompts, and repeats.
        **sampling: Options of sampling; greedy without any.
    """
    for keep, num_prompts, repeats in stages:
        rows: list[dict[str, Any]] = []
        for start in range(0, len(trees), TOGETHER):
            group = {str(place): tree for place, tree in enumerate(trees[start : start + TOGETHER])}
            found = compare_trees(target, heads, group, prompts[:num_prompts], max_new_tokens, repeats, **sampling)
            rows += found.values()
        rows.sort(key=lambda row: -row["speed_up"])
        trees = [DraftTreeConfig(**row["tree"]) for row in rows[:keep]]
        print(f"{len(trees)} trees left, the best so far: {trees[0]}", file=sys.stderr, flush=True)
    return trees[0]
