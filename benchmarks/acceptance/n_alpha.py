"""n-alpha: how often a chain's draft agrees with the target when n of the features it reads were drafted.

    python -m benchmarks n_alpha --heads model_cards/eagle model_cards/hass

What it means says `hf_specheads/figures/n_alpha.py`. Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from hf_specheads.bootstrap import ratio_draws
from hf_specheads.figures.n_alpha import agreement

from ..results import Result, footnote, markdown_table, number
from ..setup import add_generation_arguments, count_parameters, load_pair, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Heads, prompts, and how far."""
    heads = ["eagle", "hass", "poss2", "poss3"]
    add_generation_arguments(parser, heads, prompts=["held_out", "functions"], repeats=None)
    parser.add_argument("--max_n", type=int, default=4, help="most drafted features in a row")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every head on the same texts."""
    target, loaded, prompts = load_pair(args, every_round=True)
    greedy = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    texts = [(target.generate(**inputs, **greedy), inputs["input_ids"].shape[1]) for inputs in prompts]
    texts = [(text, length) for text, length in texts if text.shape[1] > length + args.max_n + 1]
    heads: dict[str, Any] = {}
    positions = 0
    for name, one in loaded.items():
        found = [agreement(target, one, text, length, args.max_n) for text, length in texts]
        agreed = torch.stack([each.sum(dim=1) for each in found]).double()  # [texts, n]
        counts = torch.tensor([each.shape[1] for each in found], dtype=torch.float64)
        positions = int(counts.sum())
        heads[name] = {
            "method": one.config.method,
            "inputs": getattr(one.config, "inputs", None),
            "trained_positions": getattr(one.config, "trained_positions", None),
            "parameters": count_parameters(one),
            "n_alpha": (agreed.sum(dim=0) / counts.sum()).tolist(),
            "standard_error": [ratio_draws(each.tolist(), counts.tolist()).std().item() for each in agreed.T],
        }
        print(f"{name}: {heads[name]['n_alpha']}", file=sys.stderr, flush=True)
    return {
        **settings(args, texts),
        "max_n": args.max_n,
        "positions": positions,
        "heads": heads,
    }


def table(result: Result) -> str:
    """One row per head, one column per number of drafted features."""
    rows = []
    for name, facts in result["heads"].items():
        cells = zip(facts["n_alpha"], facts["standard_error"], strict=True)
        row = [name, facts["inputs"] or "-", number(facts["trained_positions"], 0)]
        row += [f"{number(value, 3)} ± {number(error, 3)}" for value, error in cells]
        rows.append(row + ["-"] * (3 + result["max_n"] + 1 - len(row)))
    header = ["heads", "inputs", "trained positions", *(f"{n}-alpha" for n in range(result["max_n"] + 1))]
    sets = ", ".join(result["prompts"])
    return markdown_table(header, rows) + footnote(
        result, f"Greedy, {result['positions']} positions of {result['num_prompts']} texts (prompts: {sets}), "
        "standard errors bootstrapped over texts",
    )  # fmt: skip
