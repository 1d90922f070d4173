"""Chain, static, dynamic and optimal draft trees of the same heads: acceptance and tokens per second.

    python -m benchmarks kinds --heads model_cards/eagle model_cards/medusa

The optimal tree is searched first, on the tuning prompts, from measured costs and acceptance (`search_tree`); chain
and dynamic tree are as deep, the dynamic one has as many nodes. The static tree is EAGLE-1's.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from hf_specheads import DraftHead, DraftTreeConfig, OptimalTree, search_tree

from ..results import Result, column_table, draft_tree, footnote, number, same_text, speed_up
from ..setup import Inputs, add_generation_arguments, load_pair, load_prompts, settings
from .grid import compare_trees
from .tune import published_static


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair, and prompts to compare and to search on."""
    add_generation_arguments(parser, heads=["eagle"], prompts=["chats"])
    searched = "prompt sets to search the optimal tree on"
    parser.add_argument("--tuning", nargs="+", default=["chats_tuning"], help=searched)
    parser.add_argument("--tuning_limit", type=int, default=6)


def trees_of(
    target: PreTrainedModel, heads: DraftHead, tuning: list[Inputs]
) -> dict[str, DraftTreeConfig | OptimalTree]:
    """One tree of every kind, none deeper than the heads draft."""
    found = search_tree(target, heads, [inputs["input_ids"] for inputs in tuning], max_nodes=24)
    depth, nodes, top_k = found.tree.depth, found.tree.total_tokens, max(found.tree.top_k, 2)
    return {
        "chain": DraftTreeConfig(kind="chain", depth=depth),
        "static": published_static(heads.max_draft_positions),
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
    measured = compare_trees(target, heads, configs, prompts, args.max_new_tokens, args.repeats)
    measured["optimal"]["expected"] = {"acceptance_length": found.acceptance_length, "speed_up": found.speed_up}
    return measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All heads."""
    target, heads, prompts = load_pair(args, every_round=True)
    tuning = load_prompts(args.tuning, AutoTokenizer.from_pretrained(args.target), args.tuning_limit)
    return {
        **settings(args, prompts),
        "heads": {name: measure_heads(target, one, prompts, tuning, args) for name, one in heads.items()},
    }


def table(result: Result) -> str:
    """One row per head and kind of tree; for the optimal tree also what the search expected."""
    columns = {
        "draft tree": lambda side: draft_tree(side["tree"]), "tau": ("acceptance_length", 2),
        "speed-up (range)": speed_up, "same text": same_text, "search": _expected,
    }  # fmt: skip
    return column_table(columns, result["heads"], "heads", "kind") + footnote(
        result, "Greedy, {dtype}, batch 1, {num_prompts} prompts",
        "at most {max_new_tokens} new tokens, median of {repeats} interleaved repeats",
    )  # fmt: skip


def _expected(side: Result) -> str:
    if (expected := side.get("expected")) is None:
        return ""
    return f"expected {number(expected['acceptance_length'])}, {number(expected['speed_up'])}x"
