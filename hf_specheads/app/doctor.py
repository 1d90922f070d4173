"""Renders the doctor's diagnosis as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ..diagnosis.diagnosis import Diagnosis

SEPARATOR = "---"


def split_prompts(text: str) -> list[str]:
    """Splits the text of a text box into prompts, which are separated by lines of `---`.

    Raises:
        ValueError: If there is no prompt.
    """
    prompts, lines = [], []
    for line in [*text.splitlines(), SEPARATOR]:
        if line.strip() == SEPARATOR:
            prompts.append("\n".join(lines).strip("\n"))
            lines = []
        else:
            lines.append(line)
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ValueError(
            f"heads are diagnosed on prompts; write at least one, and separate several by lines of {SEPARATOR}."
        )
    return prompts


def join_prompts(prompts: Sequence[str]) -> str:
    """Joins prompts to the text of the text box; the inverse of [`split_prompts`]."""
    return f"\n{SEPARATOR}\n".join(prompt.strip("\n") for prompt in prompts)


def diagnosis_html(found: Diagnosis) -> str:
    """Renders the page of a [`Diagnosis`], with tables."""
    facts = found.to_dict()
    kind = "good" if found.sound else "bad"
    parts = [
        f'<div class="sh-doctor"><div class="sh-verdict {kind}"><b>{escape(found.verdict)}</b></div>',
        _findings(facts["findings"]),
        *(f"<p>{escape(problem)}</p>" for problem in found.problems),
        "<h4>Where acceptance is lost</h4>",
        _table(("", ""), [(name, _value(name, value)) for name, value in found.chain.items() if value is not None]),
        "<h4>Teacher-forced acceptance by draft position</h4>",
        _bars(found.positions),
        "<h4>Settings that the files do not determine</h4>",
        _hypotheses(found, facts["hypotheses"]),
        "<h4>By group of tokens</h4>",
        _groups(facts["groups"]),
    ]
    if found.changes:
        parts.append(
            f"<h4>Config fields that repair the heads</h4><pre>{escape(json.dumps(found.changes, indent=2))}</pre>"
        )
    words = f"{found.texts} texts, {found.tokens} tokens written by the target, {found.seconds:.0f} s"
    return "".join([*parts, f"<p>{escape(words)}</p></div>"])


def _findings(findings: Iterable[dict[str, Any]]) -> str:
    rows = [(one["cause"], one["said"], one["mend"]) for one in findings]
    return _table(("cause", "what was seen", "what to do"), rows) if rows else ""


def _hypotheses(found: Diagnosis, hypotheses: Sequence[dict[str, Any]]) -> str:
    score = found.facts.score
    rows = [_scored("current settings", score.position_1, score.tau, score.log_likelihood)]
    marked = [False]
    for trial in sorted(hypotheses, key=lambda trial: trial["setting"]):
        name = f"{trial['setting']}: {trial['value']}" + (" (better)" if trial["wins"] else "")
        rows.append(_scored(name, trial["position_1"], trial["tau"], trial["likelihood"]))
        marked.append(trial["wins"])
    return _table(("setting", "position 1", "tau", "log-likelihood"), rows, marked)


def _scored(name: str, position_1: float, tau: float | None, likelihood: float | None) -> tuple[str, ...]:
    """Row of the table of settings; tau is unknown for settings that were only tried at position 1."""
    return (name, f"{position_1:.3f}", "" if tau is None else f"{tau:.2f}",
            "" if likelihood is None else f"{likelihood:.3f}")  # fmt: skip


def _groups(groups: Iterable[dict[str, Any]]) -> str:
    rows = [tuple(_cell(value) for value in group.values()) for group in groups]
    names = next((tuple(group) for group in groups), ())
    return _table(tuple(name.replace("_", " ") for name in names), rows) if rows else ""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list | tuple):
        return " to ".join(_cell(one) for one in value)
    return str(value)


def _value(name: str, value: float) -> str:
    return f"{value:.0%}" if "coverage" in name or "position" in name else f"{value:.2f}"


def _bars(values: Sequence[float]) -> str:
    rows = "".join(
        f'<tr><td>{position}</td><td><span class="sh-bar" style="width:{round(220 * value)}px"></span> {value:.0%}'
        "</td></tr>"
        for position, value in enumerate(values, start=1)
    )
    return f"<table>{rows}</table>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] = ()) -> str:
    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        inside = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        return f"<tr{kind}>{inside}</tr>"

    wins = [*marked, *([False] * (len(rows) - len(marked)))]
    body = "".join(line(row, "td", ' class="wins"' if win else "") for row, win in zip(rows, wins, strict=True))
    return f"<table>{line(header, 'th')}{body}</table>"
