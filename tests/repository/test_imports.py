"""Who may import whom (CONTRIBUTING.md): rooms stand on steps, imports go down, and no two modules need each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_specheads"

# A room (or a file at the root of the package) imports what stands on a lower step, or in the room itself.
STEPS = (
    ("errors", "version", "provenance", "texts", "unroll", "bootstrap"),
    ("target", "tree", "draft_vocabulary"),
    ("cache", "configuration", "metrics"),
    ("contract", "publishing"),
    ("generation",),
    ("tuning", "dispatch"),
    ("heads",),
    ("checkpoints", "registration", "diagnosis"),
    ("evaluation", "app", "figures"),
    ("__init__", "cli", "custom_generate"),
    ("trainer",),
    ("__main__",),
)
STEP_OF = {room: step for step, rooms in enumerate(STEPS) for room in rooms}
NO_TRANSFORMERS = ("tree/config.py", "tree/draft_tree.py", "tree/shape.py", "metrics.py", "version.py", "errors.py")


def sources(*folders: str) -> dict[str, Path]:
    """Modules by name; `trainer/` is installed as `hf_specheads.trainer`."""
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = ("hf_specheads", *parts) if parts[0] == "trainer" else parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = sources("hf_specheads", "trainer", "benchmarks")
PACKAGE_MODULES = [name for name in MODULES if name.split(".")[0] == "hf_specheads"]


def imported(name: str, path: Path) -> Iterator[str]:
    """Everything a module imports, annotations' imports and those inside of functions included."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield whole if whole in MODULES and not re_exported(module, alias.name) else module


@lru_cache
def re_exported(module: str, name: str) -> bool:
    """Whether a package's `__init__` gives that name to something of its own, not to the module of that name."""
    path = MODULES.get(module)
    if path is None or path.name != "__init__.py":
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.ImportFrom) and node.module and any((a.asname or a.name) == name for a in node.names)
        for node in tree.body
    )


@lru_cache
def graph() -> dict[str, set[str]]:
    """Modules of this repository that every module imports; importing a module imports the packages it lies in."""
    return {name: {other for other in imported(name, path) if other in MODULES} for name, path in MODULES.items()}


def room(name: str) -> str:
    """The step's word for a module of the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_an_import_goes_to_a_lower_step_or_stays_in_its_room() -> None:
    wrong = []
    for name in PACKAGE_MODULES:
        here = room(name)
        assert here in STEP_OF, f"{name} stands on no step; layout and CONTRIBUTING.md say which rooms there are"
        for other in graph()[name]:
            there = room(other)
            if there == here or (other == "hf_specheads" and STEP_OF[here] >= STEP_OF["__init__"]):
                continue
            if STEP_OF[there] >= STEP_OF[here]:
                wrong.append(f"{name} imports {other}, which does not stand below it")
    assert not wrong


def test_no_two_modules_need_each_other() -> None:
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"import cycle: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in done:
            for other in graph()[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_the_package_never_imports_its_trainer() -> None:
    outside = [name for name in PACKAGE_MODULES if not name.startswith("hf_specheads.trainer")]
    assert not [
        (name, other) for name in outside for other in graph()[name] if other.startswith("hf_specheads.trainer")
    ]


@pytest.mark.parametrize("file", NO_TRANSFORMERS)
def test_values_and_their_arithmetic_do_without_transformers(file: str) -> None:
    name = "hf_specheads." + file.removesuffix(".py").replace("/", ".")
    assert not [other for other in imported(name, PACKAGE / file) if other.startswith("transformers")]


def test_files_stay_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
