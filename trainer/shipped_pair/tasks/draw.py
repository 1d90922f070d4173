"""Random choices of one example: reproducible, within its split, and remembered.

Values (words, and the numbers of a calculation) are split by a hash of the value itself, phrasings by their place in a
list. Both hold in every family alike. Digits, units, weekdays and the verbs of a family are its alphabet and not
values.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from .words import ANY_WORDS, CITIES, FIRST_NAMES, SURNAMES, invented, spliced

HELD_OUT_PERCENT = 12
PHRASINGS_PER_HELD_OUT = 5  # the fifth, tenth, ... phrasing of a list
INVENTED_SHARE = 0.6  # of the words in training: copying must not depend on having seen the word
CAPITALISED = (FIRST_NAMES, SURNAMES, CITIES)

# Phrasings in training are now and then reworded at random: with eight of them known by heart, a ninth would puzzle.
REWORDED_SHARE = 0.35  # of the phrasings
REPLACED_SHARE = 0.3  # of the words of a reworded one
OPENED_SHARE = 0.2  # of the phrasings have a sentence in front that says nothing
SLOTS_OR_WORDS = re.compile(r"\{[^}]*\}|[A-Za-z]{5,}")  # short words say who is who: to, from, for

Item = TypeVar("Item")


def value_is_held_out(value: str) -> bool:
    """Whether a slot's value belongs to the held-out split (12 %), by a hash of its lower-case text."""
    digest = hashlib.sha256(value.lower().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def phrasings_of(options: Sequence[Item], held_out: bool) -> list[tuple[int, Item]]:
    """The phrasings of one split with their places in the list."""
    last = PHRASINGS_PER_HELD_OUT - 1
    return [(i, option) for i, option in enumerate(options) if (i % PHRASINGS_PER_HELD_OUT == last) == held_out]


class Draw:
    """What one example is drawn with.

    Args:
        seed: Text that decides every choice.
        held_out: Draw held-out values and phrasings only, or none of them.

    Attributes:
        random: For choices that belong to no split, such as digits, or the wording of an answer.
        values: Slot values drawn so far.
        phrasings: Phrasings drawn so far, such as `ask3`.
    """

    def __init__(self, seed: str, held_out: bool):
        self.random = random.Random(seed)
        self.held_out = held_out
        self.values: list[str] = []
        self.phrasings: list[str] = []

    def words(self, slot: Sequence[str], count: int) -> list[str]:
        """`count` different words of a slot, in this split; a share of training words is invented."""
        chosen: list[str] = []
        while len(chosen) < count:
            word = self._invented(slot) if self._invents() else self.random.choice(slot)
            if value_is_held_out(word) == self.held_out and word not in chosen:
                chosen.append(word)
        self.values += chosen
        return chosen

    def word(self, slot: Sequence[str]) -> str:
        """One word of a slot."""
        return self.words(slot, 1)[0]

    def firm(self) -> str:
        """The invented name of a company."""
        while True:
            name = invented(self.random)
            if value_is_held_out(name) == self.held_out:
                self.values.append(name)
                return name.capitalize()

    def person(self) -> str:
        """First name and surname."""
        return f"{self.word(FIRST_NAMES)} {self.word(SURNAMES)}"

    def persons(self, count: int) -> list[str]:
        """First names and surnames, no first name twice."""
        return [f"{first} {self.word(SURNAMES)}" for first in self.words(FIRST_NAMES, count)]

    def numbers(self, make: Callable[[random.Random], tuple[int, ...]]) -> tuple[int, ...]:
        """The numbers of a calculation, in this split as a whole.

        Args:
            make: Draws numbers; called until they belong to the split.
        """
        while True:
            numbers = make(self.random)
            key = " ".join(map(str, numbers))
            if value_is_held_out(key) == self.held_out:
                self.values.append(key)
                return numbers

    def phrasing(self, name: str, options: Sequence[Item]) -> Item:
        """One way to say it, in this split; remembered as `name` and its place in the list.

        Raises:
            ValueError: for fewer phrasings than hold one out.
        """
        if len(options) < PHRASINGS_PER_HELD_OUT:
            raise ValueError(f"`{name}` has {len(options)} phrasings; {PHRASINGS_PER_HELD_OUT} hold one out.")
        place, option = self.random.choice(phrasings_of(options, self.held_out))
        self.phrasings.append(f"{name}{place}")
        return cast(Item, self._reworded(option)) if isinstance(option, str) and not self.held_out else option

    def choice(self, options: Sequence[Item]) -> Item:
        """One of several, whatever the split."""
        return self.random.choice(options)

    def number(self, low: int, high: int) -> int:
        """An incidental number from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def _reworded(self, phrasing: str) -> str:
        """A phrasing for training: as it stands, with other words here and there, or behind an idle sentence."""
        rng = self.random
        if rng.random() < REWORDED_SHARE:
            phrasing = SLOTS_OR_WORDS.sub(self._other_word, phrasing)
        if rng.random() >= OPENED_SHARE:
            return phrasing
        idle = " ".join(self._any_word() for _ in range(rng.randint(1, 5)))
        return f"{idle[0].upper()}{idle[1:]}{rng.choice('.!?:')} {phrasing}"

    def _other_word(self, match: re.Match[str]) -> str:
        word = match[0]
        if word.startswith("{") or self.random.random() >= REPLACED_SHARE:
            return word
        other = self._any_word()
        return other.capitalize() if word[0].isupper() else other

    def _any_word(self) -> str:
        return self.random.choice(ANY_WORDS) if self.random.random() < 0.7 else invented(self.random)

    def _invents(self) -> bool:
        return not self.held_out and self.random.random() < INVENTED_SHARE

    def _invented(self, slot: Sequence[str]) -> str:
        word = spliced(self.random, slot) if self.random.random() < 0.5 else invented(self.random)
        return word.capitalize() if slot in CAPITALISED else word
