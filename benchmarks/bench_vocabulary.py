"""Heads pruned to the most frequent tokens: acceptance lost and time won, by size of the draft vocabulary.

    python -m benchmarks.bench_vocabulary --heads model_cards/poss3 model_cards/eagle

Tokens are counted in Python's standard library, which the shipped target was trained on, without the files that
prompts were taken from (`--corpus`: in other texts). With `--random_vocabulary V`, a random target of about 100M
parameters with V tokens is timed as well, where the projection to V logits is most of drafting: what it accepts means
nothing, only the milliseconds of a round do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specheads import AutoDraftHead, load_heads
from hf_specheads.draft_vocabulary import count_tokens, most_frequent
from hf_specheads.heads.base import DraftHead

from .common import (
    PROMPTS,
    Inputs,
    Side,
    argument_parser,
    count_parameters,
    display_name,
    load_prompts,
    load_target,
    run_interleaved,
    summarise,
    write_result,
)

PLAIN = "plain generate"
DRAFTS = 7


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/poss3"], prompts=["held_out"])
    parser.set_defaults(limit=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--corpus", type=Path, nargs="+", help="text files to count tokens in")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random_vocabulary", type=int, default=128000, help="V of the random target, 0 for none")
    parser.add_argument("--random_sizes", type=int, nargs="+", default=[8192, 16384, 32768])
    return parser.parse_args()


def library_files() -> list[Path]:
    """Modules of the standard library but those that prompts come from."""
    entries = [json.loads(line) for name in ("held_out", "tuning")
               for line in (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    used = {entry["name"].split(":")[0] for entry in entries}
    return sorted(file for file in Path(statistics.__file__).parent.glob("*.py") if file.name not in used)


@torch.no_grad()
def draft_milliseconds(target: PreTrainedModel, heads: list[DraftHead], rows: int = 32) -> list[float]:
    """Median milliseconds of drafting one round's tree after a random context, all heads taking turns."""
    torch.manual_seed(0)
    vocab = target.config.vocab_size
    ids = torch.randint(vocab, (1, rows + 1))
    seconds: list[list[float]] = [[] for _ in heads]
    for repeat in range(DRAFTS + 2):
        for index, one in enumerate(heads):
            timed = one.with_tree(stop_below=0.0)
            timed.adaptive, timed.profile = False, True
            options = {"max_new_tokens": 2 + timed.tree_config.depth, "do_sample": False, "eos_token_id": None}
            target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=timed, **options)
            if repeat > 1:
                seconds[index].append(timed.last_stats.seconds["draft"] / timed.last_stats.rounds)
    return [1000 * statistics.median(values) for values in seconds]


def measure_heads(
    target: PreTrainedModel, folder: str, counts: torch.Tensor, prompts: list[Inputs], args: argparse.Namespace
) -> dict[str, Any]:
    """One head in every size, and whole."""
    sizes = [*args.sizes, len(counts)]
    heads = [load_heads(folder, dtype=target.dtype).bind(target) for _ in sizes]
    for size, one in zip(sizes[:-1], heads, strict=False):
        one.prune_draft_vocabulary(most_frequent(counts, size))
    for one in heads:
        one.adaptive = False
    sides = [Side(str(size), {"assistant_model": one}) for size, one in zip(sizes, heads, strict=True)]
    runs = run_interleaved(target, [Side(PLAIN), *sides], prompts, args.max_new_tokens, args.repeats)
    drafted = draft_milliseconds(target, heads)
    return {
        str(size): {
            "coverage": float(counts[most_frequent(counts, size)].sum() / counts.sum()),
            "draft_milliseconds": milliseconds,
            **summarise(runs[str(size)], runs[PLAIN]),
        }
        for size, milliseconds in zip(sizes, drafted, strict=True)
    }


def measure_random(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds of drafting and of a target forward, for a random target whose vocabulary outweighs its layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.random_vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    target = LlamaForCausalLM(config).to(dtype).eval()
    tree = {"kind": "chain", "depth": 4}
    sizes = [size for size in args.random_sizes if size < args.random_vocabulary]
    heads = [AutoDraftHead.from_target(target, "eagle", tree_config=tree).eval() for _ in (*sizes, None)]
    generator = torch.Generator().manual_seed(1)
    for size, one in zip(sizes, heads, strict=False):
        one.prune_draft_vocabulary(torch.randperm(args.random_vocabulary, generator=generator)[:size])
    drafted = draft_milliseconds(target, heads)
    ids, forwards = torch.zeros(1, 5, dtype=torch.long), []
    with torch.no_grad():
        for _ in range(DRAFTS):
            started = time.perf_counter()
            target(ids)
            forwards.append(1000 * (time.perf_counter() - started))
    return {
        "parameters": count_parameters(target),
        "vocabulary": args.random_vocabulary,
        "tree": heads[0].tree_config.to_dict(),
        "target_milliseconds": statistics.median(forwards),
        "draft_milliseconds": dict(zip(map(str, (*sizes, args.random_vocabulary)), drafted, strict=True)),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All heads, and the random target."""
    target, tokenizer = load_target(args)
    prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
    files = args.corpus or library_files()
    texts = (tokenizer(file.read_text(encoding="utf-8", errors="replace"))["input_ids"] for file in files)
    counts = count_tokens(texts, target.config.vocab_size)
    return {
        "target": display_name(args.target),
        "prompts": args.prompts,
        "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
        "dtype": args.dtype,
        "counted_tokens": int(counts.sum()),
        "heads": {display_name(one): measure_heads(target, one, counts, prompts, args) for one in args.heads},
        "random": measure_random(args, target.dtype) if args.random_vocabulary else None,
    }


def main() -> int:
    args = parse_args()
    result = measure(args)
    print(write_result(args.output, "bench_vocabulary", result))
    return 0 if all(row["identical"] for head in result["heads"].values() for row in head.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
