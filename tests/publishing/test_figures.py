"""Figures show what was measured, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from hf_specheads.publishing import figures
from hf_specheads.publishing.figures import CURVES, FIGURES, POS_ACC, SPEED_UP, draw_figures
from hf_specheads.publishing.palette import METHOD_COLOURS

RESULTS = [
    {"task": "greedy", "acceptance_length": 3.2, "pos_acc": [0.9, 0.75, 0.5], "speed_up": 1.8},
    {"task": "temperature 1", "acceptance_length": 1.5, "pos_acc": [0.4], "speed_up": 0.7},
]
# As a trainer logs: two steps, and an evaluation that adds tau of `generate`.
HISTORY = [
    {"step": 5, "loss": 3.0, "acceptance_1": 0.5, "acceptance_2": 0.2, "expected_acceptance_length": 1.6},
    {"step": 10, "loss": 2.0, "acceptance_1": 0.7, "acceptance_2": 0.4, "expected_acceptance_length": 2.0},
    {"step": 10, "eval_loss": 2.5, "eval_acceptance_length": 1.9, "eval_pos_acc_1": 0.65, "eval_pos_acc_2": 0.4},
    {"train_runtime": 3.0},
]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.png")}


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in draw_figures(tmp_path / "a", RESULTS, HISTORY, "poss")}
    second = {path.name: path.read_bytes() for path in draw_figures(tmp_path / "b", RESULTS, HISTORY, "poss")}
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
    draw_figures(tmp_path, [], HISTORY)
    assert names(tmp_path) == {FIGURES[CURVES]}
    draw_figures(tmp_path, [], HISTORY[1:])  # a point of each is no curve
    assert names(tmp_path) == set()


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


def test_what_is_drawn_of_a_training() -> None:
    """The numbers of the log are those of the lines, in the method's colour, later positions fainter."""
    figure = Figure()
    figures._fill_curves(figure, HISTORY, METHOD_COLOURS["poss"])
    drawn = [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in figure.axes]
    assert drawn == [
        [([5, 10], [3.0, 2.0]), ([10], [2.5])],
        [([5, 10], [0.5, 0.7]), ([10], [0.65]), ([5, 10], [0.2, 0.4]), ([10], [0.4])],
        [([5, 10], [1.6, 2.0]), ([10], [1.9])],
    ]
    assert {line.get_color() for axes in figure.axes for line in axes.lines} == {METHOD_COLOURS["poss"]}
    assert [line.get_alpha() for line in figure.axes[1].lines] == [1.0, 1.0, 0.25, 0.25]
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert legends == [["training", "held-out"], ["1", "2"], ["expected", "generate"]]


def test_every_figure_can_be_opened(tmp_path: Path) -> None:
    sizes = []
    for path in draw_figures(tmp_path, RESULTS, HISTORY):
        with Image.open(path) as image:
            sizes.append(image.size)
    assert sizes == [(600, 300), (600, 300), (900, 300)]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "can_draw", lambda: False)
    nothing: list[dict[str, Any]] = []
    assert draw_figures(tmp_path, nothing) == []
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_figures(tmp_path, RESULTS)
