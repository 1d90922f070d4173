"""Acceptance length and pos-acc of several heads on the same prompts, at several depths, with two families of trees.

    python -m benchmarks.acceptance --heads model_cards/eagle model_cards/hass model_cards/poss3

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

from .common import (
    Inputs,
    Side,
    acceptance,
    argument_parser,
    count_parameters,
    display_name,
    generate_once,
    load_bound_heads,
    load_prompts,
    load_target,
    write_result,
)
from .training_curve import compute, read_facts

PAPERS = {"kind": "dynamic", "top_k": 10, "total_tokens": 60}
RESAMPLES = 2000


def parse_args() -> argparse.Namespace:
    parser = argument_parser(
        __doc__,
        heads=[f"model_cards/{name}" for name in ("eagle", "hass", "poss1", "poss2", "poss3", "control")],
        prompts=["held_out", "functions"],
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 8])
    parser.add_argument("--families", nargs="+", choices=("papers", "default"), default=["papers", "default"])
    return parser.parse_args()


def measure_head(
    target: PreTrainedModel, side: Side, prompts: list[Inputs], plain: list[list[int]], max_new_tokens: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """One head with one tree: its numbers, and per prompt [emitted tokens, rounds]."""
    runs = [generate_once(target, side, inputs, max_new_tokens) for inputs in prompts]
    stats = [run.stats for run in runs if run.stats is not None]
    rounds = [[sum(n + 1 for n in row), len(row)] for one in stats for row in one.num_accepted]
    same = all(run.token_ids == ids for run, ids in zip(runs, plain, strict=True))
    return {**acceptance(stats), "identical": same}, torch.tensor(rounds, dtype=torch.float64)


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every head, tree family and depth."""
    target, tokenizer = load_target(args)
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
    plain = [generate_once(target, Side("plain"), inputs, args.max_new_tokens).token_ids for inputs in prompts]
    saved = load_bound_heads(target, args.heads[0]).tree_config
    families = {"papers": PAPERS, "default": {name: getattr(saved, name) for name in PAPERS}}
    families = {name: families[name] for name in args.families}
    heads: dict[str, Any] = {}
    reference: dict[tuple[str, int], torch.Tensor] = {}
    for folder in args.heads:
        loaded = load_bound_heads(target, folder)
        measured: dict[str, Any] = {family: {} for family in families}
        for family, tree in families.items():
            for depth in args.depths:
                side = Side(folder, {"assistant_model": loaded.with_tree(**tree, depth=depth)})
                numbers, rounds = measure_head(target, side, prompts, plain, args.max_new_tokens)
                samples = bootstrap(rounds)
                base = reference.setdefault((family, depth), samples)
                measured[family][str(depth)] = {
                    **numbers,
                    "standard_error": samples.std().item(),
                    "difference": difference(samples, base),
                }
                tau = numbers["acceptance_length"]
                print(f"{display_name(folder)}, {family}, depth {depth}: tau {tau:.3f}", file=sys.stderr, flush=True)
        heads[display_name(folder)] = {
            "method": loaded.config.method,
            "parameters": count_parameters(loaded),
            **compute(read_facts(folder)),
            "measured": measured,
        }
    return {
        "target": display_name(args.target),
        "prompts": args.prompts,
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "depths": args.depths,
        "families": families,
        "heads": heads,
    }


def main() -> int:
    args = parse_args()
    result = measure(args)
    print(write_result(args.output, "acceptance", result))
    families = [family for head in result["heads"].values() for family in head["measured"].values()]
    return 0 if all(cell["identical"] for family in families for cell in family.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
