"""Compiled rounds against eager ones, and both against plain `generate`, eager and compiled with a static cache.

    python -m benchmarks.bench_compile --heads model_cards/poss3 model_cards/eagle
    python -m benchmarks.bench_compile --shape llama-3-8b --dtype bfloat16 --device cuda --tau 3 4 5
    python -m benchmarks.bench_compile --shape llama-3-8b --dtype bfloat16 --on_paper 4.8e12

The first command runs the shipped pair. `--shape` makes a target and heads of given sizes with random weights instead:
only the time means something there, so acceptance is set by a stub to the values of `--tau` (drafts are computed as
always, then a path of the tree is replaced by what the target goes on to say). The floor is what reading every weight
once per use would cost at the device's memory bandwidth, measured by a copy; `--on_paper` computes it for a bandwidth
in bytes per second, without making or running anything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from hf_specheads import DraftHead, DraftHeadCandidateGenerator, DraftTreeConfig
from hf_specheads.generation.compiled import bucket
from hf_specheads.tree.draft_tree import DraftTree

from .common import (
    Inputs,
    Side,
    acceptance,
    argument_parser,
    display_name,
    load_bound_heads,
    load_prompts,
    load_target,
    write_result,
)
from .shapes import SHAPES, pair_on_paper, random_pair

PLAIN, PLAIN_COMPILED = "plain, eager", "plain, compiled, static cache"


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, heads=["model_cards/poss3", "model_cards/eagle"], prompts=["held_out"])
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of these sizes instead of --target")
    parser.add_argument("--tau", type=float, nargs="+", default=[3.0, 4.0, 5.0], help="acceptance lengths of --shape")
    parser.add_argument("--depth", type=int, default=7, help="of the chain that heads of --shape draft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--on_paper", type=float, help="only compute the floor of --shape at this memory bandwidth")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


# ---------------------------------------------------------------------- sides
def compiled_plain(target: PreTrainedModel, most_tokens: int) -> dict[str, Any]:
    """Options of `generate` for transformers' own compiled decoding, which it reserves for accelerators by default.

    One cache of the capacity our own rounds get serves all calls: a new one of another size would be compiled anew.
    """
    config = CompileConfig(mode="reduce-overhead" if target.device.type == "cuda" else None, fullgraph=False)
    config._compile_all_devices = True
    return {"past_key_values": StaticCache(target.config, max_cache_len=bucket(most_tokens)), "compile_config": config}


def both_ways(name: str, heads: DraftHead) -> list[Side]:
    """Heads with eager and with compiled rounds."""
    compiled = heads.with_tree()
    compiled.compiled = True
    return [Side(name, {"assistant_model": heads}), Side(f"{name}, compiled", {"assistant_model": compiled})]


# ---------------------------------------------------------------------- acceptance by a stub
@contextmanager
def acceptance_of(tau: float, truth: torch.Tensor) -> Iterator[None]:
    """While this lasts, drafted chains hold what the target goes on to say for as many positions as give `tau`.

    Args:
        tau: Acceptance length wanted, at most the depth + 1.
        truth: int64 [1, T], prompt and plain text.
    """
    draft = DraftHeadCandidateGenerator.draft
    state = {"owed": 0.0}

    def drafted(self: Any, rows: Any, lengths: Any, *others: Any) -> DraftTree:
        tree = draft(self, rows, lengths, *others).packed()
        state["owed"] += tau - 1
        right = min(int(state["owed"]), tree.max_depth)
        state["owed"] -= right
        known = truth[:, lengths[0] : lengths[0] + right].to(tree.token_ids.device)
        tree.token_ids[:, 1 : 1 + known.shape[1]] = known
        if 1 + right < tree.num_nodes and lengths[0] + right < truth.shape[1]:
            wrong = (truth[:, lengths[0] + right] + 1) % self.head.config.vocab_size
            tree.token_ids[:, 1 + right] = wrong.to(tree.token_ids.device)
        return tree

    DraftHeadCandidateGenerator.draft = drafted
    try:
        yield
    finally:
        DraftHeadCandidateGenerator.draft = draft


# ---------------------------------------------------------------------- measuring
def run_side(target: PreTrainedModel, side: Side, inputs: Inputs, new_tokens: int) -> tuple[list[int], float]:
    """New tokens and wall seconds of one prompt."""
    wait = getattr(torch, target.device.type).synchronize
    if (cache := side.options.get("past_key_values")) is not None:
        cache.reset()
    wait()
    started = time.perf_counter()
    out = target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
                          **side.options)  # fmt: skip
    wait()
    return out[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - started


def measure(
    target: PreTrainedModel, sides: list[Side], prompts: list[Inputs], args: argparse.Namespace, tau: float | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """All sides in turns on every prompt, and the seconds that each side's first call took."""
    plain = [run_side(target, sides[0], inputs, args.max_new_tokens)[0] for inputs in prompts]
    first_call: dict[str, float] = {}
    seconds = {side.name: [0.0] * args.repeats for side in sides}
    differing = dict.fromkeys(seconds, 0)
    stats: dict[str, list] = {side.name: [] for side in sides}

    def run(side: Side, index: int) -> tuple[list[int], float]:
        inputs = prompts[index]
        if tau is None or side.heads is None:
            return run_side(target, side, inputs, args.max_new_tokens)
        truth = torch.cat([inputs["input_ids"].cpu(), torch.tensor([plain[index]])], dim=1)
        with acceptance_of(tau, truth):
            return run_side(target, side, inputs, args.max_new_tokens)

    for side in sides:
        first_call[side.name] = run(side, 0)[1]
        run(side, 0)
    for repeat in range(args.repeats):
        for index in range(len(prompts)):
            shift = (index + repeat) % len(sides)
            for side in sides[shift:] + sides[:shift]:
                tokens, spent = run(side, index)
                seconds[side.name][repeat] += spent
                differing[side.name] += repeat == 0 and tokens != plain[index]
                stats[side.name] += [side.heads.last_stats] if side.heads and repeat == 0 else []
    total = sum(map(len, plain))
    result = {}
    for side in sides:
        median = statistics.median(seconds[side.name])
        rounds = sum(one.rounds for one in stats[side.name])
        result[side.name] = {
            "tokens_per_second": total / median,
            "over_plain_eager": _ratio(seconds[PLAIN], seconds[side.name]),
            "over_plain_compiled": _ratio(seconds[PLAIN_COMPILED], seconds[side.name]),
            "round_milliseconds": 1000 * median / rounds if rounds else None,
            "identical": differing[side.name] == 0,
            "differing": differing[side.name],
            **acceptance(stats[side.name]),
        }
    return result, {name: spent for name, spent in first_call.items() if "compiled" in name}


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


