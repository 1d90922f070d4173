"""Attention without additive masks: flex attention with block masks, and kernels that only support causal order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import batch_of, greedy
from support.heads import random_heads
from support.stubs import CountForwards, StubHead
from support.targets import own_target, shared_target
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface
from transformers.integrations import flex_attention as integration
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from hf_specheads import UnsupportedGenerationError
from hf_specheads.cache import masks

MIXED = (0, 0, 1, 0, None, 0, 0, 0, 2)
CHAIN: dict[str, Any] = {"kind": "chain", "depth": 4}
FAMILIES = ["llama", "qwen2-window"]


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces transformers' compiled flex attention by the uncompiled one. Compiling takes minutes, and the results
    are the same."""
    monkeypatch.setattr(
        integration,
        "compile_friendly_flex_attention",
        lambda *args, training, **options: flex_attention(*args, **options),
    )


def causal_kernel(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """Computes what a flash-attention kernel computes: causal order counted from the end of the keys, a window, and at
    most a padding mask [B, T]."""
    assert attention_mask is None or (attention_mask.dim() == 2 and attention_mask.shape[1] == key.shape[2])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows, slots = query.shape[2], key.shape[2]
    behind = torch.arange(slots - rows, slots)[:, None] - torch.arange(slots)
    seen = (behind >= 0) & (behind < (sliding_window or slots))
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None]
    scores = (query @ key.transpose(-1, -2)) * (scaling or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.fixture
def causal_stand_in() -> str:
    """Registers the kernel in the same way as kernels from the Hub."""
    AttentionInterface.register("causal_stand_in", causal_kernel)
    AttentionMaskInterface.register("causal_stand_in", flash_attention_mask)
    return "causal_stand_in"


def oracle(target, inputs: dict[str, torch.Tensor], texts: torch.Tensor, **tree: Any) -> StubHead:
    return StubHead.of_batch(target, inputs, texts, MIXED, **tree)


def test_block_masks_look_rows_up():
    allowed = torch.rand(2, 5, 300, generator=torch.Generator().manual_seed(0)) > 0.4
    allowed[:, :, :140] = False  # a block that no row attends to
    blocks = masks.block_mask(allowed)
    batch, rows, slots = torch.meshgrid(*map(torch.arange, allowed.shape), indexing="ij")
    assert torch.equal(blocks.mask_mod(batch, torch.zeros_like(batch), rows, slots), allowed)
    assert blocks.seq_lengths == (5, 300) and blocks.kv_num_blocks.shape[0] == 2
    assert int(blocks.kv_num_blocks.max()) == 2, "of three blocks of slots the first is empty"


@pytest.mark.slow  # flex attention is traced for every shape
@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(("family", "lengths"), [("llama", (7,)), *((family, (7, 3)) for family in FAMILIES)])
@pytest.mark.parametrize("tree", [{}, CHAIN], ids=["tree", "chain"])
def test_trees_under_flex_attention(family, lengths, tree):
    target = own_target(family, attention="flex_attention")
    inputs, _ = batch_of(lengths)
    expected = greedy(target, inputs, max_new_tokens=8)
    heads = oracle(target, inputs, expected, **tree)
    assert torch.equal(greedy(target, inputs, assistant_model=heads, max_new_tokens=8), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2
    assert torch.equal(expected, greedy(shared_target(family), inputs, max_new_tokens=8)), "other than with sdpa"


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled_flex")
def test_planted_bug_blocks_are_causal(monkeypatch):
    """Control: nodes that attend to all nodes before them attend to nodes that are not on their path."""
    target = own_target("llama", attention="flex_attention")
    inputs, _ = batch_of((7,))
    expected = greedy(target, inputs)
    monkeypatch.setattr(
        "hf_specheads.cache.target.block_mask",
        lambda allowed: masks.block_mask(torch.ones_like(allowed).tril(allowed.shape[2] - allowed.shape[1])),
    )
    assert not torch.equal(greedy(target, inputs, assistant_model=oracle(target, inputs, expected)), expected)


def test_compiled_rounds_are_refused():
    target = own_target("llama", attention="flex_attention")
    heads = random_heads(target)
    heads.compiled = True
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="flex attention"):
        greedy(target, batch_of((19,))[0], assistant_model=heads)
    assert forwards.count == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_need_no_mask(family, causal_stand_in):
    """Runs one sequence and several. In the batch, chains begin at different places behind each row's padding."""
    target = own_target(family)
    target.set_attn_implementation(causal_stand_in)
    for lengths in ((19,), (19, 4, 12)):
        inputs, _ = batch_of(lengths)
        expected = greedy(target, inputs)
        heads = oracle(target, inputs, expected, **CHAIN)
        assert torch.equal(greedy(target, inputs, assistant_model=heads), expected)
        assert max(heads.last_stats.num_accepted[0]) >= 2
    assert torch.equal(expected, greedy(shared_target(family), inputs))


def test_trees_are_refused_where_a_kernel_takes_no_mask(causal_stand_in):
    target = own_target("llama")
    target.set_attn_implementation(causal_stand_in)
    inputs, _ = batch_of((19,))
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="set_attn_implementation"):
        greedy(target, inputs, assistant_model=oracle(target, inputs, inputs["input_ids"]))
    assert forwards.count == 0
    heads = random_heads(target)  # without a tree of the user's choice, heads draft chains
    heads.forget_tree()
    assert torch.equal(greedy(target, inputs, assistant_model=heads), greedy(target, inputs))
