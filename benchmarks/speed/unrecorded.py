"""What rounds save by leaving out autograd's layers of the dispatcher: with and without, in turns.

    python -m benchmarks unrecorded --heads model_cards/poss3-longer model_cards/eagle
    python -m benchmarks unrecorded --shape llama-100m

Every round drafts, so that both ways have the same rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import nullcontext
from typing import Any
from unittest import mock

from hf_specheads.bootstrap import Interval
from hf_specheads.generation import unrecorded
from hf_specheads.tuning.turns import take_turns

from .. import setup
from ..results import Result, column_table, footnote, same_text, speed_up
from ..setup import Inputs
from ..sides import TO_THE_END, Run, generate_once, plain_and, speed_ratio, summaries

THROUGH = "{}, through autograd's layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair or its sizes, and prompts."""
    setup.add_generation_arguments(parser, heads=["poss3-longer", "eagle"], prompts=["chats"])
    setup.add_shape_arguments(parser, depth=4)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Plain texts, and with heads both ways; the gain is time over time."""
    target, heads, prompts = setup.load_pair(args, every_round=True)
    sides = plain_and(heads, **TO_THE_END)
    through = {THROUGH.format(name): sides[name] for name in heads}
    sides |= through

    def run(name: str, inputs: Inputs, turn: int) -> Run:
        guard = nullcontext if name in through else unrecorded.BELOW_AUTOGRAD
        with mock.patch.object(unrecorded, "BELOW_AUTOGRAD", guard):
            return generate_once(target, sides[name], inputs, args.max_new_tokens, turn)

    runs = take_turns(sides, prompts, run, args.repeats)
    found = summaries(target, sides, prompts, runs)
    for name in heads:
        found[name]["gain"] = dataclasses.asdict(speed_ratio(runs[name], runs[THROUGH.format(name)]))
    return {"sides": found}


def table(result: Result) -> str:
    """A row per side."""
    columns = {
        "tokens/s": ("tokens_per_second", 0), "over plain": speed_up,
        "with over without autograd's layers": lambda side: str(Interval(**side["gain"])) if "gain" in side else "",
        "same text": same_text,
    }  # fmt: skip
    return column_table(columns, result["sides"], "") + footnote(
        result, "Greedy, {dtype}, {num_prompts} prompts, {max_new_tokens} new tokens, every round drafts, median of "
        "{repeats} repeats in turns; time over time with its 95 % interval",
    )  # fmt: skip
