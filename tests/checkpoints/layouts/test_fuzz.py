"""A part of the damaged checkpoints of `fuzz.py`, and the judge itself: it must see heads that are silently wrong."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.layouts import LAYOUTS, write_file

sys.path.insert(0, str(Path(__file__).parent))  # fuzz.py and mutations.py are tools, not test modules
import fuzz
from mutations import MUTATIONS, read_tensors

COUNT = 90


def test_only_our_own_errors_and_nothing_silently_wrong() -> None:
    results = [fuzz.run_case(*case) for case in fuzz.cases(COUNT)]
    assert [result for result in results if result.failed] == []
    assert {result.mutation for result in results} == set(MUTATIONS)
    outcomes = Counter(result.outcome for result in results)
    assert outcomes["refused"] > COUNT // 3 and outcomes["same"] > COUNT // 20


def test_architectures_that_are_no_list_are_read_over() -> None:
    case = ("dflash-default-taps", "change_field", 3)
    assert (result := fuzz.run_case(*case)).change.startswith("config.json: architectures=") and not result.failed


@pytest.mark.slow
def test_many_more() -> None:
    assert [result for case in fuzz.cases(5000) if (result := fuzz.run_case(*case)).failed] == []


def damaged(tmp_path: Path, name: str = "eagle3") -> Path:
    folder = LAYOUTS[name].write(tmp_path)
    fuzz.original(name)
    return folder


def test_the_judge_sees_heads_that_read_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that mixes two tensors up, or ignores a damaged one, is found out."""
    folder = damaged(tmp_path)
    heads = fuzz.load_heads(folder)
    assert fuzz.judge("eagle3", "value", folder, "", heads, fuzz.draft(heads), "") == "same"
    with torch.no_grad():
        heads.norm.weight.mul_(2)
    assert fuzz.judge("eagle3", "value", folder, "", heads, fuzz.draft(heads), "") == "silently wrong"


def test_the_judge_allows_what_the_file_really_says(tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    tensors = read_tensors(folder / "pytorch_model.bin")
    tensors["norm.weight"] = tensors["norm.weight"] * 2
    write_file(folder / "pytorch_model.bin", tensors)
    heads = fuzz.load_heads(folder)
    assert fuzz.judge("eagle3", "value", folder, "", heads, fuzz.draft(heads), "") == "other weights"
    config = json.loads((folder / "config.json").read_text())
    write_file(folder / "config.json", config | {"rms_norm_eps": 0.1})
    write_file(folder / "pytorch_model.bin", fuzz.LAYOUTS["eagle3"].files()["pytorch_model.bin"])
    heads = fuzz.load_heads(folder)
    assert fuzz.judge("eagle3", "change_field", folder, "", heads, fuzz.draft(heads), "") == "other config"
    heads.config.rms_norm_eps = 1e-5  # as if the field had not been read
    assert fuzz.judge("eagle3", "change_field", folder, "", heads, fuzz.draft(heads), "") == "silently wrong"


def test_crashes_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("fc")

    monkeypatch.setattr(fuzz, "load_heads", broken)
    outcome, detail = fuzz.attempt("eagle", "drop", damaged(tmp_path, "hass"), "")
    assert outcome == "crash" and "KeyError" in detail


def test_rounding_is_nothing_wrong() -> None:
    """The same weights elsewhere in memory; a thousandth is something else, and so is another finite place."""
    logits = torch.randn(4, 99) * 5
    logits[:, 7] = float("-inf")
    assert fuzz.alike(logits, logits + 1e-6) and not fuzz.alike(logits, logits * 1.001)
    assert not fuzz.alike(logits, logits.nan_to_num(neginf=0.0)) and not fuzz.alike(logits, logits[:2])
