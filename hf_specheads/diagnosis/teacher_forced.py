"""Teacher-forced drafts: what heads draft at every token of the target's own text if all earlier drafts are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..heads.base import DraftHead
from ..heads.per_position import PerPositionHead
from ..unroll.rows import DraftedPass
from .evidence import Evidence, Level

CHUNK = 512  # number of rows whose logits are in memory at a time
ROUNDS = 48  # rounds per text, for heads that draft a block per round
FIRST_TOKENS = 4  # tokens that count as the beginning of a turn
LEAST_LIKELY = -20.0  # nats; floor for tokens outside of the candidates, which would otherwise be impossible


@dataclass(frozen=True)
class Drafts:
    """Greedy drafts of heads at every row of an evidence. Entry t is the guess of token t.

    Attributes:
        slots: int64 [P][B, T], index of the largest draft logit of draft position p + 1; -1 without a guess.
        tokens: int64 [P][B, T], the same as token ids of the target.
        log_probs: fp32 [P][B, T], the draft's log-probability of token t; NaN if token t cannot be drafted, or without
            a guess.
        unread: Number of tokens between the last token that the heads read and the one that position 1 guesses.
    """

    slots: tuple[torch.Tensor, ...]
    tokens: tuple[torch.Tensor, ...]
    log_probs: tuple[torch.Tensor, ...] = ()
    unread: int = 0

    @property
    def positions(self) -> int:
        """Number P of draft positions."""
        return len(self.slots)


@torch.no_grad()
def draft_everywhere(
    heads: DraftHead,
    evidence: Evidence,
    levels: Sequence[Level],
    positions: int = 1,
    shift: int = 0,
    embedding: float = 1.0,
) -> Drafts:
    """Runs the heads on captured features, many rows at once, with training's forward, which agrees with drafting.

    Args:
        heads: Heads, bound to the target. Block drafters draft at some rows of every text ([`rounds_in`]), others at
            all rows.
        evidence: Captured texts and hidden states.
        levels: Hidden states that make up the features.
        positions: Number of draft positions.
        shift: Number of tokens by which features are delayed: each row gets the feature of an earlier token (negative:
            a later one).
        embedding: Factor for the target's embeddings.
    """
    features = evidence.features(levels)
    if features is not None and shift:
        features = features.roll(shift, dims=1)
    borrowed = heads.borrowed
    anchors = rounds_in(evidence) if heads.trains_at_anchors else None
    embed = borrowed.embed_tokens if embedding == 1 else lambda ids: borrowed.embed_tokens(ids) * embedding
    rows = evidence.rows(features, embed, borrowed.lm_head, anchors)
    index, wanted = rows.anchor_rows(), slots_of_token_ids(heads, evidence.token_ids)
    known = (index >= 0) & (rows.documents.gather(1, index.clamp_min(0)) >= 0)
    slots, tokens, log_probs = [], [], []
    for position, drafted in enumerate(heads.unroll(rows, positions)):
        # Row t knows token t + 1. At offset o it guesses token t + 2 + o.
        guessed = index + 2 + drafted.offset
        valid = known & (guessed < wanted.shape[1])
        guessed = guessed.masked_fill(~valid, wanted.shape[1])  # an extra column that is discarded
        labels = torch.nn.functional.pad(wanted, (0, 1), value=-1).gather(1, guessed)
        guesses, likely = _favourites(drafted, valid, labels)
        slots.append(_placed(guesses, guessed, wanted.shape[1], -1))
        tokens.append(token_ids_of_slots(heads, slots[-1]))
        log_probs.append(_placed(likely, guessed, wanted.shape[1], torch.nan))
        if position + 1 == positions:
            break
    return Drafts(tuple(slots), tuple(tokens), tuple(log_probs), unread_tokens(heads))


def unread_tokens(heads: DraftHead) -> int:
    """Number of unread tokens: 1 for heads that read only the last feature and not the token after it, else 0.

    The former are Medusa and ungrounded Hydra heads.
    """
    return int(isinstance(heads, PerPositionHead) and not getattr(heads.config, "grounded", False))


def _placed(values: torch.Tensor, columns: torch.Tensor, width: int, nothing: float) -> torch.Tensor:
    """Scatters values [B, A] to columns [B, A] of a tensor [B, T]; the column T = `width` is discarded."""
    found = torch.full((len(values), width + 1), nothing, dtype=values.dtype, device=values.device)
    return found.scatter(1, columns, values)[:, :width]


def rounds_in(evidence: Evidence) -> torch.Tensor:
    """Chooses rows of every text at which rounds start: int64 [B, A], padded with -1.

    They are the first rows of the target's own text, others spread over it, and a few of the prompt.
    """
    chosen = []
    for start, length in zip(evidence.starts, evidence.lengths, strict=True):
        first, end = max(start - 1, 0), max(length - 2, 0)  # row length - 3 is the last, and guesses the last token
        early = range(first, min(first + FIRST_TOKENS, end))
        chosen.append(sorted({*_spread(0, first, ROUNDS // 4), *early, *_spread(first, end, ROUNDS)}))
    most = max(map(len, chosen))
    return torch.tensor([[*rows, *[-1] * (most - len(rows))] for rows in chosen], device=evidence.token_ids.device)


def _spread(first: int, end: int, most: int) -> list[int]:
    count = max(min(most, end - first), 0)
    return [first + i * (end - first) // count for i in range(count)]


def _favourites(drafted: DraftedPass, valid: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the index of the largest draft logit, int64 [B, A], and the log-probability of the labels, [B, A].

    Rows that are not valid get -1 and NaN; labels that cannot be drafted get NaN.
    """
    hidden, wanted = drafted.hidden[:, : valid.shape[1]][valid], labels[valid]
    chosen, likely = [], []
    for part, ids in zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True):
        log_probs = _log_probs(drafted, part)
        chosen.append(log_probs.argmax(-1))
        picked = log_probs.gather(-1, ids.clamp(0, log_probs.shape[-1] - 1)[:, None].to(log_probs.device))[:, 0]
        likely.append(picked.masked_fill((ids < 0).to(picked.device), torch.nan))
    found = torch.full(valid.shape, -1, dtype=torch.long, device=valid.device)
    said = torch.full(valid.shape, torch.nan, device=valid.device)
    found[valid], said[valid] = torch.cat(chosen).to(valid.device), torch.cat(likely).to(valid.device)
    return found, said


