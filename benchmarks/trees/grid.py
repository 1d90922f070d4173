"""Many trees against each other: a grid of them, and stages that keep the fastest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftHead, DraftTreeConfig

from ..setup import Inputs
from ..sides import compare, plain_and

TOGETHER = 6  # trees measured next to the same plain generations


def add_grid_arguments(
    parser: argparse.ArgumentParser,
    depths: Sequence[int],
    top_k: Sequence[int],
    total_tokens: Sequence[int],
    chains: Sequence[int],
) -> None:
    """Of which trees the grid is made."""
    parser.add_argument("--depths", type=int, nargs="+", default=depths)
    parser.add_argument("--top_k", type=int, nargs="+", default=top_k)
    parser.add_argument("--total_tokens", type=int, nargs="+", default=total_tokens)
    parser.add_argument("--chains", type=int, nargs="*", default=chains, help="depths of chains to try")


def grid(args: argparse.Namespace, deepest: int | None) -> list[DraftTreeConfig]:
    """Chains and dynamic trees, none deeper than the heads draft, none with more nodes than its levels hold or fewer
    than a path needs."""
    chains = [depth for depth in args.chains if deepest is None or depth <= deepest]
    trees = [DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1) for depth in chains]
    for depth in args.depths if deepest is None else (depth for depth in args.depths if depth <= deepest):
        for top_k in args.top_k:
            for total in args.total_tokens:
                if depth < total <= 1 + top_k + (depth - 1) * top_k * top_k:
                    trees.append(DraftTreeConfig(depth=depth, top_k=top_k, total_tokens=total))
    return trees


def compare_trees(
    target: PreTrainedModel, heads: DraftHead, trees: dict[str, DraftTreeConfig], prompts: list[Inputs],
    max_new_tokens: int, repeats: int, **sampling: Any,
) -> dict[str, Any]:  # fmt: skip
    """Named trees and plain generation, taking turns; every tree with what it measured."""
    sides = plain_and({name: heads.with_tree(**tree.to_dict()) for name, tree in trees.items()}, **sampling)
    found = compare(target, sides, prompts, max_new_tokens, repeats)
    return {name: {"tree": tree.to_dict(), **found[name]} for name, tree in trees.items()}


def fastest(
    target: PreTrainedModel, heads: DraftHead, trees: list[DraftTreeConfig], prompts: list[Inputs],
    max_new_tokens: int, stages: Sequence[tuple[int, int | None, int]], **sampling: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The ranking of the last stage.

    Args:
        target: The target.
        heads: Its heads.
        trees: Where to begin. A few at a time run next to plain generations.
        prompts: Prompts.
        max_new_tokens: Tokens per prompt.
        stages: Trees to keep, prompts, and repeats of every stage.
        **sampling: Options of a sampled run; greedy without.
    """
    ranking: list[dict[str, Any]] = []
    for keep, num_prompts, repeats in stages:
        ranking = []
        for start in range(0, len(trees), TOGETHER):
            group = {str(place): tree for place, tree in enumerate(trees[start : start + TOGETHER])}
            found = compare_trees(target, heads, group, prompts[:num_prompts], max_new_tokens, repeats, **sampling)
            ranking += found.values()
        ranking = sorted(ranking, key=lambda row: -row["speed_up"])[:keep]
        trees = [DraftTreeConfig(**row["tree"]) for row in ranking]
        print(f"{len(trees)} trees left, the best so far: {trees[0]}", file=sys.stderr, flush=True)
    return ranking
