"""Tables of measurements on borrowed machines, copied from their output by hand into `results/history`."""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

from .results import RESULTS, Result, column_table, number, percent, same_text
from .speed.compiled import stage_times

QUICKSTART, LATER, LARGE = (RESULTS / "history" / f"{name}.json" for name in ("hopper", "hopper_later", "hopper_8b"))


def _range(side: Result) -> str:
    ratios = side["speed_ups"]
    return f"{number(statistics.median(ratios), 2, 'x')} ({number(min(ratios))} to {number(max(ratios))})"


def quickstart_table(result: dict[str, Any]) -> str:
    """One row per draft head with its tree. Below the table: round times with cuDNN's attention kernels, if
    recorded."""
    columns = {
        "speed-up (range)": _range, "tau": ("acceptance_length", 2), "rounds": ("rounds", 0),
        **{f"{stage}, ms": partial(_stage, stage=stage) for stage in ("draft", "target")}, "same text": same_text,
    }  # fmt: skip
    versions = result["versions"]
    return (
        column_table(columns, result["sides"], "heads")
        + f"\n{result['accelerator']}; torch {versions['torch']}, transformers {versions['transformers']}; bfloat16, "
        f"greedy, batch 1, one chat, three repeats; {result['date']}.\n"
        + (_before(result["before"]) if "before" in result else "")
    )


def _stage(side: Result, stage: str) -> str:
    return number(side.get("stage_milliseconds", {}).get(stage), 1)


def _before(before: dict[str, Any]) -> str:
    slow = ", ".join(f"{number(spent, 0)} ({nodes})" for nodes, spent in before["round_milliseconds_by_nodes"].items())
    return (
        f"Earlier, with cuDNN's kernels: milliseconds of a round (by nodes verified in it) {slow}; "
        f"a call with eagle's heads took {number(before['eagle_seconds']['heads'])} s, of which attention took "
        f"{number(before['eagle_seconds']['attention_of_heads'])} s; plain generation took "
        f"{number(before['eagle_seconds']['plain'])} s in total.\n"
    )


def large_table(result: dict[str, Any]) -> str:
    """One row per side of the benchmark `compiled`, at the sizes of a large target. Below the table: kernel times."""
    columns = {
        "tokens/s": ("tokens_per_second", 1), "speed-up over plain, compiled": ("over_plain_compiled", 2, "x"),
        "tau": ("acceptance_length", 2), "ms per round": ("round_milliseconds", 2),
        "ms in draft, target, rest": stage_times,
        "floor / measured time": lambda side: percent(side.get("of_the_floor")), "same text": same_text,
    }  # fmt: skip
    versions, busy = result["versions"], result["device_milliseconds_of_a_round"]["eagle"]
    rate, one = (number(result[f"{name}copy_terabytes_per_second"]) for name in ("", "one_"))
    first = ", ".join(f"{name} {number(spent, 0)}" for name, spent in result["first_call_seconds"].items())
    return (
        column_table(columns, result["sides"], "llama-3-8b, acceptance length set by a stub")
        + f"\n{result['accelerator']}, which copies at {rate} TB/s ({one} when waiting for each copy); torch "
        f"{versions['torch']}, transformers {versions['transformers']}; bfloat16, greedy, batch 1, 320 new tokens; "
        f"commit {result['commit']}, {result['date']}. In a round with eagle's heads, "
        f"{number(busy['busy'])} ms are spent in {busy['kernels']} kernels: "
        f"{number(busy['products with weights'])} ms in products with weights, "
        f"{number(busy['attention'])} ms in attention. Seconds of first calls, with five processes at once: {first}.\n"
    )


def kernels_table(result: dict[str, Any]) -> str:
    """One row per kernel of this library, at the sizes of a large target."""
    rows = {}
    for one in result["microseconds"]["attention"]:
        batch, heads, key_heads, nodes, slots, width = one["sizes"]
        name = (
            f"attention, batch {batch}, {heads} heads, {key_heads} key heads, {nodes} nodes, {slots} slots, "
            f"width {width}"
        )
        rows[name] = {"ours": one["kernel"], "products": one["products"], "torch": one["sdpa"]}
    for one in result["microseconds"]["products"]:
        sizes = " + ".join(map(str, one["columns"]))
        rows[f"{one['rows']} rows of {one['width']} by {sizes} columns"] = {
            "ours": one["kernel"],
            "torch": one["torch"],
        }
    for one in result["microseconds"]["best_of_logits"]:
        rows[f"best of {one['logits']} logits"] = {"ours": one["blocks"], "torch": one["log_softmax"]}
    columns = {
        "µs": ("ours", 1), "µs with torch's matrix products": ("products", 1), "µs with torch's kernels": ("torch", 1),
    }  # fmt: skip
    return column_table(columns, rows, "kernel") + (
        f"\n{result['accelerator']}; bfloat16; weights, keys and values are read from memory; in a CUDA graph; "
        f"{result['date']}.\n"
    )


def tables() -> dict[str, str]:
    """Returns all tables, by the names under which documents show them."""
    quickstart, large, later = (json.loads(path.read_text(encoding="utf-8")) for path in (QUICKSTART, LARGE, LATER))
    return {
        "lent/hopper": quickstart_table(quickstart), "lent/hopper_later": quickstart_table(later),
        "lent/hopper_8b": large_table(large), "lent/hopper_kernels": kernels_table(large),
    }  # fmt: skip
