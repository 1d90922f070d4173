"""A target that two processes share: both draft or both take plain steps, even if their clocks disagree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.heads import random_heads
from support.targets import own_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair(tmp_path):
    """Saves target and heads in a folder, with sizes that two processes can share."""
    target = own_target("llama", intermediate_size=64)
    target.save_pretrained(tmp_path / "target")
    random_heads(target).save_pretrained(tmp_path / "heads")
    return tmp_path


def two_processes(folder: Path, *words: str) -> subprocess.CompletedProcess:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    return subprocess.run(
        [*launch, "-m", "support.two_ranks", str(folder), *words], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_clocks_that_disagree_decide_nothing(pair):
    result = two_processes(pair)
    assert result.returncode == 0, result.stderr[-4000:]
    first, second = (json.loads((pair / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["texts"] == second["texts"] and first["texts"][::2] == first["texts"][1::2]
    assert first["plain_steps"] == second["plain_steps"] > 0
    assert first["decided"] != second["decided"], "the clocks agree: a weak test"


@pytest.mark.slow
def test_planted_bug_every_process_follows_its_own_clock(pair):
    """Collectives of different sizes meet: an error, or wrong sums."""
    result = two_processes(pair, "each-for-itself")
    if result.returncode == 0:
        first, second = (json.loads((pair / f"rank{rank}.json").read_text()) for rank in (0, 1))
        assert first["texts"] != second["texts"] or first["texts"][::2] != first["texts"][1::2]
