"""Draft trees that the engine chooses by default, against the best tree of an exhaustive grid, with the same heads.

    python -m benchmarks default --heads model_cards/poss3 model_cards/eagle model_cards/medusa
    python -m benchmarks default --batch_sizes 1 4 8 --temperatures 0 1 --contexts 128 1024
    python -m benchmarks default --shape llama-100m --tau 2 3 5  # random weights, acceptance by a stub
    python -m benchmarks --render  # draws docs/images/default_against_grid.png from default.json

In every setting (heads, batch, temperature, context) the grid runs on the same prompts in stages. Each stage keeps the
fastest trees, which the next one measures on more prompts, drafting in every round. Finally three sides take turns:
the best tree of the grid; the heads as loaded, with the engine's own choice of trees; and plain generation. The engine
starts every setting without prior knowledge, and the time it spends on trying trees counts. The first pass over the
prompts, in which it learns most, is reported separately from the later passes; for these, the ratio to the best tree
comes with an interval over prompts and passes. On some machines the relative speed of larger and smaller forwards
changes from hour to hour, and with it the best tree. The interval of a single run does not include this variation.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import DraftHead
from hf_specheads.generation.pace.menu import COPIES
from hf_specheads.tuning.turns import generate_text

from .. import setup
from ..results import Result, column_table, draft_tree, footnote, number, same_text, speed_up
from ..setup import Inputs
from ..sides import PLAIN, TO_THE_END, Run, plain_and, run_interleaved, speed_ratio, summaries
from ..speed.compiled import acceptance_of
from .grid import add_grid_arguments, fastest, grid

DEFAULT, BEST = "default", "best of the grid"
STAGES = ((8, 1, 1), (3, 4, 1))  # (trees to keep, prompts or batches, repeats) of each stage
ENOUGH = 0.95  # a setting passes if the default reaches this share of the best tree's speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts, settings and trees of the grid."""
    setup.add_generation_arguments(parser, heads=["poss3", "eagle"], prompts=["chats"])
    parser.set_defaults(limit=8, max_new_tokens=96, repeats=4)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="0 means greedy")
    kept = "cut every prompt to this many of its last tokens (default: keep all)"
    parser.add_argument("--contexts", type=int, nargs="+", help=kept)
    depths = [1, 2, 3, 4, 6]
    setup.add_shape_arguments(parser, depth=8)
    parser.set_defaults(methods=["poss"])
    parser.add_argument(
        "--tau", type=float, nargs="+", default=[2.0, 3.0, 5.0], help="acceptance lengths set with --shape"
    )
    copied = f"nodes copied from the text in trees of the grid (default: 0 {COPIES}; 0 with --shape)"
    parser.add_argument("--lookup", type=int, nargs="+", help=copied)
    add_grid_arguments(parser, depths=depths, top_k=[2, 3, 6], total_tokens=[6, 12, 24], chains=[*depths, 8])


