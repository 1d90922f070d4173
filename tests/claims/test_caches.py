"""Caches that are not the default one: plain decoding's text, or one sentence before any forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.heads import random_heads
from support.stubs import CountForwards, StubHead
from support.targets import plain, prompt, shared_target
from transformers import Cache, DynamicCache, QuantizedCache
from transformers.cache_utils import QuantizedLayer

from hf_specheads import UnsupportedGenerationError
from hf_specheads.cache import recurrent

NEW = 30
MIXED = (0, 0, 1, 0, None, 0, 0, 0, 0, 2)
CHAIN = {"kind": "chain", "depth": 4}
FP8: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}


class Coarse(QuantizedLayer):
    """Quantised in groups of rows, as quanto and HQQ do, which are not installed here."""

    def _quantize(self, tensor, axis):
        return (tensor * 4).round() / 4

    def _dequantize(self, q_tensor):
        return q_tensor


def coarse_cache(target) -> Cache:
    return Cache(layers=[Coarse(residual_length=4) for _ in range(target.config.num_hidden_layers)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_eight_bit_floats(family):
    target, ids = shared_target(family, initializer_range=1.0), prompt()
    expected = plain(target, ids, NEW, **FP8)
    assert not torch.equal(expected, plain(target, ids, NEW)), "quantising plays no part"
    for ranks in (MIXED, (0,), (None,), (0, None)):
        heads = StubHead(target, expected, ranks, **CHAIN)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads, **FP8), expected)
    assert torch.equal(plain(target, ids, NEW, assistant_model=random_heads(target, **CHAIN), **FP8), expected)


def test_eight_bit_floats_in_a_conversation():
    target, texts = shared_target("llama"), []
    lengths = []
    for with_heads in (False, True):
        cache, ids = QuantizedCache("fp8", target.config), prompt()
        for turn in range(2):
            heads = {"assistant_model": StubHead(target, texts[turn], MIXED, **CHAIN)} if with_heads else {}
            text = plain(target, ids, 12, past_key_values=cache, **heads)
            texts += [] if with_heads else [text]
            assert torch.equal(text, texts[turn])
            lengths.append((cache.get_seq_length(), cache.layers[0]._quantized_keys[0].shape[-2]))
            ids = torch.cat([text, prompt(5, seed=turn)], dim=1)
    assert lengths[:2] == lengths[2:]


def test_planted_bug_rejected_rows_stay_quantised(monkeypatch):
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW, **FP8)
    monkeypatch.setattr(recurrent, "restore", lambda layer, contents: None)
    heads = StubHead(target, expected, MIXED, **CHAIN)
    assert not torch.equal(plain(target, ids, NEW, assistant_model=heads, **FP8), expected)


def refused(words: str, target, ids: torch.Tensor, tree: dict[str, Any], **options: Any) -> None:
    heads = StubHead(target, ids, **tree)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=words):
        plain(target, ids, 8, assistant_model=heads, **options)
    assert forwards.count == 0


def test_what_is_refused():
    target, ids = shared_target("llama"), prompt()
    refused("Fp8QuantizedLayer.*with_tree", target, ids, {}, **FP8)
    refused("batch of 2", target, ids.repeat(2, 1), CHAIN, **FP8)
    for tree in ({}, CHAIN):
        refused("class Coarse", target, ids, tree, past_key_values=coarse_cache(target))
        refused("cache_implementation='static'", target, ids, tree, cache_implementation="static")


def test_groups_of_rows_are_quantised_otherwise():
    """Why they are refused: logits depend on how many tokens a forward has. Those of 8-bit floats do not."""
    target = shared_target("llama")
    text = plain(target, prompt(), NEW)
    for make, same in ((coarse_cache, False), (lambda target: QuantizedCache("fp8", target.config), True)):
        logits = []
        for width in (1, 3):
            cache = make(target)
            parts = text.split([19, *[width] * (NEW // width)], dim=1)
            with torch.no_grad():
                logits.append(torch.cat([target(part, past_key_values=cache).logits for part in parts], dim=1))
        difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
        assert (difference < 1e-4) is same, difference


def test_batches_do_not_take_over_a_cache():
    """Neither tree nor chain; an empty cache that is handed in is served."""
    target, ids = shared_target("llama"), prompt().repeat(2, 1)
    cache = DynamicCache(config=target.config)
    first = plain(target, ids, 4, past_key_values=cache, assistant_model=random_heads(target))
    assert torch.equal(first, plain(target, ids, 4))
    warm = DynamicCache(config=target.config)
    longer = torch.cat([plain(target, ids, 4, past_key_values=warm), ids[:, :3]], dim=1)
    refused("holds tokens already", target, longer, {}, past_key_values=warm)


def test_an_offloaded_cache(monkeypatch):
    """Offloading wants an accelerator's streams; what counts is what the cache says of itself."""
    target, ids = shared_target("llama"), prompt()
    cache = DynamicCache(config=target.config)
    cache.offloading = True
    for tree in ({}, CHAIN):
        refused("on the CPU", target, ids, tree, past_key_values=cache)
