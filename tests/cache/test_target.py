"""The target's slots: what is taken over, kept and given back is what plain decoding would hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.targets import WINDOW, shared_target
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_specheads.cache.layers import tree_cache_problem
from hf_specheads.cache.slots import SPARE
from hf_specheads.cache.target import FIRST_SLOTS, TreeCache
from hf_specheads.tree.draft_tree import DraftTree

FAMILIES = ("llama", "mistral", "gemma3")


def stock_cache(family: str, states: list[torch.Tensor]) -> DynamicCache:
    """transformers' own cache filled with keys [B, heads, T, dim] per layer, values twice the keys."""
    cache = DynamicCache(config=shared_target(family).config)
    for index, keys in enumerate(states):
        cache.update(keys, 2 * keys, index)
    return cache


def slots_of(family: str, states: list[torch.Tensor], **options) -> TreeCache:
    batch, length = states[0].shape[0], states[0].shape[2]
    return TreeCache(stock_cache(family, states), shared_target(family), batch, None, torch.tensor([[length]]),
                     torch.float32, **options)  # fmt: skip


def chain(batch: int, nodes: int) -> DraftTree:
    ids = torch.zeros(batch, nodes, dtype=torch.long)
    steps = torch.arange(nodes).expand(batch, -1)
    return DraftTree(ids, steps - 1, steps, steps.float(), nodes - 1)


def verify(cache: TreeCache, states: list[torch.Tensor]) -> None:
    """What a forward over a tree does to the cache."""
    cache.forward_inputs(chain(states[0].shape[0], states[0].shape[2]))
    for index, keys in enumerate(states):
        cache.update(keys, 2 * keys, index)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), length=st.integers(1, 2 * WINDOW), family=st.sampled_from(FAMILIES))
def test_rounds_leave_the_cache_of_the_kept_tokens(data, length, family):
    layers, rounds = 2, data.draw(st.integers(1, 4))
    states = [torch.randn(1, 2, length, 4) for _ in range(layers)]
    cache, kept = slots_of(family, states), [keys.clone() for keys in states]
    for _ in range(rounds):
        nodes = data.draw(st.integers(1, 2 * WINDOW))
        others = data.draw(st.lists(st.integers(1, nodes - 1), unique=True, max_size=8)) if nodes > 1 else []
        path, tree = [0, *sorted(others)], [torch.randn(1, 2, nodes, 4) for _ in range(layers)]
        verify(cache, tree)
        cache.keep_paths(torch.tensor([path]), [len(path)], torch.tensor([len(path)]), path == list(range(len(path))))
        kept = [torch.cat([keys, new[:, :, path]], dim=2) for keys, new in zip(kept, tree, strict=True)]
        assert cache.counts == [kept[0].shape[2]] and cache.root_positions.tolist() == [[kept[0].shape[2]]]
    cache.give_back(cache.longest)
    fresh = stock_cache(family, kept)
    more = torch.randn(1, 2, 1, 4)
    for index, (ours, theirs) in enumerate(zip(cache.stock.layers, fresh.layers, strict=True)):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert torch.equal(cache.stock.update(more, more, index)[0], fresh.update(more, more, index)[0])
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), batch=st.integers(2, 4), static=st.booleans())
def test_rows_of_a_batch_keep_their_own_paths(data, batch, static):
    states = [torch.randn(batch, 2, 5, 4) for _ in range(2)]
    cache = slots_of("llama", states, static_capacity=64 if static else None)
    kept = [[keys[row] for row in range(batch)] for keys in states]
    for _ in range(3):
        nodes = data.draw(st.integers(2, 7))
        paths = [[0, *sorted(data.draw(st.sets(st.integers(1, nodes - 1))))] for _ in range(batch)]
        tree = [torch.randn(batch, 2, nodes, 4) for _ in range(2)]
        verify(cache, tree)
        longest = max(map(len, paths))
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        counts = [len(path) for path in paths]
        cache.keep_paths(padded, counts, torch.tensor(counts), False)
        kept = [[torch.cat([own, new[row][:, paths[row]]], dim=1) for row, own in enumerate(rows)]
                for rows, new in zip(kept, tree, strict=True)]  # fmt: skip
        if batch > 1 and data.draw(st.booleans()):
            chosen = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
            cache.select_sequences(chosen)
            kept = [[rows[row] for row in chosen] for rows in kept]
            batch = len(chosen)
        assert cache.counts == [own.shape[1] for own in kept[0]]
        for layer, rows in zip(cache.layers, kept, strict=True):
            for row, own in enumerate(rows):
                assert torch.equal(layer.keys[row, :, : own.shape[1]], own)
                assert torch.equal(layer.values[row, :, : own.shape[1]], 2 * own)


def test_growth_doubles_and_keeps_everything():
    states = [torch.randn(1, 2, 7, 4) for _ in range(2)]
    cache = slots_of("llama", states)
    assert cache.capacity == 7 + FIRST_SLOTS
    tree = [torch.randn(1, 2, FIRST_SLOTS + 9, 4) for _ in range(2)]
    verify(cache, tree)
    assert cache.capacity == 2 * (7 + FIRST_SLOTS)
    nodes = torch.arange(FIRST_SLOTS + 9)[None]
    cache.keep_paths(nodes, [FIRST_SLOTS + 9], torch.tensor([FIRST_SLOTS + 9]), True)
    assert torch.equal(cache.layers[1].keys[:, :, : cache.longest], torch.cat([states[1], tree[1]], dim=2))


def test_growth_ends_at_what_the_call_needs():
    states, most = [torch.randn(1, 2, 7, 4) for _ in range(2)], 7 + FIRST_SLOTS + 30
    cache = slots_of("llama", states, most=most)
    cache.reserve(7 + FIRST_SLOTS + 1)
    assert cache.capacity == most == cache.layers[0].keys.shape[2]
    cache.reserve(most + 1)  # more than was said
    assert cache.capacity == most + 1 + SPARE
    assert slots_of("llama", states, most=20).capacity == 20


def test_the_stock_cache_holds_nothing_while_its_rows_are_elsewhere():
    states = [torch.randn(2, 2, 7, 4) for _ in range(2)]
    cache = slots_of("gemma3", states)
    assert all(layer.keys.numel() == 0 for layer in cache.stock.layers)
    cache.give_back(None)
    assert cache.stock.get_seq_length() == 0
    cache.stock.update(states[0], states[0], 0)
    assert torch.equal(cache.stock.layers[0].keys, states[0][:, :, -(WINDOW - 1) :])


def test_only_known_layers_may_hold_a_tree():
    assert tree_cache_problem(DynamicCache(config=shared_target("gemma3").config)) is None
    assert tree_cache_problem(StaticCache(config=shared_target("gemma3").config, max_cache_len=16)) is None

    class Unknown(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [DynamicLayer(), Unknown()]
    assert "Unknown" in tree_cache_problem(cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_a_shape_share_a_buffer(family):
    cache = slots_of(family, [torch.randn(1, 2, 5, 4) for _ in range(2)])
    assert [len(group.members) for group in cache.groups] == [4]
    assert cache.groups[0].buffer.data_ptr() == cache.layers[0].keys.data_ptr()
