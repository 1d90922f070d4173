"""Measurements of the commands that explain, end to end on tiny pairs."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import doctor
from benchmarks.diagnosis.plantings import PLANTINGS
from benchmarks.results import ROOT


def test_planted_bugs_are_called_so(measure_pair) -> None:
    cases = measure_pair("diff", ["eagle"], "--dtype", "float32", "--limit", "1")["cases"]
    assert cases["eagle: nothing"]["verdicts"] == {"same": 1}
    bugs = [case for case in cases.values() if case["planted"] != "nothing"]
    assert len(bugs) == 2 and all(case["verdicts"] == {"bug": 1} and case["first_wrong"] == [1] for case in bugs)


def test_plantings_and_sound_heads_are_counted(measure, pair, monkeypatch) -> None:
    """Heads that were never trained count as a false alarm, as they are called under-trained."""
    monkeypatch.setattr(doctor, "PLANTINGS", ())
    words = ["--target", str(pair / "target"), "--pair", str(pair), "--prompts", str(pair / "prompts.jsonl")]
    result = measure("doctor", *words, "--max_new_tokens", "10", status=1, written="doctor_shipped")
    assert set(result["sound"]) == {"eagle", "poss"}
    assert result["sound"]["eagle"]["causes"] == ["under-trained"] and result["false_alarms"] == 2


def test_heads_that_are_planted_in_are_shipped() -> None:
    doctor.check_shipped(ROOT / "model_cards")


def test_heads_that_are_missing_are_named_before_any_work(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no heads eagle, eagle3, hydra-plus, medusa, poss3, in which"):
        doctor.check_shipped(tmp_path)


def test_tiny_heads_are_planted_in(measure, monkeypatch) -> None:
    chosen = [one for one in PLANTINGS if one.heads == "tiny eagle3" and one.number == 10][:1]
    monkeypatch.setattr(doctor, "PLANTINGS", chosen)
    monkeypatch.setattr(doctor, "recorded_names", list)
    monkeypatch.setattr(doctor, "METHOD_OPTIONS", {})
    monkeypatch.setattr(doctor, "OTHER_TARGETS", ())
    result = measure("doctor", "--of", "tiny", written="doctor_tiny")
    assert set(result["sound"]) == {"tiny eagle"} and result["false_alarms"] == 0
    assert result["named"] == 1 and result["planted"][0]["causes"][0] == "training labels"
    assert set(result["margins"]) == set(doctor.MEASURES)
    assert all(margin["threshold"] > 0 for margin in result["margins"].values())


@pytest.mark.slow
def test_commands_are_timed(measure, pair) -> None:
    words = ["--target", str(pair / "target"), "--heads", str(pair / "eagle"), "--only", "diff"]
    (found,) = measure("commands", *words)["commands"].values()
    assert found["verdict"] == "same" and found["seconds"] > 0 and found["processor_seconds"] > 0
