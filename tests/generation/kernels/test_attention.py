"""Attention with the additive masks of trees: the same numbers, and other calls stay untouched."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from cache.test_masks import tree_logits
from support.heads import random_heads
from support.targets import VOCAB, plain, prompt, shared_target
from support.trees import random_tree
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specheads import dispatch
from hf_specheads.generation.kernels import attention
from hf_specheads.generation.kernels.attention import (
    attend_by_kernel,
    attend_by_products,
    install_grouped_attention,
    uninstall_grouped_attention,
)


def test_the_same_logits_bit_for_bit():
    target, ids, tree = shared_target("llama"), prompt(9), random_tree(3, nodes=8, depth=3, vocab=VOCAB)
    uninstall_grouped_attention()
    try:
        copied = tree_logits(target, ids, tree)
    finally:
        install_grouped_attention()
    assert torch.equal(tree_logits(target, ids, tree), copied)


def test_no_keys_are_copied_for_trees(monkeypatch):
    target, ids, tree = shared_target("llama"), prompt(9), random_tree(3, nodes=8, depth=3, vocab=VOCAB)
    copies = []
    repeat = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *args: copies.append(1) or repeat(*args))
    tree_logits(target, ids, tree)
    assert not copies


def test_installing_twice_wraps_once_and_uninstalling_restores():
    wrapped = ALL_ATTENTION_FUNCTIONS["sdpa"]
    dispatch.install()
    install_grouped_attention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is wrapped
    uninstall_grouped_attention()
    try:
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention.sdpa_attention_forward
    finally:
        install_grouped_attention()


def test_nothing_is_switched_for_other_threads():
    """Environment, config and registry are the same before, during and after a generation."""
    target, ids = shared_target("llama"), prompt()
    heads, seen = random_heads(target), []

    def look(*_: object) -> None:
        state = (dict(os.environ), target.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["sdpa"])
        seen.append((state, threading.get_ident()))

    look()
    hook = target.register_forward_pre_hook(look)
    try:
        plain(target, ids, 12, assistant_model=heads)
    finally:
        hook.remove()
    assert len(seen) > 2 and all(entry == seen[0] for entry in seen)


def rows_and_slots(batch, heads, key_heads, rows, slots, width=16, dtype=torch.float32):
    query = torch.randn(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
    longer = (batch, key_heads, slots + 5, width)
    key, value = (torch.randn(longer, dtype=dtype)[:, :, :slots] for _ in range(2))
    allowed = torch.rand(batch, 1, rows, slots) < 0.6
    allowed[..., 0] = True
    return query, key, value, torch.where(allowed, 0.0, torch.finfo(dtype).min).to(dtype)


@pytest.mark.parametrize("attend", [attend_by_products, attend_by_kernel], ids=["products", "operator"])
@pytest.mark.parametrize("sizes", [(1, 8, 2, 7, 33), (3, 4, 4, 1, 20), (2, 6, 2, 61, 90)], ids=str)
def test_few_rows_attend_as_by_torchs_own_function(sizes, attend):
    query, key, value, mask = rows_and_slots(*sizes)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(query, key, value, mask, 0.3), expected.transpose(1, 2))


def test_rows_that_see_nothing_are_numbers():
    """Padding rows of a batch are never read, but NaN in them would spread."""
    query, key, value, mask = rows_and_slots(2, 4, 2, 3, 12)
    mask[1, :, 0] = torch.finfo(mask.dtype).min
    assert attend_by_products(query, key, value, mask, 0.25).isfinite().all()


def test_compilers_take_the_operator():
    query, key, value, mask = rows_and_slots(1, 4, 2, 5, 32)
    compiled = torch.compile(lambda *tensors: attend_by_kernel(*tensors, 0.25) + 1, fullgraph=True)
    torch.testing.assert_close(
        compiled(query, key, value, mask), attend_by_products(query, key, value, mask, 0.25) + 1
    )


@pytest.mark.parametrize(
    ("rows", "dtype", "training", "products", "kernel"),
    [
        (7, torch.bfloat16, False, True, True),
        (33, torch.bfloat16, False, True, False),  # 66 of the heads of a group
        (7, torch.float32, False, True, False),
        (129, torch.bfloat16, False, False, False),
        (7, torch.bfloat16, True, False, True),
    ],
)
def test_which_rows_attend_how(rows, dtype, training, products, kernel, monkeypatch):
    monkeypatch.setattr(attention, "HAS_TRITON", True)
    query, key, value, mask = rows_and_slots(1, 8, 4, rows, 64, dtype=dtype)
    query.requires_grad_(training)
    assert not attention._attends_by_products(query, key, mask, 0.0), "a CPU has a kernel for it"
    monkeypatch.setattr(attention, "BY_PRODUCTS", ("cpu",))
    assert attention._attends_by_products(query, key, mask, 0.0) is products
    assert attention._suits_kernel(query, key, value) is kernel
    assert not attention._attends_by_products(query, key, mask.expand(1, 8, rows, 64), 0.0)
    assert not attention._attends_by_products(query, key, mask, 0.1)


@pytest.mark.parametrize("method", ["eagle", "medusa", "dflash"])
def test_texts_of_rounds_that_attend_so(method, monkeypatch):
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, 24)
    monkeypatch.setattr(attention, "BY_PRODUCTS", ("cpu",))
    assert torch.equal(plain(target, ids, 24, assistant_model=random_heads(target, method)), expected)
