"""Acceptance over the compute of a training, and its slope where the training ends.

    python -m benchmarks curves --heads model_cards/eagle model_cards/poss3

From the evaluations that the trainings themselves kept (`training_facts.json`): tau that a chain would reach on
held-out chats, expected from the losses' own distributions. Compute is of the stage alone, not of what it starts from.
Nothing is measured anew.
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
    """Whose trainings."""
    parser.add_argument("--heads", nargs="+", required=True, help="folders with training_facts.json")


def curve_of(facts: dict[str, Any]) -> Result:
    """Evaluations of one training by compute, and what the last of them gained per TFLOP."""
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
    """All trainings."""
    facts = {display_name(folder): json.loads((Path(folder) / "training_facts.json").read_text("utf-8"))
             for folder in args.heads}  # fmt: skip
    return {"heads": {name: curve_of(one) for name, one in facts.items()}}


def table(result: Result) -> str:
    """One row per training, four points of its curve."""
    places = {
        f"tau at {place}/{QUARTERS}": lambda one, place=place: number(dict(enumerate(one["tau"], 1)).get(place))
        for place in range(1, QUARTERS + 1)
    }
    columns = {
        "starts from": lambda one: one["starts_from"] or "random weights",
        "TFLOP": ("compute", 1), **places, "slope at the end, per TFLOP": ("slope", 3),
    }  # fmt: skip
    return column_table(columns, result["heads"], "training") + footnote(
        result, "tau of a chain as expected on held-out chats, at quarters of the stage's compute"
    )
