"""Renders the page of the figures: what each figure shows, its numbers, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .draw import FIGURES

BUSY = 1.2  # load per core above which times are not reliable


def render_page(results: Mapping[str, Any], drawn: Mapping[str, Sequence[Path]], beside: Path, command: str) -> str:
    """Renders the page as Markdown.

    Args:
        results: Results of [`measure.measure`].
        drawn: Files of every figure, by name.
        beside: Folder of the page; links to pictures are relative to it.
        command: Command line that made the figures.
    """
    settings, machine = results["settings"], results["machine"]
    names = ", ".join(f"{name} ({facts['method']})" for name, facts in results["heads"].items())
    lines = [
        f"# Figures of {settings['target']}",
        "",
        f"Heads: {names}. Greedy, {settings['dtype']}, {settings['prompts']} prompts, at most "
        f"{settings['max_new_tokens']} new tokens each; every round drafts.",
        "",
        *_clock(settings, machine),
    ]
    for name, files in drawn.items():
        figure = FIGURES[name]
        link = files[0].relative_to(beside) if files[0].is_relative_to(beside) else files[0]
        lines += [f"## {figure.title}", "", figure.about, "", f"![{figure.title}]({link.as_posix()})", ""]
        lines += _table(name, results)
    if results["skipped"]:
        lines += ["## Not shown", "", *(f"- {reason}" for reason in results["skipped"]), ""]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    lines += [
        f"{machine['device']}, threads: {machine['threads']}; {versions}; {machine['date']}, {machine['seconds']} s.",
        "",
        "## Drawing them again",
        "",
        "```bash",
        f"{command}",
        "specheads figures --from results.json --only tau round    # some, from the results beside the pictures",
        "specheads figures --target T --heads A B --quick          # a quick look at models of your own",
        "specheads figures --target T --heads A B --no-timing      # on a busy machine",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _clock(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    if not settings["timing"]:
        return ["Nothing was timed, so only figures that do not depend on a clock are shown.", ""]
    if machine["load_per_core"] > BUSY:
        return [
            f"**The machine was busy** ({machine['load_per_core']} programs per core were ready to run), so the times "
            "and speeds below are unreliable.", "",
        ]  # fmt: skip
    return []


def _table(name: str, results: Mapping[str, Any]) -> list[str]:
    """Table of the numbers in a figure with one value per point; empty for other figures."""
    sweep, field = {"tau": ("depths", "tau"), "tree_tau": ("nodes", "tau"), "tree_size": ("nodes", "tau"),
                    "throughput": ("depths", "tokens_per_second")}.get(name, ("", ""))  # fmt: skip
    heads = results["heads"]
    if name == "n_alpha":
        return _rows("heads", [f"{n}-alpha" for n in range(results["settings"]["max_n"] + 1)],
                     {one: facts.get("n_alpha", []) for one, facts in heads.items()})  # fmt: skip
    if not sweep:
        return []
    points = sorted({int(point) for facts in heads.values() for point in facts.get(sweep, {})})
    values = {
        one: [facts.get(sweep, {}).get(str(point), {}).get(field) for point in points] for one, facts in heads.items()
    }
    unit = {"tau": "tau", "tokens_per_second": "tokens/s"}[field]
    return _rows(f"{unit} at {sweep}", [str(point) for point in points], values)


def _rows(corner: str, header: Sequence[str], values: Mapping[str, Sequence[float | None]]) -> list[str]:
    lines = [f"| {corner} | {' | '.join(header)} |", "|---|" + "---:|" * len(header)]
    for name, row in values.items():
        cells = [*("-" if value is None else f"{value:.2f}" for value in row), *["-"] * (len(header) - len(row))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]
