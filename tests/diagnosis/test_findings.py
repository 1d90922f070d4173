"""Rules that compare kinds of text: what heads accept of each, and what may be said of it."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specheads.diagnosis.findings import Facts, findings
from hf_specheads.diagnosis.groups import Group
from hf_specheads.diagnosis.trials import Score

TEXTS = 8
NONE = Group("special tokens", (0.0,) * TEXTS, (0.0,) * TEXTS, (0.0,) * TEXTS)


def group(name: str, accepted: float, sure: float, longest: int | None = None) -> Group:
    """Of every text 100 guesses, so many of which were right."""
    return Group(name, (100 * accepted,) * TEXTS, (100.0,) * TEXTS, (100 * sure,) * TEXTS, longest)


def facts(own: Group, **others: Any) -> Facts:
    """Nothing else is known."""
    right = tuple(map(int, own.right))
    guesses = tuple(map(int, own.guesses))
    score = Score(1, right, guesses, right, guesses)
    known: dict[str, Any] = {
        "score": score, "trials": [], "labels": {0: own.acceptance.mean}, "turn": (own, own), "contexts": [],
        "modes": [own], "special": NONE, "given": own, "own": own, "coverage": 1.0,
        "identity": None, "stored": {}, "noise": None, "free_running": None, "forced": None,
        "train_max_length": None,
    }  # fmt: skip
    return Facts(**{**known, **others})


def causes(known: Facts) -> list[str]:
    return [one.cause for one in findings(known)]


def kinds(good: Group, bad: Group) -> dict[str, dict[str, Any]]:
    """What each rule compares, the bad group where it would be blamed."""
    return {
        "not its own answers": {"given": good},
        "mode": {"modes": [bad, good]},
        "turns": {"turn": (bad, good), "answers": True},
        "context": {"contexts": [good, bad]},
    }


@pytest.mark.parametrize("rule", ["not its own answers", "mode", "turns", "context"])
def test_a_kind_of_text_is_blamed_where_heads_are_good_at_another(rule: str) -> None:
    good, bad = group("easy", 0.8, 0.9), group("strange", 0.1, 0.9)
    assert rule in causes(facts(bad, **kinds(good, bad)[rule]))
    assert causes(facts(good, **kinds(good, good)[rule])) == []


@pytest.mark.parametrize("rule", ["not its own answers", "mode", "turns", "context"])
def test_heads_that_are_good_nowhere_say_nothing_of_texts(rule: str) -> None:
    """They lose more of the texts that the target is surer of."""
    hard, easy = group("hard", 0.02, 0.5), group("easy", 0.0, 1.0)
    assert causes(facts(easy, **kinds(hard, easy)[rule])) == ["unexplained"]
    assert causes(facts(easy, untouched=True, **kinds(hard, easy)[rule])) == ["under-trained"]
    trained = {"position_1": 0.8, "from": "training_facts.json"}
    assert causes(facts(easy, stored=trained, **kinds(hard, easy)[rule])) == ["training gap"]


@pytest.mark.parametrize(
    ("accepted", "trained", "said"),
    [(0.7, None, ["context"]), (0.7, 128, ["context"]), (0.7, 512, []), (0.5, 512, ["context"])],
)
def test_contexts_within_the_training_are_blamed_for_twice_as_much(
    accepted: float, trained: int | None, said: list[str]
) -> None:
    near, far = group("context 0 to 128", 0.9, 1.0, 128), group("context 128 to 256", accepted, 1.0, 256)
    assert causes(facts(near, contexts=[near, far], train_max_length=trained)) == said
