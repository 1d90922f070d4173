"""Chain, static, dynamic and optimal draft trees of the same heads: acceptance and tokens per second.

    python -m benchmarks kinds --heads model_cards/eagle model_cards/medusa

First the optimal tree is searched on the tuning prompts, from measured costs and acceptance (`search_tree`). The chain
and the dynamic tree get the same depth, and the dynamic tree the same number of nodes. The static tree is EAGLE-1's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import DraftHead, DraftTreeConfig, search_tree

from ..results import Result, column_table, draft_tree, footnote, number, same_text, speed_up
from ..setup import Inputs, add_generation_arguments
from .grid import add_tuning_arguments, compare_trees, of_all_heads, published_static


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair and for the prompts to compare and to search on."""
    add_generation_arguments(parser, heads=["eagle"], prompts=["chats"])
    add_tuning_arguments(parser, limit=6)


@of_all_heads
def measure(
    target: PreTrainedModel, heads: DraftHead, prompts: list[Inputs], tuning: list[torch.Tensor],
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Measures one tree of every kind, none deeper than the heads can draft, and records what the search expected of
    the optimal tree."""
    found = search_tree(target, heads, tuning, max_nodes=24)
    depth, nodes, top_k = found.tree.depth, found.tree.total_tokens, max(found.tree.top_k, 2)
    trees = {
        "chain": DraftTreeConfig(kind="chain", depth=depth),
        "static": published_static(heads.max_draft_positions),
        "dynamic": DraftTreeConfig(kind="dynamic", depth=depth, top_k=top_k, total_tokens=max(nodes, depth + 1)),
        "optimal": found.tree,
    }
    measured = compare_trees(target, heads, trees, prompts, args.max_new_tokens, args.repeats)
    measured["optimal"]["expected"] = {"acceptance_length": found.acceptance_length, "speed_up": found.speed_up}
    return measured


def table(result: Result) -> str:
    """One row per head and kind of tree. For the optimal tree, the last column shows what the search expected."""
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
    return f"expected tau {number(expected['acceptance_length'])}, {number(expected['speed_up'])}x"
