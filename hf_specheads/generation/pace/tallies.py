"""How often drafts were accepted: counts that forget, for chains by depth and for what siblings add to chains."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...tree.config import DraftTreeConfig

SHORT, LONG = 1 / 16, 1 / 1024  # share a memory forgets per round: short for texts that change, long for steady ones
PLAIN_KEEPS, NEW_TEXT_KEEPS = 1 - 1 / 48, 0.25  # share the short memory keeps with a plain step, and with a new text
LONG_SAYS = 4.0  # weight, in rounds, of the long memory's expectation within the short memory
FIT_KEEPS = 1 - 1 / 128  # share that the log-likelihood of a memory or an exponent keeps per round
ROUNDS_OF_A_MEAN = 256  # tokens of a tree's rounds are a running mean over about this many rounds
UNKNOWN = 0.8  # assumed acceptance of drafts before any was seen: high, so that drafts are tried
HEARSAY = 0.5  # weight of a tree's round as evidence on chains, against 1 for a chain's round
OWN_WORD = 2.0  # weight, in rounds, of acceptance by position against counts of the rounds a chain would need
SURE = 0.99  # highest probability that a draft is ever assumed to be accepted, or rejected, with
NEGLIGIBLE = 0.01  # exponents and memories below this share of the largest weight are ignored
NEVER = 1e-9  # least probability of reaching a position, so that nothing is divided by 0
HEAVY = 1e9  # weight of a round at which all counts are scaled down
# Candidate exponents: k candidates for a position are all rejected as often as one is k ** exponent times in a row.
SIBLINGS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
RANKS = (1, 2, 3, 5, 6, 10)  # first rank of each group of siblings (favourites have rank 0) that are not told apart
BELOW_A_SIBLING = 0.7  # acceptance below a favourite's siblings, relative to that below the favourite
TEXTS_BEFORE = 8.0  # weight, in rounds, of what is usual in other texts against the current text's own rounds
ROUND_FADES, STEP_FADES = 1 / 16, 1 / 128  # share of a text's tally forgotten with every round, and every plain step
# Weight, in rounds, of the estimate from chains and siblings against a tree's own rounds. It is large because trees
# are drafted most when luck makes their estimate too high, so that their rounds then give less than expected.
BELIEVED = 256.0


class Acceptance:
    """How often drafts of a chain are accepted: a mean over memories, weighted by how well each predicts rounds.

    Args:
        deepest: Draft positions of the deepest chain.
    """

    def __init__(self, deepest: int) -> None:
        long = _Memory(LONG, deepest)
        self.memories = [_Memory(SHORT, deepest, long), long]

    def record(self, depths: Sequence[int], num_accepted: Sequence[int], then: float | None = None) -> None:
        """Adds a round of chains, one entry per sequence.

        Args:
            depths: Depths of the chains.
            num_accepted: Accepted draft tokens.
            then: Expected acceptance of one more link, where the chains ended because that was too low.
        """
        for memory in self.memories:
            memory.record(depths, num_accepted, then)

    def record_tree(self, tries: Sequence[float], num_accepted: Sequence[int]) -> None:
        """Adds a round of trees, one entry per sequence, with so many `tries` at each position. Where a candidate was
        accepted, the favourite is credited with its expected share."""
        for memory in self.memories:
            memory.record_tree(tries, num_accepted)

    def record_plain(self) -> None:
        """Adds a plain step, during which the text may have changed. Plain steps tell nothing of drafts, so without
        this a few hard rounds would be the last word."""
        self.memories[0].fade(PLAIN_KEEPS)

    def begin_text(self) -> None:
        """Begins another text, which may be drafted better or worse."""
        self.memories[0].fade(NEW_TEXT_KEEPS)

    def rates(self, depth: int) -> list[float]:
        """Acceptance by position (pos-acc); [`tokens_of`] them gives the expected tokens of chains of any depth."""
        likeliest = max(memory.fit for memory in self.memories)
        weights = [math.exp(memory.fit - likeliest) / math.sqrt(memory.forgets) for memory in self.memories]
        heard = [(weight, memory.rates(depth)) for weight, memory in zip(weights, self.memories, strict=True)
                 if weight > NEGLIGIBLE * max(weights)]  # fmt: skip
        total = sum(weight for weight, _ in heard)
        return [sum(weight * rates[place] for weight, rates in heard) / total for place in range(depth)]


class _Memory:
    """Counts over rounds of chains in which every round weighs more than the one before it.

    Easy tokens come in runs. A deep chain takes a run in one round, where a shallow chain would need several rounds,
    most of them accepted as a whole. So what a deep chain's round tells of a shallow one is less how often its first
    positions were accepted than how many rounds the shallow chain would have needed for the same tokens.

    Args:
        forgets: Share by which a round weighs less than the next one.
        deepest: Draft positions of the deepest chain.
        before: Memory that says what to expect before anything was seen; `None` for [`UNKNOWN`].

    Attributes:
        fit: Log-likelihood of the latest rounds, each by what was known before it.
        weight: Weight of the latest round.
        tried, accepted: Rounds that came to a position, and those of them that accepted it; by position.
        tokens: Tokens that the rounds gave.
        rounds: Rounds that chains of each depth from 1 on would have needed for these tokens.
        beyond: Tokens that deeper chains are expected to give on top where a chain was accepted as a whole; by depth.
    """

    def __init__(self, forgets: float, deepest: int, before: _Memory | None = None) -> None:
        self.before = before
        self.forgets, self.fit, self.weight, self.tokens = forgets, 0.0, 1.0, 0.0
        self.tried, self.accepted, self.rounds, self.beyond = ([0.0] * deepest for _ in range(4))

    def record(self, depths: Sequence[int], num_accepted: Sequence[int], then: float | None = None) -> None:
        """As [`Acceptance.record`]."""
        beyond = any(number >= depth for depth, number in zip(depths, num_accepted, strict=True))
        rates = self._by_position(len(self.rounds) if beyond else max(num_accepted) + 1)
        self.fade(1 - self.forgets)
        told, share = 0.0, self.weight / len(num_accepted)
        for depth, number in zip(depths, num_accepted, strict=True):
            number = min(number, depth)
            for position in range(number):
                self.tried[position] += share
                self.accepted[position] += share
                told += math.log(min(max(rates[position], 1 - SURE), SURE))
            if number < depth:
                self.tried[number] += share
                told += math.log(1 - min(max(rates[number], 1 - SURE), SURE))
            else:
                self._go_beyond(depth, rates, share, then)
            self.tokens += (number + 1) * share
            for place, rounds in enumerate(_rounds_for(depth, number, len(self.rounds))):
                self.rounds[place] += rounds * share
        self.fit = self.fit * FIT_KEEPS + told / len(num_accepted)

    def _go_beyond(self, depth: int, rates: Sequence[float], share: float, then: float | None) -> None:
        """Credits deeper chains with further tokens where a chain of this depth was accepted as a whole."""
        reached, more = 1.0, 0.0
        for place in range(depth, len(rates)):
            if place == depth and then is not None:  # otherwise only likely links would count at deep positions
                self.tried[place] += share
                self.accepted[place] += share * then
                reached *= then
            else:
                reached *= rates[place]
            more += reached
            self.beyond[place] += more * share

    def record_tree(self, tries: Sequence[float], num_accepted: Sequence[int]) -> None:
        """As [`Acceptance.record_tree`]."""
        rates = self._by_position(len(tries))
        self.fade(1 - self.forgets)
        for number in num_accepted:
            reached = HEARSAY * self.weight / len(num_accepted)
            for position in range(min(number + 1, len(tries))):
                self.tried[position] += reached
                if position == number:
                    break
                reached *= rates[position] / (1 - (1 - rates[position]) ** max(tries[position], 1.0))
                self.accepted[position] += reached

    def fade(self, keeps: float) -> None:
        """Multiplies the weight of everything seen so far by this factor."""
        self.weight /= keeps
        if self.weight < HEAVY:
            return
        for counts in (self.tried, self.accepted, self.rounds, self.beyond):
            counts[:] = [count / self.weight for count in counts]
        self.tokens, self.weight = self.tokens / self.weight, 1.0

    def _by_position(self, depth: int) -> list[float]:
        """Acceptance by position, given that all positions before were accepted. A position that was hardly tried is
        as in `before`, or else close to the position above it."""
        if self.before is not None:
            expected, said = self.before._by_position(depth), LONG_SAYS * self.weight
            return [(accepted + rate * said) / (tried + said)
                    for rate, accepted, tried in zip(expected, self.accepted, self.tried, strict=False)]  # fmt: skip
        rates, before, weight = [], UNKNOWN, self.weight
        for accepted, tried in zip(self.accepted[:depth], self.tried, strict=False):
            before = (accepted + before * weight) / (tried + weight)
            rates.append(before)
        return rates

    def rates(self, depth: int) -> list[float]:
        """As [`Acceptance.rates`]."""
        if self.before is None:
            expected, said = tokens_by_depth(self._by_position(depth)), OWN_WORD * self.weight
        else:
            expected, said = tokens_by_depth(self.before.rates(depth)), LONG_SAYS * self.weight
        rates: list[float] = []
        given = comes = 1.0  # expected tokens so far, and the probability of coming to the position
        for place, told in enumerate(expected):
            tokens = (self.tokens + self.beyond[place] + said * told) / (self.rounds[place] + said)
            rates.append(min(max((tokens - given) / comes, 1e-3), 1 - 1e-3))
            comes = max(comes * rates[-1], NEVER)
            given += comes
        return rates


@lru_cache(maxsize=512)
def _rounds_for(depth: int, number: int, deepest: int) -> tuple[float, ...]:
    """Rounds that chains of each depth from 1 to `deepest` would have needed for the tokens of a chain of this `depth`
    with `number` accepted drafts. If all were accepted, the run is assumed to go on, so fractions count."""
    if number < depth:
        return tuple(float(-(-(number + 1) // (chain + 1))) for chain in range(1, deepest + 1))
    return tuple(max((depth + 1) / (chain + 1), 1.0) for chain in range(1, deepest + 1))


def tokens_of(rates: Sequence[float]) -> float:
    """Expected tokens of a round over a chain whose links are accepted at these rates, bonus token included."""
    tokens = reached = 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens


def tokens_by_depth(rates: Sequence[float]) -> list[float]:
    """[`tokens_of`] chains of each depth from 1 to the number of rates."""
    reached = itertools.accumulate(rates, operator.mul)
    return list(itertools.accumulate(reached, initial=1.0))[1:]


def coming_to(rates: Sequence[float], tries: Sequence[float]) -> list[float]:
    """Probability that a round over a tree accepts at least 1, 2, ... drafts, given the `tries` at each position, the
    first of which is accepted at the `rates` of a chain. Below a wrong favourite acceptance is lower, as the text is
    hard there. A position with less than one try is not always in the tree."""
    favourites, others, found = 1.0, 0.0, []
    for rate, here in zip(rates, tries, strict=True):
        either = 1 - (1 - rate) ** here
        rate = min(rate, either)
        others = others * either * BELOW_A_SIBLING + favourites * (either - rate)
        favourites *= rate
        found.append(favourites + others)
    return found


class Siblings:
    """What siblings add to a chain: how well each exponent of [`SIBLINGS`] has predicted which child was right where
    the favourite was wrong, or how many drafts trees accepted.

    Attributes:
        misses: Wrong favourites whose right sibling was told.
    """

    def __init__(self) -> None:
        self.fits = [0.0] * len(SIBLINGS)
        self.misses = 0

    def record(self, tree: DraftTreeConfig, chain: Acceptance, num_accepted: Sequence[int]) -> None:
        """Adds a round of a tree, one entry per sequence."""
        rates = chain.rates(tree.depth)
        candidates = candidates_of(tree, rates)
        for place, exponent in enumerate(SIBLINGS):
            reached = [1.0, *coming_to(rates, _tries(candidates, exponent))]
            stops = [_not_sure(1 - then / max(before, NEVER)) for before, then in itertools.pairwise(reached)]
            goes = [0.0, *itertools.accumulate(math.log(1 - stop) for stop in stops)]
            told = sum(
                goes[min(number, tree.depth)] + (math.log(stops[number]) if number < tree.depth else 0.0)
                for number in num_accepted
            )
            self.fits[place] = self.fits[place] * FIT_KEEPS + told / len(num_accepted)
        chain.record_tree(_tries(candidates, self.exponent), num_accepted)

    def record_miss(self, rate: float, rank: int, at_least: bool = False) -> None:
        """Adds a favourite that was wrong.

        Args:
            rate: How often favourites are accepted at this position.
            rank: Rank of the child that was right, from 1 on; the favourite's is 0.
            at_least: `rank` is a lower bound.
        """
        rejected = 1 - min(max(rate, 1 - SURE), SURE)
        place = bisect.bisect_right(RANKS, rank)
        best, worst = (rank, None) if at_least else (RANKS[place - 1], (*RANKS, None)[place])
        for number, exponent in enumerate(SIBLINGS):
            chance = rejected**best**exponent - (0.0 if worst is None else rejected**worst**exponent)
            self.fits[number] = self.fits[number] * FIT_KEEPS + math.log(_not_sure(chance / rejected))
        self.misses += 1

    @property
    def exponent(self) -> float:
        """Mean exponent, weighted by how likely each is."""
        weights = self._weights()
        return sum(weight * exponent for weight, exponent in zip(weights, SIBLINGS, strict=True)) / sum(weights)

    def _weights(self) -> list[float]:
        most = max(self.fits)
        return [math.exp(fit - most) for fit in self.fits]

    def tokens(self, tree: DraftTreeConfig, rates: Sequence[float]) -> float:
        """Expected tokens of a round over a tree, from the rates of a chain of its depth."""
        candidates = candidates_of(tree, rates)
        weights = self._weights()
        expected = sum(
            weight * (1 + sum(coming_to(rates, _tries(candidates, exponent))))
            for exponent, weight in zip(SIBLINGS, weights, strict=True)
            if weight > NEGLIGIBLE
        )
        return expected / sum(weight for weight in weights if weight > NEGLIGIBLE)


def _not_sure(chance: float) -> float:
    """Clamps a probability so that its logarithm and that of its complement are finite."""
    return min(max(chance, 1e-3), 1 - 1e-3)


def candidates_of(tree: DraftTreeConfig, rates: Sequence[float]) -> list[float]:
    """Average number of a tree's nodes at each position; 1 for a chain. A dynamic tree is assumed to distribute its
    nodes by how often rounds come to each position.

    Args:
        tree: The tree.
        rates: How often drafts of a chain of its depth are accepted, by position.
    """
    nodes: float = tree.num_nodes - 1
    if tree.kind != "dynamic":
        return [min(tree.top_k, max(nodes / tree.depth, 1.0))] * tree.depth
    comes = list(itertools.accumulate(rates[: tree.depth - 1], operator.mul, initial=1.0))
    found, deeper = [], sum(comes)
    for one in comes:
        found.append(min(tree.top_k, nodes * one / deeper))
        nodes, deeper = nodes - found[-1], max(deeper - one, NEVER)
    return found


def _tries(candidates: Sequence[float], exponent: float) -> list[float]:
    """Number of independent tries that the candidates at each position are worth."""
    return [one**exponent if one > 1 else one for one in candidates]


@dataclass
class Tried:
    """What rounds of one tree have given.

    Attributes:
        tokens: Tokens per round and sequence, bonus token included, running mean.
        expected: Tokens expected of each round just before it, running mean.
        rounds: Number of rounds.
        sequences: Sum over rounds of their sequences: a round's tokens are a mean over its sequences.
        last: Number of the newest round, counted over all rounds.
        copied: Tokens per round and sequence that were copied from the text after all drafted ones, running mean.
    """

    tokens: float = 0.0
    expected: float = 0.0
    rounds: int = 0
    sequences: int = 0
    last: int = 0
    copied: float = 0.0

    def record(self, number: int, tokens: float, expected: float, copied: float, sequences: int = 1) -> None:
        """Adds a round, given its number and its values of the attributes."""
        self.rounds, self.sequences, self.last = self.rounds + 1, self.sequences + sequences, number
        # The first rounds were expected to give too much, so each round counts for more than the one before it.
        share = max(1 / ROUNDS_OF_A_MEAN, 2 / (self.rounds + 1))
        self.tokens += (tokens - self.tokens) * share
        self.expected += (expected - self.expected) * share
        self.copied += (copied - self.copied) * share

    def tokens_drafted(self, expected: float) -> float:
        """Corrects the `expected` tokens of a round, without copied ones, by the ratio of given to expected tokens so
        far, the more the more rounds there were."""
        if not self.rounds:
            return expected
        seen = min(self.sequences, ROUNDS_OF_A_MEAN)
        given = (self.tokens - self.copied) / self.expected
        return expected * (seen * given + BELIEVED) / (seen + BELIEVED)


@dataclass
class TextTally:
    """What rounds of the current texts have given. How well drafts fare differs more between texts than between trees.

    Attributes:
        tokens: Tokens of the rounds per sequence, bonus tokens included; older rounds count less.
        usual: Tokens that such rounds usually give; older rounds count less.
        prefill: Seconds of the prompts' forward.
    """

    tokens: float = 0.0
    usual: float = 0.0
    prefill: float = 0.0

    def record(self, tokens: float, usual: float) -> None:
        """Adds a round."""
        self._fade(ROUND_FADES)
        self.tokens, self.usual = self.tokens + tokens, self.usual + usual

    def record_plain(self) -> None:
        """Adds a plain step, during which the text may have changed."""
        self._fade(STEP_FADES)

    def times_usual(self, tokens: float) -> float:
        """Factor by which rounds of these texts are expected to give more than the usual number of `tokens`."""
        before = TEXTS_BEFORE * tokens
        return (self.tokens + before) / (self.usual + before)

    def _fade(self, share: float) -> None:
        self.tokens, self.usual = self.tokens * (1 - share), self.usual * (1 - share)
