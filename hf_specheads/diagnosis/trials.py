"""Tries hypotheses: measures acceptance under each alternative, and finds those that are clearly better."""

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

# An alternative wins clearly if it gains CLEAR_FIRST in acceptance at position 1 or CLEAR_LENGTH tokens per round, and
# the lower end of that gain's interval is at least SURELY.
CLEAR_FIRST, CLEAR_LENGTH, SURELY = 0.03, 0.1, 0.01
UNITS = 32  # least number of units of text for the intervals; if there are fewer texts, they are cut into pieces
# An alternative also wins if it gains A_LITTLE tokens per round and CLEAR_LIKELIHOOD nats per token. Likelihoods
# show what counts on few texts cannot. The current setting must then accept at least LEAST_TO_IMPROVE at
# position 1. `python -m benchmarks doctor` measures the largest gain of sound heads and the smallest of repaired ones.
CLEAR_LIKELIHOOD, A_LITTLE, LEAST_TO_IMPROVE = 0.025, 0.03, 0.1
SEARCHED_TEXTS, LARGEST_SEARCH = 2, 200
HOPELESS = -0.1  # nats per token at position 1; later positions are not tried for alternatives that lose more


@dataclass(frozen=True)
class Score:
    """Acceptance on the target's own texts, per unit: a text, or a piece of it if there are few texts.

    Attributes:
        pieces: Number of pieces of every text.
        first, guesses: Number of right guesses of draft position 1, and of all its guesses.
        tokens, roots: Number of accepted drafts of chains from every token, and of these tokens.
        likelihood, drafted: Summed log-likelihood of tokens under the drafts at all positions, and their number.
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
        """Log-likelihood in nats per token, higher is better; `None` if it was not computed."""
        return sum(self.likelihood) / max(sum(self.drafted), 1) if self.drafted else None

    def __str__(self) -> str:
        return self.shown()

    def shown(self, whole: bool = True) -> str:
        """Formats the score as a row of a table; tau is shown only if all positions were drafted."""
        likely = "" if self.log_likelihood is None else f"  {self.log_likelihood:.3f}"
        return f"{self.position_1:.3f}  {f'{self.tau:.2f}' if whole else '   -'}{likely}"

    @property
    def position_1(self) -> float:
        """Acceptance of draft position 1."""
        return sum(self.first) / max(sum(self.guesses), 1)

    @property
    def tau(self) -> float:
        """Tokens per round of a chain, bonus token included."""
        return 1 + sum(self.tokens) / max(sum(self.roots), 1)

    def of_texts(self, start: int) -> Score:
        """Score of the texts from index `start` on."""
        columns = (self.first, self.guesses, self.tokens, self.roots, self.likelihood, self.drafted)
        return Score(self.pieces, *(column[start * self.pieces :] for column in columns))

    def gain_over(self, other: Score) -> Gain:
        """Gain over another score, paired by unit."""
        known = self.drafted and other.drafted
        return Gain(
            difference_interval((self.first, self.guesses), (other.first, other.guesses)),
            difference_interval((self.tokens, self.roots), (other.tokens, other.roots)),
            difference_interval((self.likelihood, self.drafted), (other.likelihood, other.drafted)) if known else None,
            other,
        )


def by_piece(values: torch.Tensor, evidence: Evidence, pieces: int) -> tuple[Any, ...]:
    """Sums values [B, T] over consecutive pieces of every text's own tokens; pieces of one text are adjacent."""
    places = torch.arange(values.shape[1], device=values.device)[None]
    starts, lengths = (torch.tensor(one, device=places.device)[:, None] for one in (evidence.starts, evidence.lengths))
    piece = (places - starts).clamp_min(0) * pieces // (lengths - starts).clamp_min(1)
    sums = torch.zeros(len(values), pieces, dtype=values.dtype if values.is_floating_point() else torch.long)
    sums = sums.to(values.device).scatter_add(1, piece.clamp_max(pieces - 1), values.to(sums.dtype))
    return tuple(sums.flatten().tolist())


@dataclass(frozen=True)
class Gain:
    """Gain of an alternative over the current setting, paired by units of text.

    Attributes:
        first, length, likelihood: Gain at position 1, in tau, and in nats per token (`None` if not computed).
        over: Score that it is compared with.
    """

    first: Interval
    length: Interval
    likelihood: Interval | None
    over: Score

    @property
    def is_clear(self) -> bool:
        """Whether the gain is significant: much more is accepted, or a little more and the text is surely likelier.

        The likelihood must increase in any case: with the right setting both increase, by chance seldom.
        """
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
        """Returns plain values, for JSON: mean and lower end of every interval."""
        named = {"position_1": self.first, "tau": self.length, "likelihood": self.likelihood}
        return {name: None if one is None else [one.mean, one.low] for name, one in named.items()}


