"""How far a chain is drafted: until its next link is not worth what it costs.

How deep a draft pays changes from word to word, and heads know something about it: what they are sure of is accepted
more often, as is what follows upon accepted drafts. [`Foresight`] learns from the rounds how much either says of this
pair; a [`Reach`] asks it, link by link, whether to go on. The rule is a threshold on how likely it is that all links
are accepted, which is the best kind of rule there is (Huang et al. 2024, SpecDec++, arXiv 2405.19715, section 4); the
threshold follows from what tokens cost otherwise.

Whether there is another link depends on the links before it alone, or, of favourites, on what is no matter of chance:
so drafts keep their distribution, and texts are the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

Traits = tuple[float, float, float]  # of a link: a constant, how sure the head is of it, and the mood

UNKNOWN_MOOD = 0.7  # before any round was seen
MOOD_FOLLOWS = 0.25  # by how much, as a share, the mood of a text follows whether a link was accepted
USUAL_FOLLOWS = 0.01  # the same of the mood in which texts begin
RATE_FOLLOWS = 0.05  # and how often links at a position are accepted,
LINKS_BEFORE = 4  # of which it is expected to be as often as at the position before
BETTER_FOLLOWS = 0.1  # the same, per link, of what positions say besides
UNSURE = 4.0  # variance of what is known of the weights together, more than which rounds do not make it grow
DRIFT = 5e-5  # variance by which each of the weights may have moved from one link to the next
LOOKS_AHEAD = 8  # links, to see whether rounds are cheap again after some that are dear
CURIOUS = 0.6  # of what a link must be worth, where it leads to levels that were hardly ever drafted
LEAST_SURE = 1e-3  # probabilities are taken for at least this much, and for at most one less it,
LEAST_USUAL = 0.01  # and so are shares of links that are accepted


@dataclass
class _Position:
    """What is known of links at a draft position.

    Attributes:
        rate: Share of them that is accepted, a running mean.
        count: How many there were.
        better: By how much they fare better than their traits say, as a logit.
    """

    rate: float = UNKNOWN_MOOD
    count: int = 0
    better: float = 0.0

    def record(self, accepted: bool, chance: float) -> None:
        """Adds a link, and how likely it was to be accepted by its traits and what is known here."""
        self.count += 1
        self.rate += max(RATE_FOLLOWS, 1 / (LINKS_BEFORE + self.count)) * (accepted - self.rate)
        self.better += BETTER_FOLLOWS * (accepted - chance)


class Foresight:
    """How likely links of drafted chains are to be accepted: a logistic regression that learns from link to link, by
    Newton's steps, and forgets.

    Attributes:
        weights: Of the traits. At first a head is believed what it says.
        usual_mood: Share of links that are accepted.
    """

    def __init__(self) -> None:
        self.weights = (0.0, 1.0, 0.0)
        self.usual_mood = UNKNOWN_MOOD
        self._variance = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)  # of the weights: a symmetric matrix, row by row
        self._positions: list[_Position] = []

    def follow(self, moods: list[float | None]) -> list[float]:
        """The same list, in which new texts are in the usual mood."""
        moods[:] = [self.usual_mood if mood is None else mood for mood in moods]
        return cast(list[float], moods)

    def traits(self, sureness: float, mood: float) -> Traits:
        """What is known of a link, from the log-probability that the head gives it, and the mood of the text."""
        # In this order, what is no number (of a head that overflows) is the least.
        probability = max(LEAST_SURE, min(math.exp(min(sureness, 0.0)), 1 - LEAST_SURE))
        return 1.0, 0.5 * _logit(probability), 4 * (mood - 0.5)

    def chance(self, position: int, traits: Traits) -> float:
        """How likely a link at a position (0-based) is to be accepted, where all before it are."""
        a, b, c = self.weights
        return _sigmoid(self._at(position).better + a * traits[0] + b * traits[1] + c * traits[2])

    def chance_at(self, position: int, mood: float) -> float:
        """The same of a link that is not drafted yet, by how often such links are accepted in texts of this mood. What
        heads that are sure of anything would say of it plays no part."""
        usual = min(max(self._at(position).rate, LEAST_USUAL), 1 - LEAST_USUAL)
        return _sigmoid(_logit(usual) + 4 * self.weights[2] * (mood - self.usual_mood))

    def _at(self, position: int) -> _Position:
        """What is known of a position, or of the deepest that was ever seen."""
        known = self._positions
        return known[min(position, len(known) - 1)] if known else _Position()

    def learn(self, position: int, traits: Traits, accepted: bool) -> None:
        """Adds what became of a link."""
        # Written out, as this runs for every link.
        (aa, ab, ac, bb, bc, cc), (x, y, z) = self._variance, traits
        chance = self.chance(position, traits)
        told = max(chance * (1 - chance), 0.01)
        a, b, c = aa * x + ab * y + ac * z, ab * x + bb * y + bc * z, ac * x + bc * y + cc * z
        share = 1 / (1 / told + a * x + b * y + c * z)
        drift = DRIFT if aa + bb + cc < UNSURE else 0.0
        self._variance = (
            aa - share * a * a + drift, ab - share * a * b, ac - share * a * c,
            bb - share * b * b + drift, bc - share * b * c, cc - share * c * c + drift,
        )  # fmt: skip
        step = share / told * (accepted - chance)
        known, sure, mood = self.weights
        self.weights = (known + step * a, sure + step * b, mood + step * c)
        self.usual_mood += USUAL_FOLLOWS * (accepted - self.usual_mood)
        if position == len(self._positions):
            above = self._at(position)
            self._positions.append(_Position(above.rate, better=above.better))
        self._positions[position].record(accepted, chance)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -30.0), 30.0)))


@dataclass
class Reach:
    """Decides over the links of one round's chains, one chain per sequence and all equally long.

    Attributes:
        foresight: What is known of such links.
        moods: How well drafts of every sequence have fared of late; follows what becomes of these.
        link: Tokens, per sequence, that the time of another link would give otherwise.
        node: The same of verifying it alone.
        drawn: Links are drawn from the draft; one that is there must then be verified, however likely it is.
        drafted: Links that every chain had, with one that was not worth verifying.
        likely: How likely it is that all links of a sequence are accepted.
        next_chance: How likely another one would be, of the sequences on average; `None` before that was asked.
        ended: It was this that ended the chains, not a limit.
        known: Levels of which enough was seen to judge them; deeper ones are drafted to see them. `None` for all.
        least: Links that chains have whatever they are worth, to see what so many cost.
        farthest: Links that chains may have by now.
        steps: Tokens that the time of chains would give besides what `link` and `node` tell, by links from 0 on.
        offered: Draft logits [B, V] that the links were chosen from; `None` where nobody asks for them.
    """

    foresight: Foresight
    moods: list[float]
    link: float
    node: float
    drawn: bool = False
    drafted: int = 0
    likely: list[float] = field(default_factory=list)
    next_chance: float | None = None
    ended: bool = False
    known: int | None = None
    least: int = 0
    farthest: float = math.inf
    steps: Sequence[float] = (0.0,)
    offered: list[torch.Tensor] | None = None
    _links: list[list[Traits]] = field(default_factory=list)

    @property
    def levels(self) -> int:
        """Links of every chain."""
        return len(self._links)

    def keeps(self, sureness: Sequence[float]) -> bool:
        """Whether the newest links, one per sequence with its log-probability, are worth verifying. The first ones
        always are."""
        links = [self.foresight.traits(sure, mood) for sure, mood in zip(sureness, self.moods, strict=True)]
        likely = [self.foresight.chance(len(self._links), traits) for traits in links]
        self.drafted += 1
        if self._links:
            self.next_chance = sum(likely) / len(likely)
            likely = [before * chance for before, chance in zip(self.likely, likely, strict=True)]
            worth = len(self._links) < self.least or self._pays(likely, self.node)
            self.ended = not (self.drawn or worth)
            if self.ended:
                return False
        self.likely = likely
        self._links.append(links)
        return True

    def goes_on(self) -> bool:
        """Whether other links may be worth drafting and verifying after these."""
        chances = self._chances(0)
        self.next_chance = sum(chances) / len(chances)
        likely = [likely * chance for likely, chance in zip(self.likely, chances, strict=True)]
        if self.known is not None and len(self._links) >= self.known:
            pays = sum(likely) >= CURIOUS * self.link * len(likely)
        else:
            pays = self._pays(likely, self.link)
        self.ended = not (pays or len(self._links) < self.least) or len(self._links) >= self.farthest
        return not self.ended

    def _pays(self, likely: Sequence[float], cost: float) -> bool:
        """Whether the next link is worth its time, or the next few are, where it is after these that rounds are cheap.

        Args:
            likely: How likely the next link is to be accepted with all before it, by sequence.
            cost: Of it, in tokens; the links after it cost [`link`] each.
        """
        gain = -cost
        for more in range(1, LOOKS_AHEAD + 1):
            here = sum(likely) / len(likely)
            gain += here
            if gain >= self._step(more):
                return True
            # Further links give less and less: what is dear becomes worth it only where rounds are cheaper further on.
            at = len(self._links) + more
            cheaper = any(step < self.steps[at] for step in self.steps[at + 1 :])
            if at >= self.farthest or (here <= max(cost, self.link) and not cheaper):
                break
            likely = [before * chance for before, chance in zip(likely, self._chances(more), strict=True)]
            gain -= self.link
        return False

    def _chances(self, further: int) -> list[float]:
        """Of the next link of every sequence, or of one further on."""
        return [self.foresight.chance_at(len(self._links) + further, mood) for mood in self.moods]

    def _step(self, more: int) -> float:
        """What so many links more cost besides."""
        last = len(self.steps) - 1
        return self.steps[min(len(self._links) + more, last)] - self.steps[min(len(self._links), last)]

    def learn(self, num_accepted: Sequence[int]) -> None:
        """What became of the links, one number per sequence."""
        for sequence, number in enumerate(num_accepted):
            for position, links in enumerate(self._links[: number + 1]):
                self.foresight.learn(position, links[sequence], position < number)
            self.moods[sequence] = mood_after(self.moods[sequence], number, self.levels)


def mood_after(mood: float, number: int, levels: int) -> float:
    """The mood of a text in which a number of tokens was accepted, of so many levels that were drafted."""
    for position in range(min(number + 1, levels)):
        mood += MOOD_FOLLOWS * ((position < number) - mood)
    return mood
