"""Windows are taken from the config, so a cache that the caller made without one slides all the same."""

from __future__ import annotations

import pytest
import torch
from support.stubs import StubHead
from support.targets import plain, prompt, shared_target
from transformers import DynamicCache

from hf_specheads.cache import target as target_cache

NEW = 36
MIXED = (0, 1, 0, 2, 0, None, 0, 0, 1)


def with_own_cache(family: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns plain text and the text with heads, each after a `DynamicCache()` of the caller, and the most tokens
    that a round accepted."""
    target, ids = shared_target(family), prompt()
    expected = plain(target, ids, NEW, past_key_values=DynamicCache())
    heads = StubHead(target, expected, MIXED)
    got = plain(target, ids, NEW, past_key_values=DynamicCache(), assistant_model=heads)
    return expected, got, max(heads.last_stats.num_accepted[0])


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3", "gpt-oss", "qwen2-window", "llama"])
def test_a_cache_that_knows_of_no_windows(family):
    expected, got, accepted = with_own_cache(family)
    assert torch.equal(got, expected)
    assert accepted >= 2


def test_windows_by_the_class_of_the_caches_layers_change_the_text(monkeypatch):
    """Control: windows are read from the cache's layers, which have none in such a cache."""
    monkeypatch.setattr(target_cache, "layer_windows", lambda target: [None] * target.config.num_hidden_layers)
    expected, got, _ = with_own_cache("mistral")
    assert not torch.equal(got, expected)