def measure_setting(
    target: PreTrainedModel, make_heads: Callable[[], DraftHead], batches: list[Inputs], temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Finds the best tree of the grid, then measures it, the default and plain generation: one first pass over the
    prompts, and later passes."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    drafting, left_alone = make_heads(), make_heads()
    drafting.adaptive, left_alone.adaptive = False, True
    trees = grid(args, drafting.max_draft_positions, args.lookup or ([0] if args.shape else [0, COPIES]))
    best = fastest(target, drafting, trees, batches, args.max_new_tokens, STAGES, **sampling)
    left_alone.config.tree_config = left_alone.config.tuned = None  # the state of heads that were never tuned
    left_alone.forget_tree()
    heads = {DEFAULT: left_alone, BEST: drafting.with_tree(**best.to_dict())}
    sides = plain_and(heads, **TO_THE_END, **sampling)
    first = run_interleaved(target, sides, batches, args.max_new_tokens, 1)
    later = run_interleaved(target, sides, batches, args.max_new_tokens, args.repeats)
    return {
        "sides": summaries(target, sides, batches, later),
        "tree": best.to_dict(),
        "grid_size": len(trees),
        "learnt": None if (learnt := left_alone.learnt_tree) is None else learnt.to_dict(),
        "first": _shares(first),
        **_shares(later),
    }


def _shares(runs: dict[str, list[list[Run]]]) -> dict[str, Any]:
    """Returns the default's speed relative to plain generation, and relative to the faster of plain generation and the
    grid's best tree."""
    over_plain, over_best = (speed_ratio(runs[DEFAULT], runs[side]) for side in (PLAIN, BEST))
    over_grid = min(over_plain, over_best, key=lambda one: one.mean)
    known = math.isfinite(over_grid.low)  # a single run has no interval
    return {
        "default_over_grid": over_grid.mean,
        "interval": [over_grid.low, over_grid.high] if known else None,
        "default_over_plain": over_plain.mean,
    }


def variant(args: argparse.Namespace) -> str:
    """Stores results of random weights under a name of their own."""
    return "shape" if args.shape else ""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all settings."""
    measured = measure_shape(args) if args.shape else measure_pair(args)
    intervals = [one["interval"] for one in measured if one["interval"]]
    return {
        "measured": measured,
        "surely_enough": sum(low >= ENOUGH for low, _ in intervals),
        "surely_less": sum(high < ENOUGH for _, high in intervals),
        "least_over_grid": min(one["default_over_grid"] for one in measured),
        "least_over_plain": min(one["default_over_plain"] for one in measured),
        "least_over_grid_at_first": min(one["first"]["default_over_grid"] for one in measured),
        "least_over_plain_at_first": min(one["first"]["default_over_plain"] for one in measured),
    }


def measure_pair(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all heads at all batch sizes, temperatures and contexts."""
    target, tokenizer = setup.load_target(args)
    prompts = setup.load_prompts(args.prompts, tokenizer, args.limit)
    measured = []
    for folder, size, temperature, context in itertools.product(
        args.heads, args.batch_sizes, args.temperatures, args.contexts or [None]
    ):
        ends = prompts if context is None else setup.cut(prompts, context)
        if not (batches := setup.full_batches(ends, size)):
            raise ValueError(
                f"the prompts do not fill a batch of {size} with {context} tokens each; use more prompts, smaller "
                "--batch_sizes or smaller --contexts."
            )
        setting = {"heads": setup.display_name(folder), "batch": size, "temperature": temperature, "context": context}
        make_heads = partial(setup.load_bound_heads, target, folder)
        measured.append({**setting, **measure_setting(target, make_heads, batches, temperature, args)})
        print(measured[-1], file=sys.stderr, flush=True)
    return measured


def measure_shape(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures heads with random weights. A stub makes their drafts right as often as each `--tau` requires.

    When tokens are sampled, texts must be those that the stub knows. Random weights give many tokens nearly the same
    probability, so only temperatures close to 0 serve.
    """
    target, _, _ = setup.random_pair(args, args.device)
    measured = []
    for method, size, temperature, context, tau in itertools.product(
        args.methods, args.batch_sizes, args.temperatures, args.contexts or [None], args.tau
    ):
        # new heads for each call, without knowledge from earlier ones
        def make_heads(method: str = method) -> DraftHead:
            return setup.random_head(target, method, args.depth).bind(target)

        torch.manual_seed(0)
        [batch] = setup.full_batches(setup.random_prompts(size, args.device, context or 64), size)
        text = generate_text(target, batch, max_new_tokens=args.max_new_tokens, **TO_THE_END)
        with acceptance_of(tau, text):
            found = measure_setting(target, make_heads, [batch], temperature, args)
        name = f"{method} on {args.shape}, acceptance length set to {tau:g}"
        measured.append({"heads": name, "batch": size, "temperature": temperature, "context": context, **found})
        print(measured[-1], file=sys.stderr, flush=True)
    return measured


def setting_of(one: Result) -> str:
    """Describes a setting in words."""
    how = "greedy" if one["temperature"] == 0 else f"temperature {one['temperature']:g}"
    context = "" if one["context"] is None else f", {one['context']} tokens before"
    return f"{one['heads']}, batch {one['batch']}, {how}{context}"


def _with_interval(one: Result) -> str:
    ends = "" if one["interval"] is None else " ({} to {})".format(*(number(end, 3) for end in one["interval"]))
    return number(one["default_over_grid"], 3) + ends


def table(result: Result) -> str:
    """One row per setting."""
    columns = {
        "setting": setting_of, "default": lambda one: speed_up(one["sides"][DEFAULT]),
        "best of the grid": lambda one: speed_up(one["sides"][BEST]), "": lambda one: draft_tree(one["tree"]),
        "learnt": lambda one: "-" if one["learnt"] is None else draft_tree(one["learnt"]),
        "default / best": _with_interval,
        "default / best on the first pass": lambda one: number(one["first"]["default_over_grid"], 3),
        "same text": lambda one: "sampled" if one["temperature"] else same_text(one["sides"][DEFAULT]),
    }  # fmt: skip
    prompts = "{num_prompts} prompts" if "prompts" in result else "one batch of random prompts per setting"
    return column_table(columns, result["measured"]) + footnote(
        result, "speed-ups over plain generation, with their ranges over repeats; default / best compares with plain "
        "generation where that is faster than every tree of the grid",
        "the 95 % interval of default / best is over prompts and repeats of this run",
        f"of {len(result['measured'])} settings, {{surely_enough}} have their whole interval at or above {ENOUGH:g}, "
        "{surely_less} have it below",
        f"every grid has {min(one['grid_size'] for one in result['measured'])} trees or more",
        "lowest default / best {least_over_grid:.3f}, lowest default / plain {least_over_plain:.3f}; on the first "
        "pass, which starts untuned and is not in the speed-ups, {least_over_grid_at_first:.3f} and "
        f"{{least_over_plain_at_first:.3f}}; {prompts}, {{dtype}}",
    )  # fmt: skip
