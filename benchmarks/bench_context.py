"""Acceptance length and speed-up as functions of the context's length, and what the switch to plain steps is worth.

    python -m benchmarks.bench_context --heads model_cards/poss3 model_cards/eagle

Every prompt is the end of one long text, cut to several lengths, so that all lengths continue at the same place. Each
pair of heads runs three times: drafting every round, with the choice between drafting and plain steps
(`heads.adaptive`), and, as the worst case for that choice, with freshly made heads that know nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead

from .common import (
    Inputs,
    Side,
    argument_parser,
    display_name,
    load_bound_heads,
    load_prompts,
    load_target,
    run_interleaved,
    summarise,
    write_result,
)

PLAIN = "plain generate"


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/poss3", "model_cards/eagle"], prompts=["long"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 1536])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0, help="of a sampled run at the shortest length")
    return parser.parse_args()


def build_sides(args: argparse.Namespace, target: PreTrainedModel) -> list[Side]:
    """Plain, heads drafting every round, heads with the choice, and heads that know nothing with the choice."""
    sides = [Side(PLAIN)]
    for folder in args.heads:
        name = display_name(folder)
        sides.append(Side(name, {"assistant_model": load_bound_heads(target, folder)}))
        sides.append(Side(f"{name}, adaptive", {"assistant_model": load_bound_heads(target, folder, adaptive=True)}))
    torch.manual_seed(0)
    useless = AutoDraftHead.from_target(target, "eagle", tree_config=sides[1].heads.tree_config).eval().bind(target)
    useless.adaptive = True
    sides.append(Side("untrained, adaptive", {"assistant_model": useless}))
    return sides


def cut(prompts: list[Inputs], length: int) -> list[Inputs]:
    """The last `length` tokens of every prompt that is as long."""
    return [
        {name: tensor[:, -length:] for name, tensor in inputs.items()}
        for inputs in prompts
        if inputs["input_ids"].shape[1] >= length
    ]


def measure(
    target: PreTrainedModel, sides: list[Side], prompts: list[Inputs], args: argparse.Namespace, **sampling: Any
) -> dict[str, Any]:
    """All sides on prompts of one length."""
    runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats, sampling or None)
    result = {}
    for side in sides:
        result[side.name] = summarise(runs[side.name], runs[PLAIN])
        stats = [run.stats for repeat in runs[side.name] for run in repeat if run.stats is not None]
        if stats:
            steps = sum(one.plain_steps for one in stats) / sum(one.target_forwards for one in stats)
            result[side.name]["plain_share"] = steps
    return result


def main() -> int:
    args = parse_args()
    target, tokenizer = load_target(args)
    sides = build_sides(args, target)
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
    lengths = {str(length): measure(target, sides, cut(prompts, length), args) for length in args.lengths}
    sampled = measure(target, sides, cut(prompts, min(args.lengths)), args, temperature=args.temperature, top_k=0)
    slowest = min(
        side["speed_up"]
        for one in (*lengths.values(), sampled)
        for name, side in one.items()
        if name.endswith("adaptive")
    )
    result = {
        "target": display_name(args.target),
        "trained_length": statistics.median(side.heads.config.train_max_length or 0 for side in sides[1:-1]),
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "num_prompts": len(cut(prompts, max(args.lengths))),
        "lengths": lengths,
        "sampled": {"temperature": args.temperature, "length": min(args.lengths), "sides": sampled},
        "slowest_adaptive": slowest,
    }
    print(write_result(args.output, "context", result))
    greedy = [side["identical"] for one in lengths.values() for side in one.values()]
    return 0 if all(greedy) else 1


if __name__ == "__main__":
    sys.exit(main())
