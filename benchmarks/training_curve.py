"""Acceptance length over training compute, collected from what the trainer wrote next to the weights.

    python -m benchmarks.training_curve --heads model_cards/eagle model_cards/hass model_cards/poss3

Reads `training_facts.json` of every folder (its `log_history` holds `eval_acceptance_length` at several steps) and,
for warm-started heads, the compute of the heads they started from, found by name next to the folder. Writes JSON, a
table and `training_curve.png`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .common import add_output_argument, display_name, write_result

FACTS = "training_facts.json"
AXES = {"training_flops": "training compute (FLOP)", "hours": "hours of training", "steps": "optimizer steps"}


def read_facts(folder: str | Path) -> dict[str, Any] | None:
    """Facts of the run that made some heads, `None` if the folder does not tell."""
    path = Path(folder) / FACTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def lineage(facts: dict[str, Any], folder: str | Path) -> list[dict[str, Any]]:
    """Facts of these heads and of those they were warm-started from, the oldest first."""
    chain = [facts]
    while chain[0].get("starts_from"):
        before = read_facts(Path(folder).parent / chain[0]["starts_from"])
        if before is None:
            break
        chain.insert(0, before)
    return chain


def total_compute(facts: dict[str, Any] | None, folder: str | Path) -> dict[str, Any]:
    """Summed compute of a run and of those it started from, as far as it is known."""
    if facts is None:
        return {}
    chain = lineage(facts, folder)
    return {
        "starts_from": facts.get("starts_from"),
        **{axis: sum(run[axis] for run in chain) for axis in AXES if all(axis in run for run in chain)},
    }


def curve(facts: dict[str, Any], folder: str | Path) -> list[dict[str, float]]:
    """Points of one run: step, acceptance length, and compute spent so far including the warm start's."""
    before = total_compute(facts, folder)
    points = []
    for entry in facts["log_history"]:
        if "eval_acceptance_length" not in entry:
            continue
        left = 1 - entry["step"] / facts["steps"]
        spent = {axis: before[axis] - left * facts[axis] for axis in AXES if axis in before}
        points.append({**spent, "step": entry["step"], "acceptance_length": entry["eval_acceptance_length"]})
    return points


def collect(folders: list[str]) -> dict[str, Any]:
    """Curves of all folders that have one, and the axis all of them know."""
    curves = {}
    for folder in folders:
        facts = read_facts(folder)
        points = curve(facts, folder) if facts and facts.get("steps") else []
        if points:
            curves[display_name(folder)] = {"starts_from": facts.get("starts_from"), "points": points}
    if not curves:
        raise FileNotFoundError(f"none of {folders} has a {FACTS} with `eval_acceptance_length` in its log_history")
    axis = next(axis for axis in AXES if all(axis in p for c in curves.values() for p in c["points"]))
    return {"axis": axis, "curves": curves}


def draw(result: dict[str, Any], path: Path) -> None:
    """One line per heads, tau over compute."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, one in result["curves"].items():
        x = [point[result["axis"]] for point in one["points"]]
        axes.plot(x, [point["acceptance_length"] for point in one["points"]], marker="o", markersize=3, label=name)
    axes.set_xlabel(f"{AXES[result['axis']]}, warm start included")
    axes.set_ylabel("acceptance length (tau)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = ("eagle", "hass", "poss1", "poss2", "poss3", "control")
    parser.add_argument("--heads", nargs="+", default=[f"model_cards/{name}" for name in names])
    add_output_argument(parser)
    args = parser.parse_args()
    result = collect(args.heads)
    print(write_result(args.output, "training_curve", result))
    draw(result, args.output / "training_curve.png")


if __name__ == "__main__":
    main()
