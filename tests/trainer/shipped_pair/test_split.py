"""Nothing held out stands in a chat for training: no slot value, no phrasing, no word."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest

from hf_specheads.trainer.shipped_pair.tasks import (
    FAMILIES,
    Draw,
    Example,
    Family,
    examples,
    phrasings_of,
    value_is_held_out,
    words,
)

SLOTS = {name: getattr(words, name) for name in ("FIRST_NAMES", "SURNAMES", "CITIES", "THINGS", "TOPICS", "COLOURS")}
HELD_OUT_WORDS = {word.lower() for slot in SLOTS.values() for word in slot if value_is_held_out(word)}


def words_of(example: Example) -> set[str]:
    """Lower-case words of a chat, parts of identifiers alone, with and without a plural's s."""
    text = json.dumps([example.messages, example.tools], ensure_ascii=False).replace("\\n", "\n")
    found = {word.lower() for word in re.findall(r"[^\W\d_]+", text)}
    return found | {word.removesuffix("s") for word in found}


@pytest.mark.parametrize("slot", SLOTS)
def test_slots_have_words_of_both_splits(slot: str) -> None:
    listed = SLOTS[slot]
    assert len(set(listed)) == len(listed) and 200 <= len(listed) <= 400
    assert sum(map(value_is_held_out, listed)) >= 20
    assert all(re.fullmatch(r"[^\W\d_]+", word) for word in listed)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_nothing_held_out_stands_in_training(family: Family) -> None:
    training = list(islice(examples(family), 600)) + list(islice(examples(family, seed=9), 200))
    held_out = list(islice(examples(family, held_out=True), 200))
    for read in (lambda e: {value.lower() for value in e.values}, lambda e: set(e.template.split())):
        seen, kept = ({item for e in part for item in read(e)} for part in (training, held_out))
        assert seen and kept and not seen & kept
    assert not HELD_OUT_WORDS & set().union(*map(words_of, training))
    assert HELD_OUT_WORDS & set().union(*map(words_of, held_out))
    prompts = {json.dumps(example.prompt) for example in training}
    assert not prompts & {json.dumps(example.prompt) for example in held_out}


def test_a_draw_stays_within_its_split() -> None:
    for held_out in (False, True):
        draw = Draw("x", held_out)
        drawn = [draw.word(words.CITIES) for _ in range(50)] + draw.persons(3)[0].split() + [draw.firm()]
        assert {value_is_held_out(word) for word in drawn} == {held_out}
        numbers = [draw.numbers(lambda rng: (rng.randint(1, 99), rng.randint(1, 99))) for _ in range(30)]
        assert {value_is_held_out(f"{a} {b}") for a, b in numbers} == {held_out}
    assert len(set(Draw("y", held_out=True).words(words.THINGS, 8))) == 8


def test_every_fifth_phrasing_is_held_out() -> None:
    options = tuple("abcdefghij")
    assert phrasings_of(options, held_out=True) == [(4, "e"), (9, "j")]
    assert [option for _, option in phrasings_of(options, held_out=False)] == list("abcdfghi")
    with pytest.raises(ValueError, match="`ask` has 4 phrasings"):
        Draw("x", held_out=True).phrasing("ask", options[:4])
