"""The page around the figures: what each shows, the numbers behind it, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .draw import FIGURES

BUSY = 1.2  # programs per core from which on a clock is not to be trusted


def render_page(results: Mapping[str, Any], drawn: Mapping[str, Sequence[Path]], beside: Path, command: str) -> str:
    """Markdown.

    Args:
        results: As [`measure.measure`] gives them.
        drawn: Files of every figure.
        beside: Folder the page lies in; pictures are linked from there.
        command: What made it.
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
        "specheads figures --from results.json --only tau round    # some of them, from what lies beside the pictures",
        "specheads figures --target T --heads A B --quick          # a look in passing at models of your own",
        "specheads figures --target T --heads A B --no-timing      # on a busy machine",
        "```",
    ]
    return "\n".join(lines) + "\n"


def _clock(settings: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    if not settings["timing"]:
        return ["Nothing was timed, so only figures that do not depend on a clock are here.", ""]
    if machine["load_per_core"] > BUSY:
        return [
            f"**The machine was busy** ({machine['load_per_core']} programs per core wanted to run): times and speeds "
            "below are those of a part of it, and jump.", "",
        ]  # fmt: skip
    return []


def _table(name: str, results: Mapping[str, Any]) -> list[str]:
    """The numbers of a figure that has one value per point."""
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
