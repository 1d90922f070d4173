"""Figures of a model card, drawn from measured results: pos-acc by draft position, and speed-up."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Title, which is the alternative text of the image, and where it lies beside the weights.
POS_ACC, SPEED_UP = "pos-acc by draft position", "speed-up over plain generate"
FIGURES = {POS_ACC: "figures/pos_acc.png", SPEED_UP: "figures/speed_up.png"}
Evaluations = Sequence[Mapping[str, Any]]  # results as `specheads eval --json` writes them
Drawing = Callable[["Axes", Evaluations], None]
SIZE, DPI, COLOURS = (6.0, 3.0), 100, 48


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_figures(folder: str | Path, evaluations: Evaluations) -> list[Path]:
    """Draws what was measured into a folder, and removes figures of what no longer is.

    The same results give the same bytes.

    Args:
        folder: Of the saved heads; the files go where [`FIGURES`] says.
        evaluations: Results as `specheads eval --json` writes them; each may carry a `task` name.

    Returns:
        The files drawn.

    Raises:
        ImportError: if there is something to draw, and matplotlib is not installed.
    """
    drawn = []
    for title, draw, field in ((POS_ACC, _draw_pos_acc, "pos_acc"), (SPEED_UP, _draw_speed_up, "speed_up")):
        path = Path(folder) / FIGURES[title]
        measured = [result for result in evaluations if result.get(field)]
        if not measured:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(path, title, draw, measured)
        drawn.append(path)
    return drawn


def _draw(path: Path, title: str, draw: Drawing, measured: Evaluations) -> None:
    if not can_draw():
        raise ImportError("figures need matplotlib; install it with `pip install matplotlib`.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # comes with matplotlib

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")  # not pyplot: no global state, no window
    axes = figure.subplots()
    draw(axes, measured)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # A palette, for a third of the size; and no version of matplotlib in the file, which would change with it.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS)
    image.save(path, optimize=True)


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
