"""Tuned draft trees against the default, the published one and the best of an exhaustive grid, with the same heads.

    python -m benchmarks.bench_tune --heads model_cards/poss3 model_cards/eagle model_cards/eagle3 model_cards/medusa

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

from hf_specheads import DraftTreeConfig
from hf_specheads.heads.base import DraftHead
from hf_specheads.tree.default import default_tree
from hf_specheads.tree.published import EAGLE_CHOICES

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

PLAIN = "plain generate"
TOGETHER = 6  # trees measured next to the same plain generations
# Trees to keep and prompts of the grid's stages.
STAGES = ((12, 1), (4, 4))


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/poss3"], prompts=["held_out", "functions"])
    parser.set_defaults(limit=10, max_new_tokens=64)
    parser.add_argument("--repeats", type=int, default=3, help="of the final comparison, and of tuning")
    parser.add_argument("--tuning", nargs="+", help="prompt sets to tune on; default every other one of --prompts")
    parser.add_argument("--tuning_limit", type=int, default=12)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--top_k", type=int, nargs="+", default=[2, 3, 6])
    parser.add_argument("--total_tokens", type=int, nargs="+", default=[6, 10, 16, 32])
    return parser.parse_args()


def grid(args: argparse.Namespace, deepest: int | None) -> list[DraftTreeConfig]:
    """Chains, dynamic trees and EAGLE-1's static tree, none deeper than the heads draft, none with more nodes than its
    levels hold or fewer than a path needs."""
    depths = [depth for depth in args.depths if deepest is None or depth <= deepest]
    trees = [DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1) for depth in depths]
    for depth in depths:
        for top_k in args.top_k:
            for total in args.total_tokens:
                if depth < total <= 1 + top_k + (depth - 1) * top_k * top_k:
                    trees.append(DraftTreeConfig(depth=depth, top_k=top_k, total_tokens=total))
    choices = tuple(path for path in EAGLE_CHOICES if deepest is None or len(path) <= deepest)
    return [*trees, DraftTreeConfig(kind="static", choices=choices)]


def compare(
    target: PreTrainedModel,
    heads: DraftHead,
    trees: dict[str, DraftTreeConfig],
    prompts: list[Inputs],
    args: argparse.Namespace,
    repeats: int,
) -> dict[str, Any]:
    """Named trees and plain generation, taking turns; tree, speed-up and tokens per second of each."""
    fixed = {name: heads.with_tree(**tree.to_dict()) for name, tree in trees.items()}
    for one in fixed.values():
        one.adaptive = False  # trees are compared, not the switch to plain decoding
    sides = [Side(PLAIN), *(Side(name, {"assistant_model": one}) for name, one in fixed.items())]
    runs = run_interleaved(target, sides, prompts, args.max_new_tokens, repeats)
    return {name: {"tree": tree.to_dict(), **summarise(runs[name], runs[PLAIN])} for name, tree in trees.items()}


def best_of_grid(
    target: PreTrainedModel, heads: DraftHead, trees: list[DraftTreeConfig], prompts: list[Inputs], args: Any
) -> DraftTreeConfig:
    """The fastest tree of the last stage."""
    for keep, num_prompts in STAGES:
        ranking: list[dict[str, Any]] = []
        for start in range(0, len(trees), TOGETHER):
            group = {str(number): tree for number, tree in enumerate(trees[start : start + TOGETHER])}
            ranking += compare(target, heads, group, prompts[:num_prompts], args, 1).values()
        ranking.sort(key=lambda row: -row["speed_up"])
        trees = [DraftTreeConfig(**row["tree"]) for row in ranking[:keep]]
    return trees[0]


def measure_heads(
    target: PreTrainedModel, heads: DraftHead, prompts: list[Inputs], tuning: list[Inputs], args: argparse.Namespace
) -> dict[str, Any]:
    """One head: what tuning promised and took, and the final comparison."""
    saved = heads.tree_config
    ids = [inputs["input_ids"] for inputs in tuning]
    tuned = heads.tune(target, ids, max_new_tokens=args.max_new_tokens, repeats=args.repeats)
    print(tuned, file=sys.stderr, flush=True)
    candidates = grid(args, heads.max_draft_positions)
    trees = {
        "tuned": tuned.tree,
        "best of the grid": best_of_grid(target, heads, candidates, prompts, args),
        "saved": saved,
        "default of the device": default_tree(heads.device, heads.published_tree, heads.max_draft_positions),
        "published": heads.published_tree,
    }
    found = compare(target, heads, trees, prompts, args, args.repeats)
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
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer)]
    tuning, prompts = prompts[::2], prompts[1::2] or prompts
    if args.tuning:
        prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer)]
        tuning = [inputs for name in args.tuning for inputs in load_prompts(name, tokenizer)]
    tuning, prompts = spread(tuning, args.tuning_limit), spread(prompts, args.limit)
    heads = {display_name(folder): load_bound_heads(target, folder) for folder in args.heads}
    return {
        "target": display_name(args.target),
        "prompts": args.prompts,
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "dtype": args.dtype,
        "heads": {name: measure_heads(target, one, prompts, tuning, args) for name, one in heads.items()},
    }


def main() -> int:
    args = parse_args()
    result = measure(args)
    print(write_result(args.output, "bench_tune", result))
    return 0 if all(row["identical"] for head in result["heads"].values() for row in head["trees"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
