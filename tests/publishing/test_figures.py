"""Figures show what was measured, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from hf_specheads.publishing import figures
from hf_specheads.publishing.figures import FIGURES, POS_ACC, SPEED_UP, draw_figures

RESULTS = [
    {"task": "greedy", "acceptance_length": 3.2, "pos_acc": [0.9, 0.75, 0.5], "speed_up": 1.8},
    {"task": "temperature 1", "acceptance_length": 1.5, "pos_acc": [0.4], "speed_up": 0.7},
]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.png")}


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in draw_figures(tmp_path / "a", RESULTS)}
    second = {path.name: path.read_bytes() for path in draw_figures(tmp_path / "b", RESULTS)}
    assert first == second and names(tmp_path / "a") == set(FIGURES.values())
    for data in first.values():
        assert data.startswith(b"\x89PNG") and len(data) < 20_000
    other = draw_figures(tmp_path / "b", [RESULTS[0] | {"speed_up": 1.9}])
    assert other[1].read_bytes() != first["speed_up.png"]


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert draw_figures(tmp_path, []) == [] and names(tmp_path) == set()
    draw_figures(tmp_path, RESULTS)
    draw_figures(tmp_path, [{"task": "x", "speed_up": 1.5, "pos_acc": []}])  # and is removed where it was
    assert names(tmp_path) == {FIGURES[SPEED_UP]}
    draw_figures(tmp_path, [{"pos_acc": [0.5]}, {"pos_acc": [0.7]}])
    assert names(tmp_path) == {FIGURES[POS_ACC]}


def test_what_is_drawn() -> None:
    """The numbers of the results are those of the lines and bars."""
    axes = Figure().subplots()
    figures._draw_pos_acc(axes, RESULTS)
    assert [list(line.get_ydata()) for line in axes.lines] == [result["pos_acc"] for result in RESULTS]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["greedy", "temperature 1"]
    axes = Figure().subplots()
    figures._draw_speed_up(axes, [*RESULTS, {"speed_up": 2.0}])
    assert [bar.get_width() for bar in axes.patches] == [1.8, 0.7, 2.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["greedy", "temperature 1", "held-out prompts"]
    assert [text.get_text() for text in axes.texts][:2] == [
        "1.80 (acceptance length 3.20)",
        "0.70 (acceptance length 1.50)",
    ]


def test_every_figure_can_be_opened(tmp_path: Path) -> None:
    for path in draw_figures(tmp_path, RESULTS):
        with Image.open(path) as image:
            assert image.size == (600, 300)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "can_draw", lambda: False)
    nothing: list[dict[str, Any]] = []
    assert draw_figures(tmp_path, nothing) == []
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_figures(tmp_path, RESULTS)
