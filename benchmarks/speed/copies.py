"""Several samples of every prompt (`num_return_sequences`): tokens per second with heads against plain `generate`.

    python -m benchmarks copies --heads model_cards/poss3-longer model_cards/eagle --copies 1 4 8

With heads, a prompt is read once for all its samples, while plain `generate` reads it for each. Sides named `prompt
read for each` use heads, but read the prompt for each sample. All texts are sampled and therefore not compared.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest import mock

from hf_specheads.generation import loop
from hf_specheads.generation.prompts import copies_of_prompts
from hf_specheads.tuning.turns import take_turns

from ..results import Result, footnote, markdown_table, number, speed_up
from ..setup import Inputs, add_generation_arguments, load_pair
from ..sides import PLAIN, TO_THE_END, Run, generate_once, plain_and, summaries

FOR_EACH = "{}, prompt read for each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts, number of samples, and sampling."""
    add_generation_arguments(parser, heads=["poss3-longer", "eagle"], prompts=["chats"])
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all sides at all numbers of samples."""
    target, heads, prompts = load_pair(args)
    drawn = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k}
    found = {}
    for number_of in args.copies:
        sides = plain_and(heads, **TO_THE_END, **drawn, num_return_sequences=number_of)
        for_each = {FOR_EACH.format(name): sides[name] for name in heads} if number_of > 1 else {}
        sides |= for_each

        def run(name: str, inputs: Inputs, turn: int, sides: Any = sides, for_each: Any = for_each) -> Run:
            copies = (lambda config, model_kwargs: 1) if name in for_each else copies_of_prompts
            with mock.patch.object(loop, "copies_of_prompts", copies):
                return generate_once(target, sides[name], inputs, args.max_new_tokens, turn)

        def warm_up(name: str, inputs: Inputs, run: Any = run) -> None:
            run(name, inputs, 0)

        found[str(number_of)] = summaries(
            target, sides, prompts, take_turns(sides, prompts, run, args.repeats, warm_up)
        )
    prompt_tokens = sum(inputs["input_ids"].shape[1] for inputs in prompts) / len(prompts)
    return {"copies": found, "temperature": args.temperature, "top_k": args.top_k, "prompt_tokens": prompt_tokens}


def table(result: Result) -> str:
    """One row per side, one column per number of samples."""
    counts = result["copies"]
    header = ["speed-up over plain, same number of samples", *(f"samples per prompt: {count}" for count in counts)]
    rows = [[f"{PLAIN}, tokens/s", *(number(sides[PLAIN]["tokens_per_second"], 0) for sides in counts.values())]]
    names = dict.fromkeys(name for sides in counts.values() for name in sides if name != PLAIN)
    for name in names:
        rows.append([name, *(speed_up(sides[name]) if name in sides else "" for sides in counts.values())])
    return markdown_table(header, rows) + footnote(
        result, "Temperature {temperature}, top-k {top_k}, {dtype}, {max_new_tokens} new tokens per sample, "
        "{num_prompts} prompts of {prompt_tokens:.0f} tokens, median of {repeats} interleaved repeats",
    )  # fmt: skip
