"""Tokens per second with heads against plain `generate` at the same batch size; checks that texts agree, row by row.

    python -m benchmarks batch --heads model_cards/poss3 model_cards/eagle --batch_sizes 1 2 4 8

A batch holds different prompts, padded on the left. With more rows, reading weights takes a smaller share of a forward
and smaller trees become the best. Every batch size is therefore measured with the saved tree and with shorter chains
(`--chains`).
"""

from __future__ import annotations

import argparse
from typing import Any

from hf_specheads import DraftHead

from ..results import Result, footnote, markdown_table, number, same_text, speed_up
from ..setup import add_generation_arguments, full_batches, load_pair
from ..sides import PLAIN, TO_THE_END, compare, plain_and


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts, batch sizes and trees."""
    add_generation_arguments(parser, heads=["poss3", "eagle"], prompts=["chats"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chains", type=int, nargs="*", default=[2, 4], help="also measure chains of these depths")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all sides at all batch sizes."""
    target, loaded, prompts = load_pair(args)
    heads: dict[str, DraftHead] = {}
    for name, one in loaded.items():
        heads[name] = one
        heads |= {f"{name}, chain of {depth}": one.with_tree(kind="chain", depth=depth) for depth in args.chains}
    sides = plain_and(heads, **TO_THE_END)
    return {
        "trees": {name: one.tree_config.to_dict() for name, one in heads.items()},
        "batch_sizes": {
            str(size): compare(target, sides, full_batches(prompts, size), args.max_new_tokens, args.repeats)
            for size in args.batch_sizes
        },
    }


def table(result: Result) -> str:
    """One row per side, one column per batch size."""
    sizes = result["batch_sizes"]
    header = ["speed-up over plain, same batch size", *(f"batch {size}" for size in sizes), "tau", "same text"]
    plain = [number(one[PLAIN]["tokens_per_second"], 0) for one in sizes.values()]
    rows = [[f"{PLAIN}, tokens/s", *plain, "", ""]]
    for name in result["trees"]:
        cells = [one[name] for one in sizes.values()]
        rows.append([name, *map(speed_up, cells), number(cells[0]["acceptance_length"]), same_text(*cells)])
    return markdown_table(header, rows) + footnote(
        result, "Greedy, {dtype}, {max_new_tokens} new tokens per row, {num_prompts} prompts, median of {repeats} "
        "interleaved repeats; tau is that of the first batch size",
    )  # fmt: skip
