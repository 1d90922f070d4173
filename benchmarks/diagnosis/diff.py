"""Verdicts of `specheads diff` on bfloat16 texts that differ at ties of logits, and on bugs planted in the engine.

    python -m benchmarks diff

Every prompt is generated with heads and plainly: without changes, and with each of two planted bugs (nodes that attend
to all nodes of their tree, and nodes whose position is one too high). Without changes, texts that differ must be
called ties. With a bug, they must be called bugs, from the first round on: the prefill's token is right, and the next
one is the first that is wrong.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import hf_specheads.cache.target as target_cache
from hf_specheads import explain_difference
from hf_specheads.diagnosis.difference import Difference
from hf_specheads.tree.draft_tree import DraftTree

from ..results import Result, column_table, footnote
from ..setup import add_generation_arguments, load_pair

SOURCES = ("hf_specheads", "hf_specheads/diagnosis", "benchmarks/diagnosis")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair and its prompts."""
    add_generation_arguments(parser, ["eagle3"], ["chats_tuning"], repeats=None)
    parser.set_defaults(dtype="bfloat16", limit=6, max_new_tokens=64)


def wrong_mask() -> AbstractContextManager:
    """Makes every node attend to all nodes of its tree, not only to its ancestors."""
    right = target_cache.TreeCache.attention_masks

    def everything(self: Any, tree: DraftTree) -> Any:
        known = replace(tree, shape=None)
        object.__setattr__(known, "_ancestor_mask", torch.ones_like(tree.ancestor_mask))
        return right(self, known)

    return patch.object(target_cache.TreeCache, "attention_masks", everything)


def wrong_positions() -> AbstractContextManager:
    """Moves the position of every node one too far."""
    right = target_cache.TreeCache.forward_inputs

    def shifted(self: Any, tree: Any) -> dict[str, Any]:
        inputs = right(self, tree)
        return {**inputs, "position_ids": inputs["position_ids"] + 1}

    return patch.object(target_cache.TreeCache, "forward_inputs", shifted)


PLANTED: dict[str, Callable[[], AbstractContextManager]] = {
    "nothing": nullcontext,
    "nodes see all nodes": wrong_mask,
    "positions one too far": wrong_positions,
}


def measure(args: argparse.Namespace) -> Result:
    """Collects the verdicts of all heads on all prompts, without changes and with each bug."""
    target, heads, prompts = load_pair(args)
    found = {}
    for name, one in heads.items():
        tree = one.with_tree(kind="dynamic", depth=4, top_k=4, total_tokens=16)
        for planted, plant in PLANTED.items():
            with plant():
                said = [explain_difference(target, each, tree, max_new_tokens=args.max_new_tokens) for each in prompts]
            found[f"{name}: {planted}"] = {"planted": planted, **_summary(said)}
    return {"cases": found}


def _summary(said: list[Difference]) -> Result:
    gaps = [abs(one.gap) for one in said if one.verdict == "tie" and one.gap is not None]
    first = [one.first_wrong for one in said if one.verdict == "bug" and one.first_wrong is not None]
    return {
        "verdicts": Counter(one.verdict for one in said),
        "largest_tie": max(gaps, default=None),
        "allowed_gap": statistics.median(one.allowed_gap for one in said),
        "first_wrong": sorted(set(first)),
        "differ": sum(one.position is not None for one in said),
    }


def texts_agree(result: Result) -> bool:
    """Tells whether no unchanged case is called a bug, and every case with a bug is."""
    return all(
        set(one["verdicts"]) <= ({"same", "tie"} if one["planted"] == "nothing" else {"bug"})
        for one in result["cases"].values()
    )


def table(result: Result) -> str:
    """One row per planted bug."""
    verdicts = ("same", "tie", "bug")
    columns = {
        "texts differ": ("differ", 0),
        **{verdict: lambda one, verdict=verdict: str(one["verdicts"].get(verdict, 0)) for verdict in verdicts},
        "widest gap of a tie": ("largest_tie", 3), "allowed": ("allowed_gap", 3),
        "first wrong new token": lambda one: ", ".join(map(str, one["first_wrong"])) or "-",
    }  # fmt: skip
    note = footnote(result, "{num_prompts} prompts, {max_new_tokens} tokens each, {dtype}")
    return f"{column_table(columns, result['cases'], 'planted')}\n{note}"
