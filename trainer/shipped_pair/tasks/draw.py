"""Random choices for one example: reproducible, restricted to its split, and recorded.

Values (words, and the numbers of a calculation) are split by a hash of the value itself, phrasings by their index in a
list. The rules are the same in every family. Digits, units, weekdays and the verbs of a family are a fixed alphabet
that is not split.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from .words import ANY_WORDS, CITIES, FIRST_NAMES, SURNAMES, invented, spliced

HELD_OUT_PERCENT = 12
PHRASINGS_PER_HELD_OUT = 5  # the fifth, tenth, ... phrasing of a list is held out
INVENTED_SHARE = 0.6  # share of invented words in training, so that copying does not depend on known words
CAPITALISED = (FIRST_NAMES, SURNAMES, CITIES)

# Training phrasings are sometimes reworded at random. A target that only knows a few fixed phrasings would fail on new
# ones.
REWORDED_SHARE = 0.35  # share of phrasings that are reworded
REPLACED_SHARE = 0.3  # share of words that are replaced in a reworded phrasing
OPENED_SHARE = 0.2  # share of phrasings that get a meaningless sentence in front
SLOTS_OR_WORDS = re.compile(r"\{[^}]*\}|[A-Za-z]{5,}")  # short words (to, from, for) carry roles and must stay

Item = TypeVar("Item")


def value_is_held_out(value: str) -> bool:
    """Whether a slot's value belongs to the held-out split (12 %), by a hash of its lower-case text."""
    digest = hashlib.sha256(value.lower().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def phrasings_of(options: Sequence[Item], held_out: bool) -> list[tuple[int, Item]]:
    """Returns the phrasings of one split with their indices in the list."""
    last = PHRASINGS_PER_HELD_OUT - 1
    return [(i, option) for i, option in enumerate(options) if (i % PHRASINGS_PER_HELD_OUT == last) == held_out]


class Draw:
    """Source of the random choices for one example.

    Args:
        seed: Text that determines every choice.
        held_out: Whether to draw only held-out values and phrasings, or only those for training.

    Attributes:
        random: Generator for choices that belong to no split, such as digits, or the wording of an answer.
        values: Slot values drawn so far.
        phrasings: Names of the phrasings drawn so far, such as `ask3`.
    """

    def __init__(self, seed: str, held_out: bool):
        self.random = random.Random(seed)
        self.held_out = held_out
        self.values: list[str] = []
        self.phrasings: list[str] = []

    def words(self, slot: Sequence[str], count: int) -> list[str]:
        """Draws `count` different words of a slot from this split; in training, a share of them is invented."""
        chosen: list[str] = []
        while len(chosen) < count:
            word = self._invented(slot) if self._invents() else self.random.choice(slot)
            if value_is_held_out(word) == self.held_out and word not in chosen:
                chosen.append(word)
        self.values += chosen
        return chosen

    def word(self, slot: Sequence[str]) -> str:
        """Draws one word of a slot."""
        return self.words(slot, 1)[0]

    def firm(self) -> str:
        """Invents the name of a company."""
        while True:
            name = invented(self.random)
            if value_is_held_out(name) == self.held_out:
                self.values.append(name)
                return name.capitalize()

    def person(self) -> str:
        """Draws a first name and a surname."""
        return f"{self.word(FIRST_NAMES)} {self.word(SURNAMES)}"

    def persons(self, count: int) -> list[str]:
        """Draws first names and surnames; no first name occurs twice."""
        return [f"{first} {self.word(SURNAMES)}" for first in self.words(FIRST_NAMES, count)]

    def numbers(self, make: Callable[[random.Random], tuple[int, ...]]) -> tuple[int, ...]:
        """Draws the numbers of a calculation, which belong to this split as a tuple.

        Args:
            make: Draws numbers; called until the tuple belongs to the split.
        """
        while True:
            numbers = make(self.random)
            key = " ".join(map(str, numbers))
            if value_is_held_out(key) == self.held_out:
                self.values.append(key)
                return numbers

    def phrasing(self, name: str, options: Sequence[Item]) -> Item:
        """Draws a phrasing from this split, and records it as `name` with its index in the list.

        Raises:
            ValueError: for fewer than `PHRASINGS_PER_HELD_OUT` phrasings, of which none would be held out.
        """
        if len(options) < PHRASINGS_PER_HELD_OUT:
            raise ValueError(f"`{name}` has {len(options)} phrasings; {PHRASINGS_PER_HELD_OUT} hold one out.")
        place, option = self.random.choice(phrasings_of(options, self.held_out))
        self.phrasings.append(f"{name}{place}")
        return cast(Item, self._reworded(option)) if isinstance(option, str) and not self.held_out else option

    def choice(self, options: Sequence[Item]) -> Item:
        """Draws one of several options, independently of the split."""
        return self.random.choice(options)

    def number(self, low: int, high: int) -> int:
        """Draws an incidental number from `low` to `high`, both included, independently of the split."""
        return self.random.randint(low, high)

    def _reworded(self, phrasing: str) -> str:
        """Varies a phrasing for training: may replace some words, and may put a meaningless sentence in front."""
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
