"""The comparison of transformers' own tests with and without this package, on a checkout of three tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("upstream.py")
TESTS = """
import sys
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
"""
PLANTED = """
def test_minds_the_import(): assert "hf_specheads" not in sys.modules
"""


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(checkout), *arguments], capture_output=True, text=True)


def test_differences() -> None:
    spec = importlib.util.spec_from_file_location("upstream", SCRIPT)
    assert spec is not None and spec.loader is not None
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    same = {"a::x": "passed", "a::y": "failure"}
    assert upstream.differences(same, dict(same)) == []
    changed = {"a::x": "failure", "a::z": "passed"}
    assert upstream.differences(same, changed) == [
        "a::x: passed, with hf_specheads failure",
        "a::y: failure, with hf_specheads not there",
        "a::z: not there, with hf_specheads passed",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_outcomes_are_compared(tmp_path: Path, planted: bool) -> None:
    folder = tmp_path / "tests" / "generation"
    folder.mkdir(parents=True)
    (folder / "test_utils.py").write_text(TESTS + (PLANTED if planted else ""), encoding="utf-8")
    ran = run(tmp_path, "tests/generation", "--", "-p", "no:randomly")
    assert ran.returncode == int(planted), ran.stderr
    lines = ran.stdout.splitlines()
    expected = ["tests.generation.test_utils::test_minds_the_import: passed, with hf_specheads failure"]
    assert lines[:-1] == (expected if planted else [])
    assert lines[-1].endswith(f"{int(planted)} differ") and "'failure': 1" in lines[-1] and "'skipped': 1" in lines[-1]


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    ran = run(tmp_path)
    assert ran.returncode == 2 and "has no tests/generation" in ran.stderr
