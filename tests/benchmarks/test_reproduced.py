"""The acceptance that was committed is measured here again, on whatever machine this is: every prompt has the same
tokens and rounds, so tau is the same to the last digit."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks.__main__ import make_parser
from benchmarks.acceptance import acceptance
from benchmarks.results import RESULTS, ROOT
from benchmarks.setup import prompt_entries

RESULT = json.loads((RESULTS / "acceptance.json").read_text(encoding="utf-8"))
FEW = max(1, 4 // len(RESULT["prompts"]))  # prompts of every set
WORDS = shlex.split(RESULT["provenance"]["command"])[3:]


def first_of_every_set(limit: int | None) -> list[int]:
    """Places of the first prompts of every set among all that were measured."""
    places, start = [], 0
    for name in RESULT["prompts"]:
        count = len(prompt_entries(name)[:limit])
        places += range(start, start + min(FEW, count))
        start += count
    assert start == RESULT["num_prompts"]
    return places


def test_tau_is_the_committed_one_to_the_last_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name = "eagle"
    limit = make_parser().parse_args(WORDS).limit
    depth, tree = str(RESULT["depths"][-1]), next(iter(RESULT["trees"]))
    asked = f"--heads model_cards/{name} --limit {FEW} --modes greedy --depths {depth} --trees".split()
    measured = acceptance.measure(make_parser().parse_args([*WORDS, *asked, tree]))["heads"][name]["measured"]
    committed = RESULT["heads"][name]["measured"]["greedy"][tree][depth]["counts"].split()
    expected = [committed[place] for place in first_of_every_set(limit)]
    assert measured["greedy"][tree][depth]["counts"].split() == expected
