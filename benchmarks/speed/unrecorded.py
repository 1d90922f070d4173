"""Time that rounds save by bypassing the dispatcher's autograd layers: with and without, in turns.

python -m benchmarks unrecorded --heads model_cards/poss3-longer model_cards/eagle
python -m benchmarks unrecorded --shape llama-100m
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any
from unittest import mock

from hf_specheads.generation.kernels import unrecorded

from .. import setup
from ..results import Result
from . import both_ways

add_arguments = both_ways.add_arguments


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures generation in both ways."""
    pair = setup.load_pair(args, every_round=True)
    return {"sides": both_ways.measure_both(pair, args, through_autograd)}


def through_autograd() -> Any:
    """Makes a context in which rounds run through the dispatcher's autograd layers."""
    return mock.patch.object(unrecorded, "BELOW_AUTOGRAD", nullcontext)


def table(result: Result) -> str:
    """One row per side."""
    return both_ways.table_of_both(result, "the autograd bypass")
