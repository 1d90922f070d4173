"""Which draft tree is fastest here: tries a grid of trees and prints the best for these heads on this machine.

    python -m benchmarks.choose_tree --heads model_cards/poss3

Runs in stages: every stage measures the trees that are left on more prompts and repeats and keeps the fastest. Uses
`tuning.jsonl`, so that numbers reported on the other prompts are not the ones the tree was chosen by.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftTreeConfig
from hf_specheads.heads.base import DraftHead

from .common import (
    Inputs,
    Side,
    argument_parser,
    display_name,
    load_bound_heads,
    load_prompts,
    load_target,
    run_interleaved,
    summarise,
    write_result,
)

PLAIN = "plain"
TOGETHER = 4  # trees measured next to the same plain generations
# Trees to keep, prompts, repeats; the last stage measures what is left.
STAGES = ((16, 3, 1), (5, 6, 2), (5, None, 3))


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/poss3"], prompts=["tuning"])
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 4, 5, 6])
    parser.add_argument("--top_k", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--total_tokens", type=int, nargs="+", default=[6, 8, 12, 16, 24, 32])
    parser.add_argument("--chains", type=int, nargs="*", default=[2, 3, 4, 5, 6], help="depths of chains to try")
    return parser.parse_args()


def grid(args: argparse.Namespace) -> list[DraftTreeConfig]:
    """All trees to try: none with more nodes than its levels hold, nor with fewer than a path needs."""
    trees = [DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1) for depth in args.chains]
    for depth in args.depths:
        for top_k in args.top_k:
            for total in args.total_tokens:
                if depth < total <= 1 + top_k + (depth - 1) * top_k * top_k:
                    trees.append(DraftTreeConfig(kind="dynamic", depth=depth, top_k=top_k, total_tokens=total))
    return trees


def rank(
    target: PreTrainedModel,
    heads: DraftHead,
    trees: list[DraftTreeConfig],
    prompts: list[Inputs],
    new_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Trees with what they measured, the fastest first. A few trees at a time run next to plain generations."""
    ranking = []
    for start in range(0, len(trees), TOGETHER):
        group = {str(tree): tree for tree in trees[start : start + TOGETHER]}
        sides = [Side(name, {"assistant_model": heads.with_tree(**tree.to_dict())}) for name, tree in group.items()]
        runs = run_interleaved(target, [Side(PLAIN), *sides], prompts, new_tokens, repeats)
        ranking += [{"tree": tree.to_dict(), **summarise(runs[name], runs[PLAIN])} for name, tree in group.items()]
    return sorted(ranking, key=lambda row: -row["speed_up"])


def choose(
    target: PreTrainedModel, heads: DraftHead, trees: list[DraftTreeConfig], prompts: list[Inputs], new_tokens: int
) -> list[dict[str, Any]]:
    """The last stage's ranking."""
    ranking: list[dict[str, Any]] = []
    for keep, num_prompts, repeats in STAGES:
        ranking = rank(target, heads, trees, prompts[:num_prompts], new_tokens, repeats)[:keep]
        trees = [DraftTreeConfig(**row["tree"]) for row in ranking]
        print(f"{len(trees)} trees left, the best so far: {trees[0]}", file=sys.stderr, flush=True)
    return ranking


def main() -> None:
    args = parse_args()
    target, tokenizer = load_target(args)
    heads = load_bound_heads(target, args.heads[0])
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
    trees = grid(args)
    result = {
        "heads": display_name(args.heads[0]),
        "target": display_name(args.target),
        "prompts": args.prompts,
        "max_new_tokens": args.max_new_tokens,
        "candidates": len(trees),
        "ranking": choose(target, heads, trees, prompts, args.max_new_tokens),
    }
    print(write_result(args.output, "choose_tree", result))
    best = {k: v for k, v in result["ranking"][0]["tree"].items() if v is not None}
    print(f"best default tree for {result['heads']}: {best}")


if __name__ == "__main__":
    main()
