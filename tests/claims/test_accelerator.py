"""Devices other than the CPU. Runs `on_accelerator.py` in a process of its own, on CUDA or on an emulation of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.accelerator import emulation_problem

CASES = Path(__file__).with_name("on_accelerator.py")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["placement", "waiting", "timing", "graphs"])
def test_on_an_accelerator(part):
    if not torch.cuda.is_available() and (problem := emulation_problem()):
        pytest.skip(problem)
    if not torch.cuda.is_available() and part == "graphs":
        pytest.skip("an emulation captures no graphs")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", part, str(CASES)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command, cwd=CASES.parents[2], env=alone | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
