"""Hybrid and recurrent targets under chains of set acceptance: the speed-up, and the cost of keeping states.

    python -m benchmarks hybrid [--shapes qwen3-next mamba-2] [--rates 0.6 0.8 1.0] [--batches 1 4]

Targets have random weights. Drafts come from a stub that knows the target's text and is wrong at a set share of its
positions, so drafting costs almost nothing. The speed-up thus shows what the engine makes of such acceptance, not what
real heads achieve. For a call with one sequence, two costs are given as shares of its time: `states` is the copying
and restoring of states, and `replay` the extra time of forwards that begin with tokens accepted before. The latter is
found by timing forwards of both widths from the same states.

A draft tree would have to be verified as separate paths, one row each, from the same states. The benchmark also
measures how much longer that takes than one path, which is what a tree's higher acceptance would have to make up for.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_specheads.cache import recurrent
from hf_specheads.cache.names import cache_parameter
from hf_specheads.cache.recurrent import RecurrentCache
from hf_specheads.target.structure import forward_parameters
from hf_specheads.tuning.turns import generate_text
from tests.support.stubs import StubHead

from ..results import Result, column_table, footnote, percent, same_text
from ..sides import compare, generate_once, plain_and, timed_calls

VOCAB = 8192
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next", "hidden_size": 640, "num_hidden_layers": 12, "num_attention_heads": 10,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 384, "shared_expert_intermediate_size": 384,
    },
    "mamba-2": {
        "model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64,
        # Without the kernels of mamba_ssm, a forward of several tokens is padded to whole chunks.
        "state_size": 128, "n_groups": 1, "chunk_size": 16,
    },
}  # fmt: skip
WRONG_IN = 101  # the stub's mistakes repeat after this many positions
TIMINGS = 5  # timings of each forward
PATHS = (2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for targets, acceptance and lengths."""
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.6, 0.8, 1.0], help="shares of right drafts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--depth", type=int, default=4, help="draft positions of a chain")
    parser.add_argument("--prompt_length", type=int, default=64)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)


def random_target(shape: str) -> PreTrainedModel:
    """Makes a target of a shape with random weights, in fp32."""
    torch.manual_seed(0)
    ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(**SHAPES[shape], **ids)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    return target


def ranks_of(rate: float) -> tuple[int | None, ...]:
    """Returns 0 for every position at which the stub is right, and `None` where it is wrong."""
    wrong = random.Random(0).sample(range(WRONG_IN), round((1 - rate) * WRONG_IN))
    return tuple(None if position in wrong else 0 for position in range(WRONG_IN))


# ---------------------------------------------------------------------- what states cost
@contextmanager
def watched() -> Iterator[tuple[list[float], list[float], list[tuple[int, int]]]]:
    """Context that records the costs of states.

    Yields:
        Seconds of every copying of states; seconds of every restoring; and for every verifying forward the number of
        nodes of its tree and of all its tokens, including the accepted ones that it begins with.
    """
    verify, widths = RecurrentCache.verify, []

    def watching(cache: RecurrentCache, tree: Any, **asked: Any) -> Any:
        outputs = verify(cache, tree, **asked)
        widths.append((tree.num_nodes, cache._last.token_ids.shape[1]))
        return outputs

    with (
        timed_calls(recurrent, "contents_with_states") as copied,
        timed_calls(recurrent, "restore") as restored,
        mock.patch.object(RecurrentCache, "verify", watching),
    ):
        yield copied, restored, widths


@torch.no_grad()
def forward_seconds(
    target: PreTrainedModel, ids: torch.Tensor, shapes: list[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Returns the median seconds of forwards by (rows, tokens per row), all from the states of one prompt [1, T]."""
    parameters = forward_parameters(target)
    name = cache_parameter(parameters)
    cache = DynamicCache(config=target.config)
    target(ids, use_cache=True, **{name: cache})
    with timed_calls(target, "forward") as seconds:
        for rows, width in shapes * TIMINGS:
            mine = copy.deepcopy(cache)
            mine.reorder_cache(torch.zeros(rows, dtype=torch.long))
            target(ids[:, :1].expand(rows, width), use_cache=True, **{name: mine})
    return {shape: statistics.median(seconds[place :: len(shapes)]) for place, shape in enumerate(shapes)}


def measure_paths(target: PreTrainedModel, args: argparse.Namespace) -> Result:
    """Measures how much longer a forward over several paths takes than one over a single path."""
    ids = torch.arange(5, 5 + args.prompt_length)[None]
    seconds = forward_seconds(target, ids, [(rows, args.depth + 1) for rows in (1, *PATHS)])
    return {str(rows): seconds[rows, args.depth + 1] / seconds[1, args.depth + 1] for rows in PATHS}


def measure_cell(target: PreTrainedModel, args: argparse.Namespace, batch: int, rate: float) -> Result:
    """Measures plain generation and chains of one acceptance, in turns. For one sequence also measures the cost of
    states."""
    torch.manual_seed(1)
    ids = torch.randint(5, VOCAB, (batch, args.prompt_length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    text = generate_text(target, inputs, max_new_tokens=args.max_new_tokens)
    heads = StubHead(target, text, ranks_of(rate), kind="chain", depth=args.depth)
    heads.adaptive = False
    sides = plain_and({"chain": heads})
    cell = compare(target, sides, [inputs], args.max_new_tokens, args.repeats)["chain"]
    if batch == 1:
        with watched() as (copied, restored, widths):
            whole = generate_once(target, sides["chain"], inputs, args.max_new_tokens).seconds
        typical = forward_seconds(target, ids, sorted({(1, width) for pair in widths for width in pair}))
        replayed = sum(typical[1, in_all] - typical[1, nodes] for nodes, in_all in widths)
        cell |= {"states_share": sum(copied + restored) / whole, "replay_share": replayed / whole}
    return cell


def measure(args: argparse.Namespace) -> Result:
    """Measures all shapes, batch sizes and rates."""
    shapes: Result = {}
    for shape in args.shapes:
        target = random_target(shape)
        cells = {
            str(batch): {str(rate): measure_cell(target, args, batch, rate) for rate in args.rates}
            for batch in args.batches
        }
        paths = measure_paths(target, args)
        shapes[shape] = {"parameters": target.num_parameters(), "batches": cells, "paths": paths}
    return {"shapes": shapes, "depth": args.depth, "new_tokens": args.max_new_tokens}


def table(result: Result) -> str:
    """One row per shape, batch size and rate."""
    columns = {
        "tau": ("acceptance_length", 2), "speed-up": ("speed_up", 2, "x"),
        "states": lambda cell: percent(cell.get("states_share")),
        "replay": lambda cell: percent(cell.get("replay_share")), "same text": same_text,
    }  # fmt: skip
    shapes = {f"{shape}, {one['parameters'] / 1e6:.0f} M": one for shape, one in result["shapes"].items()}
    cells = {
        shape: {batch: {percent(float(rate)): cell for rate, cell in cells.items()}
                for batch, cells in one["batches"].items()}
        for shape, one in shapes.items()
    }  # fmt: skip
    paths = {shape: one["paths"] for shape, one in result["shapes"].items()}
    of_paths = {str(rows): (str(rows), 2, "x") for rows in PATHS}
    tables = [
        column_table(columns, cells, "target", "batch", "right drafts"),
        column_table(of_paths, paths, "time of a forward by number of paths, relative to one path"),
    ]
    return "\n".join(tables) + footnote(
        result, "greedy, fp32, random weights", "chains of {depth} drafted by a stub, {new_tokens} new tokens",
        "median of {repeats} interleaved repeats", "states and replay are shares of the time of a call",
    )  # fmt: skip