@dataclass(frozen=True)
class Trial:
    """Trial of an alternative.

    Attributes:
        alternative: Alternative that was tried.
        score: Its score; of position 1 only if that was clearly worse.
        gain: Its gain, on texts that were not used for choosing the alternative.
        whole: Whether later positions were tried as well.
    """

    alternative: Alternative
    score: Score
    gain: Gain
    whole: bool = True

    @property
    def wins(self) -> bool:
        """Whether the alternative should replace the current setting."""
        return self.gain.is_clear and self.gain.first.mean >= self.alternative.least


def try_all(
    heads: DraftHead, target: PreTrainedModel, evidence: Evidence, positions: int, in_force: Score
) -> list[Trial]:
    """Tries every alternative, including the best of a search over single hidden states."""
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
    # Among very many sets, one is always better than a known set by chance, so its lead must be clear.
    rivals = [other.score for other in found if other.wins and other.alternative.levels is not None]
    clear = all(
        trial.score.of_texts(SEARCHED_TEXTS).gain_over(one.of_texts(SEARCHED_TEXTS)).is_clear for one in rivals
    )
    return [*found, trial] if clear else found


def _hopeless(heads: DraftHead, evidence: Evidence, alternative: Alternative, in_force: Score) -> Trial | None:
    """Trial of an alternative that makes position 1, on which all others depend, clearly worse; `None` otherwise."""
    score = Score.of(drafts_under(heads, evidence, alternative, 1), evidence)
    gain = score.gain_over(in_force)
    worse = gain.likelihood is not None and gain.likelihood.mean < HOPELESS
    return Trial(alternative, score, gain, whole=False) if worse else None


def _trial(
    heads: DraftHead, evidence: Evidence, alternative: Alternative, positions: int, in_force: Score, first: int = 0
) -> Trial:
    """Tries an alternative. Its gain is measured on texts from `first` on; earlier ones were used to choose it."""
    score = Score.of(drafts_under(heads, evidence, alternative, positions), evidence)
    return Trial(alternative, score, score.of_texts(first).gain_over(in_force.of_texts(first)))


def drafts_under(heads: DraftHead, evidence: Evidence, alternative: Alternative, positions: int) -> Drafts:
    """Drafts of the heads under an alternative."""
    levels = alternative.levels or tuple(heads.feature_layers)
    with tried(heads, alternative):
        return draft_everywhere(heads, evidence, levels, positions, alternative.shift, alternative.embedding)


def search_taps(heads: DraftHead, evidence: Evidence) -> Alternative | None:
    """Searches for better hidden states on a few texts, trying all of them for one part of the feature at a time.

    Returns `None` if the current ones are best, if there are too many to try, or if no other texts would be left for a
    fair trial.
    """
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
    """Log-likelihood of the texts under drafts of position 1 from these hidden states."""
    likely = Score.of(draft_everywhere(heads, evidence, levels), evidence).log_likelihood
    return float("-inf") if likely is None else likely


# ---------------------------------------------------------------------- vocabulary and labels, without a forward
def mapping_trials(heads: DraftHead, drafts: Drafts, evidence: Evidence, in_force: Score) -> list[Trial]:
    """Tries other draft vocabularies: identity, shifts by one token, offsets read as ids, a map fitted to texts."""
    mapping = heads.trained_vocabulary
    if mapping is None:
        return []
    mend = "the map from draft ids to tokens is not the one that the heads were trained with; use `d2t` from training"
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
    """Scores a draft vocabulary fitted to the texts, and the current one; `None` for a single text.

    In each half of the texts, every draft id is mapped to the token that was right most often in the other half.
    """
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
        for pair in pairs[counts.argsort(stable=True)].tolist():  # ascending: the most frequent overwrites others
            fitted[pair // vocabulary] = pair % vocabulary
        other = slice(1 - half, None, 2)
        tokens[other] = torch.where(slots[other] < 0, -1, fitted.to(slots.device)[slots[other].clamp_min(0)])
    one = (Drafts(drafts.slots[:1], (kind,)) for kind in (tokens, drafts.tokens[0]))
    fitted_score, plain = (Score.of(each, evidence) for each in one)
    return fitted_score, plain


def label_offsets(drafts: Drafts, evidence: Evidence, reach: Sequence[int] = (-1, 0, 1, 2)) -> dict[int, float]:
    """For every offset, how often the draft of position 1 is the token that many places after the right one."""
    text, guess = guessed_text(drafts, evidence), drafts.tokens[0]
    found = {}
    for offset in reach:
        other = evidence.token_ids.roll(-offset, dims=1)
        usable = text.clone()
        if offset > 0:  # near the end of a text there is no such token
            usable[:, -offset:] = False
            usable &= own_text(evidence, 0).roll(-offset, dims=1)
        found[offset] = float((guess == other)[usable].float().mean()) if bool(usable.any()) else 0.0
    return found
