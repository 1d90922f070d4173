"""How many operations a step takes, counted while it runs, and how many a device could do in that time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..arguments import DraftHeadTrainingArguments

T = TypeVar("T")

# TFLOP/s of dense matrix products in 16 bits, from the makers' data sheets (which often say twice as much, for sparse
# ones). The words are of the name that torch gives a device; the first entry whose words all occur counts.
PEAK_TFLOPS: dict[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI325X": 1307.0,
    "MI300X": 1307.0,
}


def peak_flops(args: DraftHeadTrainingArguments) -> float | None:
    """Operations per second that the device of a run can do; `None` if nobody knows.

    Args:
        args: `peak_tflops` counts before the table.
    """
    if args.peak_tflops is not None:
        return args.peak_tflops * 1e12
    if args.device.type != "cuda":
        return None
    known = known_peak(torch.cuda.get_device_name(args.device))
    return None if known is None else known * 1e12


def known_peak(device_name: str) -> float | None:
    """TFLOP/s of a device in [`PEAK_TFLOPS`], by its name; `None` if it is not there."""
    words = set(re.findall(r"\w+", device_name.upper()))
    if "MIG" in words:  # a part of it
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if set(name.upper().split()) <= words), None)


def count_operations(work: Callable[[], T]) -> tuple[T, int]:
    """What some work returns, and the floating-point operations of its matrix products and attention, forward and
    backward: those that torch sees, not what compiled kernels and quantised products do inside.

    Args:
        work: Runs on torch.
    """
    with FlopCounterMode(display=False) as counter:
        result = work()
    return result, counter.get_total_flops()
