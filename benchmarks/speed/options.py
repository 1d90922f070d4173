"""What calls ask for besides a length: speed with heads over plain `generate` under criteria and processors.

    python -m benchmarks options --heads model_cards/poss3-longer --batch_sizes 1 8

Criteria look at every token, of which a round emits several, and some processors look at the text before every token.
The criteria here end no text, so that all texts are equally long. Both sides of a comparison have the same options.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..results import Result, footnote, markdown_table, number, speed_up
from ..setup import add_generation_arguments, full_batches, load_all_heads, load_prompts, load_target
from ..sides import PLAIN, compare, plain_and

STRINGS = ["<|end of turn|>", "<|user|>"]  # in none of the texts
A_DAY = 24 * 3600.0


class Never(StoppingCriteria):
    """Ends no text."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts and batch sizes."""
    add_generation_arguments(parser, heads=["poss3-longer"], prompts=["chats"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures plain generation and heads, with every option and batch size."""
    target, tokenizer = load_target(args)
    heads, prompts = load_all_heads(target, args.heads), load_prompts(args.prompts, tokenizer, args.limit)
    asked = {
        "nothing": {},
        "stop strings": {"stop_strings": STRINGS, "tokenizer": tokenizer},
        "`max_time`": {"max_time": A_DAY},
        "an own criterion": {"stopping_criteria": StoppingCriteriaList([Never()])},
        "`repetition_penalty=1.05`": {"repetition_penalty": 1.05},
        "`no_repeat_ngram_size=12`": {"no_repeat_ngram_size": 12},
    }
    no_token = {"eos_token_id": len(tokenizer), "pad_token_id": 0}  # in a batch, other criteria need an end token
    sizes: dict[str, Any] = {}
    for size in args.batch_sizes:
        call = (full_batches(prompts, size), args.max_new_tokens, args.repeats)
        sizes[str(size)] = {
            name: compare(target, plain_and(heads, **no_token, **options), *call) for name, options in asked.items()
        }
    return {"sizes": sizes}


def table(result: Result) -> str:
    """One row per option and side, one column per batch size."""
    sizes = result["sizes"]
    header = ["asked for besides a length", "", *(f"batch {size}" for size in sizes)]
    rows = []
    for option in next(iter(sizes.values())):
        found = [sides[option] for sides in sizes.values()]
        for name in found[0]:
            values = [f"{number(sides[name]['tokens_per_second'], 0)} tokens/s" if name == PLAIN
                      else speed_up(sides[name]) for sides in found]  # fmt: skip
            rows.append([option, name, *values])
    return markdown_table(header, rows) + footnote(
        result, "Greedy, {dtype}, {num_prompts} prompts, {max_new_tokens} new tokens per text, median of {repeats} "
        "interleaved repeats; speed-ups are over plain generation with the same options",
    )  # fmt: skip
