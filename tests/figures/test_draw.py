"""Pictures of results made by hand: all of them, the same bytes twice, legends beside the data, colours by method."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from hf_specheads.figures.draw import FIGURES, draw_figures
from hf_specheads.figures.page import render_page
from hf_specheads.heads.auto import METHODS
from hf_specheads.publishing.palette import METHOD_COLOURS, PLAIN, line_styles, method_colour

SETTINGS = {"target": "tiny", "dtype": "float32", "prompts": 2, "max_new_tokens": 8, "max_n": 2, "timing": True}
MACHINE = {"device": "a processor", "threads": 1, "versions": {"torch": "2"}, "date": "2026-01-01", "seconds": 3,
           "load_per_core": 0.5}  # fmt: skip


def facts(method: str, tau: float) -> dict[str, Any]:
    point = {"tau": tau, "pos_acc": [0.8, 0.6], "reached": [9, 7], "rounds": 9, "tokens_per_second": 10 * tau,
             "milliseconds": {"draft": 2.0, "target": 9.0}}  # fmt: skip
    sweep = {"1": point, "4": {**point, "tau": tau + 1}}
    return {"method": method, "depths": sweep, "nodes": {"2": point, "16": point}, "batches": {"1": 9.0, "2": 12.0},
            "n_alpha": [0.8, 0.7, 0.6],
            "training": {"loss": [[1, 9.0], [2, 3.0]], "tau": [[1, 1.5], [2, 2.5]]}}  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "heads": {"one": facts("eagle", 2.0), "two": facts("poss", 2.5), "three": facts("poss", 2.7)},
        "plain": {"tokens_per_second": 11.0, "batches": {"1": 8.0, "2": 10.0}},
        "skipped": ["four: n-alpha is of others"],
        "settings": SETTINGS,
        "machine": MACHINE,
    }


TIMED = ("tree_size", "round", "throughput")


def untimed(results: dict[str, Any]) -> dict[str, Any]:
    """The same as it is measured without a clock."""
    found = copy.deepcopy(results)
    found["settings"] = {**SETTINGS, "timing": False}
    found["plain"] = {}
    for one in found["heads"].values():
        del one["batches"]
        for point in (*one["depths"].values(), *one["nodes"].values()):
            point.pop("milliseconds", None)
            point.pop("tokens_per_second", None)
    return json.loads(json.dumps(found))


def test_all_figures_twice_the_same(results, tmp_path: Path) -> None:
    drawn = draw_figures(results, tmp_path / "a", ["svg"])
    assert set(drawn) == set(FIGURES) - {"tree_tau"}
    again = draw_figures(results, tmp_path / "b", ["svg"], only=["tau", "round"])
    assert set(again) == {"tau", "round"}
    for name, (file,) in again.items():
        assert file.read_bytes() == drawn[name][0].read_bytes()


def test_without_a_clock_only_what_needs_none(results, tmp_path: Path) -> None:
    drawn = draw_figures(untimed(results), tmp_path, ["png"], only=["tree_tau", *TIMED])
    assert set(drawn) == {"tree_tau"}
    (file,) = drawn["tree_tau"]
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 60_000


def test_a_legend_stands_beside_the_data(results, tmp_path: Path) -> None:
    """All of its words are to the right of every panel."""
    (file,) = draw_figures(results, tmp_path, ["svg"], only=["throughput"])["throughput"]
    root = ET.fromstring(file.read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    (legend,) = [group for group in root.iter(f"{svg}g") if group.get("id") == "legend_1"]
    words = {text.text for text in legend.iter(f"{svg}text")}
    assert words == {"one", "two", "three", "plain generate"}
    panels = [group for group in root.iter(f"{svg}g") if (group.get("id") or "").startswith("axes_")]
    patches = [next(group.iter(f"{svg}path")).get("d").split() for group in panels]
    rightmost = max(float(part) for patch in patches for part in patch[1:6:3])
    lefts = [float(text.get("x")) for text in legend.iter(f"{svg}text")]
    assert len(panels) == 2 and min(lefts) > rightmost


def test_one_colour_per_method_everywhere() -> None:
    assert set(METHODS) <= set(METHOD_COLOURS) and len(set(METHOD_COLOURS.values())) == len(METHOD_COLOURS)
    assert PLAIN not in METHOD_COLOURS.values() and method_colour("plain") == PLAIN
    styles = line_styles({"one": "poss", "two": "poss", "three": "eagle"})
    assert styles["one"]["color"] == styles["two"]["color"] != styles["three"]["color"]
    assert styles["one"]["marker"] != styles["two"]["marker"]


def test_the_page_has_every_picture_and_its_numbers(results, tmp_path: Path) -> None:
    drawn = draw_figures(results, tmp_path / "pictures", ["svg"], only=["tau", "n_alpha"])
    page = render_page(results, drawn, tmp_path, "specheads figures --mine")
    assert "![n-alpha](pictures/n_alpha.svg)" in page and "## Tokens per round against depth" in page
    assert "| one | 2.00 | 3.00 |" in page and "| two | 0.80 | 0.70 | 0.60 |" in page
    assert "four: n-alpha is of others" in page and "\nspecheads figures --mine\n" in page and "was busy" not in page
    busy = {**results, "machine": {**MACHINE, "load_per_core": 7.0}}
    assert "**The machine was busy** (7.0 programs per core" in render_page(busy, drawn, tmp_path, "x")
    assert "Nothing was timed" in render_page(untimed(results), {}, tmp_path, "x")


def test_unknown_names_are_refused(results, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown figures \['pie'\]; expected some of \['pos_acc'"):
        draw_figures(results, tmp_path, only=["pie"])
    with pytest.raises(ValueError, match=r"unknown formats \['gif'\]"):
        draw_figures(results, tmp_path, ["gif"])
