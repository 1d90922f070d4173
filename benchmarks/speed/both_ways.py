"""Measures what a part of the engine is worth: generation with and without this part, in turns.

Draft heads draft in every round, so that both ways have the same rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hf_specheads.bootstrap import Interval
from hf_specheads.tuning.turns import take_turns

from .. import setup
from ..results import Result, column_table, footnote, same_text, speed_up
from ..setup import Inputs
from ..sides import TO_THE_END, Run, generate_once, plain_and, speed_ratio, summaries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair or its sizes, and for the prompts."""
    setup.add_generation_arguments(parser, heads=["poss3-longer", "eagle"], prompts=["chats"])
    setup.add_shape_arguments(parser, depth=4)


def measure_both(pair: Any, args: argparse.Namespace, without: Callable[[], AbstractContextManager]) -> dict[str, Any]:
    """Measures plain generation, and generation with heads both ways. The gain is the ratio of their times.

    Args:
        pair: A pair from [`setup.load_pair`], with heads that draft in every round.
        args: Arguments of the measurement.
        without: Makes a context that switches the part off.
    """
    target, heads, prompts = pair
    sides = plain_and(heads, **TO_THE_END)
    others = {f"{name}, without": sides[name] for name in heads}
    sides |= others

    def run(name: str, inputs: Inputs, turn: int) -> Run:
        with without() if name in others else nullcontext():
            return generate_once(target, sides[name], inputs, args.max_new_tokens, turn)

    runs = take_turns(sides, prompts, run, args.repeats)
    found = summaries(target, sides, prompts, runs)
    for name in heads:
        found[name]["gain"] = dataclasses.asdict(speed_ratio(runs[name], runs[f"{name}, without"]))
    return found


def table_of_both(result: Result, part: str) -> str:
    """One row per side.

    Args:
        result: A result with `sides`.
        part: Name of the part that the sides called `without` leave out.
    """
    columns = {
        "tokens/s": ("tokens_per_second", 0), "speed-up over plain (range)": speed_up,
        "speed with / without": lambda side: str(Interval(**side["gain"])) if "gain" in side else "",
        "same text": same_text,
    }  # fmt: skip
    return column_table(columns, result["sides"], "") + footnote(
        result, "Greedy, {dtype}, {num_prompts} prompts, {max_new_tokens} new tokens, drafting in every round, "
        f"median of {{repeats}} interleaved repeats; with / without: speed with {part} divided by speed without, "
        "with its 95 % interval",
    )  # fmt: skip
