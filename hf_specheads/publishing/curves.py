"""Reads the log of a training run, as curves and as a table of the last values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

History = Sequence[Mapping[str, Any]]  # a trainer's `log_history`: one entry per logging or evaluation step
# Rows of the table: title, log name of the loss, log name of tau, and log prefix of the values per draft position.
LAST_VALUES = (
    ("training, expected", "loss", "expected_acceptance_length", "acceptance_"),
    ("held-out, expected", "eval_loss", "eval_expected_acceptance_length", "eval_acceptance_"),
    ("held-out, by `generate`", "", "eval_acceptance_length", "eval_pos_acc_"),
)


def read_history(facts: str | Path) -> list[dict[str, Any]]:
    """Reads the log in `training_facts.json` or in a checkpoint's `trainer_state.json`; empty if there is none."""
    path = Path(facts)
    return json.loads(path.read_text(encoding="utf-8")).get("log_history") or [] if path.is_file() else []


def curve(history: History, key: str) -> list[list[float]]:
    """Returns `[step, value]` of every entry that has a value of this name."""
    return [[entry["step"], entry[key]] for entry in history if key in entry and "step" in entry]


def by_position(names: Mapping[str, Any], prefix: str) -> list[str]:
    """Returns the names that consist of the prefix and a draft position, in order of position."""
    found = {int(match[1]): name for name in names if (match := re.fullmatch(re.escape(prefix) + r"(\d+)", name))}
    return [found[position] for position in sorted(found)]


def last_values(history: History) -> tuple[list[str], list[list[str]]]:
    """Builds header and rows of a table of the last logged values; no rows if nothing was logged."""
    rows = []
    for title, loss, tau, prefix in LAST_VALUES:
        entry = next((entry for entry in reversed(history) if loss in entry or tau in entry), None)
        if entry is not None:
            values = [entry.get(name) for name in (loss, tau, *by_position(entry, prefix))]
            rows.append([title, str(entry.get("step", "")), *("" if v is None else f"{v:.3g}" for v in values)])
    width = max(map(len, rows), default=0)
    header = ["last logged", "step", "loss", "tau", *(str(position) for position in range(1, width - 3))]
    return header, [[*row, *[""] * (width - len(row))] for row in rows]
