"""Heads of the full-precision target beside its quantised copies: acceptance, tokens per second, and the same text.

    python -m benchmarks.bench_quantised --heads model_cards/poss3 model_cards/eagle

Weight-only int8 and int4 of torchao (`pip install 'hf-specheads[quant]'`); every copy is compared with its own plain
generation. Texts that differ are looked into: the gap between the two tokens' logits where they part, 0 for a tie.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

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
    parser = argument_parser(__doc__, heads=["model_cards/poss3"], prompts=["held_out"])
    parser.set_defaults(limit=6, max_new_tokens=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"], choices=["none", "int8", "int4"])
    return parser.parse_args()


def quantise(target: PreTrainedModel, name: str) -> PreTrainedModel:
    """Weights of all linear layers but the `lm_head`, in place.

    torchao's packed int4 has no CPU kernels; there its int4 is stored in bytes and multiplied after conversion.
    """
    if name == "none":
        return target
    from torchao.quantization import (
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    int4 = IntxWeightOnlyConfig(torch.int4, PerGroup(32)) if target.device.type == "cpu" else Int4WeightOnlyConfig()
    config = Int8WeightOnlyConfig() if name == "int8" else int4
    quantize_(target, config, lambda module, path: isinstance(module, nn.Linear) and path != "lm_head")
    return target


@torch.no_grad()
def gap_where_texts_part(target: PreTrainedModel, inputs: Inputs, mine: list[int], theirs: list[int]) -> float:
    """Logit of the plain token minus that of ours, at the first place where they differ."""
    place = next(index for index, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
    text = torch.cat([inputs["input_ids"], torch.tensor([theirs[:place]], dtype=torch.long)], dim=1)
    logits = target(text).logits[0, -1].float()
    return float(logits[theirs[place]] - logits[mine[place]])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every format with every head."""
    formats = {}
    for name in args.formats:
        target, tokenizer = load_target(args)
        prompts = [inputs for one in args.prompts for inputs in load_prompts(one, tokenizer, args.limit)]
        quantise(target, name)
        heads = {display_name(folder): load_bound_heads(target, folder) for folder in args.heads}
        for one in heads.values():
            one.adaptive = False
        sides = [Side(PLAIN), *(Side(title, {"assistant_model": one}) for title, one in heads.items())]
        runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats)
        formats[name] = {side.name: summarise(runs[side.name], runs[PLAIN]) for side in sides}
        for title in heads:
            row = formats[name][title]
            pairs = [
                (runs[title][0][index].token_ids, runs[PLAIN][0][index].token_ids) for index in range(len(prompts))
            ]
            differing = row["differing_prompts"]
            row["gaps"] = [gap_where_texts_part(target, prompts[index], *pairs[index]) for index in differing]
    return {
        "target": display_name(args.target),
        "prompts": args.prompts,
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "dtype": args.dtype,
        "formats": formats,
    }


def main() -> int:
    args = parse_args()
    result = measure(args)
    print(write_result(args.output, "bench_quantised", result))
    rows = [row for sides in result["formats"].values() for row in sides.values()]
    return 0 if all(row["identical"] for row in rows) or args.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
