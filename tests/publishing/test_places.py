"""Facts without places on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_specheads.publishing.places import without_places


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/home/me/runs/poss3", "poss3"),
        ("specheads train output_dir=/home/me/runs/poss3 max_steps=4", "specheads train output_dir=poss3 max_steps=4"),
        (
            "/usr/bin/specheads eval --heads ~/runs/h --prompts '/data/p.jsonl'",
            "specheads eval --heads h --prompts 'p.jsonl'",
        ),
        ("train_data=[/a/b/c.jsonl,/a/d.jsonl]", "train_data=[c.jsonl,d.jsonl]"),
        (r"output_dir=C:\\Users\\me\\poss3", "output_dir=poss3"),
        *((same, same) for same in ("runs/poss3", "org/name", "https://hf.co/org/name", "tokens/s, a / b", "/", "")),
    ],
)
def test_absolute_paths_leave_their_last_name(given: str, left: str) -> None:
    assert without_places(given.replace("\\\\", "\\")) == left


def test_at_any_depth_and_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    facts = {"recipe": {"target": str(folder), "steps": 4, "data": [{"path": "/data/x"}, None]}, "log": [1.5, True]}
    assert without_places(facts) == {
        "recipe": {"target": "my runs", "steps": 4, "data": [{"path": "x"}, None]}, "log": [1.5, True],
    }  # fmt: skip
