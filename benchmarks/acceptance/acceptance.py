"""Acceptance length and pos-acc of several heads on the same prompts, at several depths, with two families of trees.

    python -m benchmarks acceptance --heads model_cards/eagle model_cards/hass model_cards/poss3

`papers` are the trees of the published numbers (10 children, 60 nodes), `default` those the first heads are saved
with; the depth is what varies. tau comes with a bootstrap standard error over prompts, and the difference to the first
heads with a paired 95 % interval. Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import DraftHead

from ..results import Result, footnote, markdown_table, millions, number, pos_acc, teraflop
from ..setup import Inputs, add_generation_arguments, load_pair, settings
from ..sides import PLAIN, Side, acceptance, generate_once
from .training_curve import describe

PAPERS = {"kind": "dynamic", "top_k": 10, "total_tokens": 60}
RESAMPLES = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Heads, prompts, depths and families of trees."""
    heads = ["eagle", "hass", "poss1", "poss2", "poss3", "control"]
    add_generation_arguments(parser, heads, prompts=["held_out", "functions"], repeats=None)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 8])
    parser.add_argument("--families", nargs="+", choices=("papers", "default"), default=["papers", "default"])


def measure_head(
    target: PreTrainedModel, side: Side, prompts: list[Inputs], plain: list[list[list[int]]], max_new_tokens: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """One head with one tree: its numbers, and per prompt [emitted tokens, rounds]."""
    runs = [generate_once(target, side, inputs, max_new_tokens) for inputs in prompts]
    stats = [run.stats for run in runs if run.stats is not None]
    rounds = [[sum(n + 1 for n in row), len(row)] for one in stats for row in one.num_accepted]
    same = all(run.token_ids == ids for run, ids in zip(runs, plain, strict=True))
    return {**acceptance([runs]), "identical": same}, torch.tensor(rounds, dtype=torch.float64)


def bootstrap(rounds: torch.Tensor) -> torch.Tensor:
    """tau of RESAMPLES resampled sets of prompts, the same resamples for every head; [RESAMPLES].

    Args:
        rounds: [prompts, 2], emitted tokens and rounds of every prompt.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(rounds), (RESAMPLES, len(rounds)), generator=generator)
    tokens, count = rounds[chosen].sum(1).unbind(-1)
    return tokens / count


def difference(samples: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Paired difference of two bootstraps: mean and 95 % interval."""
    gap = samples - reference
    low, high = torch.quantile(gap, torch.tensor([0.025, 0.975], dtype=gap.dtype)).tolist()
    return {"mean": gap.mean().item(), "low": low, "high": high}


def measure_trees(
    target: PreTrainedModel,
    heads: DraftHead,
    families: dict[str, Any],
    prompts: list[Inputs],
    plain: list[list[list[int]]],
    reference: dict[tuple[str, int], torch.Tensor],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One head with every tree. `reference` holds the first heads' bootstraps; an empty one is filled with these."""
    measured: dict[str, Any] = {family: {} for family in families}
    for family, tree in families.items():
        for depth in args.depths:
            side = Side(heads.config.method, {"assistant_model": heads.with_tree(**tree, depth=depth)})
            numbers, rounds = measure_head(target, side, prompts, plain, args.max_new_tokens)
            samples = bootstrap(rounds)
            base = reference.setdefault((family, depth), samples)
            measured[family][str(depth)] = {
                **numbers,
                "standard_error": samples.std().item(),
                "difference": difference(samples, base),
            }
            tau = numbers["acceptance_length"]
            print(f"{side.name}, {family}, depth {depth}: tau {tau:.3f}", file=sys.stderr, flush=True)
    return measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every head, tree family and depth."""
    target, loaded, prompts = load_pair(args, every_round=True)
    plain = [generate_once(target, Side(PLAIN), inputs, args.max_new_tokens).token_ids for inputs in prompts]
    saved = next(iter(loaded.values())).tree_config
    families = {"papers": PAPERS, "default": {name: getattr(saved, name) for name in PAPERS}}
    families = {name: families[name] for name in args.families}
    heads: dict[str, Any] = {}
    reference: dict[tuple[str, int], torch.Tensor] = {}
    for folder, (name, one) in zip(args.heads, loaded.items(), strict=True):
        measured = measure_trees(target, one, families, prompts, plain, reference, args)
        heads[name] = {**describe(one, folder), "measured": measured}
    return {**settings(args, prompts), "depths": args.depths, "families": families, "heads": heads}


def table(result: Result) -> str:
    """One table per family of trees: rows are heads, columns are depths."""
    depths = result["depths"]
    text = ""
    for family, tree in result["families"].items():
        rows = []
        for name, facts in result["heads"].items():
            cells = [facts["measured"][family][str(depth)] for depth in depths]
            compute = teraflop(facts.get("training_flops"), facts.get("starts_from"))
            row = [name, millions(facts["parameters"]), compute]
            row += [f"{number(c['acceptance_length'])} ± {number(c['standard_error'])}" for c in cells]
            rows.append([*row, pos_acc(cells[-1]["pos_acc"])])
        header = [f"{tree['total_tokens']} nodes, top-k {tree['top_k']}", "parameters", "training TFLOP"]
        header += [f"tau, depth {depth}" for depth in depths] + [f"pos-acc, depth {depths[-1]}"]
        text += markdown_table(header, rows) + "\n"
    text += _differences(result)
    sets = ", ".join(result["prompts"])
    return text.rstrip("\n") + "\n" + footnote(result, f"Greedy, prompts: {sets} ({result['num_prompts']})")


def _differences(result: Result) -> str:
    """Paired differences of tau to the first head."""
    names, depths = list(result["heads"]), result["depths"]
    rows = []
    for name in names[1:]:
        for family in result["families"]:
            cells = [result["heads"][name]["measured"][family][str(depth)]["difference"] for depth in depths]
            rows.append([name, family, *(f"{c['mean']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}]" for c in cells)])
    if not rows:
        return ""
    header = [f"tau minus {names[0]}'s", "tree", *(f"depth {depth}" for depth in depths)]
    return markdown_table(header, rows) + "\n(95 % bootstrap intervals over prompts, paired.)\n"
