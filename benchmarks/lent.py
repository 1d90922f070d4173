"""What was measured on machines that were lent for minutes: taken down from output, and shown as it was taken down."""

from __future__ import annotations

import json
import statistics
from typing import Any

from .results import RESULTS, Result, column_table, number, same_text

QUICKSTART = RESULTS / "history" / "hopper.json"


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


def tables() -> dict[str, str]:
    """Tables by the names that documents know them by."""
    return {"lent/hopper": quickstart_table(json.loads(QUICKSTART.read_text(encoding="utf-8")))}
