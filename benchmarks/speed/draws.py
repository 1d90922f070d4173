"""Time that sampled rounds of a batch save by drawing only from the tokens that top-k keeps.

    python -m benchmarks draws --heads model_cards/poss3-longer model_cards/eagle
    python -m benchmarks draws --shape llama-100m --methods eagle

Every round drafts. Both ways draw from the same distribution but different tokens, so their rounds differ. The time
that accepting takes in a round is therefore reported in addition to tokens per second.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any
from unittest import mock

from hf_specheads.generation.sampling import TokenSampler
from hf_specheads.tuning.turns import take_turns

from .. import setup
from ..results import Result, column_table, footnote, percent, speed_up
from ..setup import Inputs
from ..sides import TO_THE_END, Run, generate_once, plain_and, summaries

FROM_ALL = "{}, from the whole vocabulary"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair or its sizes, the prompts, and sampling."""
    setup.add_generation_arguments(parser, heads=["poss3-longer", "eagle"], prompts=["chats"])
    setup.add_shape_arguments(parser, depth=4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top_k", type=int, default=20)
    parser.add_argument("--top_p", type=float, default=0.8)


def accepting(runs: list[list[Run]]) -> dict[str, float]:
    """Returns the milliseconds that accepting takes in a round, and its share of the time after prefill."""
    stats = [run.stats for turn in runs for run in turn if run.stats is not None]
    spent = [one.seconds["accept"] for one in stats]
    rounds = [one.seconds["total"] - one.seconds["prefill"] for one in stats]
    each = (1000 * seconds / max(one.rounds, 1) for seconds, one in zip(spent, stats, strict=True))
    return {"accept_milliseconds": statistics.median(each), "accept_share": sum(spent) / sum(rounds)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures plain sampling, and sampling with heads in both ways."""
    target, heads, prompts = setup.load_pair(args, every_round=True)
    for one in heads.values():
        one.profile = True
    sampled = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    sides = plain_and(heads, **TO_THE_END, **sampled)
    from_all = {FROM_ALL.format(name): sides[name] for name in heads}
    sides |= from_all

    def run(name: str, inputs: Inputs, turn: int) -> Run:
        few = None if name in from_all else vars(TokenSampler)["last_few"]
        with mock.patch.object(TokenSampler, "last_few", few):
            return generate_once(target, sides[name], inputs, args.max_new_tokens, turn)

    batches = setup.full_batches(prompts, args.batch_size)
    runs = take_turns(sides, batches, run, args.repeats)
    found = summaries(target, sides, batches, runs)
    for name in (*heads, *from_all):
        found[name] |= accepting(runs[name])
    settings = {"batch_size": args.batch_size, "vocabulary": target.config.get_text_config().vocab_size}
    return {"sides": found, **settings, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}


def table(result: Result) -> str:
    """One row per side."""
    columns = {
        "tokens/s": ("tokens_per_second", 0), "speed-up over plain (range)": speed_up,
        "accepting, ms per round": ("accept_milliseconds", 2),
        "share of the round": lambda side: percent(side["accept_share"]) if "accept_share" in side else "",
    }  # fmt: skip
    return column_table(columns, result["sides"], "") + footnote(
        result, "Temperature {temperature}, top-k {top_k}, top-p {top_p}, {dtype}, vocabulary of {vocabulary}, batch "
        "{batch_size}, {num_prompts} prompts, {max_new_tokens} new tokens, drafting in every round, median of "
        "{repeats} interleaved repeats",
    )  # fmt: skip
