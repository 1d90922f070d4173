"""Caches: compaction equals a naive gather, the draft cache keeps committed rows and forgets drafted ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import WINDOW, prompt, shared_target
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_specheads.cache import DraftCache, compact, refuse_tree_cache, stop_recording


def filled(family: str, length: int, nodes: int) -> tuple[DynamicCache, list[torch.Tensor]]:
    """A target cache of `length` committed rows and `nodes` tree rows, and the keys as they were, uncut."""
    target = shared_target(family)
    cache = DynamicCache(config=target.config)
    states = []
    for index in range(len(cache.layers)):
        keys = torch.randn(1, 2, length + nodes, 4)
        cache.update(keys[:, :, :length], 2 * keys[:, :, :length], index)
        states.append(keys)
    cache.activate_past_recording()
    for index, keys in enumerate(states):
        cache.update(keys[:, :, length:], 2 * keys[:, :, length:], index)
    return cache, states


@settings(max_examples=40, deadline=None)
@given(data=st.data(), length=st.integers(1, 2 * WINDOW), nodes=st.integers(1, 2 * WINDOW))
def test_compaction_equals_a_naive_gather(data, length, nodes):
    for family in ("llama", "mistral", "gemma3"):
        cache, states = filled(family, length, nodes)
        others = data.draw(st.lists(st.integers(1, nodes - 1), unique=True, max_size=8)) if nodes > 1 else []
        path = [0, *sorted(others)]
        compact(cache, nodes, torch.tensor([path]))
        for layer, keys in zip(cache.layers, states, strict=True):
            kept = torch.cat([keys[:, :, :length], keys[:, :, [length + node for node in path]]], dim=2)
            if layer.is_sliding:
                assert isinstance(layer, DynamicSlidingWindowLayer)
                kept = kept[:, :, -(WINDOW - 1) :]
            assert torch.equal(layer.keys, kept)
            assert torch.equal(layer.values, 2 * kept)
            assert layer.get_seq_length() == length + len(path)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_compacted_cache_is_the_cache_of_the_kept_tokens(family):
    """Against a fresh cache filled with the kept rows only, also for what is appended afterwards."""
    cache, states = filled(family, WINDOW + 2, 6)
    path = [0, 2, 5]
    compact(cache, 6, torch.tensor([path]))
    stop_recording(cache)
    rows = [*range(WINDOW + 2), *(WINDOW + 2 + node for node in path)]
    fresh = DynamicCache(config=shared_target(family).config)
    for index, keys in enumerate(states):
        fresh.update(keys[:, :, rows], 2 * keys[:, :, rows], index)
    for index, (ours, theirs) in enumerate(zip(cache.layers, fresh.layers, strict=True)):
        assert torch.equal(ours.keys, theirs.keys)
        more = torch.randn(1, 2, 1, 4)
        assert torch.equal(cache.update(more, more, index)[0], fresh.update(more, more, index)[0])
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_rows_of_a_batch_keep_their_own_paths():
    cache = DynamicCache()
    keys = torch.randn(2, 2, 9, 4)
    cache.update(keys, keys, 0)
    compact(cache, 5, torch.tensor([[0, 2, 4], [0, 1, 3]]))
    assert torch.equal(cache.layers[0].keys[0], keys[0][:, [0, 1, 2, 3, 4, 6, 8]])
    assert torch.equal(cache.layers[0].keys[1], keys[1][:, [0, 1, 2, 3, 4, 5, 7]])


def test_only_known_layers_may_hold_a_tree():
    assert refuse_tree_cache(DynamicCache(config=shared_target("gemma3").config)) is None
    static = StaticCache(config=shared_target("llama").config, max_cache_len=16)
    assert "StaticLayer" in refuse_tree_cache(static)

    class Unknown(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [DynamicLayer(), Unknown()]
    assert "Unknown" in refuse_tree_cache(cache)


def test_drafted_rows_end_with_their_round():
    cache = DraftCache(2)
    keys = torch.randn(1, 2, 200, 4)
    cache.update(keys[:, :, :3], keys[:, :, :3], 0)
    cache.update(keys[:, :, :3], keys[:, :, :3], 1)
    cache.commit(3)
    cache.update(keys[:, :, 3:7], keys[:, :, 3:7], 0)
    cache.drafted_inputs.append(keys)
    cache.drop_drafted()
    assert [layer.length for layer in cache.layers] == [3, 3]
    assert cache.drafted_inputs == []
    # The buffer grows without losing what is committed.
    seen, values = cache.update(keys[:, :, 3:], keys[:, :, 3:], 0)
    assert torch.equal(seen, keys)
    assert torch.equal(values, keys)


def test_padding_of_the_prompt_stays_known():
    cache = DraftCache(1)
    cache.context_mask = torch.tensor([[False, True, True]])
    cache.commit(3)
    cache.commit(2)
    assert cache.context_mask.tolist() == [[False, True, True, True, True]]


def test_a_generation_leaves_no_recording_behind():
    target = shared_target("mistral")
    cache = DynamicCache(config=target.config)
    target(prompt(), past_key_values=cache)
    cache.activate_past_recording()
    assert all(layer.record_past for layer in cache.layers)
    stop_recording(cache)
    assert not any(layer.record_past for layer in cache.layers)
