"""The log of a training, as curves and as its last values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

History = Sequence[Mapping[str, Any]]  # `log_history` of a trainer: an entry per step that was logged or evaluated
# Rows of the last values: a title, and where loss, tau and values by draft position stand in the log.
LAST_VALUES = (
    ("training, expected", "loss", "expected_acceptance_length", "acceptance_"),
    ("held-out, expected", "eval_loss", "eval_expected_acceptance_length", "eval_acceptance_"),
    ("held-out, by `generate`", "", "eval_acceptance_length", "eval_pos_acc_"),
)


def read_history(facts: str | Path) -> list[dict[str, Any]]:
    """The log that `training_facts.json`, or a checkpoint's `trainer_state.json`, holds; empty without one."""
    path = Path(facts)
    return json.loads(path.read_text(encoding="utf-8")).get("log_history") or [] if path.is_file() else []


def curve(history: History, key: str) -> list[list[float]]:
    """`[step, value]` of every entry that has a value of this name."""
    return [[entry["step"], entry[key]] for entry in history if key in entry and "step" in entry]


def by_position(names: Mapping[str, Any], prefix: str) -> list[str]:
    """Names that are a prefix and a draft position, position 1 first."""
    found = {int(match[1]): name for name in names if (match := re.fullmatch(re.escape(prefix) + r"(\d+)", name))}
    return [found[position] for position in sorted(found)]


def last_values(history: History) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of what was logged last; no rows if nothing was."""
    rows = []
    for title, loss, tau, prefix in LAST_VALUES:
        entry = next((entry for entry in reversed(history) if loss in entry or tau in entry), None)
        if entry is not None:
            values = [entry.get(name) for name in (loss, tau, *by_position(entry, prefix))]
            rows.append([title, str(entry.get("step", "")), *("" if v is None else f"{v:.3g}" for v in values)])
    width = max(map(len, rows), default=0)
    header = ["last logged", "step", "loss", "tau", *(str(position) for position in range(1, width - 3))]
    return header, [[*row, *[""] * (width - len(row))] for row in rows]
