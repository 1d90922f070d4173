"""What all tables of results are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A rounded number; a dash for one that was not measured."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{100 * value:.0f} %"


def millions(parameters: int) -> str:
    """A number of parameters."""
    return f"{parameters / 1e6:.2f} M"


def pos_acc_text(values: Sequence[float] | None) -> str:
    """pos-acc in hundredths, draft position 1 first."""
    return " ".join(f".{round(100 * value):02d}" if value < 0.995 else "1." for value in values or ()) or "-"


def tree_text(tree: Result) -> str:
    """A draft tree in words."""
    if tree["kind"] == "chain":
        return f"chain of {tree['depth']}"
    kind = "" if tree["kind"] == "dynamic" else f"{tree['kind']}, "
    return f"{kind}depth {tree['depth']}, top-k {tree['top_k']}, {tree['total_tokens']} nodes"


def footnote(result: Result, *more: str) -> str:
    """Where a table comes from."""
    facts = result["provenance"]
    commit = (facts["commit"] or "unknown")[:10] + ("+" if facts["uncommitted_changes"] else "")
    versions = facts["versions"]
    parts = [
        *more,
        f"{facts['processor']}, {facts['threads']} threads",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        f"commit {commit}, {facts['date']}",
    ]
    return "\n" + "; ".join(parts) + f".\n`{facts['command']}`\n"
