"""Who may import whom (CONTRIBUTING.md): layers of modules point one way, and the trainer is never imported back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_specheads"

# A module imports only modules of lower rank; packages count as one module. Equal rank: leaves of one another.
RANKS = {
    "version": 0, "errors": 0, "features": 0, "streams": 0, "draft_vocabulary": 2, "configuration": 1, "tree": 1,
    "adapters": 1, "sampling": 1, "stopping": 1, "unroll": 1, "layers": 2, "metrics": 2, "masks": 1.5, "cache": 2.5,
    "fixed_trees": 0.5, "slots": 1, "sequences": 0, "pace": 0, "stream_attention": 2, "target_cache": 3, "outputs": 3,
    "compiled": 4.5,
    "verification": 2, "verification_sampled": 3, "verification_typical": 3,
    "modeling": 3, "heads": 4, "drafting": 4, "auto": 5, "candidates": 5, "compatibility": 5,
    "conversion": 6, "export": 6, "generation": 6, "hub": 7, "dispatch": 7, "cli": 9, "__main__": 10,
    "figures": 0, "card_sections": 1.2, "model_card": 1.4, "push": 1.6, "custom_generate": 8,
    "tree_measurement": 5, "tree_search": 6, "tree_defaults": 2, "tree_replay": 5, "round_timing": 6, "tuning": 7,
    "vocabulary_tuning": 7,
}  # fmt: skip
# Methods that hand over to a layer above, which they import when called.
HANDED_OVER = {("tree_defaults", "tuning")}
NO_TRANSFORMERS = {"tree", "metrics", "version", "errors"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_at_run_time(path: Path) -> set[str]:
    """Absolute names of everything a file imports, except under TYPE_CHECKING."""
    package = ["hf_specheads", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name} if node.module else {f"{name}.{alias.name}" for alias in node.names}
        pending += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    here = top(path)
    if here == "__init__":
        return
    assert here in RANKS, f"{path.name} has no rank; add it to RANKS"
    for name in imports_at_run_time(path):
        parts = name.split(".")
        if parts[0] != "hf_specheads" or len(parts) == 1 or parts[1] == here or parts[1] not in RANKS:
            continue
        if (here, parts[1]) in HANDED_OVER:
            continue
        assert RANKS[parts[1]] < RANKS[here], f"{path.relative_to(ROOT)} imports {name}, which is not below it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_never_imports_its_trainer(path: Path) -> None:
    names = imports_at_run_time(path)
    assert not [name for name in names if name.split(".")[0] == "trainer" or name.startswith("hf_specheads.trainer")]


@pytest.mark.parametrize("module", sorted(NO_TRANSFORMERS))
def test_values_and_their_arithmetic_do_without_transformers(module: str) -> None:
    assert not [name for name in imports_at_run_time(PACKAGE / f"{module}.py") if name.startswith("transformers")]


@pytest.mark.parametrize("path", [*modules(), *sorted((ROOT / "trainer").rglob("*.py"))], ids=lambda p: str(p.name))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
