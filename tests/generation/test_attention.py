"""Grouped attention under the additive masks of trees on a CPU: the same numbers, and other calls untouched."""

from __future__ import annotations

import os
import threading

import torch
from cache.test_masks import tree_logits
from support.heads import random_heads
from support.targets import VOCAB, plain, prompt, shared_target
from support.trees import random_tree
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specheads import dispatch
from hf_specheads.generation.attention import install_grouped_attention, uninstall_grouped_attention


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
