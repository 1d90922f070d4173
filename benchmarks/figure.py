"""The README's picture: how far drafts are accepted, and what that brings at which batch size.

    python -m benchmarks.figure  # draws docs/images/accepted.png from speedup.json and batch.json

The file names the results it was drawn from, and the commits they measured (`Description`).
"""

from __future__ import annotations

import itertools
import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specheads.publishing.palette import method_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "accepted.png"
HEADS = {"eagle": method_colour("eagle"), "poss3": method_colour("poss")}
STYLES = ("-", "--")


def read_results() -> dict[str, Any]:
    """The results that are drawn, by name."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in ("speedup", "batch")}


def sources(results: dict[str, Any]) -> str:
    """Names of results, each with the commit it measured and the command that made it."""
    facts = {name: result["provenance"] for name, result in results.items()}
    return "; ".join(f"{name}: {fact['commit']}, {fact['command']}" for name, fact in facts.items())


def draw(path: Path, results: dict[str, Any]) -> None:
    """Draws both panels; the same results give the same bytes.

    Args:
        path: Of the PNG.
        results: As [`read_results`] gives them.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    accepted, batches = figure.subplots(1, 2)
    _draw_accepted(accepted, results["speedup"]["prompt_sets"])
    _draw_batches(batches, results["batch"]["batch_sizes"])
    for axes in (accepted, batches):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", linewidth=0.4)
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None, "Description": sources(results)})


def _draw_accepted(axes: Axes, prompt_sets: dict[str, Any]) -> None:
    """Per draft position the product of pos-acc down to it: the share of drafts that were accepted so far."""
    for (name, sides), style in zip(prompt_sets.items(), itertools.cycle(STYLES), strict=False):
        for heads, colour in HEADS.items():
            reached = list(itertools.accumulate(sides[heads]["pos_acc"], operator.mul))
            label = f"{heads}, {name}: tau {sides[heads]['acceptance_length']:.1f}"
            axes.plot(range(1, len(reached) + 1), reached, style, color=colour, marker="o", markersize=3, label=label)
    axes.set(ylim=(0, 1.03))
    axes.set_xlabel("draft position", fontsize=9)
    axes.set_ylabel("share of drafts accepted", fontsize=9)


def _draw_batches(axes: Axes, batch_sizes: dict[str, Any]) -> None:
    """Speed-up over plain `generate` at the same batch size, with the range over repeats."""
    places = range(len(batch_sizes))
    for heads, colour in HEADS.items():
        sides = [sides[heads] for sides in batch_sizes.values()]
        values = [side["speed_up"] for side in sides]
        below = [side["speed_up"] - side["speed_up_range"][0] for side in sides]
        above = [side["speed_up_range"][1] - side["speed_up"] for side in sides]
        axes.errorbar(
            places, values, yerr=(below, above), color=colour, marker="o", markersize=3, capsize=3, label=heads
        )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set(xticks=places, xticklabels=list(batch_sizes))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences at once", fontsize=9)
    axes.set_ylabel("speed-up over plain generate", fontsize=9)


if __name__ == "__main__":
    draw(PICTURE, read_results())
