"""Draws the figures from results: one colour per method, legends next to the data, readable at half size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..publishing.palette import PLAIN, line_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")
WIDTH, HEIGHT, DPI, COLOURS = 7.6, 3.3, 150, 64
LEAST_ROUNDS = 5  # pos-acc values from fewer rounds are not drawn
FONT = 10.5  # points at full width; at half width still larger than footnotes
Results = Mapping[str, Any]
Styles = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        title: Title of its section on the page, and alternative text of the picture.
        about: What the figure shows, in a sentence or two.
        panels: Functions that draw its panels.
        has: Function that says whether results contain the data of the figure.
        timed: Whether it shows measured times.
    """

    title: str
    about: str
    panels: tuple[Callable[[Axes, Results, Styles], None], ...]
    has: Callable[[Results], bool]
    timed: bool = False


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_figures(
    results: Results, folder: str | Path, formats: Sequence[str] = FORMATS, only: Sequence[str] | None = None
) -> dict[str, list[Path]]:
    """Draws all figures that the results have data for; the same results give the same bytes.

    Args:
        results: Results of [`measure.measure`].
        folder: Folder for the files, which are named after the figures; it is created if necessary.
        formats: Formats, from [`FORMATS`].
        only: Names of figures to draw; default all.

    Returns:
        The files of every figure that was drawn, by name.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If a figure or format is unknown.
    """
    check_names(only, formats)
    if not can_draw():
        raise ImportError('figures need matplotlib, which is not installed; pip install "hf-specheads[figures]".')
    Path(folder).mkdir(parents=True, exist_ok=True)
    styles = line_styles({name: facts["method"] for name, facts in results["heads"].items()})
    drawn = {}
    for name, figure in FIGURES.items():
        if figure.has(results) and (only is None or name in only):
            drawn[name] = _draw(figure, results, styles, Path(folder) / name, formats)
    return drawn


def check_names(only: Sequence[str] | None, formats: Sequence[str]) -> None:
    """Refuses unknown names of figures and formats.

    Raises:
        ValueError: The message lists the known names.
    """
    for given, known, what in ((only or (), tuple(FIGURES), "figures"), (formats, FORMATS, "formats")):
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"unknown {what} {unknown}; expected some of {list(known)}.")


def _draw(figure: Figure, results: Results, styles: Styles, path: Path, formats: Sequence[str]) -> list[Path]:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas  # pyplot would have global state and may open windows

    with mpl.rc_context({"font.size": FONT, "svg.hashsalt": "specheads", "svg.fonttype": "none"}):
        canvas = Canvas(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        panels = canvas.subplots(1, len(figure.panels), squeeze=False)[0]
        for axes, draw in zip(panels, figure.panels, strict=True):
            draw(axes, results, styles)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", linewidth=0.4)
        lines = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        canvas.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False, fontsize=FONT - 1)
        files = [path.with_suffix(f".{kind}") for kind in formats]
        for file in files:
            _save(canvas, file)
    return files


def _save(canvas: Any, file: Path) -> None:
    if file.suffix == ".svg":
        canvas.savefig(file, metadata={"Date": None, "Creator": None})
        return
    from PIL import Image

    canvas.savefig(file, metadata={"Software": None})
    # A palette makes the file a third of the size.
    image = Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(file, optimize=True)


# ---------------------------------------------------------------------- panels
def _line(axes: Axes, styles: Styles, name: str, x: Sequence[float], y: Sequence[float], **more: Any) -> None:
    axes.plot(x, y, **{"label": name, "markersize": 4.5, "linewidth": 1.6, **styles[name], **more})


def _points(facts: Mapping[str, Any], sweep: str, field: str) -> tuple[list[int], list[float]]:
    """Points of a sweep that have a value for a field, in order, and these values."""
    found = sorted((int(point), one[field]) for point, one in facts.get(sweep, {}).items() if field in one)
    return [point for point, _ in found], [value for _, value in found]


