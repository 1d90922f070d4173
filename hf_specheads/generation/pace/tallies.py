"""How often drafts were accepted: counts that forget, of chains by depth, and of what siblings add to them."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...tree.config import DraftTreeConfig

SHORT, LONG = 1 / 16, 1 / 1024  # of what was seen, forgotten with every round: for texts that change, and that do not
PLAIN_KEEPS, NEW_TEXT_KEEPS = 1 - 1 / 48, 0.25  # of what the former knows, with a plain step, and in another text
LONG_SAYS = 4.0  # rounds' worth: what the latter lets expect, next to what the former has seen
FIT_KEEPS = 1 - 1 / 128  # of how well each of them, or of exponents, has told what came, with every round
ROUNDS_OF_A_MEAN = 256  # tokens of a tree's rounds are a running mean over about so many
UNKNOWN = 0.8  # acceptance of drafts before any was seen: high, so that they are seen
HEARSAY = 0.5  # of a chain's round: what a tree's tells of chains
OWN_WORD = 2.0  # rounds' worth: what acceptance by position tells of a chain, next to how many rounds it would need
SURE = 0.99  # that a draft is accepted, or rejected: more than this nothing is taken for
NEGLIGIBLE = 0.01  # of the weight of the likeliest exponent or memory
NEVER = 1e-9  # how likely it is, at the least, to come to a position: nothing is divided by less
HEAVY = 1e9  # weight of a round at which all are made lighter
# How much k candidates for a position are worth: rejected as often as one is k ** exponent times in a row.
SIBLINGS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
RANKS = (1, 2, 3, 5, 6, 10)  # of children besides favourites: each is where those begin that are not told apart
BELOW_A_SIBLING = 0.7  # times as often as below a favourite, drafts are accepted below its siblings
TEXTS_BEFORE = 8.0  # rounds' worth: what texts before tell of the one at hand, next to its own rounds,
ROUND_FADES, STEP_FADES = 1 / 16, 1 / 128  # of which so much is forgotten with every round, and every plain step
# Rounds' worth: what chains and siblings tell of a tree, next to its own rounds. It has those where luck lets more be
# expected of it than of others, so that they give less than was expected.
BELIEVED = 256.0


class Acceptance:
    """How often drafts of a chain are accepted, as several memories have it, the better they tell what comes the more.

    Args:
        deepest: Positions of the deepest chain.
    """

    def __init__(self, deepest: int) -> None:
        long = _Memory(LONG, deepest)
        self.memories = [_Memory(SHORT, deepest, long), long]

    def record(self, depths: Sequence[int], num_accepted: Sequence[int], then: float | None = None) -> None:
        """Adds a round of chains, one entry per sequence.

        Args:
            depths: Draft positions.
            num_accepted: Accepted tokens.
            then: How likely another one would have been, where chains ended because of that.
        """
        for memory in self.memories:
            memory.record(depths, num_accepted, then)

    def record_tree(self, tries: Sequence[float], num_accepted: Sequence[int]) -> None:
        """Adds a round of trees with so many `tries` by position, one entry per sequence: where one of the candidates
        was accepted, it was the favourite as often as that is to be expected."""
        for memory in self.memories:
            memory.record_tree(tries, num_accepted)

    def record_plain(self) -> None:
        """A plain step: the text may have changed meanwhile. Else a few hard rounds would be the last word on it, as
        plain steps tell nothing of drafts."""
        self.memories[0].fade(PLAIN_KEEPS)

    def begin_text(self) -> None:
        """Another text may be drafted better or worse."""
        self.memories[0].fade(NEW_TEXT_KEEPS)

    def rates(self, depth: int) -> list[float]:
        """Per position: those at which chains of any depth give, by [`tokens_of`], what is expected of them."""
        likeliest = max(memory.fit for memory in self.memories)
        weights = [math.exp(memory.fit - likeliest) / math.sqrt(memory.forgets) for memory in self.memories]
        heard = [(weight, memory.rates(depth)) for weight, memory in zip(weights, self.memories, strict=True)
                 if weight > NEGLIGIBLE * max(weights)]  # fmt: skip
        total = sum(weight for weight, _ in heard)
        return [sum(weight * rates[place] for weight, rates in heard) / total for place in range(depth)]


class _Memory:
    """Counts of chains' rounds in which every round weighs more than the one before it.

    What is easy to guess comes in runs. A deep chain takes a run at once, of which a shallow one would make several
    rounds, most of them accepted as a whole; so its rounds tell less of a shallow chain by how often their first
    positions were accepted than by how many rounds that would have needed for the same tokens.

    Args:
        forgets: By how much, as a share, a round weighs less than the next.
        deepest: Positions of the deepest chain.
        before: What is expected before anything was seen; `None` for [`UNKNOWN`].

    Attributes:
        fit: Log-likelihood of the latest rounds, each by what was known before it.
        weight: Of the latest round.
        tried, accepted: Rounds that came to a position, and of these, that went on. By position.
        tokens: What rounds gave.
        rounds: In how many a chain would have given it, by depth from 1; with what it would have given `beyond` it.
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
        """A chain of a depth was accepted as a whole: deeper ones are expected to give more."""
        reached, more = 1.0, 0.0
        for place in range(depth, len(rates)):
            if place == depth and then is not None:  # else only what is likely would be seen of deep positions
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
        """Makes all that was seen count for less, by this factor."""
        self.weight /= keeps
        if self.weight < HEAVY:
            return
        for counts in (self.tried, self.accepted, self.rounds, self.beyond):
            counts[:] = [count / self.weight for count in counts]
        self.tokens, self.weight = self.tokens / self.weight, 1.0

    def _by_position(self, depth: int) -> list[float]:
        """Given that all before were accepted; of a position hardly tried, as before, or close to that of the one
        above."""
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
        given = comes = 1.0  # tokens by all that is known, and how likely it is to come so far
        for place, told in enumerate(expected):
            tokens = (self.tokens + self.beyond[place] + said * told) / (self.rounds[place] + said)
            rates.append(min(max((tokens - given) / comes, 1e-3), 1 - 1e-3))
            comes = max(comes * rates[-1], NEVER)
            given += comes
        return rates


