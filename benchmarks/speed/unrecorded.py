"""What rounds save by leaving out autograd's layers of the dispatcher: with and without, in turns.

python -m benchmarks unrecorded --heads model_cards/poss3-longer model_cards/eagle
python -m benchmarks unrecorded --shape llama-100m
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from hf_specheads.generation import unrecorded
from hf_specheads.tuning.turns import generate_text

from .. import setup
from ..results import Result, column_table, footnote, same_text, speed_up
from ..setup import Inputs
from ..sides import PLAIN, TO_THE_END, speed_up_of, timed_in_turns

WITH = "{}, through autograd's layers"
Texts = list[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair or its sizes, and prompts."""
    setup.add_generation_arguments(parser, heads=["poss3-longer", "eagle"], prompts=["chats"])
    setup.add_shape_arguments(parser, depth=4)


def texts_of(target: PreTrainedModel, prompts: list[Inputs], max_new_tokens: int, **options: Any) -> Texts:
    """Text after text."""
    found = (generate_text(target, one, max_new_tokens=max_new_tokens, **TO_THE_END, **options) for one in prompts)
    return [ids[0, one["input_ids"].shape[1] :].tolist() for ids, one in zip(found, prompts, strict=True)]


def through_all_layers(texts: Callable[[], Texts]) -> Texts:
    """The same with nothing left out."""
    with mock.patch.object(unrecorded, "BELOW_AUTOGRAD", nullcontext):
        return texts()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Plain texts, and with heads both ways, in turns; every round drafts, so that all have the same rounds."""
    target, heads, prompts = setup.load_pair(args, every_round=True)
    call = (target, prompts, args.max_new_tokens)
    write: dict[str, Callable[[], Texts]] = {PLAIN: partial(texts_of, *call)}
    for name, one in heads.items():
        write[name] = partial(texts_of, *call, assistant_model=one)
        write[WITH.format(name)] = partial(through_all_layers, write[name])
    seconds, texts = timed_in_turns(write, args.repeats, warm_ups=1)
    gains = {name: median_ratio(seconds[WITH.format(name)], seconds[name]) for name in heads}
    return {"sides": {name: {**summarise(name, seconds, texts), "gain": gains.get(name)} for name in write}}


def median_ratio(theirs: list[float], mine: list[float]) -> dict[str, Any]:
    """How many times as long they took as this side did in the same turn."""
    return speed_up_of([other / own for other, own in zip(theirs, mine, strict=True)])


def summarise(name: str, seconds: dict[str, list[float]], texts: dict[str, Texts]) -> dict[str, Any]:
    """Tokens per second, next to plain generation in the same turn."""
    tokens = sum(map(len, texts[name]))
    return {
        "tokens_per_second": statistics.median(tokens / spent for spent in seconds[name]),
        **median_ratio(seconds[PLAIN], seconds[name]),
        "identical": texts[name] == texts[PLAIN],
    }


def table(result: Result) -> str:
    """A row per side."""
    columns = {
        "tokens/s": ("tokens_per_second", 0), "over plain": speed_up,
        "over the same through autograd's layers": lambda side: speed_up(side["gain"]) if side["gain"] else "",
        "same text": same_text,
    }  # fmt: skip
    return column_table(columns, result["sides"], "") + footnote(
        result, "Greedy, {dtype}, {num_prompts} prompts, {max_new_tokens} new tokens, every round drafts, "
        "median of {repeats} repeats in turns",
    )  # fmt: skip
