"""How often drafts were accepted: counts that forget, of chains by position, and of what siblings add to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..tree.config import DraftTreeConfig

TALLY_KEEPS = 1 - 1 / 64  # of the acceptance of drafts so far, with every round
ROUNDS_OF_A_MEAN = 64  # tokens of a tree's rounds are a running mean over about so many
UNKNOWN = 0.8  # acceptance of drafts before any was seen: high, so that they are seen
HEARSAY = 0.5  # of a chain's round: what a tree's tells of chains
NEGLIGIBLE = 0.01  # of the weight of the likeliest exponent
# How much k candidates for a position are worth: rejected as often as one is k ** exponent times in a row.
SIBLINGS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BELIEVED = 12.0  # rounds' worth: what chains and siblings tell of a tree, next to its own rounds


@dataclass
class Acceptance:
    """How often drafts of a chain are accepted, by position, given that all before were; newer rounds count more."""

    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def record(self, depth: int, num_accepted: Sequence[int]) -> None:
        """Adds a round of chains of a depth, one entry per sequence."""
        self._make_room(depth)
        for number in num_accepted:
            for position in range(min(number + 1, depth)):
                self.tried[position] += 1 / len(num_accepted)
                self.accepted[position] += (position < number) / len(num_accepted)

    def record_tree(self, depth: int, tries: float, num_accepted: Sequence[int]) -> None:
        """Adds a round of trees with so many `tries` at every position, one entry per sequence: where one of the
        candidates was accepted, it was the favourite as often as that is to be expected."""
        rates = self.rates(depth)
        self._make_room(depth)
        for number in num_accepted:
            reached = HEARSAY / len(num_accepted)
            for position in range(min(number + 1, depth)):
                self.tried[position] += reached
                if position == number:
                    break
                reached *= rates[position] / (1 - (1 - rates[position]) ** tries)
                self.accepted[position] += reached

    def _make_room(self, depth: int) -> None:
        """Older rounds count less, for positions down to a depth."""
        for counts in (self.tried, self.accepted):
            counts[:] = [count * TALLY_KEEPS for count in counts] + [0.0] * (depth - len(counts))

    def rates(self, depth: int) -> list[float]:
        """Per position; of one that was hardly tried, close to that of the position before."""
        rates, before = [], UNKNOWN
        for position in range(depth):
            if position < len(self.tried):
                before = (self.accepted[position] + before) / (self.tried[position] + 1)
            rates.append(before)
        return rates


def tokens_of(rates: Sequence[float], tries: float = 1.0) -> float:
    """Expected tokens of a round over a chain, the bonus token included: with so many `tries` at every position, of
    which each is accepted at these rates."""
    tokens = reached = 1.0
    for rate in rates:
        reached *= rate if tries == 1 else 1 - (1 - rate) ** tries
        tokens += reached
    return tokens


class Siblings:
    """What siblings add to a chain: how well each of the exponents [`SIBLINGS`] has told what trees gave."""

    def __init__(self) -> None:
        self.fits = [0.0] * len(SIBLINGS)

    def record(self, tree: DraftTreeConfig, chain: Acceptance, num_accepted: Sequence[int]) -> None:
        """Adds a round of a tree, one entry per sequence."""
        rates, candidates = chain.rates(tree.depth), candidates_of(tree)
        for place, exponent in enumerate(SIBLINGS):
            stops = [min(max((1 - rate) ** candidates**exponent, 1e-3), 1 - 1e-3) for rate in rates]
            goes = [0.0, *itertools.accumulate(math.log(1 - stop) for stop in stops)]
            told = sum(
                goes[min(number, tree.depth)] + (math.log(stops[number]) if number < tree.depth else 0.0)
                for number in num_accepted
            )
            self.fits[place] = self.fits[place] * TALLY_KEEPS + told / len(num_accepted)
        chain.record_tree(tree.depth, candidates**self.exponent, num_accepted)

    @property
    def exponent(self) -> float:
        """Of which to expect most."""
        weights = self._weights()
        return sum(weight * exponent for weight, exponent in zip(weights, SIBLINGS, strict=True)) / sum(weights)

    def _weights(self) -> list[float]:
        most = max(self.fits)
        return [math.exp(fit - most) for fit in self.fits]

    def tokens(self, tree: DraftTreeConfig, rates: Sequence[float]) -> float:
        """Expected tokens of a round over a tree, from the rates of a chain of its depth."""
        candidates = candidates_of(tree)
        weights = self._weights()
        expected = sum(
            weight * tokens_of(rates, candidates**exponent)
            for exponent, weight in zip(SIBLINGS, weights, strict=True)
            if weight > NEGLIGIBLE
        )
        return expected / sum(weight for weight in weights if weight > NEGLIGIBLE)


def candidates_of(tree: DraftTreeConfig) -> float:
    """Of a position of a tree, on average: 1 of a chain."""
    return min(tree.top_k, max((tree.num_nodes - 1) / tree.depth, 1.0))


@dataclass
class Tried:
    """What rounds of one tree have given.

    Attributes:
        tokens: Tokens per round and sequence, bonus token included, running mean.
        rounds: How many there were.
        last: Number of the newest, counted over all rounds.
        copied: Tokens per round and sequence that were copied from the text after all drafted ones, running mean.
    """

    tokens: float = 0.0
    rounds: int = 0
    last: int = 0
    copied: float = 0.0

    def record(self, number: int, tokens: float, copied: float) -> None:
        """Adds a round: its number, and the latest of everything else that is kept."""
        self.rounds, self.last = self.rounds + 1, number
        share = max(1 / ROUNDS_OF_A_MEAN, 1 / self.rounds)
        self.tokens += (tokens - self.tokens) * share
        self.copied += (copied - self.copied) * share

    def tokens_given(self, expected: float) -> float:
        """Tokens of a round: on average so far, the more rounds there were the less what was `expected`."""
        rounds = min(self.rounds, ROUNDS_OF_A_MEAN)
        return (rounds * self.tokens + BELIEVED * expected) / (rounds + BELIEVED)
