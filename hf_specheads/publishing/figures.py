"""Draws the figures of a model card: measured pos-acc by draft position and speed-up, and the training curves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .curves import History, by_position, curve
from .palette import method_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paths of the figures relative to the weights, by title; the title is also the alternative text of the image.
POS_ACC, SPEED_UP = "pos-acc by draft position", "speed-up over plain generate"
CURVES = "loss, acceptance by draft position, and tau while training"
FIGURES = {POS_ACC: "figures/pos_acc.png", SPEED_UP: "figures/speed_up.png", CURVES: "figures/training.png"}
Evaluations = Sequence[Mapping[str, Any]]  # results as `specheads eval --json` writes them
Drawing = Callable[["Axes", Evaluations], None]
SIZE, CURVES_SIZE, DPI, COLOURS = (6.0, 3.0), (9.0, 3.0), 100, 48
# The training curves are drawn if any of these was logged more than once.
DRAWN = ("loss", "eval_loss", "eval_acceptance_length", "expected_acceptance_length")
FAINTEST = 0.25  # opacity of the curve of the deepest draft position


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_figures(folder: str | Path, evaluations: Evaluations, history: History = (), method: str = "") -> list[Path]:
    """Draws figures of evaluations and training log into a folder, and removes figures without data.

    The same results give the same bytes.

    Args:
        folder: Folder of the saved heads; files are written to the paths in [`FIGURES`].
        evaluations: Results as `specheads eval --json` writes them; each may have a `task` name.
        history: Log of the training. A curve needs at least two entries.
        method: Method of the heads, which determines the colour of the curves.

    Returns:
        The files that were drawn.

    Raises:
        ImportError: If there is something to draw and matplotlib is not installed.
    """
    drawn: list[Path] = []
    for title, draw, field in ((POS_ACC, _draw_pos_acc, "pos_acc"), (SPEED_UP, _draw_speed_up, "speed_up")):
        measured = [result for result in evaluations if result.get(field)]
        fill = partial(_fill, title=title, draw=draw, measured=measured)
        drawn += _draw(Path(folder) / FIGURES[title], fill, SIZE) if measured else _remove(folder, title)
    if any(len(curve(history, name)) > 1 for name in DRAWN):
        fill = partial(_fill_curves, history=history, colour=method_colour(method))
        return drawn + _draw(Path(folder) / FIGURES[CURVES], fill, CURVES_SIZE)
    return drawn + _remove(folder, CURVES)


def _remove(folder: str | Path, title: str) -> list[Path]:
    (Path(folder) / FIGURES[title]).unlink(missing_ok=True)
    return []


def _draw(path: Path, fill: Callable[[Figure], None], size: tuple[float, float]) -> list[Path]:
    if not can_draw():
        raise ImportError("figures need matplotlib; install it with `pip install matplotlib`.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # a dependency of matplotlib

    figure = Figure(figsize=size, dpi=DPI, layout="constrained")  # pyplot would have global state and may open windows
    fill(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # A palette makes the file a third of the size. Saving with PIL keeps matplotlib's version out of the metadata, so
    # that a new version does not change the bytes.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
    return [path]


def _fill(figure: Figure, title: str, draw: Drawing, measured: Evaluations) -> None:
    axes = figure.subplots()
    draw(axes, measured)
    axes.set_title(title, fontsize=10, loc="left")


def _fill_curves(figure: Figure, history: History, colour: str) -> None:
    """Draws loss, acceptance by draft position and tau: lines for training data, circles for held-out data."""
    loss, positions, tau = figure.subplots(1, 3)
    _curve(loss, history, "loss", "eval_loss", "training", "held-out", colour)
    _curve(tau, history, "expected_acceptance_length", "eval_acceptance_length", "expected", "generate", colour)
    names = {name: None for entry in history for name in entry}
    depth = max(len(by_position(names, "acceptance_")), len(by_position(names, "eval_pos_acc_")))
    for i in range(1, depth + 1):
        strength = 1 - (1 - FAINTEST) * (i - 1) / max(depth - 1, 1)
        trained = bool(curve(history, f"acceptance_{i}"))
        labels = (str(i), "") if trained else ("", str(i))
        _curve(positions, history, f"acceptance_{i}", f"eval_pos_acc_{i}", *labels, colour, alpha=strength)
    positions.set_ylim(0, 1.03)
    tau.set_ylim(bottom=1)
    for axes, title in ((loss, "loss"), (positions, "accepted at draft position"), (tau, "tau")):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("optimizer step", fontsize=9)
        axes.grid(axis="y", linewidth=0.4)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), handlelength=1)


def _curve(
    axes: Axes, history: History, line: str, circles: str, label: str, held_out: str, colour: str, alpha: float = 1.0
) -> None:
    styles = ((line, label, {"linewidth": 1.2}),
              (circles, held_out, {"marker": "o", "markersize": 3, "linewidth": 0.6, "linestyle": "--"}))  # fmt: skip
    for name, text, style in styles:
        if points := curve(history, name):
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=colour, alpha=alpha, label=text, **style)


def _draw_pos_acc(axes: Axes, measured: Evaluations) -> None:
    deepest = max(len(result["pos_acc"]) for result in measured)
    for result in measured:
        positions = range(1, len(result["pos_acc"]) + 1)
        axes.plot(positions, result["pos_acc"], marker="o", markersize=4, linewidth=1.5, label=_task(result))
    axes.set(ylim=(0, 1.03), xticks=range(1, deepest + 1), xlim=(0.7, deepest + 0.3))
    axes.set_xlabel("draft position", fontsize=9)
    axes.set_ylabel("accepted, given all earlier were", fontsize=9)
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(fontsize=8, frameon=False)


def _draw_speed_up(axes: Axes, measured: Evaluations) -> None:
    values = [float(result["speed_up"]) for result in measured]
    bars = axes.barh(range(len(values)), values, height=0.5)
    axes.bar_label(bars, [_bar_text(result) for result in measured], padding=4, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(values)), [_task(result) for result in measured])
    axes.set_xlim(0, 1.6 * max(1.0, *values))
    axes.set_xlabel("tokens per second, times those of plain generate", fontsize=9)
    axes.invert_yaxis()


def _bar_text(result: Mapping[str, Any]) -> str:
    length = result.get("acceptance_length")
    return f"{result['speed_up']:.2f}" + (f" (acceptance length {length:.2f})" if length else "")


def _task(result: Mapping[str, Any]) -> str:
    return str(result.get("task") or "held-out prompts")
