"""All methods on one target: parameters, training, acceptance and tokens per second, greedy and at temperature 1.

    python -m benchmarks.methods --heads model_cards/eagle model_cards/medusa model_cards/poss3

Speed is measured with each head's own saved tree, interleaved with plain `generate` in the same mode; pos-acc with a
tree of up to 8 levels and 60 nodes, which is not timed. Sampled texts are compared too: with the same seed they are
plain generate's, unless the draft tree's children are sampled themselves or verification is lossy. Heads that come
with an adapter of their target (Medusa-2) are measured alone, against the adapted target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specheads.heads.base import DraftHead

from .acceptance import compute, read_facts
from .common import (
    Inputs,
    Run,
    Side,
    acceptance,
    argument_parser,
    count_parameters,
    display_name,
    generate_once,
    load_bound_heads,
    load_prompts,
    load_target,
    run_interleaved,
    summarise,
    write_result,
)

PLAIN = "plain generate"
MODES: dict[str, dict[str, Any] | None] = {"greedy": None, "temperature 1": {"temperature": 1.0, "top_k": 0}}
WIDE = {"kind": "dynamic", "top_k": 10, "total_tokens": 60}
WIDE_DEPTH = 8


def parse_args() -> argparse.Namespace:
    released = sorted(str(path.parent) for path in Path("model_cards").glob("*/config.json"))
    heads = [folder for folder in released if display_name(folder) not in ("target", "medusa2")]
    parser = argument_parser(__doc__, heads=heads, prompts=["held_out", "functions"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    return parser.parse_args()


def wide_tree(heads: DraftHead) -> DraftHead:
    """The heads with the tree that pos-acc is measured with, as deep as they can draft."""
    return heads.with_tree(**WIDE, depth=min(WIDE_DEPTH, heads.max_draft_positions or WIDE_DEPTH))


def pooled(runs: list[list[Run]]) -> dict[str, Any]:
    """Acceptance over all repeats, which differ in their seeds."""
    return acceptance([run.stats for repeat in runs for run in repeat if run.stats is not None])


def measure_mode(
    target: PreTrainedModel, loaded: dict[str, DraftHead], prompts: list[Inputs], args: argparse.Namespace, mode: str
) -> dict[str, Any]:
    """All sides in one mode."""
    sides = [Side(PLAIN), *(Side(name, {"assistant_model": heads}) for name, heads in loaded.items())]
    runs = run_interleaved(target, sides, prompts, args.max_new_tokens, args.repeats, MODES[mode])
    return {side.name: {**summarise(runs[side.name], runs[PLAIN]), **pooled(runs[side.name])} for side in sides}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every head in every mode, and its pos-acc."""
    target, tokenizer = load_target(args)
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
    loaded = {display_name(folder): load_bound_heads(target, folder) for folder in args.heads}
    facts: dict[str, Any] = {}
    for folder, (name, heads) in zip(args.heads, loaded.items(), strict=True):
        side = Side(name, {"assistant_model": wide_tree(heads)})
        stats = [generate_once(target, side, inputs, args.max_new_tokens).stats for inputs in prompts]
        facts[name] = {
            "method": heads.config.method,
            "parameters": count_parameters(heads),
            "tree": heads.tree_config.to_dict(),
            "max_draft_positions": heads.max_draft_positions,
            **compute(read_facts(folder)),
            "hours": (read_facts(folder) or {}).get("hours"),
            "wide": acceptance(stats),
        }
        print(f"{name}: {facts[name]['wide']}", file=sys.stderr, flush=True)
    return {
        "target": display_name(args.target),
        "prompts": args.prompts,
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "dtype": args.dtype,
        "wide_tree": {**WIDE, "depth": WIDE_DEPTH},
        "heads": facts,
        "modes": {mode: measure_mode(target, loaded, prompts, args, mode) for mode in args.modes},
    }


def main() -> int:
    args = parse_args()
    result = measure(args)
    print(write_result(args.output, "methods", result))
    greedy = result["modes"].get("greedy", {})
    return 0 if all(side["identical"] for side in greedy.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