# ---------------------------------------------------------------------- the floor on paper
def bandwidth(device: str) -> float:
    """Bytes per second of a large copy, reads and writes counted."""
    source = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    sink, wait = torch.empty_like(source), getattr(torch, torch.device(device).type).synchronize
    best = 0.0
    for _ in range(5):
        wait()
        started = time.perf_counter()
        sink.copy_(source)
        wait()
        best = max(best, 2 * source.numel() / (time.perf_counter() - started))
    return best


def floor(target: PreTrainedModel, heads: dict[str, DraftHead], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a round, and tokens per second, if every weight that is used were read once per use.

    The token embedding is looked up, not read; a draft step reads one specialist and the projection to draft logits.
    """
    per_second = args.on_paper or bandwidth(args.device)
    result: dict[str, Any] = {"name": args.shape, "bytes_per_second": per_second, "heads": {}}
    embedding = target.get_input_embeddings().weight
    body = sum(_bytes(p) for p in target.parameters()) - (
        0 if target.config.tie_word_embeddings else _bytes(embedding)
    )  # fmt: skip
    for name, made in heads.items():
        own = sum(_bytes(p) for key, p in made.named_parameters() if ".1." not in key and ".2." not in key)
        own -= _bytes(made.embed_tokens.weight) if getattr(made, "embed_tokens", None) is not None else 0
        shared = 0 if made.own_projections() else _bytes(target.get_output_embeddings().weight)
        target_ms, draft_ms = 1000 * body / per_second, 1000 * args.depth * (own + shared) / per_second
        round_ms = target_ms + draft_ms
        result["heads"][name] = {
            "target_ms": target_ms,
            "draft_ms": draft_ms,
            "round_ms": round_ms,
            "tokens_per_second": {f"{tau:g}": 1000 * tau / round_ms for tau in args.tau},
        }
    return result


def _bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def main() -> int:
    args = parse_args()
    result: dict[str, Any] = {"dtype": args.dtype, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    tables, compile_seconds = {}, {}
    if args.on_paper:
        result |= {"target": args.shape, "floor": floor(*pair_on_paper(args.shape, getattr(torch, args.dtype)), args)}
        print(write_result(args.output, "compile_floor", result))
        return 0
    if args.shape:
        if args.threads:
            torch.set_num_threads(args.threads)
        tree = DraftTreeConfig(kind="chain", depth=args.depth)
        target, heads = random_pair(args.shape, tree, getattr(torch, args.dtype), args.device)
        result |= {"target": args.shape, "parameters": target.num_parameters(), "floor": floor(target, heads, args)}
        prompts = [{"input_ids": torch.randint(5, 1000, (1, 64), device=args.device)} for _ in range(args.limit or 2)]
        for inputs in prompts:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        taus: list[float | None] = [*args.tau]
    else:
        target, tokenizer = load_target(args)
        heads = {display_name(folder): load_bound_heads(target, folder) for folder in args.heads}
        result["target"] = display_name(args.target)
        prompts = [inputs for name in args.prompts for inputs in load_prompts(name, tokenizer, args.limit)]
        taus = [None]
    most_tokens = max(inputs["input_ids"].shape[1] for inputs in prompts) + args.max_new_tokens + args.depth + 1
    sides = [Side(PLAIN), Side(PLAIN_COMPILED, compiled_plain(target, most_tokens))]
    sides += [side for name, made in heads.items() for side in both_ways(name, made)]
    for tau in taus:
        name = result["target"] if tau is None else f"{args.shape}, acceptance length set to {tau:g}"
        tables[name], seconds = measure(target, sides, prompts, args, tau)
        compile_seconds = compile_seconds or seconds
    result |= {"num_prompts": len(prompts), "tables": tables, "compile_seconds": compile_seconds}
    print(write_result(args.output, "compile_shape" if args.shape else "compile", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
