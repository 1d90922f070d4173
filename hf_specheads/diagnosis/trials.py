"""Trying hypotheses: what heads accept under each, and which one is clearly better than what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bootstrap import Interval, difference_interval
from ..heads.base import DraftHead
from ..tuning.progress import bar
from .evidence import Evidence, Level
from .hypotheses import Alternative, alternatives, single_taps, tap, tried
from .teacher_forced import Drafts, accepted, draft_everywhere, hits, own_text, token_ids_of_slots

# A clear winner: that much better at the first position, or that many more tokens a round, and surely so.
CLEAR_FIRST, CLEAR_LENGTH, SURELY = 0.03, 0.1, 0.01
CLEAR_SHARE = 0.08
# Or a little better, and surely more likely, in nats a token: likelihoods tell what few texts cannot count.
CLEAR_LIKELIHOOD, A_LITTLE, LEAST_TO_IMPROVE = 0.01, 0.004, 0.1
SEARCHED_TEXTS, LARGEST_SEARCH = 2, 200


@dataclass(frozen=True)
class Score:
    """What heads accept of the target's own texts, per text.

    Attributes:
        first, guesses: Guesses of draft position 1 that were right, and all of them.
        tokens, roots: Accepted drafts of a chain from every token, and the number of these tokens.
        likelihood, drafted: Log-likelihood of the text's tokens under the drafts, all positions, and their number.
    """

    first: tuple[int, ...]
    guesses: tuple[int, ...]
    tokens: tuple[int, ...]
    roots: tuple[int, ...]
    likelihood: tuple[float, ...] = ()
    drafted: tuple[int, ...] = ()

    @classmethod
    def of(cls, drafts: Drafts, evidence: Evidence) -> Score:
        text = own_text(evidence, 0)
        right = hits(drafts, evidence)[0] & text
        count, roots = accepted(drafts, evidence)
        columns = (right, text, count * roots, roots)
        sums, counts = torch.zeros(len(text), device=text.device), torch.zeros_like(text[:, 0], dtype=torch.long)
        for position, likely in enumerate(drafts.log_probs):
            there = own_text(evidence, position) & ~likely.isnan()
            sums += likely.masked_fill(~there, 0.0).sum(-1)
            counts += there.sum(-1)
        known = (tuple(sums.tolist()), tuple(counts.tolist())) if drafts.log_probs else ((), ())
        return cls(*(tuple(column.sum(-1).tolist()) for column in columns), *known)

    @property
    def log_likelihood(self) -> float | None:
        """Nats a token, the higher the better; `None` where it was not computed."""
        return sum(self.likelihood) / max(sum(self.drafted), 1) if self.drafted else None

    def __str__(self) -> str:
        likely = "" if self.log_likelihood is None else f"  {self.log_likelihood:.3f}"
        return f"{self.position_1:.3f}  {self.tau:.2f}{likely}"

    @property
    def position_1(self) -> float:
        """Acceptance of draft position 1."""
        return sum(self.first) / max(sum(self.guesses), 1)

    @property
    def tau(self) -> float:
        """Tokens a round of a chain, the bonus token included."""
        return 1 + sum(self.tokens) / max(sum(self.roots), 1)

    def better_than(self, other: Score) -> tuple[Interval, Interval]:
        """By how much, at position 1 and in tau."""
        return (
            difference_interval((self.first, self.guesses), (other.first, other.guesses)),
            difference_interval((self.tokens, self.roots), (other.tokens, other.roots)),
        )

    def clearly_better_than(self, other: Score) -> bool:
        """Whether this is no accident."""
        first, length = self.better_than(other)
        longer = max(CLEAR_LENGTH, CLEAR_SHARE * other.tau)  # of long rounds a tenth of a token is little
        if (first.mean >= CLEAR_FIRST and first.low >= SURELY) or (length.mean >= longer and length.low >= SURELY):
            return True
        works = other.position_1 >= LEAST_TO_IMPROVE and self.drafted and other.drafted
        if not works or first.mean < A_LITTLE or length.mean < 0:
            return False
        likely = difference_interval((self.likelihood, self.drafted), (other.likelihood, other.drafted))
        return likely.mean >= CLEAR_LIKELIHOOD and likely.low > 0


@dataclass(frozen=True)
class Trial:
    """An alternative and what it scores."""

    alternative: Alternative
    score: Score
    wins: bool


def try_all(
    heads: DraftHead, target: PreTrainedModel, evidence: Evidence, positions: int, in_force: Score
) -> list[Trial]:
    """Every alternative, the best of a search over single hidden states included."""
    found = []
    levels = tuple(evidence.states)
    for alternative in bar(alternatives(heads, target, evidence.depth, levels), "hypotheses"):
        found.append(_trial(heads, evidence, alternative, positions, in_force))
    searched = search_taps(heads, evidence)
    if searched is not None and all(searched.levels != trial.alternative.levels for trial in found):
        found.append(_trial(heads, evidence, searched, positions, in_force))
    return found


def _trial(heads: DraftHead, evidence: Evidence, alternative: Alternative, positions: int, in_force: Score) -> Trial:
    drafts = drafts_under(heads, evidence, alternative, positions)
    score = Score.of(drafts, evidence)
    return Trial(alternative, score, score.clearly_better_than(in_force))


def drafts_under(heads: DraftHead, evidence: Evidence, alternative: Alternative, positions: int) -> Drafts:
    """What the heads draft as the alternative says."""
    levels = alternative.levels or tuple(heads.feature_layers)
    with tried(heads, alternative):
        return draft_everywhere(heads, evidence, levels, positions, alternative.shift)


def search_taps(heads: DraftHead, evidence: Evidence) -> Alternative | None:
    """The best hidden states found by trying all of them at one place after the other, on a few of the texts; `None`
    if those in force are, or if there are too many to try."""
    levels: tuple[Level, ...] = tuple(evidence.depth if level == -1 else level for level in heads.feature_layers)
    if not levels or len(levels) * (evidence.depth + 1) > LARGEST_SEARCH:
        return None
    part = evidence.part(range(min(SEARCHED_TEXTS, len(evidence.lengths))))
    best, start = levels, _likelihood(heads, part, levels)
    top = start
    for place in bar(range(len(levels)), "hidden states, one by one"):
        for alternative in dict(single_taps(heads, evidence.depth, best))[place]:
            score = _likelihood(heads, part, alternative.levels or levels)
            if score > top:
                top, best = score, alternative.levels or levels
    return tap(heads, best, "searched") if best != levels and top >= start + CLEAR_LIKELIHOOD else None


def _likelihood(heads: DraftHead, evidence: Evidence, levels: tuple[Level, ...]) -> float:
    """Of the texts under first drafts from these hidden states."""
    likely = Score.of(draft_everywhere(heads, evidence, levels), evidence).log_likelihood
    return float("-inf") if likely is None else likely


# ---------------------------------------------------------------------- vocabulary and labels, without a forward
def mapping_trials(heads: DraftHead, drafts: Drafts, evidence: Evidence, in_force: Score) -> list[Trial]:
    """Other meanings of the draft vocabulary: none at all, offsets read as ids, and the one the texts tell."""
    mapping = heads.trained_vocabulary
    if mapping is None:
        return []
    mend = "the map from draft ids to tokens is not the one the heads were trained with; get `d2t` of that training"
    now = "as in the files"
    found = []
    others: dict[str, Any] = {"identity": torch.arange(len(mapping))}
    offsets = getattr(heads, "d2t", None)
    if offsets is not None:
        others["offsets read as token ids"] = offsets
    for words, other in others.items():
        alternative = Alternative("draft vocabulary", words, now, "draft vocabulary", mend=mend)
        found.append(_mapped(heads, drafts, evidence, alternative, other, in_force))
    halves = fitted_mapping(drafts, evidence, mapping)
    if halves is not None:
        score, before = halves
        words = "fitted to one half of the texts, tried on the other"
        alternative = Alternative("draft vocabulary", words, now, "draft vocabulary", mend=mend)
        found.append(Trial(alternative, score, score.clearly_better_than(before)))
    return found


def _mapped(
    heads: DraftHead, drafts: Drafts, evidence: Evidence, alternative: Alternative, mapping: Any, in_force: Score
) -> Trial:
    tokens = tuple(token_ids_of_slots(heads, slots, mapping) for slots in drafts.slots)
    score = Score.of(Drafts(drafts.slots, tokens), evidence)
    return Trial(alternative, score, score.clearly_better_than(in_force))


def fitted_mapping(drafts: Drafts, evidence: Evidence, mapping: torch.Tensor) -> tuple[Score, Score] | None:
    """What is accepted if every draft id stands for the token that followed it most often in the other texts, and
    what is accepted there as it is. `None` for a single text."""
    if len(evidence.lengths) < 2:
        return None
    text, slots = own_text(evidence, 0), drafts.slots[0]
    vocabulary = int(max(evidence.token_ids.max(), mapping.max())) + 1
    tokens = drafts.tokens[0].clone()
    for half in (0, 1):
        fit = torch.zeros_like(text)
        fit[half::2] = text[half::2]
        seen = fit & (slots >= 0)
        index = slots[seen].cpu() * vocabulary + evidence.token_ids[seen].cpu()
        pairs, counts = index.unique(return_counts=True)
        fitted = mapping.cpu().clone()
        for pair in pairs[counts.argsort(stable=True)].tolist():  # the most frequent last
            fitted[pair // vocabulary] = pair % vocabulary
        other = slice(1 - half, None, 2)
        tokens[other] = torch.where(slots[other] < 0, -1, fitted.to(slots.device)[slots[other].clamp_min(0)])
    one = (Drafts(drafts.slots[:1], (kind,)) for kind in (tokens, drafts.tokens[0]))
    fitted_score, plain = (Score.of(each, evidence) for each in one)
    return fitted_score, plain


def label_offsets(drafts: Drafts, evidence: Evidence, reach: Sequence[int] = (-1, 0, 1, 2)) -> dict[int, float]:
    """How often the first draft is the token that stands so many places after the one it should guess."""
    text, guess = own_text(evidence, 0), drafts.tokens[0]
    found = {}
    for offset in reach:
        other = evidence.token_ids.roll(-offset, dims=1)
        usable = text.clone()
        if offset > 0:  # there must be such a token
            usable[:, -offset:] = False
            usable &= text.roll(-offset, dims=1)
        found[offset] = float((guess == other)[usable].float().mean()) if bool(usable.any()) else 0.0
    return found