def _deepest(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return facts["depths"][max(facts["depths"], key=int)] if facts.get("depths") else {"pos_acc": [], "reached": []}


def _pos_acc(axes: Axes, results: Results, styles: Styles) -> None:
    longest = 1
    for name, facts in results["heads"].items():
        deepest = _deepest(facts)
        pairs = zip(deepest["pos_acc"], deepest["reached"], strict=True)
        values = [value for value, reached in pairs if reached >= LEAST_ROUNDS]  # few rounds reach deep positions
        longest = max(longest, len(values))
        _line(axes, styles, name, range(1, len(values) + 1), values)
    axes.set(xlabel="draft position", ylabel="accepted, given all before were", ylim=(0, 1.03))
    axes.set_xticks(range(1, longest + 1))


def _sweep(sweep: str, field: str, x: str, y: str) -> Callable[[Axes, Results, Styles], None]:
    """Makes a panel with one line per draft heads over the points of a sweep."""

    def draw(axes: Axes, results: Results, styles: Styles) -> None:
        ticks: set[int] = set()
        for name, facts in results["heads"].items():
            points, values = _points(facts, sweep, field)
            ticks.update(points)
            _line(axes, styles, name, points, values)
        plain = results.get("plain", {}).get("tokens_per_second")
        if field == "tokens_per_second" and plain:
            axes.axhline(plain, color=PLAIN, linestyle=":", linewidth=1.4, label="plain generate")
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(bottom=0)
        _ticks(axes, sorted(ticks), sweep)

    return draw


def _ticks(axes: Axes, ticks: Sequence[int], sweep: str) -> None:
    if sweep == "nodes":
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _n_alpha(axes: Axes, results: Results, styles: Styles) -> None:
    most = 0
    for name, facts in results["heads"].items():
        values = facts.get("n_alpha", [])
        most = max(most, len(values))
        if values:
            _line(axes, styles, name, range(len(values)), values)
    axes.set(xlabel="drafted features n", ylabel="n-alpha", ylim=(0, 1.03))
    axes.set_xticks(range(most), [f"{n}" for n in range(most)])


def _stages(sweep: str, x: str) -> Callable[[Axes, Results, Styles], None]:
    """Makes a panel of milliseconds per round: filled markers for drafting, hollow ones for verifying."""

    def draw(axes: Axes, results: Results, styles: Styles) -> None:
        ticks: set[int] = set()
        for name, facts in results["heads"].items():
            points, stages = _points(facts, sweep, "milliseconds")
            ticks.update(points)
            _line(axes, styles, name, points, [one["draft"] for one in stages])  # type: ignore[index]
            hollow = {"markerfacecolor": "white", "alpha": 0.75, "linewidth": 1.0, "label": "_verify"}
            _line(axes, styles, name, points, [one["target"] for one in stages], **hollow)  # type: ignore[index]
        axes.plot([], [], color="black", marker="o", markersize=4.5, label="filled: draft")
        axes.plot([], [], color="black", marker="o", markersize=4.5, markerfacecolor="white", label="hollow: verify")
        axes.set(xlabel=x, ylabel="ms per round")
        axes.set_ylim(bottom=0)
        _ticks(axes, sorted(ticks), sweep)

    return draw


def _batches(axes: Axes, results: Results, styles: Styles) -> None:
    sides = {name: facts.get("batches", {}) for name, facts in results["heads"].items()}
    plain = results.get("plain", {}).get("batches", {})
    sizes = sorted({int(size) for speeds in (*sides.values(), plain) for size in speeds})
    for name, speeds in sides.items():
        _line(axes, styles, name, sizes, [speeds[str(size)] for size in sizes])
    if plain:
        speeds = [plain[str(size)] for size in sizes]
        axes.plot(sizes, speeds, color=PLAIN, linestyle=":", linewidth=1.4, label="plain generate")
    axes.set(xlabel="sequences at once", ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(sizes, [str(size) for size in sizes])


def _training(curve: str, y: str) -> Callable[[Axes, Results, Styles], None]:
    def draw(axes: Axes, results: Results, styles: Styles) -> None:
        from matplotlib.ticker import LogLocator

        for name, facts in results["heads"].items():
            curves = facts.get("training", {})
            if points := curves.get(curve) or curves.get(f"evaluation_{curve}"):
                many = {"marker": ""} if len(points) > 12 else {}
                _line(axes, styles, name, [step for step, _ in points], [value for _, value in points], **many)
        axes.set(xlabel="optimizer step", ylabel=y)
        if curve == "loss":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        else:
            axes.set_ylim(bottom=1)

    return draw


def _has(sweep: str, field: str) -> Callable[[Results], bool]:
    return lambda results: any(_points(facts, sweep, field)[0] for facts in results["heads"].values())


def _has_any(field: str) -> Callable[[Results], bool]:
    return lambda results: any(facts.get(field) for facts in results["heads"].values())


FIGURES: dict[str, Figure] = {
    "pos_acc": Figure(
        "Acceptance by draft position",
        "How often the draft at a position is accepted, given that all earlier ones were (PosS, section 3); "
        f"positions that fewer than {LEAST_ROUNDS} rounds reached are left out.",
        (_pos_acc,), _has("depths", "pos_acc"),
    ),
    "tau": Figure(
        "Tokens per round against depth",
        "The acceptance length tau, bonus token included, of chains of every depth.",
        (_sweep("depths", "tau", "depth of the chain", "tau"),), _has("depths", "tau"),
    ),
    "n_alpha": Figure(
        "n-alpha",
        "How often draft and target agree when n of the features that the draft reads were drafted (EAGLE, "
        "section 4).",
        (_n_alpha,), _has_any("n_alpha"),
    ),
    "tree_size": Figure(
        "Tree size against tau and speed",
        "tau and tokens per second of dynamic trees, against the number of their nodes, the root included.",
        (_sweep("nodes", "tau", "nodes of the tree", "tau"),
         _sweep("nodes", "tokens_per_second", "nodes of the tree", "tokens/s")),
        _has("nodes", "tokens_per_second"), timed=True,
    ),
    "tree_tau": Figure(
        "Tree size against tau",
        "tau of dynamic trees, against the number of their nodes, the root included.",
        (_sweep("nodes", "tau", "nodes of the tree", "tau"),),
        lambda results: _has("nodes", "tau")(results) and not _has("nodes", "tokens_per_second")(results),
    ),
    "round": Figure(
        "Time of a round",
        "Milliseconds that a round spends drafting and verifying, against the depth of chains and the nodes of trees.",
        (_stages("depths", "depth of the chain"), _stages("nodes", "nodes of the tree")),
        _has("depths", "milliseconds"), timed=True,
    ),
    "throughput": Figure(
        "Tokens per second against depth and batch",
        "Chains of every depth for one sequence, and one chain for several sequences at once.",
        (_sweep("depths", "tokens_per_second", "depth of the chain", "tokens/s"), _batches),
        _has("depths", "tokens_per_second"), timed=True,
    ),
    "training": Figure(
        "Training",
        "Loss (of the evaluation, if no other was recorded) and tau of generations while the heads were trained. "
        "Losses of different methods are sums of different terms.",
        (_training("loss", "loss"), _training("tau", "tau")), _has_any("training"),
    ),
}  # fmt: skip
