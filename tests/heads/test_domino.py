"""Domino: a recurrent correction along the drafted path, the same in drafting and training, and its first loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.blocks import slots_both_ways
from support.heads import scrambled_heads
from support.targets import shared_target

from hf_specheads import AutoDraftHead, DraftHead


def heads_of(**options: Any) -> DraftHead:
    options = {"num_hidden_layers": 2, "block_size": 5, "gru_hidden_size": 12, "correction_rank": 6, **options}
    return scrambled_heads(shared_target(), "domino", **options).bind(shared_target())


@pytest.mark.parametrize("anchor_slot", ["drafts", "idle"])
@pytest.mark.parametrize("plain_positions", [0, 2])
@torch.no_grad()
def test_training_says_what_drafting_says(plain_positions: int, anchor_slot: str) -> None:
    """Logits of every slot after true tokens; the first positions keep the slot's own."""
    heads = heads_of(anchor_slot=anchor_slot, plain_positions=plain_positions)
    for slot in slots_both_ways(heads):
        torch.testing.assert_close(slot.drafted.logits(slot.held), slot.logits, rtol=1e-4, atol=1e-4)
        base = heads.slot_logits(slot.cache, slot.position)[:, 0]
        torch.testing.assert_close(slot.drafted.base(slot.held), base, rtol=1e-4, atol=1e-4)
        assert ((slot.logits - base).abs().max() > 1e-3) == (slot.position >= plain_positions)


@torch.no_grad()
def test_the_recurrent_step_is_that_of_pytorch() -> None:
    heads = heads_of()
    theirs = torch.nn.GRU(32, 12, bias=False, batch_first=True)
    theirs.load_state_dict(heads.prefix_gru.state_dict())
    tokens, state = torch.randn(2, 4, 32), torch.zeros(2, 12)
    for position, expected in enumerate(theirs(tokens)[0].unbind(1)):
        state = heads.prefix_gru(tokens[:, position], state)
        torch.testing.assert_close(state, expected)


@torch.no_grad()
def test_all_tokens_of_a_branch_count() -> None:
    """Also those before the last one, and those drafted where nothing is corrected."""
    heads = heads_of(plain_positions=2)
    features = torch.randn(1, 5, len(heads.feature_layers) * heads.config.feature_size)
    cache = heads.new_draft_cache()
    state, _ = heads.start_draft(cache, torch.tensor([[0, 1, 2, 3, 4, 5]]), features)
    states, logits = heads.extend_draft(cache, 1, torch.tensor([[7, 8]]), state.expand(-1, 2, -1), None)
    assert torch.equal(logits[:, 0], logits[:, 1])
    again = heads.extend_draft(cache, 2, torch.tensor([[9, 9]]), states, None)[1]
    assert (again[:, 0] - again[:, 1]).abs().max() > 1e-4


def test_impossible_configs() -> None:
    with pytest.raises(ValueError, match=r"plain_positions.*less than `block_size`, got 9"):
        AutoDraftHead.from_target(shared_target(), "domino", block_size=9, plain_positions=9)
    with pytest.raises(ValueError, match="gru_hidden_size"):
        AutoDraftHead.from_target(shared_target(), "domino", gru_hidden_size=0)
