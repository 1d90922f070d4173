"""Tokens per second of plain `generate` and with heads, on the same prompts, interleaved; checks that texts agree.

    python -m benchmarks speedup --heads model_cards/poss3 model_cards/eagle --baselines

`--baselines` adds transformers' own prompt lookup. The command exits with 1 if a text of ours differs from the plain
one.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from .. import results
from ..results import Result, column_table, draft_tree, footnote, percent, pos_acc, same_text, same_texts, speed_up
from ..setup import add_generation_arguments, load_all_heads, load_prompts, load_target
from ..sides import compare, plain_and

LOOKED_UP = 5  # number of tokens that transformers' prompt lookup copies at a time
SHOWN = ("eagle", "poss3-longer")  # heads in the README's table
HOW = "{dtype}, batch 1, at most {max_new_tokens} new tokens, median of {repeats} interleaved repeats"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts and baselines."""
    add_generation_arguments(parser, heads=["poss3"], prompts=["chats"], repeats=5)
    parser.add_argument("--baselines", action="store_true", help="also measure transformers' prompt lookup")
    parser.add_argument("--profile", action="store_true", help="also show the drafting time per round")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all sides on all prompt sets: plain generation, then heads, then transformers' own methods."""
    target, tokenizer = load_target(args)
    heads = load_all_heads(target, args.heads)
    for one in heads.values():
        one.profile = args.profile
    sides = plain_and(heads)
    if args.baselines:
        sides[f"prompt lookup, {LOOKED_UP} tokens"] = {"prompt_lookup_num_tokens": LOOKED_UP}
    prompts = {name: load_prompts([name], tokenizer, args.limit) for name in args.prompts}
    return {
        "target_parameters": target.num_parameters(),
        "trees": {name: one.tree_config.to_dict() for name, one in heads.items()},
        "prompt_sets": {
            name: compare(target, sides, one, args.max_new_tokens, args.repeats) for name, one in prompts.items()
        },
    }


def texts_agree(result: Result) -> bool:
    """Checks the texts of our heads only, not those of transformers' own methods."""
    return all(sides[name]["identical"] for sides in result["prompt_sets"].values() for name in result["trees"])


def table(result: Result) -> str:
    """One table per prompt set."""
    profiled = any("draft_milliseconds" in side for one in result["prompt_sets"].values() for side in one.values())
    columns = {
        "tokens/s": ("tokens_per_second", 0), "speed-up (range)": speed_up, "tau": ("acceptance_length", 2),
        "pos-acc": lambda side: pos_acc(side.get("pos_acc")),
        **({"draft ms per round": ("draft_milliseconds", 2)} if profiled else {}),
        "tokens per forward": ("tokens_per_forward", 2),
        "forwards saved": lambda one: percent(one["forwards_saved"]), "same text": same_texts,
    }  # fmt: skip
    text = "\n".join(column_table(columns, sides, name) for name, sides in result["prompt_sets"].items())
    trees = "; ".join(f"{name}: {draft_tree(tree)}" for name, tree in result["trees"].items())
    return text + footnote(result, f"Greedy, {HOW}", f"saved trees: {trees}")


def short_table(result: Result) -> str:
    """The README's table: one row per side, and columns of speeds per prompt set."""
    sets, shown = result["prompt_sets"], [name for name in result["trees"] if name in SHOWN]
    plain, *others = next(iter(sets.values()))
    names = [plain, *shown, *(name for name in others if name.startswith("prompt lookup"))]
    header = ["greedy", *(f"{one}: {what}" for one in sets for what in ("tokens/s", "speed-up", "tau")), "same text"]
    rows = []
    for name in names:
        found = [sides[name] for sides in sets.values()]
        cells = [(f"{one['tokens_per_second']:.0f}", f"{one['speed_up']:.2f}x",
                  results.number(one.get("acceptance_length"))) for one in found]  # fmt: skip
        rows.append([name, *itertools.chain(*cells), same_text(*found)])
    trees = sorted({draft_tree(result["trees"][name]) for name in shown})
    return results.markdown_table(header, rows) + footnote(result, HOW, f"saved trees: {', '.join(trees)}")
