"""What rounds save by leaving out autograd's layers of the dispatcher: with and without, in turns.

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
    """Generation in both ways."""
    pair = setup.load_pair(args, every_round=True)
    return {"sides": both_ways.measure_both(pair, args, through_autograd)}


def through_autograd() -> Any:
    """Rounds run through those layers."""
    return mock.patch.object(unrecorded, "BELOW_AUTOGRAD", nullcontext)


def table(result: Result) -> str:
    """A row per side."""
    return both_ways.table_of_both(result, "the guard")
