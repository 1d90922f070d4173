"""Tokens per second with heads against plain `generate` at the same batch size; checks that texts agree, row by row.

    python -m benchmarks.bench_batch --heads model_cards/poss3 model_cards/eagle --batch_sizes 1 2 4 8

A batch is filled with different prompts, padded on the left. The more rows, the less of a forward is spent on weights,
and the smaller the best tree: every batch size is measured with the saved tree and with shorter chains (`--chains`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads.cli.bench import batches_of

from .common import (
    Side,
    acceptance,
    argument_parser,
    display_name,
    load_bound_heads,
    load_target,
    prompt_texts,
    write_result,
)

PLAIN = "plain generate"


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/poss3", "model_cards/eagle"], prompts=["held_out"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chains", type=int, nargs="*", default=[2, 4], help="also chains of these depths")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def timed_batch(
    target: PreTrainedModel, side: Side, batch: dict[str, torch.Tensor], new_tokens: int
) -> tuple[torch.Tensor, float]:
    """New tokens [B, n] of a batch, and the wall seconds they took; every row gets as many tokens."""
    started = time.perf_counter()
    output = target.generate(
        **batch, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        **side.options,
    )  # fmt: skip
    new = output[:, batch["input_ids"].shape[1] :].cpu()
    return new, time.perf_counter() - started


def measure_batch_size(
    target: PreTrainedModel, sides: list[Side], batches: list[dict[str, torch.Tensor]], args: argparse.Namespace
) -> dict[str, Any]:
    """All sides on all batches in turns; the speed-up is the median over repeats."""
    seconds = {side.name: [0.0] * args.repeats for side in sides}
    texts: dict[str, list[torch.Tensor]] = {side.name: [] for side in sides}
    stats: dict[str, list] = {side.name: [] for side in sides}
    for side in sides:
        timed_batch(target, side, batches[0], min(args.max_new_tokens, 12))
    for repeat in range(args.repeats):
        for index, batch in enumerate(batches):
            shift = (index + repeat) % len(sides)
            for side in sides[shift:] + sides[:shift]:
                new, spent = timed_batch(target, side, batch, args.max_new_tokens)
                seconds[side.name][repeat] += spent
                if repeat == 0:
                    texts[side.name].append(new)
                    stats[side.name] += [side.heads.last_stats] if side.heads else []
    tokens = sum(new.numel() for new in texts[PLAIN])
    result = {}
    for side in sides:
        ratios = [plain / ours for plain, ours in zip(seconds[PLAIN], seconds[side.name], strict=True)]
        same = [torch.equal(ours, plain) for ours, plain in zip(texts[side.name], texts[PLAIN], strict=True)]
        result[side.name] = {
            "tokens_per_second": tokens / statistics.median(seconds[side.name]),
            "speed_up": statistics.median(ratios),
            "speed_up_range": [min(ratios), max(ratios)],
            "identical": all(same),
            **acceptance(stats[side.name]),
        }
    return result


def build_sides(args: argparse.Namespace, target: PreTrainedModel) -> list[Side]:
    """Plain, and of all heads the saved tree and shorter chains."""
    sides = [Side(PLAIN)]
    for folder in args.heads:
        heads, name = load_bound_heads(target, folder), display_name(folder)
        sides.append(Side(name, {"assistant_model": heads}))
        for depth in args.chains:
            chain = heads.with_tree(kind="chain", depth=depth)
            sides.append(Side(f"{name}, chain of {depth}", {"assistant_model": chain}))
    return sides


def main() -> int:
    args = parse_args()
    target, tokenizer = load_target(args)
    sides = build_sides(args, target)
    texts = [text for name in args.prompts for text in prompt_texts(name, args.limit)]
    sizes = {}
    for batch_size in args.batch_sizes:
        whole = len(texts) - len(texts) % batch_size  # every batch is full
        batches = batches_of(tokenizer, texts[:whole], batch_size)
        sizes[str(batch_size)] = measure_batch_size(target, sides, batches, args)
    result = {
        "target": display_name(args.target),
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "num_prompts": len(texts),
        "trees": {side.name: side.heads.tree_config.to_dict() for side in sides if side.heads},
        "batch_sizes": sizes,
    }
    print(write_result(args.output, "batch", result))
    return 0 if all(side["identical"] for one in sizes.values() for side in one.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
