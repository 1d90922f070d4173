"""docs/architecture.md describes the code there is: places it names, steps, rooms, letters of shapes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import hf_specheads.contract

from .test_imports import STEPS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines
MOST_MODULES = 25  # in a folder; `heads` has one for every method
PLACES = sorted(set(re.findall(r"\b((?:\w+/)*\w+\.py):(\w+(?:\.\w+)?)", PAGE)))


def blocks() -> list[str]:
    """The fenced blocks of the page."""
    return re.findall(r"```\n(.*?)```", PAGE, flags=re.DOTALL)


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Functions, classes and assigned names of a module or class."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(("file", "name"), PLACES, ids=[":".join(place) for place in PLACES])
def test_places_exist(file: str, name: str) -> None:
    path = next((path for path in (ROOT / "hf_specheads" / file, ROOT / file) if path.is_file()), None)
    assert path is not None, f"there is no {file}"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        names = defined(body)
        assert part in names, f"{file} has no {name}"
        body = getattr(names[part], "body", [])


def test_a_round_and_a_training_step_are_told() -> None:
    told = [block for block in blocks() if ".py:" in block]
    assert len(told) == 2
    for block in told:
        assert all(re.match(r"[\w/]+\.py:[\w.]+ {3,}\S", line) for line in block.splitlines() if line)


def test_the_steps_are_those_that_are_tested() -> None:
    steps = "".join(f"{number}  {' '.join(rooms)}\n" for number, rooms in enumerate(STEPS))
    assert steps in blocks()


def test_every_room_is_on_the_map() -> None:
    package = ROOT / "hf_specheads"
    rooms = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    files = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    for name in (*rooms, *files, "trainer/"):
        assert f"`{name}`" in PAGE.partition("## One round")[0], f"{name} is not on the map of docs/architecture.md"


def test_the_letters_are_those_of_the_contract() -> None:
    said = [line[4:] for line in hf_specheads.contract.__doc__.splitlines() if line.startswith("    ")]
    assert "\n".join(said) + "\n" in blocks()


@pytest.mark.parametrize("folder", ["hf_specheads", "trainer", "benchmarks"])
def test_files_and_functions_are_short(folder: str) -> None:
    """As CONTRIBUTING.md says; docstrings count."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    assert [str(path) for path, text in texts.items() if text.count("\n") > LONGEST_FILE] == []
    functions = [(path, node) for path, text in texts.items() for node in ast.walk(ast.parse(text))
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]  # fmt: skip
    lengths = {f"{path}:{node.name}": node.end_lineno - node.lineno + 1 for path, node in functions}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("folder", ["hf_specheads", "trainer", "benchmarks"])
def test_no_folder_is_a_heap(folder: str) -> None:
    modules = Counter(path.parent for path in (ROOT / folder).rglob("*.py") if not path.name.startswith("__"))
    assert {str(room): number for room, number in modules.items()
            if number > MOST_MODULES and room.name != "heads"} == {}  # fmt: skip


def test_every_room_within_a_room_is_on_the_map() -> None:
    rooms = [
        path.parent
        for folder in ("generation", "../trainer")
        for path in (ROOT / "hf_specheads" / folder).glob("*/__init__.py")
    ]
    for room in rooms:
        name = f"`{room.parent.name}/{room.name}/`"
        assert name in PAGE or room.name == "shipped_pair", f"{name} is not on the map of docs/architecture.md"
