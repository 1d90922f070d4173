"""What rounds have cost and given: counts that forget, by tree and by draft position."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

ROUNDS_BEFORE_A_VERDICT = 3  # of a tree; the first of them may be slow for reasons of its own
REMEMBERED = 9  # rounds of a tree, and plain steps, whose median counts
TALLY_KEEPS = 1 - 1 / 64  # of the acceptance of drafts so far, with every round
ROUNDS_OF_A_MEAN = 24  # tokens of a tree's rounds are a running mean over about so many
UNKNOWN = 0.8  # acceptance of drafts before any was seen: high, so that they are seen


def recent() -> deque[float]:
    """The latest of some times."""
    return deque(maxlen=REMEMBERED)


@dataclass
class Acceptance:
    """How often drafts of a chain are accepted, by position, given that all before were; newer rounds count more."""

    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def record(self, depth: int, num_accepted: Sequence[int]) -> None:
        """Adds a round of chains of a depth, one entry per sequence."""
        for counts in (self.tried, self.accepted):
            counts[:] = [count * TALLY_KEEPS for count in counts] + [0.0] * (depth - len(counts))
        for number in num_accepted:
            for position in range(min(number + 1, depth)):
                self.tried[position] += 1 / len(num_accepted)
                self.accepted[position] += (position < number) / len(num_accepted)

    def rates(self, depth: int) -> list[float]:
        """Per position; of one that was hardly tried, close to that of the position before."""
        rates, before = [], UNKNOWN
        for position in range(depth):
            tried = self.tried[position] if position < len(self.tried) else 0.0
            accepted = self.accepted[position] if position < len(self.accepted) else 0.0
            before = (accepted + before) / (tried + 1)
            rates.append(before)
        return rates

    def tokens(self, depth: int, hope: float = 1.0) -> float:
        """Expected tokens of a round over a chain, the bonus token included; `hope` scales the rejections."""
        tokens = reached = 1.0
        for rate in self.rates(depth):
            reached *= 1 - hope * (1 - rate)
            tokens += reached
        return tokens


@dataclass
class Tried:
    """What rounds of one tree have cost and given.

    Attributes:
        costs: Wall time of the latest rounds, in plain steps.
        tokens: Tokens per round and sequence, bonus token included, running mean.
        rounds: How many there were.
        last: Number of the newest, counted over all rounds.
        copied: Tokens per round and sequence that were copied from the text after all drafted ones, running mean.
    """

    costs: deque[float] = field(default_factory=recent)
    tokens: float = 0.0
    rounds: int = 0
    last: int = 0
    copied: float = 0.0

    def record(self, number: int, cost: float, tokens: float, copied: float) -> None:
        """Adds a round: its number, and the latest of everything else that is kept."""
        self.rounds, self.last = self.rounds + 1, number
        self.costs.append(cost)
        share = max(1 / ROUNDS_OF_A_MEAN, 1 / self.rounds)
        self.tokens += (tokens - self.tokens) * share
        self.copied += (copied - self.copied) * share

    @property
    def cost(self) -> float:
        """Of a round, in plain steps. While there are two at most the faster counts."""
        costs = list(self.costs)  # another thread may add to it
        return min(costs) if len(costs) < ROUNDS_BEFORE_A_VERDICT else statistics.median(costs)
