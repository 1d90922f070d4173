"""Decides how far a chain is drafted: until its next link is not worth its cost.

How deep a draft pays changes from word to word, and the draft head knows something about it: tokens it is sure of are
accepted more often, and so are tokens that follow accepted drafts. [`Foresight`] learns from the rounds how much each
of these tells for this pair of target and draft head. A [`Reach`] asks it, link by link, whether to go on. The rule is
a threshold on the probability that all links are accepted, which is the optimal form of such a rule (Huang et al.
2024, SpecDec++, arXiv 2405.19715, section 4). The threshold follows from what tokens cost otherwise.

Whether there is another link depends only on the links before it or, for chains of the most probable children, on
quantities that are not random. So drafts keep their distribution, and the text keeps that of the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

# What the regression sees of a link: a constant, how sure the draft head is of it, and the mood of the text, which is
# the share of links accepted lately.
Traits = tuple[float, float, float]

UNKNOWN_MOOD = 0.7  # assumed mood before any round was seen
MOOD_FOLLOWS = 0.25  # step of the running mean that a text's mood is, per link
USUAL_FOLLOWS = 0.01  # step of the running mean of the mood in which texts begin, per link
RATE_FOLLOWS = 0.05  # least step of the running mean of acceptance at a position, per link
LINKS_BEFORE = 4  # weight, in links, of the assumption that a position is accepted as often as the one before it
BETTER_FOLLOWS = 0.1  # step by which a position's offset follows the error of the prediction, per link
UNSURE = 4.0  # total variance of the weights above which drift adds no more
DRIFT = 5e-5  # variance by which each weight may have moved from one link to the next
LOOKS_AHEAD = 8  # links to look ahead, as rounds may be cheap again beyond some expensive numbers of links
CURIOUS = 0.6  # share of the usual worth that is enough for a link to levels that were hardly ever drafted
LEAST_SURE = 1e-3  # probabilities of a draft head are clamped to at least this, and at most 1 minus this
LEAST_USUAL = 0.01  # pos-acc values are clamped to at least this, and at most 1 minus this


@dataclass
class _Position:
    """What is known of links at a draft position.

    Attributes:
        rate: Share of links that is accepted, a running mean.
        count: Number of links seen.
        better: Offset, as a logit, by which links fare better than their traits say.
    """

    rate: float = UNKNOWN_MOOD
    count: int = 0
    better: float = 0.0

    def record(self, accepted: bool, chance: float) -> None:
        """Adds a link, given whether it was accepted and the `chance` that was predicted for it."""
        self.count += 1
        self.rate += max(RATE_FOLLOWS, 1 / (LINKS_BEFORE + self.count)) * (accepted - self.rate)
        self.better += BETTER_FOLLOWS * (accepted - chance)


class Foresight:
    """Predicts whether links of drafted chains are accepted: a logistic regression that learns online, by Newton steps
    after every link, and forgets.

    Attributes:
        weights: Weights of the traits. At first the draft head's own probability is taken as the prediction.
        usual_mood: Share of links that are accepted, over all texts.
    """

    def __init__(self) -> None:
        self.weights = (0.0, 1.0, 0.0)
        self.usual_mood = UNKNOWN_MOOD
        self._variance = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)  # covariance of the weights: upper triangle, row by row
        self._positions: list[_Position] = []

    def follow(self, moods: list[float | None]) -> list[float]:
        """Puts new texts, whose mood is `None`, into the usual mood; changes and returns the list."""
        moods[:] = [self.usual_mood if mood is None else mood for mood in moods]
        return cast(list[float], moods)

    def traits(self, sureness: float, mood: float) -> Traits:
        """Traits of a link, from the log-probability that the draft head gives it and the mood of the text."""
        # In this order of min and max, NaN (from a draft head that overflows) becomes the least probability.
        probability = max(LEAST_SURE, min(math.exp(min(sureness, 0.0)), 1 - LEAST_SURE))
        return 1.0, 0.5 * _logit(probability), 4 * (mood - 0.5)

    def chance(self, position: int, traits: Traits) -> float:
        """Probability that a link at a position (0-based) is accepted, given that all links before it are."""
        a, b, c = self.weights
        return _sigmoid(self._at(position).better + a * traits[0] + b * traits[1] + c * traits[2])

    def chance_at(self, position: int, mood: float) -> float:
        """Probability that a link which is not drafted yet is accepted, from how often links at this position are
        accepted in texts of this mood. The draft head has not said anything of it yet."""
        usual = min(max(self._at(position).rate, LEAST_USUAL), 1 - LEAST_USUAL)
        return _sigmoid(_logit(usual) + 4 * self.weights[2] * (mood - self.usual_mood))

    def _at(self, position: int) -> _Position:
        """What is known of a position, or of the deepest position seen if that is less deep."""
        known = self._positions
        return known[min(position, len(known) - 1)] if known else _Position()

    def learn(self, position: int, traits: Traits, accepted: bool) -> None:
        """Learns from whether a link was accepted."""
        # The matrix products are written out because this runs for every link.
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
    """Decides where the chains of one round end. There is one chain per sequence, and all have the same length.

    Attributes:
        foresight: What is known of the acceptance of links.
        moods: How well drafts of each sequence have fared lately; updated by [`learn`].
        link: Tokens per sequence that the time of drafting and verifying another link would give otherwise.
        node: Tokens per sequence that the time of verifying another link alone would give otherwise.
        drawn: Links are drawn from the draft. Once drawn, a link must be verified, however unlikely it is.
        drafted: Links drafted per chain, including one that was not worth verifying.
        likely: Probability that all links are accepted, per sequence.
        next_chance: Probability that another link would be accepted, averaged over sequences; `None` until computed.
        ended: The chains were ended by this rule, not by a limit of the tree.
        known: Levels that were seen often enough to judge them; deeper levels may be drafted to learn about them.
            `None` if all levels are known.
        least: Links that chains have whatever they are worth, to measure what that many cost.
        farthest: Most links that chains may have for now.
        steps: Tokens that the time of chains would give on top of what `link` and `node` tell, by number of links
            from 0 on.
        offered: Draft logits [B, V] that each link was chosen from; `None` if they are not needed.
        copied: Nodes copied from the text that were added to the chains.
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
    copied: int = 0
    _links: list[list[Traits]] = field(default_factory=list)

    @property
    def levels(self) -> int:
        """Links that every chain has."""
        return len(self._links)

    def keeps(self, sureness: Sequence[float]) -> bool:
        """Whether the newest links are worth verifying, given their log-probabilities, one per sequence. A chain's
        first link always is."""
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
        """Whether another link may be worth drafting and verifying."""
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
        """Whether the next link is worth its time, or the next few together where rounds get cheaper after them.

        Args:
            likely: Probability that the next link and all before it are accepted, per sequence.
            cost: Cost of the next link, in tokens; the links after it cost [`link`] each.
        """
        gain = -cost
        for more in range(1, LOOKS_AHEAD + 1):
            here = sum(likely) / len(likely)
            gain += here
            if gain >= self._step(more):
                return True
            # Further links give less and less, so they can only pay if rounds get cheaper further on.
            at = len(self._links) + more
            cheaper = any(step < self.steps[at] for step in self.steps[at + 1 :])
            if at >= self.farthest or (here <= max(cost, self.link) and not cheaper):
                break
            likely = [before * chance for before, chance in zip(likely, self._chances(more), strict=True)]
            gain -= self.link
        return False

    def _chances(self, further: int) -> list[float]:
        """Acceptance probability, per sequence, of the next link or of one that is `further` links on."""
        return [self.foresight.chance_at(len(self._links) + further, mood) for mood in self.moods]

    def _step(self, more: int) -> float:
        """What `more` further links cost on top of `link` and `node`, by [`steps`]."""
        last = len(self.steps) - 1
        return self.steps[min(len(self._links) + more, last)] - self.steps[min(len(self._links), last)]

    def learn(self, num_accepted: Sequence[int]) -> None:
        """Learns from the number of accepted tokens of each sequence."""
        for sequence, number in enumerate(num_accepted):
            for position, links in enumerate(self._links[: number + 1]):
                self.foresight.learn(position, links[sequence], position < number)
            self.moods[sequence] = mood_after(self.moods[sequence], number, self.levels)


def mood_after(mood: float, number: int, levels: int) -> float:
    """The mood of a text after a round in which `number` tokens were accepted of `levels` that were drafted."""
    for position in range(min(number + 1, levels)):
        mood += MOOD_FOLLOWS * ((position < number) - mood)
    return mood
