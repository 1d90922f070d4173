"""Products of a few rows on a CPU with the fastest kernel available, in bare forwards and in generation.

    python -m benchmarks few_rows --heads model_cards/poss3 model_cards/eagle
    python -m benchmarks few_rows --shape llama-3.2-1b --methods eagle --limit 1 --max_new_tokens 8

The time of a forward is given in units of a plain step, a forward over one token. That is the number of tokens that a
round must at least yield to pay.
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

CONTEXT = 128  # tokens in the cache before each forward
WARM_UPS = 15  # forwards during which the kernels for all sizes of products are timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of all measurements with and without a part, and those for bare forwards."""
    both_ways.add_arguments(parser)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16, 32, 64], help="tokens in a forward"
    )
    parser.add_argument("--forwards", type=int, default=9, help="number of times that every forward is timed")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures forwards and then generation, both in both ways."""
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
    """Makes a context in which rounds compute products as torch does."""
    return mock.patch.object(few_rows, "_is_plain", lambda layer: False)


@torch.no_grad()
def time_forwards(target: PreTrainedModel, rows: int, repeats: int) -> dict[str, Any]:
    """Measures a plain step, and a forward over `rows` tokens with torch's products and with the fastest, in turns.

    Returns:
        Median milliseconds by name, and the gain with its interval.
    """
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
    """Forwards by number of rows, then generation."""
    header = ["tokens in a forward", "time with torch's products", "time with the fastest products", "torch / fastest"]
    lines = []
    for rows, one in result["forwards"].items():
        steps = [f"{number(one[way] / one['plain step'], 2)} plain steps" for way in ("torch", "faster")]
        lines.append([rows, *steps, str(Interval(**one["gain"]))])
    generation = both_ways.table_of_both(result, "the fastest products")
    return markdown_table(header, lines) + "\n" + generation
