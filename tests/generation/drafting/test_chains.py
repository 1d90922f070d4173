"""The best of many logits, found by blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specheads.generation.drafting.chains import BLOCKS, MANY_LOGITS, best_of_blocks


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.integers(MANY_LOGITS, MANY_LOGITS + 3 * BLOCKS),
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    spread=st.sampled_from([0.0, 1.0, 300.0]),
    left=st.sampled_from([None, 5, MANY_LOGITS // 2]),
    seed=st.integers(0, 2**20),
)
def test_the_same_as_by_all_log_probabilities(vocab, rows, spread, left, seed):
    """Includes logits with most tokens ruled out, and with many ties."""
    torch.manual_seed(seed)
    logits = spread * torch.randn(*rows, vocab)
    if left is not None:
        logits[..., torch.randperm(vocab)[left:]] = -torch.inf
    scores, tokens = best_of_blocks(logits)
    expected = torch.log_softmax(logits, -1).max(-1, keepdim=True).values
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(tokens, logits.argmax(-1, keepdim=True)), "of several as good, the first"


def test_no_numbers_are_said_to_be_none():
    logits = torch.randn(2, MANY_LOGITS)
    logits[1, 7] = torch.nan
    scores, _ = best_of_blocks(logits)
    assert scores[0].isfinite() and scores[1].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_of_the_type_of_the_logits(dtype):
    scores, tokens = best_of_blocks(torch.randn(1, 1, 5000).to(dtype))
    assert scores.dtype == dtype and scores.shape == tokens.shape == (1, 1, 1)
