"""What heads would accept of the target's own text if every earlier draft were right, at every token of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..heads.base import DraftHead
from .evidence import Evidence, Level

CHUNK = 512  # rows whose logits exist at a time


@dataclass(frozen=True)
class Drafts:
    """Greedy drafts of heads at every row of an evidence.

    Attributes:
        slots: int64 [P][B, T], index of the favourite draft logit of draft position p + 1, by the token it guesses:
            entry t is the guess of token t; -1 where there is none.
        tokens: The same as token ids of the target.
        log_probs: fp32 [P][B, T], logarithm of the draft's probability of token t; NaN where it cannot be drafted, or
            there is no guess.
    """

    slots: tuple[torch.Tensor, ...]
    tokens: tuple[torch.Tensor, ...]
    log_probs: tuple[torch.Tensor, ...] = ()

    @property
    def positions(self) -> int:
        """Draft positions P."""
        return len(self.slots)


@torch.no_grad()
def draft_everywhere(
    heads: DraftHead,
    evidence: Evidence,
    levels: Sequence[Level],
    positions: int = 1,
    shift: int = 0,
) -> Drafts:
    """Runs the heads on captured features, all rows at once: the forward that training uses, which is drafting's.

    Args:
        heads: Bound to the target.
        evidence: What was captured.
        levels: Hidden states that make up the features.
        positions: Draft positions.
        shift: Rows get the feature of the token that many tokens before their own (negative: after).
    """
    features = evidence.features(levels)
    if features is not None and shift:
        features = features.roll(shift, dims=1)
    borrowed = heads.borrowed
    rows = evidence.rows(features, borrowed.embed_tokens, borrowed.lm_head)
    slots, tokens, log_probs = [], [], []
    wanted = slots_of_token_ids(heads, evidence.token_ids)
    valid = rows.documents >= 0
    for position, drafted in enumerate(heads.unroll(rows, positions)):
        # Row t knows the token t + 1 and, at offset o, guesses the token t + 2 + o.
        reach = 2 + drafted.offset
        rows_of = evidence.token_ids.shape[1] - reach
        labels = torch.full_like(valid, -1, dtype=torch.long)
        labels[:, :rows_of] = wanted[:, reach:]
        guesses, likely = _favourites(drafted, valid, labels)
        placed, said = torch.full_like(wanted, -1), torch.full(wanted.shape, torch.nan, device=wanted.device)
        placed[:, reach:], said[:, reach:] = guesses[:, :rows_of], likely[:, :rows_of]
        slots.append(placed)
        tokens.append(token_ids_of_slots(heads, placed))
        log_probs.append(said)
        if position + 1 == positions:
            break
    return Drafts(tuple(slots), tuple(tokens), tuple(log_probs))


def _favourites(drafted: Any, valid: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the favourite draft logit at valid rows, int64 [B, R], -1 elsewhere, and the log-probability of the
    labels [B, R], NaN where there is none."""
    hidden, wanted = drafted.hidden[:, : valid.shape[1]][valid], labels[valid]
    chosen, likely = [], []
    for part, ids in zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True):
        log_probs = drafted.logits(part).float().log_softmax(-1)
        chosen.append(log_probs.argmax(-1))
        picked = log_probs.gather(-1, ids.clamp(0, log_probs.shape[-1] - 1)[:, None].to(log_probs.device))[:, 0]
        likely.append(picked.masked_fill((ids < 0).to(picked.device), torch.nan))
    found = torch.full(valid.shape, -1, dtype=torch.long, device=valid.device)
    said = torch.full(valid.shape, torch.nan, device=valid.device)
    found[valid], said[valid] = torch.cat(chosen).to(valid.device), torch.cat(likely).to(valid.device)
    return found, said


def slots_of_token_ids(heads: DraftHead, token_ids: torch.Tensor) -> torch.Tensor:
    """Indices of the draft logits of tokens, int64 [B, T]; -1 for tokens that cannot be drafted."""
    mapping = heads.trained_vocabulary
    if mapping is None:
        return token_ids
    known = torch.full((heads.config.vocab_size,), -1, dtype=torch.long, device=token_ids.device)
    known[mapping.to(token_ids.device)] = torch.arange(len(mapping), device=token_ids.device)
    return known[token_ids]


def token_ids_of_slots(heads: DraftHead, slots: torch.Tensor, mapping: torch.Tensor | None = None) -> torch.Tensor:
    """Token ids that indices of draft logits stand for; -1 stays."""
    mapping = heads.trained_vocabulary if mapping is None else mapping
    if mapping is None:
        return slots
    return torch.where(slots < 0, slots, mapping.to(slots.device)[slots.clamp_min(0)])


def own_text(evidence: Evidence, position: int) -> torch.Tensor:
    """bool [B, T], tokens that draft position `position` (0-based) can guess in rounds: those the target wrote after
    the first one, which the prefill gives and a round starts from."""
    places = torch.arange(evidence.token_ids.shape[1], device=evidence.token_ids.device)[None]
    starts, lengths = (torch.tensor(one, device=places.device)[:, None] for one in (evidence.starts, evidence.lengths))
    return (places > starts + position) & (places < lengths)


def hits(drafts: Drafts, evidence: Evidence) -> list[torch.Tensor]:
    """bool [P][B, T]: whether draft position p + 1 guesses token t, which the target wrote."""
    return [tokens == evidence.token_ids for tokens in drafts.tokens]


def accepted(drafts: Drafts, evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of P drafts a chain from every token of the target's text would have accepted, int64 [B, T], and at
    which roots all P could have been, bool [B, T]."""
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
    return count, (places >= starts) & (places + len(found) < lengths)
