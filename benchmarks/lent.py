"""What was measured on machines that were lent for minutes: taken down from output, and shown as it was taken down."""

from __future__ import annotations

import json
import statistics
from typing import Any

from .results import RESULTS, Result, column_table, number, percent, same_text
from .speed.compiled import stage_times

QUICKSTART, LARGE = RESULTS / "history" / "hopper.json", RESULTS / "history" / "hopper_8b.json"


def _range(side: Result) -> str:
    ratios = side["speed_ups"]
    return f"{number(statistics.median(ratios), 2, 'x')} ({number(min(ratios))} to {number(max(ratios))})"


def quickstart_table(result: dict[str, Any]) -> str:
    """Rows are heads with their trees; below, what rounds took before."""
    columns = {
        "speed-up (range)": _range, "tau": ("acceptance_length", 2), "rounds": ("rounds", 0),
        "draft, ms": lambda side: number(side["stage_milliseconds"]["draft"], 1),
        "target, ms": lambda side: number(side["stage_milliseconds"]["target"], 1), "same text": same_text,
    }  # fmt: skip
    before, versions = result["before"], result["versions"]
    rounds = before["round_milliseconds_by_nodes"].items()
    slow = ", ".join(f"{number(spent, 0)} ({nodes})" for nodes, spent in rounds)
    return (
        column_table(columns, result["sides"], "heads")
        + f"\n{result['accelerator']}; torch {versions['torch']}, transformers {versions['transformers']}; bfloat16, "
        f"greedy, batch 1, three turns of one chat; {result['date']}.\n"
        f"With cuDNN's kernels, before: milliseconds of a round (nodes verified) {slow}; "
        f"of a call of {number(before['eagle_seconds']['heads'])} s with eagle's heads attention took "
        f"{number(before['eagle_seconds']['attention_of_heads'])} s, and plain generation "
        f"{number(before['eagle_seconds']['plain'])} s altogether.\n"
    )


def large_table(result: dict[str, Any]) -> str:
    """Rows are sides of the benchmark `compiled` at the sizes of a large target; below, what its kernels took."""
    columns = {
        "tokens/s": ("tokens_per_second", 1), "/ plain compiled": ("over_plain_compiled", 2, "x"),
        "tau": ("acceptance_length", 2), "ms per round": ("round_milliseconds", 1), "draft, target, rest": stage_times,
        "of its floor": lambda side: percent(side.get("of_the_floor")), "same text": same_text,
    }  # fmt: skip
    versions, floor, busy = result["versions"], result["floor_milliseconds"], result["device_milliseconds"]
    rate = number(result["copy_terabytes_per_second"])
    of_round = {name: number(busy[name] / busy["rounds"], 1) for name in ("whole", "draft", "target", "attention")}
    return (
        column_table(columns, result["sides"], "llama-3-8b, acceptance length set")
        + f"\n{result['accelerator']}, which copies at {rate} TB/s: the floor of a round is "
        f"{number(floor['round_ms'], 1)} ms; torch {versions['torch']}, transformers {versions['transformers']}; "
        f"bfloat16, greedy, batch 1, 320 new tokens, median of 3 repeats in turns; {result['date']}.\n"
        f"Of a round of {number(1000 * busy['call_seconds'] / busy['rounds'], 1)} ms with eagle's heads kernels took "
        f"{of_round['whole']} (draft {of_round['draft']}, target {of_round['target']}, of which attention "
        f"{of_round['attention']}).\n`{result['command']}`\n"
    )


def tables() -> dict[str, str]:
    """Tables by the names that documents know them by."""
    quickstart, large = (json.loads(path.read_text(encoding="utf-8")) for path in (QUICKSTART, LARGE))
    return {"lent/hopper": quickstart_table(quickstart), "lent/hopper_8b": large_table(large)}
