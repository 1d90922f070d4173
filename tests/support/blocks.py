"""Runs block drafters both as in training, at sampled rows, and as in drafting, round by round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_specheads import DraftHead
from hf_specheads.cache.draft import DraftCache
from hf_specheads.unroll.rows import DraftedPass, TrainingRows

from .targets import shared_target

ANCHORS = (3, 6)


@dataclass(frozen=True)
class Slot:
    """One slot after true tokens.

    Attributes:
        drafted: The training pass of the slot's draft position.
        held: Row [1, *] of that pass at the anchor.
        cache: Draft cache of the round.
        position: Draft position, from 0.
        before: The token before the slot, [1, 1].
        logits: Logits of the slot when drafting, [1, Vd].
    """

    drafted: DraftedPass
    held: torch.Tensor
    cache: DraftCache
    position: int
    before: torch.Tensor
    logits: torch.Tensor


def slots_both_ways(heads: DraftHead) -> Iterator[Slot]:
    """Yields all slots of the blocks after two anchors of a random text. The heads must be bound to the shared
    target."""
    heads.tree_config = heads.tree_config.replace(kind="chain", depth=heads.max_draft_positions)
    generator, target = torch.Generator().manual_seed(2), shared_target()
    features = torch.randn(1, 12, len(heads.feature_layers) * heads.config.feature_size, generator=generator)
    ids = torch.randint(90, (1, 13), generator=generator)
    rows = TrainingRows(
        features=features,
        token_ids=None,
        next_token_ids=ids[:, 1:],
        documents=torch.zeros(1, 12, dtype=torch.long),
        position_ids=torch.arange(12)[None],
        embed=target.get_input_embeddings(),
        lm_head=target.lm_head,
        anchors=torch.tensor([ANCHORS]),
    )
    passes = list(heads.unroll(rows, heads.max_draft_positions))
    for column, anchor in enumerate(ANCHORS):
        cache = heads.new_draft_cache()
        state, logits = heads.start_draft(cache, ids[:, : anchor + 2], features[:, : anchor + 1])
        for position, drafted in enumerate(passes):
            before = ids[:, anchor + 1 + position : anchor + 2 + position]
            if position:
                state, logits = heads.extend_draft(cache, position, before, state, None)
            yield Slot(drafted, drafted.hidden[:, column], cache, position, before, logits[:, 0])
