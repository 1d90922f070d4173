"""Acceptance length over training compute, collected from what the trainer wrote next to the weights.

    python -m benchmarks training_curve --heads runs/heads/eagle-base runs/heads/hass runs/heads/poss3

Reads `training_facts.json` of every folder (its `log_history` holds `eval_acceptance_length` at several steps) and,
for warm-started heads, the compute of the heads they started from, found by name next to the folder. Writes JSON, a
table and `training_curve.png`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_specheads import DraftHead
from hf_specheads.publishing.palette import line_styles

from ..results import Result, footnote, markdown_table, number
from ..setup import count_parameters, display_name

SOURCES = ()  # the numbers are the trainer's, of its own time
FACTS = "training_facts.json"
AXES = {"training_flops": "training compute (FLOP)", "hours": "hours of training", "steps": "optimizer steps"}


def read_facts(folder: str | Path) -> dict[str, Any] | None:
    """Facts of the run that made some heads, `None` if the folder does not tell."""
    path = Path(folder) / FACTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def starts_from(facts: dict[str, Any]) -> str | None:
    """Name of the run the heads were warm-started from, `None` for random weights."""
    return (facts.get("recipe") or {}).get("starts_from")


def compute(facts: dict[str, Any] | None) -> dict[str, Any]:
    """What a run by itself has cost, as far as it is known, and what it started from."""
    if facts is None:
        return {}
    return {"starts_from": starts_from(facts), **{axis: facts[axis] for axis in AXES if axis in facts}}


def describe(heads: DraftHead, folder: str) -> dict[str, Any]:
    """Method, parameters and training of heads."""
    return {
        "method": heads.config.method,
        "parameters": count_parameters(heads),
        **compute(read_facts(folder)),
    }


def earlier_runs(facts: dict[str, Any], folder: str | Path) -> list[dict[str, Any]]:
    """Facts of all runs these heads go back to, their own left out.

    Raises:
        FileNotFoundError: if one of them does not lie next to the folder.
    """
    runs = []
    while (name := starts_from(facts)) is not None:
        facts = read_facts(Path(folder).parent / name)
        if facts is None:
            raise FileNotFoundError(f"{folder} was warm-started from {name!r}, of which no {FACTS} lies next to it")
        runs.append(facts)
    return runs


def curve(facts: dict[str, Any], folder: str | Path) -> list[dict[str, float]]:
    """Points of one run: step, acceptance length, and compute spent so far including the warm start's."""
    earlier = earlier_runs(facts, folder)
    axes = [axis for axis in AXES if all(axis in run for run in [facts, *earlier])]
    points = []
    for entry in facts["log_history"]:
        if "eval_acceptance_length" not in entry:
            continue
        share = entry["step"] / facts["steps"]
        spent = {axis: sum(run[axis] for run in earlier) + share * facts[axis] for axis in axes}
        points.append({**spent, "step": entry["step"], "acceptance_length": entry["eval_acceptance_length"]})
    return points


def collect(folders: list[str]) -> dict[str, Any]:
    """Curves of all folders that have one, and the axis all of them know."""
    curves = {}
    for folder in folders:
        facts = read_facts(folder)
        points = curve(facts, folder) if facts and facts.get("steps") else []
        if points:
            started = {"method": facts.get("method"), "starts_from": starts_from(facts)}
            curves[display_name(folder)] = {**started, "points": points}
    if not curves:
        raise FileNotFoundError(f"none of {folders} has a {FACTS} with `eval_acceptance_length` in its log_history")
    axis = next(axis for axis in AXES if all(axis in p for c in curves.values() for p in c["points"]))
    return {"axis": axis, "curves": curves}


def draw(result: dict[str, Any], path: Path) -> None:
    """One line per heads, tau over compute; a warm-started line leaves from where the line of its start ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    styles = line_styles({name: one.get("method", name) for name, one in result["curves"].items()})
    for name, one in result["curves"].items():
        before = result["curves"].get(one["starts_from"], {"points": []})["points"][-1:]
        points = [*before, *one["points"]]
        x = [point[result["axis"]] for point in points]
        taus = [point["acceptance_length"] for point in points]
        axes.plot(x, taus, **{**styles[name], "markersize": 3, "label": name})
    axes.set_xlabel(f"{AXES[result['axis']]}, warm start included")
    axes.set_ylabel("acceptance length (tau)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)  # beside the curves, which fill the panel
    figure.savefig(path, dpi=130, metadata={"Software": None})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs."""
    parser.add_argument("--heads", nargs="+", required=True, help="folders written by the trainer")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Curves of all runs, and the figure."""
    result = collect(args.heads)
    args.output.mkdir(parents=True, exist_ok=True)
    draw(result, args.output / "training_curve.png")
    return result


def table(result: Result) -> str:
    """tau at a few shares of each run's own compute; the whole curve is in the JSON and in the figure."""
    axis = result["axis"]
    unit, scale = ("TFLOP", 1e12) if axis == "training_flops" else (axis, 1)
    rows = []
    for name, curve in result["curves"].items():
        points = curve["points"]
        taus = " ".join(number(point["acceptance_length"]) for point in points)
        spent = number(points[-1][axis] / scale, 1)
        rows.append((name, curve["starts_from"] or "random", str(points[-1]["step"]), spent, taus))
    header = ("heads", "started from", "steps", f"{unit}, warm start included", "tau along the run")
    return markdown_table(header, rows) + footnote(result)
