"""Counts the operations of a step while it runs, and knows the peak performance of devices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..arguments import DraftHeadTrainingArguments

T = TypeVar("T")

# TFLOP/s of dense 16-bit matrix products, from the vendors' data sheets (which often give the doubled value for sparse
# matrices). A device matches the first entry whose words all occur in the device name that torch reports.
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
    """Returns the peak operations per second of a run's device; `None` if unknown.

    Args:
        args: Training arguments; `peak_tflops` takes precedence over [`PEAK_TFLOPS`].
    """
    if args.peak_tflops is not None:
        return args.peak_tflops * 1e12
    if args.device.type != "cuda":
        return None
    known = known_peak(torch.cuda.get_device_name(args.device))
    return None if known is None else known * 1e12


def known_peak(device_name: str) -> float | None:
    """Returns the TFLOP/s of a device in [`PEAK_TFLOPS`] by its name; `None` if it is not listed."""
    words = set(re.findall(r"\w+", device_name.upper()))
    if "MIG" in words:  # a MIG instance is a part of the device, of unknown size
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if set(name.upper().split()) <= words), None)


def count_operations(work: Callable[[], T]) -> tuple[T, int]:
    """Runs some work; returns its result and the floating-point operations of its matrix products and attention,
    forward and backward. Operations inside compiled kernels and quantised products are not counted.

    Args:
        work: Function that computes with torch.
    """
    with FlopCounterMode(display=False) as counter:
        result = work()
    return result, counter.get_total_flops()
