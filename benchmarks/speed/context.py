"""Acceptance length and speed-up by length of the context, and the value of switching to plain steps.

    python -m benchmarks context --heads model_cards/poss3 model_cards/eagle

Every prompt is the end of one long text, cut to several lengths, so that the continuation starts at the same place for
all lengths. Draft heads run in two ways: drafting in every round, and choosing between drafting and plain steps
(`heads.adaptive`). As the worst case for that choice, untrained heads run with it, too.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead

from .. import setup
from ..results import Result, footnote, markdown_table, number, percent
from ..setup import cut
from ..sides import compare, plain_and

TEMPERATURE = 1.0  # of the sampled run at the shortest length
SAMPLING = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts and lengths."""
    setup.add_generation_arguments(parser, heads=["poss3", "eagle"], prompts=["long"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 1536])


def load_heads(args: argparse.Namespace, target: PreTrainedModel) -> dict[str, DraftHead]:
    """Loads heads that draft in every round and heads that may take plain steps, and makes untrained heads that may do
    so."""
    heads = {}
    for folder in args.heads:
        name = setup.display_name(folder)
        heads[name] = setup.load_bound_heads(target, folder, every_round=True)
        heads[f"{name}, adaptive"] = setup.load_bound_heads(target, folder)
    torch.manual_seed(0)
    tree = next(iter(heads.values())).tree_config
    useless = AutoDraftHead.from_target(target, "eagle", tree_config=tree).eval().bind(target)
    useless.adaptive = True
    return {**heads, "untrained, adaptive": useless}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all lengths, and the shortest one sampled, too."""
    target, tokenizer = setup.load_target(args)
    prompts, shortest = setup.load_prompts(args.prompts, tokenizer, args.limit), min(args.lengths)
    heads = load_heads(args, target)

    def measure_length(length: int, **sampling: Any) -> dict[str, Any]:
        sides = plain_and(heads, **sampling)
        return compare(target, sides, cut(prompts, length), args.max_new_tokens, args.repeats)

    lengths = {str(length): measure_length(length) for length in args.lengths}
    drawn = measure_length(shortest, **SAMPLING)
    measured = [found.items() for found in (*lengths.values(), drawn)]
    return {
        "num_prompts": len(cut(prompts, max(args.lengths))),
        "trained_length": statistics.median([one.config.train_max_length or 0 for one in heads.values()][:-1]),
        "lengths": lengths,
        "sampled": {"temperature": TEMPERATURE, "length": shortest, "sides": drawn},
        "slowest_adaptive": min(
            side["speed_up"] for found in measured for name, side in found if name.endswith("adaptive")
        ),
    }


def table(result: Result) -> str:
    """One row per side, one column per context length."""
    lengths = result["lengths"]
    names = list(next(iter(lengths.values())))[1:]
    sampled = result["sampled"]
    header = ["speed-up (tau)", *(f"{length} tokens" for length in lengths)]
    header += [f"temperature {sampled['temperature']:g}, {sampled['length']} tokens", "plain steps when sampling"]
    rows = []
    for name in names:
        drawn = sampled["sides"][name]
        cells = [*(one[name] for one in lengths.values()), drawn]
        shown = [f"{number(c['speed_up'])}x ({number(c.get('acceptance_length'))})" for c in cells]
        rows.append([name, *shown, percent(drawn.get("plain_share"))])
    return markdown_table(header, rows) + footnote(
        result, "{dtype}, batch 1, {max_new_tokens} new tokens, {num_prompts} prompts, heads trained on contexts of "
        "{trained_length:g} tokens; tau counts only rounds that drafted; slowest adaptive side: "
        "{slowest_adaptive:.2f}x",
    )  # fmt: skip
