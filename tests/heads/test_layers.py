"""Decoder layers of heads compute what transformers' layers compute, and no more of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.heads import random_heads
from support.targets import shared_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_specheads.heads import layers


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_rotated_as_transformers_rotates():
    states, other = torch.randn(2, 3, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    expected = apply_rotary_pos_emb(states, other, cos, sin)
    for mine, theirs in zip((states, other), expected, strict=True):
        assert torch.equal(layers.rotated(mine, cos, sin), theirs)


def rotations_of_a_level() -> int:
    """How often one forward of a head's layer turns the halves of queries or keys around."""
    heads = random_heads(shared_target("llama"), "eagle")
    width = heads.config.hidden_size
    positions, mask = torch.arange(3)[None], torch.zeros(1, 1, 3, 3)
    with torch.no_grad(), Operations() as operations:
        heads(torch.randn(1, 3, width), positions, mask)
    assert operations.counts["mul"] > 4
    return operations.counts["neg"]


def test_queries_and_keys_are_rotated_once():
    assert rotations_of_a_level() == 2


def test_planted_bug_each_is_rotated_twice(monkeypatch):
    monkeypatch.setattr(layers, "rotated", lambda states, *tables: apply_rotary_pos_emb(states, states, *tables)[0])
    with pytest.raises(AssertionError):
        test_queries_and_keys_are_rotated_once()
