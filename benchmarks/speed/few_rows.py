"""Products of a few rows on a CPU, in the fastest way there is: bare forwards over so many tokens, and generation.

    python -m benchmarks few_rows --heads model_cards/poss3 model_cards/eagle
    python -m benchmarks few_rows --shape llama-3.2-1b --methods eagle --limit 1 --max_new_tokens 8

Forwards are told in plain steps, forwards over one token: what a round must give in tokens, at the least, to pay.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_specheads.bootstrap import Interval, ratio_interval
from hf_specheads.cache.names import CACHE_NAME
from hf_specheads.generation.kernels import few_rows
from hf_specheads.generation.kernels.few_rows import FewRows
from hf_specheads.generation.kernels.few_rows_native import WORKSHOP

from .. import setup
from ..results import Result, markdown_table, number
from ..sides import timed_in_turns
from . import both_ways

CONTEXT = 128  # tokens before those of a forward
WARM_UPS = 15  # forwards, in which all sizes of products are timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As of all measurements with and without a part, and forwards."""
    both_ways.add_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16, 32, 64], help="of forwards")
    parser.add_argument("--forwards", type=int, default=9, help="times that every forward is timed")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Forwards, then generation, both in both ways."""
    pair = setup.load_pair(args, every_round=True)
    FewRows(pair[0])
    WORKSHOP.wait()
    forwards = {str(rows): time_forwards(pair[0], rows, args.forwards) for rows in args.rows}
    return {
        "target_parameters": pair[0].num_parameters(),
        "forwards": forwards,
        "sides": both_ways.measure_both(pair, args, as_ever),
    }


def as_ever() -> Any:
    """Rounds compute products as torch does."""
    return mock.patch.object(few_rows, "_is_plain", lambda layer: False)


@torch.no_grad()
def time_forwards(target: PreTrainedModel, rows: int, repeats: int) -> dict[str, Any]:
    """Medians of a plain step, and a forward over so many tokens by torch's products and the fastest, in turns; ms."""
    cache, quick = DynamicCache(config=target.config), FewRows(target)
    vocab, generator = target.config.get_text_config(decoder=True).vocab_size, torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (1, CONTEXT + rows), generator=generator).to(target.device)
    target(ids[:, :CONTEXT], **{CACHE_NAME: cache})

    def forward(tokens: int, way: Any) -> None:
        with way:
            target(ids[:, -tokens:], **{CACHE_NAME: cache}, use_cache=True)
        cache.crop(-tokens)

    calls = {
        "plain step": lambda: forward(1, nullcontext()),
        "torch": lambda: forward(rows, nullcontext()),
        "faster": lambda: forward(rows, quick.at_work(rows, fewest=2)),
    }
    seconds, _ = timed_in_turns(calls, repeats, WARM_UPS)
    gain = ratio_interval(seconds["torch"], seconds["faster"])
    return {name: 1000 * statistics.median(spent) for name, spent in seconds.items()} | {"gain": vars(gain)}


def table(result: Result) -> str:
    """Forwards by rows, then generation."""
    header = ["tokens in a forward", "torch's products", "in the fastest way", "torch's over these"]
    lines = []
    for rows, one in result["forwards"].items():
        steps = [f"{number(one[way] / one['plain step'], 2)} plain steps" for way in ("torch", "faster")]
        lines.append([rows, *steps, str(Interval(**one["gain"]))])
    generation = both_ways.table_of_both(result, "these products")
    return markdown_table(header, lines) + "\n" + generation
