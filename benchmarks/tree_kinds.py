"""Chain, static, dynamic and optimal draft trees of the same heads: acceptance and tokens per second.

    python -m benchmarks.tree_kinds --heads model_cards/eagle model_cards/medusa

The optimal tree is searched first, on the tuning prompts, from measured costs and acceptance (`search_tree`); chain
and dynamic tree are as deep, the dynamic one has as many nodes. The static tree is EAGLE-1's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftTreeConfig, OptimalTree, search_tree
from hf_specheads.heads.base import DraftHead
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


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/eagle"], prompts=["held_out", "functions"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tuning", nargs="+", default=["tuning"], help="prompt sets to search the optimal tree on")
    parser.add_argument("--tuning_limit", type=int, default=6)
    return parser.parse_args()


def trees_of(
    target: PreTrainedModel, heads: DraftHead, tuning: list[Inputs]
) -> dict[str, DraftTreeConfig | OptimalTree]:
    """One tree of every kind, none deeper than the heads draft."""
    found = search_tree(target, heads, [inputs["input_ids"] for inputs in tuning], max_nodes=24)
    depth, nodes, top_k = found.tree.depth, found.tree.total_tokens, max(found.tree.top_k, 2)
    deepest = heads.max_draft_positions or len(EAGLE_CHOICES[-1])
    static = tuple(path for path in EAGLE_CHOICES if len(path) <= deepest)
    return {
        "chain": DraftTreeConfig(kind="chain", depth=depth),
        "static": DraftTreeConfig(kind="static", choices=static),
        "dynamic": DraftTreeConfig(kind="dynamic", depth=depth, top_k=top_k, total_tokens=max(nodes, depth + 1)),
        "optimal": found,
    }


def measure_heads(
    target: PreTrainedModel, heads: DraftHead, prompts: list[Inputs], tuning: list[Inputs], args: argparse.Namespace
) -> dict[str, Any]:
    """Every kind of tree of one head, and what the search expected of the optimal one."""
    trees = trees_of(target, heads, tuning)
    found = trees["optimal"]
    configs = {kind: tree.tree if tree is found else tree for kind, tree in trees.items()}
    sides = [Side(PLAIN)]
    sides += [Side(kind, {"assistant_model": heads.with_tree(**tree.to_dict())}) for kind, tree in configs.items()]
    runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats)
    measured = {kind: {"tree": tree.to_dict(), **summarise(runs[kind], runs[PLAIN])} for kind, tree in configs.items()}
    measured["optimal"]["expected"] = {"acceptance_length": found.acceptance_length, "speed_up": found.speed_up}
    return measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All heads."""
    target, tokenizer = load_target(args)
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
    tuning = [inputs for name in args.tuning for inputs in load_prompts(name, tokenizer, args.tuning_limit)]
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
    print(write_result(args.output, "tree_kinds", result))
    kinds = [kind for head in result["heads"].values() for kind in head.values()]
    return 0 if all(kind["identical"] for kind in kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
