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
from .alternative import Alternative, tried
from .evidence import Evidence, Level
from .hypotheses import alternatives, single_taps, tap
from .teacher_forced import Drafts, accepted, draft_everywhere, guessed_text, hits, own_text, token_ids_of_slots

# A clear winner: that much better at the first position, or that many more tokens a round, and surely so.
CLEAR_FIRST, CLEAR_LENGTH, SURELY = 0.03, 0.1, 0.01
UNITS = 32  # of text that intervals are drawn over, at least; a piece of a text for each where there are few texts
# Or a little better, and surely more likely, in nats a token: likelihoods tell what few texts cannot count. What sound
# heads gain at most and mended ones at least is measured by `python -m benchmarks doctor`.
CLEAR_LIKELIHOOD, A_LITTLE, LEAST_TO_IMPROVE = 0.025, 0.03, 0.1
SEARCHED_TEXTS, LARGEST_SEARCH = 2, 200
HOPELESS = -0.1  # nats a token at position 1: what makes texts that much less likely is not looked at further


@dataclass(frozen=True)
class Score:
    """What heads accept of the target's own texts, per unit: a text, or a piece of it where there are few texts.

    Attributes:
        pieces: Of every text.
        first, guesses: Guesses of draft position 1 that were right, and all of them.
        tokens, roots: Accepted drafts of a chain from every token, and the number of these tokens.
        likelihood, drafted: Log-likelihood of the text's tokens under the drafts, all positions, and their number.
    """

    pieces: int
    first: tuple[int, ...]
    guesses: tuple[int, ...]
    tokens: tuple[int, ...]
    roots: tuple[int, ...]
    likelihood: tuple[float, ...] = ()
    drafted: tuple[int, ...] = ()

    @classmethod
    def of(cls, drafts: Drafts, evidence: Evidence) -> Score:
        text = guessed_text(drafts, evidence)
        right = hits(drafts, evidence)[0] & text
        count, roots = accepted(drafts, evidence)
        columns = [right, text, count * roots, roots]
        if drafts.log_probs:
            sums, counts = (
                torch.zeros(text.shape, dtype=torch.float32, device=text.device),
                torch.zeros_like(text, dtype=torch.long),
            )
            for position, likely in enumerate(drafts.log_probs):
                there = own_text(evidence, position) & ~likely.isnan()
                sums += likely.masked_fill(~there, 0.0)
                counts += there
            columns += [sums, counts]
        pieces = -(-UNITS // len(text))
        return cls(pieces, *(by_piece(column, evidence, pieces) for column in columns))

    @property
    def log_likelihood(self) -> float | None:
        """Nats a token, the higher the better; `None` where it was not computed."""
        return sum(self.likelihood) / max(sum(self.drafted), 1) if self.drafted else None

    def __str__(self) -> str:
        return self.shown()

    def shown(self, whole: bool = True) -> str:
        """As a row of a table; tau only of all positions."""
        likely = "" if self.log_likelihood is None else f"  {self.log_likelihood:.3f}"
        return f"{self.position_1:.3f}  {f'{self.tau:.2f}' if whole else '   -'}{likely}"

    @property
    def position_1(self) -> float:
        """Acceptance of draft position 1."""
        return sum(self.first) / max(sum(self.guesses), 1)

    @property
    def tau(self) -> float:
        """Tokens a round of a chain, the bonus token included."""
        return 1 + sum(self.tokens) / max(sum(self.roots), 1)

    def of_texts(self, start: int) -> Score:
        """Of the texts from one on."""
        columns = (self.first, self.guesses, self.tokens, self.roots, self.likelihood, self.drafted)
        return Score(self.pieces, *(column[start * self.pieces :] for column in columns))

    def gain_over(self, other: Score) -> Gain:
        """By how much this is better, unit by unit."""
        known = self.drafted and other.drafted
        return Gain(
            difference_interval((self.first, self.guesses), (other.first, other.guesses)),
            difference_interval((self.tokens, self.roots), (other.tokens, other.roots)),
            difference_interval((self.likelihood, self.drafted), (other.likelihood, other.drafted)) if known else None,
            other,
        )


def by_piece(values: torch.Tensor, evidence: Evidence, pieces: int) -> tuple[Any, ...]:
    """Sums of values [B, T] over consecutive pieces of every text's own tokens, the pieces of a text together."""
    places = torch.arange(values.shape[1], device=values.device)[None]
    starts, lengths = (torch.tensor(one, device=places.device)[:, None] for one in (evidence.starts, evidence.lengths))
    piece = (places - starts).clamp_min(0) * pieces // (lengths - starts).clamp_min(1)
    sums = torch.zeros(len(values), pieces, dtype=values.dtype if values.is_floating_point() else torch.long)
    sums = sums.to(values.device).scatter_add(1, piece.clamp_max(pieces - 1), values.to(sums.dtype))
    return tuple(sums.flatten().tolist())


@dataclass(frozen=True)
class Gain:
    """By how much a setting is better than the one in force, paired by units of text.

    Attributes:
        first, length, likelihood: At position 1, in tau, and in nats a token (`None` where not computed).
        over: What it is compared with.
    """

    first: Interval
    length: Interval
    likelihood: Interval | None
    over: Score

    @property
    def is_clear(self) -> bool:
        """Whether this is no accident: much more is accepted, or a little more and the text is surely likelier. What
        is accepted more often must be likelier too; training sees to that, and chance seldom does."""
        if self.likelihood is not None and self.likelihood.mean <= 0:
            return False
        if self.first.mean >= CLEAR_FIRST and self.first.low >= SURELY:
            return True
        if self.length.mean >= CLEAR_LENGTH and self.length.low >= SURELY:
            return True
        if self.likelihood is None or self.over.position_1 < LEAST_TO_IMPROVE:
            return False
        a_little = self.first.mean >= 0 and self.length.mean >= A_LITTLE
        return a_little and self.likelihood.mean >= CLEAR_LIKELIHOOD and self.likelihood.low > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: mean, and lower end of the interval."""
        named = {"position_1": self.first, "tau": self.length, "likelihood": self.likelihood}
        return {name: None if one is None else [one.mean, one.low] for name, one in named.items()}


@dataclass(frozen=True)
class Trial:
    """An alternative, what it scores, and by how much that is better on texts it was not chosen by.

    Attributes:
        alternative: What was tried.
        score, gain: What came of it; of position 1 alone where that was bad enough.
        whole: Whether later positions were looked at.
    """

    alternative: Alternative
    score: Score
    gain: Gain
    whole: bool = True

    @property
    def wins(self) -> bool:
        """Whether it should be in force."""
        return self.gain.is_clear and self.gain.first.mean >= self.alternative.least


def try_all(
    heads: DraftHead, target: PreTrainedModel, evidence: Evidence, positions: int, in_force: Score
) -> list[Trial]:
    """Every alternative, the best of a search over single hidden states included."""
    found = []
    levels = tuple(evidence.states)
    first = Score.of(draft_everywhere(heads, evidence, tuple(heads.feature_layers)), evidence)
    for alternative in bar(alternatives(heads, target, evidence.depth, levels), "hypotheses"):
        bad = None if heads.trains_at_anchors else _hopeless(heads, evidence, alternative, first)
        found.append(bad or _trial(heads, evidence, alternative, positions, in_force))
    searched = search_taps(heads, evidence)
    if searched is None or any(searched.levels == trial.alternative.levels for trial in found):
        return found
    trial = _trial(heads, evidence, searched, positions, in_force, SEARCHED_TEXTS)
    # One of very many sets is better than a known one by chance; it has to be clearly.
    rivals = [other.score for other in found if other.wins and other.alternative.levels is not None]
    clear = all(
        trial.score.of_texts(SEARCHED_TEXTS).gain_over(one.of_texts(SEARCHED_TEXTS)).is_clear for one in rivals
    )
    return [*found, trial] if clear else found


def _hopeless(heads: DraftHead, evidence: Evidence, alternative: Alternative, in_force: Score) -> Trial | None:
    """An alternative that makes position 1 clearly worse, which later ones depend on; `None` for others."""
    score = Score.of(drafts_under(heads, evidence, alternative, 1), evidence)
    gain = score.gain_over(in_force)
    worse = gain.likelihood is not None and gain.likelihood.mean < HOPELESS
    return Trial(alternative, score, gain, whole=False) if worse else None


def _trial(
    heads: DraftHead, evidence: Evidence, alternative: Alternative, positions: int, in_force: Score, first: int = 0
) -> Trial:
    """What an alternative scores; its gain on the texts from `first` on, those before have chosen it."""
    score = Score.of(drafts_under(heads, evidence, alternative, positions), evidence)
    return Trial(alternative, score, score.of_texts(first).gain_over(in_force.of_texts(first)))


def drafts_under(heads: DraftHead, evidence: Evidence, alternative: Alternative, positions: int) -> Drafts:
    """What the heads draft as the alternative says."""
    levels = alternative.levels or tuple(heads.feature_layers)
    with tried(heads, alternative):
        return draft_everywhere(heads, evidence, levels, positions, alternative.shift, alternative.embedding)


def search_taps(heads: DraftHead, evidence: Evidence) -> Alternative | None:
    """The best hidden states found by trying all of them at one place after the other, on a few of the texts; `None`
    if those in force are, if there are too many to try, or too few texts to try the best one on others."""
    levels: tuple[Level, ...] = tuple(evidence.depth if level == -1 else level for level in heads.feature_layers)
    too_many = len(levels) * (evidence.depth + 1) > LARGEST_SEARCH
    if not levels or too_many or len(evidence.lengths) < 2 * SEARCHED_TEXTS:
        return None
    part = evidence.part(range(SEARCHED_TEXTS))
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
    last = heads.config.vocab_size - 1
    others |= {"one token earlier": (mapping - 1).clamp_min(0), "one token later": (mapping + 1).clamp_max(last)}
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
        found.append(Trial(alternative, score, score.gain_over(before)))
    return found


def _mapped(
    heads: DraftHead, drafts: Drafts, evidence: Evidence, alternative: Alternative, mapping: Any, in_force: Score
) -> Trial:
    tokens = tuple(token_ids_of_slots(heads, slots, mapping) for slots in drafts.slots)
    score = Score.of(Drafts(drafts.slots, tokens), evidence)
    return Trial(alternative, score, score.gain_over(in_force))


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
    text, guess = guessed_text(drafts, evidence), drafts.tokens[0]
    found = {}
    for offset in reach:
        other = evidence.token_ids.roll(-offset, dims=1)
        usable = text.clone()
        if offset > 0:  # there must be such a token
            usable[:, -offset:] = False
            usable &= own_text(evidence, 0).roll(-offset, dims=1)
        found[offset] = float((guess == other)[usable].float().mean()) if bool(usable.any()) else 0.0
    return found
