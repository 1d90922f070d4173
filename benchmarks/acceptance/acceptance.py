"""Acceptance length and pos-acc of several heads on the same prompts: greedy and sampled, several trees and depths.

    python -m benchmarks acceptance --heads model_cards/eagle model_cards/hass model_cards/poss3

All heads draft the same trees: chains, 16 nodes, or the 60 nodes of the published numbers. tau (micro-averaged: over
all rounds) comes with its 95 % interval over prompts. Two heads are told apart if the interval of their difference,
paired by prompts, does not contain 0. The result holds tokens and rounds of every prompt, so further comparisons need
no new measurement. Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftHead
from hf_specheads.bootstrap import ratio_interval

from ..results import Result, footnote, markdown_table, millions, number, pos_acc, teraflop
from ..setup import Inputs, add_generation_arguments, describe, load_pair, padded, prompt_entries
from ..sides import Options, Run, acceptance, generate_once
from .questions import Counts, answers_table, counts_as_text, difference, verdict

TREES: dict[str, dict[str, Any]] = {
    "60 nodes": {"kind": "dynamic", "top_k": 10, "total_tokens": 60},
    "16 nodes": {"kind": "dynamic", "top_k": 4, "total_tokens": 16},
    "chain": {"kind": "chain", "top_k": 1},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for heads, prompts, ways of decoding, trees and depths."""
    heads = ["eagle", "hass", "poss1", "poss2", "poss3", "control"]
    add_generation_arguments(parser, heads, prompts=["chats"], repeats=None)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 8])
    parser.add_argument("--trees", nargs="+", choices=list(TREES), default=["60 nodes", "16 nodes"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["greedy"])
    parser.add_argument("--batch_size", type=int, default=16, help="prompts of similar length per batch")


# ---------------------------------------------------------------------- generating
def generate_all(
    target: PreTrainedModel, options: Options, prompts: Sequence[Inputs], args: argparse.Namespace
) -> list[tuple[list[int], Run]]:
    """Runs one side on all prompts, batching prompts of about the same length. Returns, for every batch, the places of
    its prompts and the run."""
    order = sorted(range(len(prompts)), key=lambda place: prompts[place]["input_ids"].shape[1])
    batches = [order[start : start + args.batch_size] for start in range(0, len(order), args.batch_size)]
    return [
        (places, generate_once(target, options, padded([prompts[place] for place in places]), args.max_new_tokens))
        for places in batches
    ]


def counts_of(runs: Sequence[tuple[list[int], Run]]) -> Counts:
    """Returns the tokens and rounds of every prompt, in the order of the prompts."""
    accepted = {place: row for places, run in runs for place, row in zip(places, run.stats.num_accepted, strict=True)}
    rows = [accepted[place] for place in sorted(accepted)]
    return [float(sum(row) + len(row)) for row in rows], [float(len(row)) for row in rows]


# ---------------------------------------------------------------------- measuring
def numbers_of(counts: Counts, groups: dict[str, list[int]]) -> dict[str, Any]:
    """Returns the interval of tau, the mean of the prompts' own taus, tau by group of prompts, and the underlying
    counts."""
    micro = ratio_interval(*counts)
    each = [tokens / rounds for tokens, rounds in zip(*counts, strict=True) if rounds]
    return {
        "interval": [micro.low, micro.high],
        "macro": sum(each) / max(len(each), 1),
        "groups": {name: ratio_interval(*([each[place] for place in places] for each in counts)).mean
                   for name, places in groups.items()},
        "counts": counts_as_text(counts),
    }  # fmt: skip


def groups_of(args: argparse.Namespace) -> dict[str, list[int]]:
    """Returns the places of the prompts of each group, and of those with and without a think block, if a set has
    these."""
    groups: dict[str, list[int]] = {}
    for place, entry in enumerate(entry for name in args.prompts for entry in prompt_entries(name)[: args.limit]):
        thinking = {True: "thinking", False: "not thinking"}.get(entry.get("thinking"))
        for name in filter(None, (entry.get("group"), thinking)):
            groups.setdefault(name, []).append(place)
    return groups


def with_tree(heads: DraftHead, tree: str, depth: int) -> DraftHead:
    """Returns heads that draft one of the trees, as deep as `depth` or as they can draft."""
    depth = min(depth, heads.max_draft_positions or depth)
    return heads.with_tree(**{"depth": depth, "total_tokens": depth + 1, **TREES[tree]})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every combination of heads, mode, tree and depth."""
    target, loaded, prompts = load_pair(args, every_round=True)
    plain = [run.token_ids for _, run in generate_all(target, {}, prompts, args)]
    groups, heads = groups_of(args), {}
    for folder, (name, one) in zip(args.heads, loaded.items(), strict=True):
        measured = {mode: {tree: {} for tree in args.trees} for mode in args.modes}
        heads[name] = {**describe(one, folder), "measured": measured}
    for name, mode, tree, depth in itertools.product(loaded, args.modes, args.trees, args.depths):
        options = {**MODES[mode], "assistant_model": with_tree(loaded[name], tree, depth)}
        runs = generate_all(target, options, prompts, args)
        cell = {**acceptance([run for _, run in runs]), **numbers_of(counts_of(runs), groups)}
        if mode == "greedy":  # sampled rows of a batch share random numbers, so their texts cannot be compared
            cell["identical"] = [run.token_ids for _, run in runs] == plain
        heads[name]["measured"][mode][tree][str(depth)] = cell
        print(f"{name}, {mode}, {tree}, depth {depth}: tau {cell['acceptance_length']:.3f}", file=sys.stderr)
    trees = {tree: TREES[tree] for tree in args.trees}
    return {"modes": args.modes, "trees": trees, "depths": args.depths, "heads": heads}


# ---------------------------------------------------------------------- the table
def table(result: Result) -> str:
    """One table of tau by depth for each mode and tree, then tables of tau by groups of prompts."""
    parts = [_of_tree(result, mode, tree) for mode in result["modes"] for tree in result["trees"]]
    parts += [_of_groups(result, mode) for mode in result["modes"]]
    sets = ", ".join(result["prompts"])
    return "\n".join(filter(None, parts)) + footnote(
        result, f"tau with 95 % intervals over {{num_prompts}} prompts ({sets}), at most {{max_new_tokens}} new "
        "tokens",
        f"not told apart: the 95 % interval of the difference, paired by prompts, contains 0 at depth "
        f"{result['depths'][-1]}; every pair is tested by itself",
    )  # fmt: skip


def _of_tree(result: Result, mode: str, tree: str) -> str:
    """One row per head, in descending order of tau."""
    deepest = str(result["depths"][-1])
    found = {name: facts["measured"][mode][tree] for name, facts in result["heads"].items()}
    rows = []
    for name in sorted(found, key=lambda name: -found[name][deepest]["acceptance_length"]):
        facts = result["heads"][name]
        same = [other for other in found if other != name and not told_apart(found[name], found[other], deepest)]
        rows.append([
            name, millions(facts["parameters"]), teraflop(facts.get("training_flops"), facts.get("starts_from")),
            *map(_with_interval, found[name].values()), pos_acc(found[name][deepest]["pos_acc"]),
            ", ".join(same) or "all told apart",
        ])  # fmt: skip
    header = [f"{mode}, {tree}", "parameters", "training TFLOP", *(f"tau, depth {d}" for d in result["depths"])]
    return markdown_table([*header, f"pos-acc, depth {deepest}", "not told apart from"], rows)


def _with_interval(cell: Result) -> str:
    low, high = cell["interval"]
    return f"{number(cell['acceptance_length'])} ({number(low)}-{number(high)})"


short_table = answers_table  # the short table shows the answers to the questions


def told_apart(ours: Result, theirs: Result, depth: str) -> bool:
    """Tells whether the interval of the difference excludes 0."""
    return verdict(difference(ours, theirs, depth)) != "not told apart"


def _of_groups(result: Result, mode: str) -> str:
    """Formats tau of every group with the first tree at the last depth; empty if prompts have no groups."""
    tree, deepest = next(iter(result["trees"])), str(result["depths"][-1])
    cells = {name: facts["measured"][mode][tree][deepest] for name, facts in result["heads"].items()}
    names = list(next(iter(cells.values()))["groups"])
    if not names:
        return ""
    rows = [[name, number(cell["macro"]), *(number(cell["groups"][one]) for one in names)]
            for name, cell in cells.items()]  # fmt: skip
    return markdown_table([f"tau, {mode}, {tree}, depth {deepest}", "mean of prompts", *names], rows)
