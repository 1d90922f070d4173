"""Memory of training on each device: derived for large targets, and checked against measured peaks of small shapes.

    python -m benchmarks memory

`hf_specheads.trainer.memory` derives the memory from sizes alone. The measured peak is, as in `step`, the growth of
the resident set of a separate process during one step of POSS heads (fp32).
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from hf_specheads.trainer.memory import LayerSizes, TargetSizes, TrainingSizes, training_bytes, unroll_bytes

from ..results import Result, column_table, footnote, markdown_table, number, percent
from .step import CHUNK, FAMILIES, SIZES, peak_apart

SOURCES = ("hf_specheads/unroll", "trainer")
PROCESSES = 8
TARGETS = {
    "8B (Llama 3.1)": TargetSizes(LayerSizes(4096, 14336, 4096, 1024), 32, 128256),
    "32B (Qwen3)": TargetSizes(LayerSizes(5120, 25600, 8192, 1024), 64, 151936),
    "70B (Llama 3.3)": TargetSizes(LayerSizes(8192, 28672, 8192, 1024), 80, 128256),
}
TRAININGS = {"EAGLE": TrainingSizes(), "POSS-3": TrainingSizes(specialists=3, passes=9)}
SMALL = {"family": "poss", "dtype": "float32", **SIZES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that select the measured steps."""
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--passes", nargs="+", type=int, default=[1, 3, 6])


def derived(target: TargetSizes, training: TrainingSizes) -> dict[str, Any]:
    """Derives the parts of memory on each of `PROCESSES` devices, with the whole target on each and with a sharded
    one."""
    return {
        placed: training_bytes(target, training, PROCESSES, sharded)
        for placed, sharded in (("whole", False), ("sharded", True))
    }


def small_bytes(rows: int, passes: int) -> int:
    """Derives the bytes that a measured step should add."""
    width = SMALL["hidden_size"]
    target = TargetSizes(LayerSizes(width, 8 * width // 3, width, width), 8, SMALL["vocab_size"])
    sizes = TrainingSizes(FAMILIES["poss"]["num_specialists"], passes, 1, rows, CHUNK, state_bytes=4)
    return sum(unroll_bytes(target, sizes).values())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Computes both tables."""
    checks = []
    for rows, passes in itertools.product(args.lengths, args.passes):
        peak = peak_apart({**SMALL, "rows": rows, "passes": passes}, "ours")
        checks.append({"rows": rows, "passes": passes, "measured": peak, "derived": small_bytes(rows, passes)})
    tables = {
        name: {method: derived(target, training) for method, training in TRAININGS.items()}
        for name, target in TARGETS.items()
    }
    return {"processes": PROCESSES, "length": TrainingSizes().length, "targets": tables, "checks": checks}


def table(result: Result) -> str:
    """Gigabytes on each device, followed by derived and measured megabytes of small steps."""
    rows = []
    for target, methods in result["targets"].items():
        for method, placements in methods.items():
            for placed, parts in placements.items():
                step = sum(parts[name] for name in ("gradients", "passes", "logits", "buckets"))
                columns = (parts["target"], parts["heads"] + parts["optimizer"], step, sum(parts.values()))
                rows.append((target, method, placed, *(number(value / 1e9, 1) for value in columns)))
    header = ("target", "heads", "target is", "target weights, GB", "heads and AdamW, GB", "one step, GB", "total, GB")
    columns = {
        "rows T": ("rows", 0), "passes D": ("passes", 0),
        "derived, MB": lambda check: number(check["derived"] / 1e6, 0),
        "measured, MB": lambda check: number(check["measured"] / 1e6, 0),
        "derived / measured": lambda check: percent(check["derived"] / check["measured"]),
    }  # fmt: skip
    small = column_table(columns, result["checks"])
    return f"{markdown_table(header, rows)}\n{small}" + footnote(
        result, "First table: derived for each of {processes} devices, one sequence of {length} tokens on each, "
        "target in bf16, heads in fp32 under bf16 autocast; second table: memory that one step of POSS heads adds on "
        "a CPU, hidden size 256, vocabulary 8192",
    )  # fmt: skip


def short_table(result: Result) -> str:
    """Only the first of the two tables."""
    return table(result).partition("\n\n")[0] + "\n"