def _log_probs(drafted: DraftedPass, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities that drafting uses, fp32 [R, V], at least [`LEAST_LIKELY`].

    For heads that choose among candidates, they are the candidates' scores.
    """
    logits = drafted.logits(rows).float()
    if drafted.selected is not None:
        candidates, scores = drafted.selected(rows, logits)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores.float())
    return logits.log_softmax(-1).clamp_min(LEAST_LIKELY)


def slots_of_token_ids(heads: DraftHead, token_ids: torch.Tensor) -> torch.Tensor:
    """Maps token ids to indices of draft logits, int64 [B, T]; -1 for tokens that cannot be drafted."""
    mapping = heads.trained_vocabulary
    if mapping is None:
        return token_ids
    known = torch.full((heads.config.vocab_size,), -1, dtype=torch.long, device=token_ids.device)
    known[mapping.to(token_ids.device)] = torch.arange(len(mapping), device=token_ids.device)
    return known[token_ids]


def token_ids_of_slots(heads: DraftHead, slots: torch.Tensor, mapping: torch.Tensor | None = None) -> torch.Tensor:
    """Maps indices of draft logits to token ids; -1 is kept."""
    mapping = heads.trained_vocabulary if mapping is None else mapping
    if mapping is None:
        return slots
    return torch.where(slots < 0, slots, mapping.to(slots.device)[slots.clamp_min(0)])


def own_text(evidence: Evidence, position: int) -> torch.Tensor:
    """Tokens that draft position `position` (0-based) can guess in rounds, bool [B, T].

    They are the target's tokens except the first ones: the prefill gives the first, and rounds start from it.
    """
    places = torch.arange(evidence.token_ids.shape[1], device=evidence.token_ids.device)[None]
    starts, lengths = (torch.tensor(one, device=places.device)[:, None] for one in (evidence.starts, evidence.lengths))
    return (places > starts + position) & (places < lengths)


def guessed_text(drafts: Drafts, evidence: Evidence, position: int = 0) -> torch.Tensor:
    """Tokens of [`own_text`] for which there is a guess, bool [B, T]."""
    return own_text(evidence, position) & (drafts.slots[position] >= 0)


def hits(drafts: Drafts, evidence: Evidence) -> list[torch.Tensor]:
    """Whether the guess of draft position p + 1 for token t is right, bool [P][B, T]."""
    return [tokens == evidence.token_ids for tokens in drafts.tokens]


def accepted(drafts: Drafts, evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts the accepted drafts of a chain of P drafts from every token, int64 [B, T].

    Also returns the tokens that are roots after which all P drafts could have been accepted, bool [B, T].
    """
    found, length = hits(drafts, evidence), evidence.token_ids.shape[1]
    running = torch.ones_like(evidence.token_ids, dtype=torch.bool)
    count = torch.zeros_like(evidence.token_ids)
    for position, hit in enumerate(found):
        moved = torch.zeros_like(hit)
        moved[:, : length - position - 1] = hit[:, position + 1 :]
        running = running & moved
        count = count + running
    places = torch.arange(length, device=count.device)[None]
    starts, lengths = (torch.tensor(one, device=count.device)[:, None] for one in (evidence.starts, evidence.lengths))
    begun = torch.nn.functional.pad(drafts.slots[0][:, 1:] >= 0, (0, 1))  # roots: tokens with a guess for the next one
    return count, begun & (places >= starts) & (places + len(found) < lengths)
