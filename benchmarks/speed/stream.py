"""Requests of mixed lengths, served until all are done: a stream of rounds against static batches.

    python -m benchmarks stream --heads model_cards/poss3 --max_batch 8

A static batch runs until its longest text ends. Tokens past a request's own limit are computed, thrown away and not
counted. In a stream, the next request takes the place of a text that has ended. Limits are drawn between `--shortest`
and `--max_new_tokens`. Limits and the order of requests are the same for all sides. In a further side, every second
request is sampled in a way of its own, which no static batch can serve; only its greedy texts are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftHead, generate_stream
from hf_specheads.tuning.turns import generate_text

from ..results import Result, column_table, footnote, same_text, speed_up
from ..setup import Inputs, add_generation_arguments, load_pair, padded
from ..sides import PLAIN, TO_THE_END, speed_up_of, timed_in_turns

SOURCES = ("hf_specheads", "hf_specheads/generation/streams")
Texts = list[list[int]]
MIXED = "stream, every second request sampled in its own way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, the requests and the number served at a time."""
    add_generation_arguments(parser, heads=["poss3", "eagle"], prompts=["chats"])
    parser.add_argument("--max_batch", type=int, default=8, help="number of sequences served at a time")
    parser.add_argument("--shortest", type=int, default=16, help="smallest limit on the new tokens of a request")


def in_static_batches(
    target: PreTrainedModel, prompts: list[Inputs], limits: list[int], size: int, **options: Any
) -> Texts:
    """Serves batch after batch, each until its longest text ends."""
    texts: Texts = []
    for start in range(0, len(prompts), size):
        inputs, own = padded(prompts[start : start + size]), limits[start : start + size]
        found = generate_text(target, inputs, max_new_tokens=max(own), **TO_THE_END, **options)
        new_ids = found[:, inputs["input_ids"].shape[1] :].tolist()
        texts += [row[:limit] for row, limit in zip(new_ids, own, strict=True)]
    return texts


def in_a_stream(
    target: PreTrainedModel, prompts: list[Inputs], limits: list[int], size: int, heads: DraftHead, mixed: bool = False
) -> Texts:
    """Serves requests as a stream: a new request takes the place of one that has ended.

    If `mixed`, every second request is sampled, at one of five temperatures.
    """
    requests = [{**inputs, "max_new_tokens": limit} for inputs, limit in zip(prompts, limits, strict=True)]
    for number in range(1, len(requests) if mixed else 0, 2):
        requests[number] |= {"do_sample": True, "temperature": 0.5 + 0.1 * (number // 2 % 5), "top_p": 0.9}
    found = generate_stream(target, heads, requests, size, do_sample=False, **TO_THE_END)
    return [one.token_ids for one in sorted(found, key=lambda one: one.index)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures plain static batches, static batches with heads, and streams with heads, in turns."""
    target, heads, prompts = load_pair(args)
    draw = random.Random(0)
    limits = [draw.randint(args.shortest, args.max_new_tokens) for _ in prompts]
    call = (target, prompts, limits, args.max_batch)
    serve: dict[str, Callable[[], Texts]] = {PLAIN: partial(in_static_batches, *call)}
    for name, one in heads.items():
        serve[f"{name}, static batches"] = partial(in_static_batches, *call, assistant_model=one)
        serve[f"{name}, stream"] = partial(in_a_stream, *call, one)
        serve[f"{name}, {MIXED}"] = partial(in_a_stream, *call, one, mixed=True)
    seconds, texts = timed_in_turns(serve, args.repeats, warm_ups=1)
    return {
        "max_batch": args.max_batch,
        "limits": [min(limits), max(limits)],
        "sides": {name: summarise(name, seconds, texts) for name in serve},
    }


def summarise(name: str, seconds: dict[str, list[float]], texts: dict[str, Texts]) -> dict[str, Any]:
    """Summarises one side: requested tokens per second, and the speed-up over plain static batches in the same
    turn."""
    tokens, compared = sum(map(len, texts[name])), slice(None, None, 2 if name.endswith(MIXED) else 1)
    return {
        "tokens_per_second": statistics.median(tokens / spent for spent in seconds[name]),
        **speed_up_of([theirs / mine for mine, theirs in zip(seconds[name], seconds[PLAIN], strict=True)]),
        "new_tokens": tokens,
        "identical": texts[name][compared] == texts[PLAIN][compared],
    }


def table(result: Result) -> str:
    """One row per side."""
    columns = {
        "tokens/s": ("tokens_per_second", 0), "speed-up over plain static batches": speed_up, "same text": same_text,
    }  # fmt: skip
    sides = {f"{name}, static batches" if name == PLAIN else name: side for name, side in result["sides"].items()}
    return column_table(columns, sides, "") + footnote(
        result, "Greedy unless said otherwise, {dtype}, {num_prompts} requests for {limits[0]} to {limits[1]} new "
        "tokens, at most {max_batch} at a time, median of {repeats} interleaved repeats",
    )  # fmt: skip
