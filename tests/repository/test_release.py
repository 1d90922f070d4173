"""What a release shows: version, citation, badges and forms say what the project is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import hf_specheads
from hf_specheads.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_one_version() -> None:
    """Of the package, the citation and the changelog, whose newest section is this version or not released yet."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == hf_specheads.__version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert newest is not None and newest[1] in ("Unreleased", hf_specheads.__version__)


def test_cited_papers_are_those_of_the_readme() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["references"] and all(one["url"] in README for one in citation["references"])


def test_badges_say_what_ci_runs() -> None:
    spec = importlib.util.spec_from_file_location("badges", ROOT / "docs" / "images" / "badges.py")
    assert spec is not None and spec.loader is not None
    badges = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(badges)
    assert badges.PICTURE.read_text(encoding="utf-8") == badges.draw(), "run `python docs/images/badges.py`"
    assert badges.ci_checks() == ["ruff", "mypy", "pytest"]
    assert "](docs/images/badges.svg)" in README


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms(form: Path) -> None:
    """Fields that GitHub asks for, ids that differ, and commands that exist."""
    text = form.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    if form.stem == "config":
        assert set(content) == {"blank_issues_enabled"}
        return
    assert content["name"] and content["description"] and content["body"]
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields) and all(part["attributes"]["label"] for part in fields)
    assert {part["type"] for part in content["body"]} <= {"markdown", "textarea"}
    assert set(re.findall(r"`specheads (\w+)", text)) <= set(COMMANDS)


def test_there_are_forms() -> None:
    assert {path.stem for path in FORMS} >= {"bug", "different_text", "low_acceptance", "feature"}
    request = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make (\w+)", request):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
