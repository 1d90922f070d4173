"""DFlash 2: convolutions stay in their block, candidates follow the token before, drafting is what is trained."""

from __future__ import annotations

import pytest
import torch
from support.blocks import slots_both_ways
from support.heads import scrambled_heads
from support.targets import plain, prompt, shared_target
from transformers import set_seed

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.heads.dflash2 import BlockConvolution


def heads_of(**options) -> DraftHead:
    options = {"num_hidden_layers": 2, "block_size": 5, "selector_rank": 6, "selector_top_k": 8, **options}
    return scrambled_heads(shared_target(), "dflash2", **options).bind(shared_target())


def test_convolution_row_by_row() -> None:
    """y_t = sum over taps of (base + delta of the channel's group) * x_{t - tap}, from the block's own rows."""
    heads = heads_of(conv_kernel_size=3)
    convolution, rows = heads.layers[0].attention_conv, torch.randn(1, 10, 32)
    deltas = convolution.deltas(rows)
    groups = convolution.kernel_projection(rows).view(1, 10, 2, 3, 2)  # of 16 channels each
    result = convolution(rows, deltas, 1)
    for row in range(10):
        for channel in (0, 15, 16, 31):
            expected = sum(
                (convolution.base_kernel[1, tap, channel] + groups[0, row, 1, tap, channel // 16])
                * rows[0, row - tap, channel]
                for tap in range(3)
                if row % 5 >= tap
            )
            torch.testing.assert_close(result[0, row, channel], expected, rtol=1e-4, atol=1e-5)


def test_fresh_convolutions_are_the_identity() -> None:
    heads = AutoDraftHead.from_target(shared_target(), "dflash2", num_hidden_layers=1, block_size=5)
    convolutions = [module for module in heads.modules() if isinstance(module, BlockConvolution)]
    rows = torch.randn(2, 10, 32)
    assert len(convolutions) == 2
    for convolution in convolutions:
        assert torch.equal(convolution(rows, convolution.deltas(rows), 0), rows)


@torch.no_grad()
def test_training_says_what_drafting_says() -> None:
    """Candidates and scores of every slot after true tokens."""
    for slot in slots_both_ways(heads_of()):
        candidates, scores = slot.drafted.selected(slot.held, slot.drafted.logits(slot.held))
        torch.testing.assert_close(slot.logits[0, candidates[0]], scores[0], rtol=1e-4, atol=1e-4)
        assert int(slot.logits.isfinite().sum()) == 8


@pytest.mark.parametrize("kind", ["chain", "static"])
def test_drawn_children_are_candidates(kind: str) -> None:
    """q is the selector's: drawn children of every node are among its candidates, and the text is reproducible."""
    target, ids, heads = shared_target(), prompt(), heads_of()
    heads.trace, heads.adaptive, heads.exact_seed = True, False, False
    tree = {"kind": kind, "depth": 3} if kind == "chain" else {"kind": kind, "choices": ((0,), (1,), (0, 0), (1, 0))}
    drawn = heads.with_tree(children="sampled", **tree)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": True, "top_k": 0}
    texts = []
    for _ in range(2):
        set_seed(3)
        texts.append(target.generate(ids, assistant_model=drawn, **options))
        assert all(bool(one.scores.isfinite().all()) for one in drawn.last_stats.trees)
    assert torch.equal(*texts)
    assert torch.equal(plain(target, ids, 16, assistant_model=drawn), plain(target, ids, 16))


def test_impossible_configs() -> None:
    with pytest.raises(ValueError, match=r"conv_group_size.*32.*got 7"):
        AutoDraftHead.from_target(shared_target(), "dflash2", conv_group_size=7)
    with pytest.raises(ValueError, match="selector_top_k"):
        AutoDraftHead.from_target(shared_target(), "dflash2", selector_top_k=1000)
