"""`docs/layouts.md` lists every layout under test, and every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.layouts import LAYOUTS

TESTS = Path(__file__).resolve().parents[2]
DOCUMENT = (TESTS.parent / "docs" / "layouts.md").read_text(encoding="utf-8")
TABLE = DOCUMENT.split("## What is read and written")[1].split("\n## ")[0]
ROWS = [line.strip("|").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]


class Collector:
    """A plugin that keeps the names of collected tests."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = {f"{item.path.relative_to(TESTS.parent)}::{item.name}" for item in session.items}


@pytest.fixture(scope="module")
def collected() -> set[str]:
    collector = Collector()
    files = [str(Path(__file__).with_name("test_layouts.py")), str(TESTS / "checkpoints" / "test_write.py")]
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist"]
    assert pytest.main([*options, *files], plugins=[collector]) == pytest.ExitCode.OK
    return collector.names


def test_every_layout_has_a_row() -> None:
    assert [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])] == list(LAYOUTS)
    assert all(len(row) == 4 for row in ROWS)


def test_every_named_test_exists(collected: set[str]) -> None:
    for pattern in re.findall(r"`(tests/[^`]*?\[NAME\])`", DOCUMENT):
        for name in LAYOUTS:
            assert pattern.replace("NAME", name) in collected
    exports = [test for row in ROWS for test in re.findall(r"`(test_[^`]+)`", row[3])]
    assert len(exports) > 12
    for test in exports:
        assert f"tests/checkpoints/test_write.py::{test}" in collected


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", DOCUMENT):
        assert (TESTS.parent / "docs" / link).exists()
    for path in re.findall(r"`(tests/[\w/]+\.py)", DOCUMENT):
        assert (TESTS.parent / path).exists()
