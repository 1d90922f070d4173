"""Acceptance as a function of training compute, and its slope at the end of training.

    python -m benchmarks curves --heads model_cards/eagle model_cards/poss3

The numbers come from the evaluations stored during training (`training_facts.json`): the tau that a chain would reach
on held-out chats, expected from the distributions of the losses. Compute is that of the stage alone, without the heads
it starts from. Nothing is measured anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..results import Result, column_table, footnote, number
from ..setup import display_name

SOURCES = ("trainer/shipped_pair",)
TERA = 1e12
QUARTERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names the trained heads."""
    parser.add_argument("--heads", nargs="+", required=True, help="folders with training_facts.json")


def curve_of(facts: dict[str, Any]) -> Result:
    """Returns the last evaluations of one training by compute, and the gain in tau per TFLOP between the last two."""
    kept = [entry for entry in facts["log_history"] if "eval_expected_acceptance_length" in entry and entry["step"]]
    per_step = facts["training_flops"] / facts["steps"] / TERA
    found = [(entry["step"] * per_step, entry["eval_expected_acceptance_length"]) for entry in kept][-QUARTERS:]
    (before, lower), (end, upper) = found[-2:]
    return {
        "starts_from": facts["recipe"]["starts_from"],
        "compute": end,
        "tau": [tau for _, tau in found],
        "slope": (upper - lower) / (end - before),
    }


def measure(args: argparse.Namespace) -> Result:
    """Reads all trainings."""
    facts = {display_name(folder): json.loads((Path(folder) / "training_facts.json").read_text("utf-8"))
             for folder in args.heads}  # fmt: skip
    return {"heads": {name: curve_of(one) for name, one in facts.items()}}


def table(result: Result) -> str:
    """One row per training, with four points of its curve."""
    places = {
        f"tau at {place}/{QUARTERS}": lambda one, place=place: number(dict(enumerate(one["tau"], 1)).get(place))
        for place in range(1, QUARTERS + 1)
    }
    columns = {
        "starts from": lambda one: one["starts_from"] or "random weights",
        "TFLOP": ("compute", 1), **places, "slope at the end, tau per TFLOP": ("slope", 3),
    }  # fmt: skip
    return column_table(columns, result["heads"], "training") + footnote(
        result, "expected tau of a chain on held-out chats, after each quarter of the compute of the training"
    )
