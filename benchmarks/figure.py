"""Draws pictures of results: acceptance by position, speed-up by batch size, and the default against a grid.

`python -m benchmarks --render` redraws docs/images/accepted.png and default_against_grid.png if they are not based on
the committed results. Each file's metadata (`Description`) names the results it was drawn from and the commits they
measured.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from hf_specheads.publishing.palette import method_colour

from .results import RESULTS, ROOT, Result
from .trees.default import BEST, DEFAULT, setting_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = ROOT / "docs" / "images" / "accepted.png"
HEADS = {"eagle": method_colour("eagle"), "poss3-longer": method_colour("poss")}
STYLES = ("-", "--")


def read_results(picture: Path = PICTURE) -> dict[str, Result]:
    """Reads the committed results that one of `PICTURES` shows, by name."""
    names, _ = PICTURES[picture]
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def sources(results: dict[str, Result]) -> str:
    """Names results, each with the commit it measured and the command that made it."""
    facts = {name: result["provenance"] for name, result in results.items()}
    return "; ".join(f"{name}: {fact['commit']}, {fact['command']}" for name, fact in facts.items())


def draw(path: Path, results: dict[str, Result]) -> None:
    """Draws the two panels of the README's picture from the output of [`read_results`]."""
    with _picture(path, results, (8, 3.4), panels=2) as (accepted, batches):
        _draw_accepted(accepted, results["speedup"]["prompt_sets"])
        _draw_batches(batches, results["batch"]["batch_sizes"])
        for axes in (accepted, batches):
            axes.grid(axis="y", linewidth=0.4)
            axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def draw_default(path: Path, results: dict[str, Result]) -> None:
    """Draws the speed-ups of the default and of the grid's best tree, one line per setting of `default`."""
    measured = results["default"]["measured"][::-1]
    with _picture(path, results, (7, 1.2 + 0.32 * len(measured)), panels=1) as (axes,):
        axes.axvline(1, color="grey", linewidth=0.8)
        for height, one in enumerate(measured):
            ends = {name: one["sides"][name]["speed_up"] for name in (BEST, DEFAULT)}
            axes.plot(list(ends.values()), [height, height], color="lightgrey", linewidth=2, zorder=1)
            for (name, end), marker, colour in zip(ends.items(), "|o", ("black", "tab:blue"), strict=True):
                label = name if height == 0 else None
                axes.scatter(end, height, marker=marker, color=colour, s=60, zorder=2, label=label)
        axes.set_yticks(range(len(measured)), [setting_of(one) for one in measured])
        axes.set_xlabel("speed-up over plain generation")
        axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


@contextmanager
def _picture(path: Path, results: dict[str, Result], size: tuple[float, float], panels: int) -> Iterator[list[Axes]]:
    """Yields panels to draw in, side by side, and saves the picture afterwards."""
    from matplotlib.figure import Figure  # instead of pyplot, which keeps global state and opens windows

    figure = Figure(figsize=size, layout="constrained")
    every = list(figure.subplots(1, panels, squeeze=False)[0])
    yield every
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None, "Description": sources(results)})


def _draw_accepted(axes: Axes, prompt_sets: dict[str, Any]) -> None:
    """Draws, per draft position, the product of pos-acc up to there: the share of drafts accepted so far."""
    for (name, sides), style in zip(prompt_sets.items(), itertools.cycle(STYLES), strict=False):
        for heads, colour in HEADS.items():
            reached = list(itertools.accumulate(sides[heads]["pos_acc"], operator.mul))
            label = f"{heads}, {name}: tau {sides[heads]['acceptance_length']:.1f}"
            axes.plot(range(1, len(reached) + 1), reached, style, color=colour, marker="o", markersize=3, label=label)
    axes.set(ylim=(0, 1.03))
    axes.set_xlabel("draft position", fontsize=9)
    axes.set_ylabel("share of drafts accepted", fontsize=9)


def _draw_batches(axes: Axes, batch_sizes: dict[str, Any]) -> None:
    """Draws the speed-up over plain `generate` at the same batch size, with its range over repeats."""
    places = range(len(batch_sizes))
    for heads, colour in HEADS.items():
        sides = [sides[heads] for sides in batch_sizes.values()]
        values = [side["speed_up"] for side in sides]
        below = [side["speed_up"] - side["speed_up_range"][0] for side in sides]
        above = [side["speed_up_range"][1] - side["speed_up"] for side in sides]
        line = {"color": colour, "marker": "o", "markersize": 3, "capsize": 3, "label": heads}
        axes.errorbar(places, values, yerr=(below, above), **line)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set(xticks=places, xticklabels=list(batch_sizes))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size", fontsize=9)
    axes.set_ylabel("speed-up over plain generate", fontsize=9)


# The results that each picture shows, and the function that draws it
PICTURES: dict[Path, tuple[tuple[str, ...], Callable[[Path, dict[str, Result]], None]]] = {
    PICTURE: (("speedup", "batch"), draw),
    PICTURE.with_name("default_against_grid.png"): (("default",), draw_default),
}


def redraws() -> dict[Path, Callable[[], None]]:
    """Returns functions that redraw the pictures that are missing or not based on the committed results."""
    shown = {path: read_results(path) for path in PICTURES}
    stale = [path for path, results in shown.items() if _drawn_from(path) != sources(results)]
    return {path: partial(PICTURES[path][1], path, shown[path]) for path in stale}


def _drawn_from(path: Path) -> str | None:
    """Returns the [`sources`] that a picture names, or None if the picture does not exist."""
    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get("Description")
