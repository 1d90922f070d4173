"""Batches whose prompts have different lengths: tokens per second with heads against plain `generate`.

    python -m benchmarks mixed_lengths --heads model_cards/poss3-longer --batch_size 8

With heads, prompts are read in groups of similar length, without common padding. Plain `generate` reads all prompts of
a batch padded to the longest, and so do heads on the sides named `read together`. The prompts are ends of long texts,
cut to lengths drawn evenly between the shortest and the longest of each column.
"""

from __future__ import annotations

import argparse
import random
from typing import Any
from unittest import mock

import torch

from hf_specheads.generation import loop
from hf_specheads.generation.prompts import groups_of_prompts
from hf_specheads.tuning.turns import take_turns

from ..results import Result, footnote, markdown_table, number, same_text, speed_up
from ..setup import Inputs, add_generation_arguments, cut, full_batches, load_pair
from ..sides import PLAIN, TO_THE_END, Run, generate_once, plain_and, summaries

TOGETHER = "{}, read together"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts, lengths and batch size."""
    add_generation_arguments(parser, heads=["poss3-longer"], prompts=["long"])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lengths", nargs="+", default=["64-128", "64-512", "64-1536"], help="shortest-longest")


def batches(prompts: list[Inputs], shortest: int, longest: int, size: int) -> list[Inputs]:
    """Batches of the ends of prompts, cut to drawn lengths. The first prompt of a batch has the longest length."""
    draw = random.Random(0)
    long = cut(prompts, longest)
    rows = [cut([one], longest if place % size == 0 else draw.randint(shortest, longest))[0]
            for place, one in enumerate(long)]  # fmt: skip
    return full_batches(rows, size)


def read_together(target: Any, input_ids: torch.Tensor, *call: Any) -> list[list[int]]:
    """Takes the place of `groups_of_prompts`: one group of all prompts."""
    return [list(range(len(input_ids)))]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all sides at all spans of lengths."""
    target, heads, prompts = load_pair(args)
    sides = plain_and(heads, **TO_THE_END)
    together = {TOGETHER.format(name): sides[name] for name in heads}
    sides |= together

    def run(name: str, inputs: Inputs, turn: int) -> Run:
        grouping = read_together if name in together else groups_of_prompts
        with mock.patch.object(loop, "groups_of_prompts", grouping):
            return generate_once(target, sides[name], inputs, args.max_new_tokens, turn)

    def warm_up(name: str, inputs: Inputs) -> None:
        run(name, inputs, 0)

    found, real = {}, {}
    for span in args.lengths:
        shortest, longest = map(int, span.split("-"))
        rows = batches(prompts, shortest, longest, args.batch_size)
        masks = [one["attention_mask"].float() for one in rows]
        real[span] = float(torch.cat([mask.flatten() for mask in masks]).mean())
        found[span] = summaries(target, sides, rows, take_turns(sides, rows, run, args.repeats, warm_up))
    return {"batch_size": args.batch_size, "lengths": found, "tokens_among_rows": real}


def table(result: Result) -> str:
    """One row per side, one column per span of lengths."""
    spans = result["lengths"]
    header = ["speed-up over plain, same batch", *(f"prompts of {span} tokens" for span in spans), "same text"]
    rows = [[f"{PLAIN}, tokens/s", *(number(sides[PLAIN]["tokens_per_second"], 0) for sides in spans.values()), ""]]
    names = [name for name in next(iter(spans.values())) if name != PLAIN]
    for name in names:
        cells = [sides[name] for sides in spans.values()]
        rows.append([name, *map(speed_up, cells), same_text(*cells)])
    real = ", ".join(f"{100 * share:.0f} %" for share in result["tokens_among_rows"].values())
    return markdown_table(header, rows) + footnote(
        result, "Greedy, {dtype}, batches of {batch_size}, {max_new_tokens} new tokens per text, "
        f"median of {{repeats}} interleaved repeats; of the padded rows, {real} are tokens",
    )  # fmt: skip
