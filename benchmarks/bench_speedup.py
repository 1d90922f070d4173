"""Tokens per second of plain `generate` and with heads, on the same prompts, interleaved; checks that texts agree.

    python -m benchmarks.bench_speedup --heads model_cards/poss3 model_cards/eagle --baselines

`--baselines` adds transformers' own prompt lookup, `--assistant` a small assistant model. Exits with 1 if a text of
ours differs from the plain one.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .common import (
    Side,
    argument_parser,
    count_parameters,
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
    parser = argument_parser(__doc__, heads=["model_cards/poss3"], prompts=["held_out", "functions"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--baselines", action="store_true", help="also measure transformers' prompt lookup")
    parser.add_argument("--prompt_lookup_num_tokens", type=int, default=5)
    parser.add_argument("--assistant", help="also measure this small assistant model")
    return parser.parse_args()


def build_sides(args: argparse.Namespace, target: PreTrainedModel) -> list[Side]:
    """Plain first, then heads, then what transformers offers."""
    sides = [Side(PLAIN)]
    for folder in args.heads:
        sides.append(Side(display_name(folder), {"assistant_model": load_bound_heads(target, folder)}))
    if args.baselines:
        tokens = args.prompt_lookup_num_tokens
        sides.append(Side(f"prompt lookup, {tokens} tokens", {"prompt_lookup_num_tokens": tokens}))
    if args.assistant:
        dtype = getattr(torch, args.dtype)
        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=dtype).eval()
        name = f"assistant model, {count_parameters(assistant) / 1e6:.1f} M"
        sides.append(Side(name, {"assistant_model": assistant}))
    return sides


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All sides on all prompt sets."""
    target, tokenizer = load_target(args)
    sides = build_sides(args, target)
    prompt_sets = {}
    for name in args.prompts:
        prompts = load_prompts(name, tokenizer, args.limit)
        runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats)
        prompt_sets[name] = {side.name: summarise(runs[side.name], runs[PLAIN]) for side in sides}
    return {
        "target": display_name(args.target),
        "target_parameters": count_parameters(target),
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "trees": {side.name: side.heads.tree_config.to_dict() for side in sides if side.heads},
        "prompt_sets": prompt_sets,
    }


def main() -> int:
    args = parse_args()
    result = measure(args)
    print(write_result(args.output, "speedup", result))
    ours = [sides[name] for sides in result["prompt_sets"].values() for name in result["trees"]]
    return 0 if all(side["identical"] for side in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
