"""Heads trained for the full-precision target, used with quantised copies: acceptance, tokens per second, same text.

    python -m benchmarks quantised --heads model_cards/poss3 model_cards/eagle

The formats are torchao's weight-only int8 and int4 (`pip install 'hf-specheads[quant]'`). Every copy is compared with
its own plain generation. Where texts differ, the gap between the logits of the two tokens at the first difference is
reported; 0 is a tie.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..results import Result, column_table, footnote, number, same_text
from ..setup import Inputs, add_generation_arguments, load_all_heads, load_prompts, load_target
from ..sides import PLAIN, plain_and, run_interleaved, summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts and formats."""
    add_generation_arguments(parser, heads=["poss3"], prompts=["chats"])
    parser.set_defaults(limit=6, max_new_tokens=64)
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"], choices=["none", "int8", "int4"])


def quantise(target: PreTrainedModel, name: str) -> PreTrainedModel:
    """Quantises the weights of all linear layers except `lm_head`, in place.

    torchao's packed int4 has no CPU kernels. On a CPU, its unpacked int4 is used, which is stored in bytes and
    converted before products.
    """
    if name == "none":
        return target
    from torchao import quantization as ao

    on_cpu = target.device.type == "cpu"
    int4 = ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)) if on_cpu else ao.Int4WeightOnlyConfig()
    config = ao.Int8WeightOnlyConfig() if name == "int8" else int4
    ao.quantize_(target, config, lambda module, path: isinstance(module, nn.Linear) and path != "lm_head")
    return target


@torch.no_grad()
def gap_where_texts_part(target: PreTrainedModel, inputs: Inputs, mine: list[int], theirs: list[int]) -> float:
    """Returns the logit of the plain token minus that of our token, at the first place where the texts differ."""
    place = next(index for index, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
    text = torch.cat([inputs["input_ids"], torch.tensor([theirs[:place]], dtype=torch.long)], dim=1)
    logits = target(text).logits[0, -1].float()
    return float(logits[theirs[place]] - logits[mine[place]])


def measure_format(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measures all heads on a target in one format."""
    target, tokenizer = load_target(args)
    prompts = load_prompts(args.prompts, tokenizer, args.limit)
    sides = plain_and(load_all_heads(quantise(target, name), args.heads))
    runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats)
    found = {name: summarise(mine, runs[PLAIN]) for name, mine in runs.items()}
    texts = {name: [run.token_ids[0] for run in mine[0]] for name, mine in runs.items()}
    for name, side in found.items():
        side["gaps"] = [
            gap_where_texts_part(target, prompts[place], texts[name][place], texts[PLAIN][place])
            for place in side["differing_prompts"]
        ]
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every format with every head."""
    return {"formats": {name: measure_format(args, name) for name in args.formats}}


def table(result: Result) -> str:
    """One row per format of the target's weights and side, plain and with heads."""
    columns = {
        "tau": ("acceptance_length", 2), "tokens/s": ("tokens_per_second", 1),
        "speed-up over plain": ("speed_up", 2, "x"), "same text": same_text,
        "gaps": lambda row: ", ".join(number(gap, 3) for gap in row.get("gaps", ())) or "-",
    }  # fmt: skip
    text = column_table(columns, result["formats"], "weights", "")
    return text + footnote(
        result, "{num_prompts} prompts, {dtype}; gaps: logit of the plain token minus ours where texts first differ"
    )