@lru_cache(maxsize=512)
def _rounds_for(depth: int, number: int, deepest: int) -> tuple[float, ...]:
    """In how many rounds chains of every depth from 1 on would have given the tokens of one of this `depth`, of which
    a `number` was accepted: what is accepted in one round would be in several, and where all was, it goes on so."""
    if number < depth:
        return tuple(float(-(-(number + 1) // (chain + 1))) for chain in range(1, deepest + 1))
    return tuple(max((depth + 1) / (chain + 1), 1.0) for chain in range(1, deepest + 1))


def tokens_of(rates: Sequence[float]) -> float:
    """Expected tokens of a round over a chain, the bonus token included, of links accepted at these rates."""
    tokens = reached = 1.0
    for rate in rates:
        reached *= rate
        tokens += reached
    return tokens


def tokens_by_depth(rates: Sequence[float]) -> list[float]:
    """[`tokens_of`] chains of every depth from 1 to that of the rates."""
    reached = itertools.accumulate(rates, operator.mul)
    return list(itertools.accumulate(reached, initial=1.0))[1:]


def coming_to(rates: Sequence[float], tries: Sequence[float]) -> list[float]:
    """How likely rounds over a tree are to accept so many drafts, from 1 on, with so many `tries` by position, of
    which the first is accepted at the rates of a chain. Where that was wrong once, the text is a hard one. With less
    than one try a position is not always there."""
    favourites, others, found = 1.0, 0.0, []
    for rate, here in zip(rates, tries, strict=True):
        either = 1 - (1 - rate) ** here
        rate = min(rate, either)
        others = others * either * BELOW_A_SIBLING + favourites * (either - rate)
        favourites *= rate
        found.append(favourites + others)
    return found


class Siblings:
    """What siblings add to a chain: how well each of the exponents [`SIBLINGS`] has told which children were right
    where favourites were not, or what trees gave.

    Attributes:
        misses: Favourites that were wrong, of which it was told what was right.
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
            rate: How often favourites are accepted there.
            rank: Of the child that was right, from 1 on; the favourite's is 0.
            at_least: It is that or a higher one.
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
        """Of which to expect most."""
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
    """A chance of which the logarithm is a number, and that of its contrary."""
    return min(max(chance, 1e-3), 1 - 1e-3)


def candidates_of(tree: DraftTreeConfig, rates: Sequence[float]) -> list[float]:
    """Nodes of a tree by position, on average: 1 each of a chain. Those of a dynamic tree are where rounds come to, as
    far as heads know that.

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
    """What so many candidates by position are worth."""
    return [one**exponent if one > 1 else one for one in candidates]


@dataclass
class Tried:
    """What rounds of one tree have given.

    Attributes:
        tokens: Tokens per round and sequence, bonus token included, running mean.
        expected: What was expected of them just before, running mean.
        rounds: How many there were.
        sequences: Of those rounds, one with the other: what a round gives is a mean over so many.
        last: Number of the newest, counted over all rounds.
        copied: Tokens per round and sequence that were copied from the text after all drafted ones, running mean.
    """

    tokens: float = 0.0
    expected: float = 0.0
    rounds: int = 0
    sequences: int = 0
    last: int = 0
    copied: float = 0.0

    def record(self, number: int, tokens: float, expected: float, copied: float, sequences: int = 1) -> None:
        """Adds a round: its number, and the latest of everything else that is kept."""
        self.rounds, self.sequences, self.last = self.rounds + 1, self.sequences + sequences, number
        # Of the first rounds too much was expected: each counts for more than the one before it.
        share = max(1 / ROUNDS_OF_A_MEAN, 2 / (self.rounds + 1))
        self.tokens += (tokens - self.tokens) * share
        self.expected += (expected - self.expected) * share
        self.copied += (copied - self.copied) * share

    def tokens_given(self, expected: float) -> float:
        """Tokens of a round of which now so many are expected: as many times more or less as there were until now, the
        more there were."""
        if not self.rounds:
            return expected
        seen = min(self.sequences, ROUNDS_OF_A_MEAN)
        return expected * (seen * self.tokens / self.expected + BELIEVED) / (seen + BELIEVED)


@dataclass
class TextTally:
    """What rounds of the texts at hand have given: how well drafts fare differs from text to text, by more than from
    tree to tree.

    Attributes:
        tokens: Tokens of the rounds per sequence, bonus tokens included; older rounds count less.
        usual: What such rounds usually give.
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
        """Adds a plain step: the text may have changed meanwhile."""
        self._fade(STEP_FADES)

    def times_usual(self, tokens: float) -> float:
        """How many times as much as usual rounds may be expected to give here, where that is so many tokens."""
        before = TEXTS_BEFORE * tokens
        return (self.tokens + before) / (self.usual + before)

    def _fade(self, share: float) -> None:
        self.tokens, self.usual = self.tokens * (1 - share), self.usual * (1 - share)
