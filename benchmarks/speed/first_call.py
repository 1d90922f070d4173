"""Seconds of the first compiled call of a process: with nothing compiled before, and with everything on disk.

    python -m benchmarks first_call --heads model_cards/poss3-longer model_cards/eagle

Every side has its own processes and caches, so none finds what another has compiled. The first process finds nothing
at all, not even the headers that torch precompiles for every compilation. The second process finds what the first has
left on disk. Loading models is not part of the call. A function of one line shows the fixed cost of compiling
anything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch

from hf_specheads.cache.names import CACHE_NAME
from hf_specheads.tuning.turns import timed_generation

from .. import setup
from ..results import Result, column_table, footnote, same_text
from ..sides import TO_THE_END
from .compiled import PLAIN_COMPILED, build_sides

# the second folder belongs to this measurement: other numbers do not depend on all of it
SOURCES = ("hf_specheads", "hf_specheads/generation/compiled")

ONE_LINE = "a function of one line"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair and a prompt."""
    setup.add_generation_arguments(parser, heads=["poss3-longer", "eagle"], prompts=["chats"])
    parser.set_defaults(limit=1, max_new_tokens=64, repeats=1)


def calls_of_one_line() -> dict[str, Any]:
    """Times the first and a later call of a compiled function of one line. It generates no text to compare."""
    compiled, numbers = torch.compile(lambda x: torch.nn.functional.silu(x) * x.exp()), torch.ones(64, 64)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        compiled(numbers)
        seconds.append(time.perf_counter() - started)
    return {"first": seconds[0], "later": seconds[1], "identical": True}


def calls_of(args: argparse.Namespace, folder: str | None) -> dict[str, Any]:
    """Times the first and a later call with the heads in a folder, or of plain generation for `None`."""
    target, tokenizer = setup.load_target(args)
    inputs = setup.load_prompts(args.prompts, tokenizer, 1)[0]
    length = {"max_new_tokens": args.max_new_tokens}
    text, _ = timed_generation(target, inputs, **length, **TO_THE_END)
    heads = {} if folder is None else setup.load_all_heads(target, [folder])
    options = build_sides(target, heads, inputs["input_ids"].shape[1] + args.max_new_tokens)
    side = options[PLAIN_COMPILED if folder is None else f"{next(iter(heads))}, compiled"]
    # without CountForwards, whose hook would be compiled, too
    first, first_seconds = timed_generation(target, inputs, **length, **side)
    if folder is None:
        side[CACHE_NAME].reset()
    later, later_seconds = timed_generation(target, inputs, **length, **side)
    return {"first": first_seconds, "later": later_seconds, "identical": first == later == text}


def in_its_own_process(caches: str, call: Any, *args: Any) -> dict[str, Any]:
    """Returns the result of `call` in a new process whose caches lie in the folder `caches`."""
    places = {"TMPDIR": caches, "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "inductor")}
    spawn = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, places), ProcessPoolExecutor(1, mp_context=spawn) as processes:
        return processes.submit(call, *args).result()


def measure_side(repeats: int, call: Any, *args: Any) -> dict[str, Any]:
    """Returns medians over repeats. Each repeat starts with empty caches."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as caches:
            found.append((in_its_own_process(caches, call, *args), in_its_own_process(caches, call, *args)))
    return {
        "cold": statistics.median(cold["first"] for cold, _ in found),
        "warm": statistics.median(warm["first"] for _, warm in found),
        "later": statistics.median(one["later"] for pair in found for one in pair),
        "identical": all(one["identical"] for pair in found for one in pair),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures a function of one line, plain generation, and every head."""
    sides = {ONE_LINE: measure_side(args.repeats, calls_of_one_line)}
    sides[PLAIN_COMPILED] = measure_side(args.repeats, calls_of, args, None)
    for folder in args.heads:
        sides[setup.display_name(folder)] = measure_side(args.repeats, calls_of, args, folder)
    return {"sides": sides}


def table(result: Result) -> str:
    """One row per side."""
    columns = {
        "nothing compiled before, s": ("cold", 1), "compiled by an earlier process, s": ("warm", 1),
        "later call, s": ("later", 2), "same text": same_text,
    }  # fmt: skip
    return column_table(columns, result["sides"], "first call") + footnote(
        result, "Greedy, {dtype}, batch 1, {max_new_tokens} new tokens, median of {repeats} repeats",
        "every first call in a new process, after the models were loaded",
    )  # fmt: skip
