"""All methods on one target: parameters, training, acceptance and tokens per second, greedy and at temperature 1.

    python -m benchmarks methods --heads model_cards/eagle model_cards/medusa model_cards/poss3

Speed is measured with each head's own saved tree, interleaved with plain `generate` in the same mode; pos-acc with a
tree of up to 8 levels and 60 nodes, which is not timed. Sampled texts are compared too: with the same seed they are
plain generate's, unless the draft tree's children are sampled themselves or verification is lossy. Heads that come
with an adapter of their target (Medusa-2) are measured alone, against the adapted target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftHead

from ..results import (
    Result,
    draft_tree,
    footnote,
    identical,
    markdown_table,
    millions,
    number,
    pos_acc,
    speed_up,
    teraflop,
)
from ..setup import Inputs, add_generation_arguments, describe, load_pair, settings
from ..sides import PLAIN, Side, acceptance, generate_once, plain_and, run_interleaved, summarise

MODES: dict[str, dict[str, Any] | None] = {"greedy": None, "temperature 1": {"temperature": 1.0, "top_k": 0}}
WIDE = {"kind": "dynamic", "top_k": 10, "total_tokens": 60}
WIDE_DEPTH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Heads, prompts and modes."""
    released = sorted(path.parent.name for path in Path("model_cards").glob("*/config.json"))
    heads = [name for name in released if name not in ("target", "medusa2")]
    add_generation_arguments(parser, heads, prompts=["chats"])
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))


def wide_tree(heads: DraftHead) -> DraftHead:
    """The heads with the tree that pos-acc is measured with, as deep as they can draft."""
    return heads.with_tree(**WIDE, depth=min(WIDE_DEPTH, heads.max_draft_positions or WIDE_DEPTH))


def measure_mode(
    target: PreTrainedModel, loaded: dict[str, DraftHead], prompts: list[Inputs], args: argparse.Namespace, mode: str
) -> dict[str, Any]:
    """All sides in one mode; acceptance over all repeats, which differ in their seeds."""
    sides = plain_and(loaded)
    runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats, MODES[mode])
    return {name: {**summarise(runs[name], runs[PLAIN]), **acceptance(runs[name])} for name in runs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every head in every mode, and its pos-acc."""
    target, loaded, prompts = load_pair(args)
    facts: dict[str, Any] = {}
    for folder, (name, heads) in zip(args.heads, loaded.items(), strict=True):
        side = Side(name, {"assistant_model": wide_tree(heads)})
        facts[name] = {
            **describe(heads, folder),
            "tree": heads.tree_config.to_dict(),
            "max_draft_positions": heads.max_draft_positions,
            "wide": acceptance([[generate_once(target, side, inputs, args.max_new_tokens) for inputs in prompts]]),
        }
        print(f"{name}: {facts[name]['wide']}", file=sys.stderr, flush=True)
    return {
        **settings(args, prompts),
        "wide_tree": {**WIDE, "depth": WIDE_DEPTH},
        "heads": facts,
        "modes": {mode: measure_mode(target, loaded, prompts, args, mode) for mode in args.modes},
    }


def texts_agree(result: Result) -> bool:
    """The greedy ones."""
    return identical(result["modes"].get("greedy"))


def table(result: Result) -> str:
    """One row per head: what it is, what it cost, what it accepts and what that buys, by mode."""
    modes = result["modes"]
    header = ["heads", "parameters", "training TFLOP", "minutes"]
    header += [f"{what}, {mode}" for mode in modes for what in ("tau", "speed-up")]
    header += [f"pos-acc 1 to {result['wide_tree']['depth']}", "draft tree"]
    rows = []
    for name, facts in sorted(result["heads"].items(), key=lambda item: -_speed_up_of(result, item[0])):
        hours, compute = facts.get("hours"), teraflop(facts.get("training_flops"), facts.get("starts_from"))
        row = [name, millions(facts["parameters"]), compute, number(hours and 60 * hours, 0)]
        for sides in modes.values():
            row += [number(sides[name]["acceptance_length"]), speed_up(sides[name])]
        rows.append([*row, pos_acc(facts["wide"]["pos_acc"]), draft_tree(facts["tree"])])
    sets = ", ".join(result["prompts"])
    return markdown_table(header, rows) + footnote(
        result, f"{result['dtype']}, batch 1, at most {result['max_new_tokens']} new tokens, {result['num_prompts']} "
        f"prompts ({sets}), median of {result['repeats']} interleaved repeats",
        f"pos-acc with {result['wide_tree']['total_tokens']} nodes, greedy, as deep as the heads draft",
    )  # fmt: skip


def _speed_up_of(result: Result, name: str) -> float:
    """Of the first mode measured."""
    return next(iter(result["modes"].values()))[name]["speed_up"]
