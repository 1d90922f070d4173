"""Tree masks: one forward over a tree gives the logits of one forward per path, for every kind of attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.targets import VOCAB, WINDOW, prompt, shared_target
from support.trees import path_of, random_tree
from transformers import DynamicCache

from hf_specheads.cache.masks import additive_mask, slot_mask, tree_position_ids
from hf_specheads.cache.target import TreeCache
from hf_specheads.generation.drafting.chains import fixed_tree
from hf_specheads.tree.config import DraftTreeConfig
from hf_specheads.tree.draft_tree import DraftTree
from hf_specheads.tree.shape import fixed_shape

CASES = [
    ("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("mistral", "eager"), ("qwen2-window", "sdpa"),
    ("gemma2", "eager"), ("gemma3", "sdpa"), ("gemma3", "eager"), ("gpt2", "eager"), ("opt", "sdpa"),
]  # fmt: skip


@torch.no_grad()
def filled(
    target, ids: torch.Tensor, padding: torch.Tensor | None = None, dtype=torch.float32, **options
) -> TreeCache:
    """Slots that hold a prompt [B, T]."""
    cache = DynamicCache(config=target.config)
    target(ids, past_key_values=cache)
    return TreeCache(cache, target, len(ids), padding, torch.tensor([[ids.shape[1]]]), dtype, **options)


@torch.no_grad()
def tree_logits(target, ids: torch.Tensor, tree: DraftTree, **options) -> torch.Tensor:
    """Logits [B, N, V] of one tree forward on a cache of the prompt."""
    return target(tree.token_ids, **filled(target, ids, **options).forward_inputs(tree)).logits


@torch.no_grad()
def path_logits(target, ids: torch.Tensor, tree: DraftTree, index: int, node: int) -> torch.Tensor:
    """Logits [V] at one node: prompt and path as a plain sequence, without cache."""
    path = tree.token_ids[index, path_of(tree.parents[index].tolist(), node)]
    return target(torch.cat([ids[index], path])[None], use_cache=False).logits[0, -1]


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize(("length", "depth"), [(WINDOW + 7, 4), (5, WINDOW + 2)], ids=["long prompt", "deep tree"])
def test_tree_forward_equals_one_forward_per_path(family, attention, length, depth):
    target, ids = shared_target(family, attention=attention), prompt(length)
    tree = random_tree(2, nodes=18 if depth < WINDOW else 30, depth=depth, vocab=VOCAB)
    logits = tree_logits(target, ids, tree)
    for node in range(tree.num_nodes):
        expected = path_logits(target, ids, tree, 0, node)
        torch.testing.assert_close(logits[0, node], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_every_row_of_a_batch_has_its_own_tree(family):
    target = shared_target(family)
    ids = torch.cat([prompt(WINDOW + 3, seed=seed) for seed in (1, 2, 3)])
    tree = random_tree(5, nodes=10, depth=3, batch=3, vocab=VOCAB)
    logits = tree_logits(target, ids, tree)
    assert logits.shape[:2] == (3, 10)
    for index in range(3):
        for node in range(10):
            expected = path_logits(target, ids, tree, index, node)
            torch.testing.assert_close(logits[index, node], expected, atol=1e-4, rtol=1e-4)


def test_masks_are_additive_and_of_the_compute_dtype():
    """Eager attention adds the mask to the scores: a boolean one would silently change them."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = filled(shared_target("llama"), prompt(5), dtype=dtype)
        mask = cache.forward_inputs(random_tree(1, nodes=6, depth=2))["attention_mask"]
        assert mask.dtype == dtype
        assert mask.shape == (1, 1, 6, 11)
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding_of_the_prompt_is_hidden(family):
    padding = torch.ones(1, 20, dtype=torch.long)
    padding[:, :14] = 0
    cache = filled(shared_target(family), prompt(20), padding)
    mask = cache.forward_inputs(random_tree(1, nodes=4, depth=2))["attention_mask"]
    slots = mask.shape[-1] - 4
    assert slots == (20 if family == "llama" else WINDOW - 1)
    assert (mask[0, 0, :, : slots - 6] < 0).all()
    assert (mask[0, 0, 0, slots - 6 : slots] == 0).all()


def test_targets_with_layer_types_get_one_mask_per_type():
    masks = filled(shared_target("gemma3"), prompt(20)).forward_inputs(random_tree(1, nodes=4, depth=2))
    assert {kind: mask.shape[-1] for kind, mask in masks["attention_mask"].items()} == {
        "full_attention": 24,
        "sliding_attention": WINDOW - 1 + 4,
    }


def chain_of(depth: int, batch: int) -> DraftTree:
    """A chain of a shape that is known beforehand."""
    paths = DraftTreeConfig(kind="chain", depth=depth).paths
    shape, tokens = fixed_shape(paths, depth, torch.device("cpu")), torch.ones(batch, 1, dtype=torch.long)
    return fixed_tree(tokens, [tokens] * depth, [torch.zeros(batch, depth)], shape, None)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("length", [1, 5, WINDOW - 4, WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 7])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["root", "chain", "tree"])
def test_masks_made_without_a_look_at_every_slot_are_those_of_the_rule(kind, family, length, rows):
    target, ids = shared_target(family), prompt(length).expand(rows, -1)
    if kind == "tree":
        tree = random_tree(3, nodes=9, depth=3, batch=rows)
    else:
        tree = DraftTree.root_only(ids[:, -1]) if kind == "root" else chain_of(3, rows)
    cache = filled(target, ids)
    masks = cache.forward_inputs(tree)["attention_mask"]
    for layers, mask in masks.items() if isinstance(masks, dict) else [(family, masks)]:
        window = WINDOW if layers in ("sliding_attention", "mistral") else None
        allowed = slot_mask(tree.ancestor_mask, length, *cache.shown(window), window, tree.depths)
        torch.testing.assert_close(mask, additive_mask(allowed, torch.float32)[:, None])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_fixed_shapes_give_the_same_logits(family):
    """All slots shown, most of them masked, against only those in use."""
    target, ids = shared_target(family), torch.cat([prompt(WINDOW + 3, seed=seed) for seed in (1, 2)])
    tree = random_tree(5, nodes=10, depth=3, batch=2, vocab=VOCAB)
    fixed = tree_logits(target, ids, tree, static_capacity=64)
    torch.testing.assert_close(fixed, tree_logits(target, ids, tree), atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slots_seen_by_every_row(data):
    """Against the rule written out slot by slot."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    batch, rows, window = len(lengths), data.draw(st.integers(1, 5)), data.draw(st.sampled_from([None, 1, 3, 20]))
    visible = torch.rand(batch, rows, rows) < 0.6
    depths = torch.randint(0, 4, (batch, rows))
    first = data.draw(st.integers(0, min(lengths) if window is None else 0))
    end = max(lengths) + rows + data.draw(st.integers(0, 3))
    padding = data.draw(st.sampled_from([None, torch.rand(batch, min(lengths)) < 0.7]))
    known = lengths[0] if len(set(lengths)) == 1 and data.draw(st.booleans()) else torch.tensor(lengths)
    mask = slot_mask(visible, known, first, end, window, depths, padding)
    assert mask.shape == (batch, rows, end - first)
    for row, length in enumerate(lengths):
        for query in range(rows):
            for slot in range(first, end):
                own = slot - length
                if own < 0:
                    distance, allowed = length + depths[row, query] - slot, True
                elif own < rows:
                    distance, allowed = depths[row, query] - depths[row, own], bool(visible[row, query, own])
                else:
                    distance, allowed = 0, False
                allowed = allowed and (window is None or distance < window)
                if padding is not None and slot < padding.shape[1]:
                    allowed = allowed and bool(padding[row, slot])
                assert bool(mask[row, query, slot - first]) == bool(allowed)


def test_positions_are_the_roots_plus_the_depth():
    tree = random_tree(1, nodes=7, depth=3)
    root = torch.tensor([[8]])
    assert torch.equal(tree_position_ids(root, tree), 8 + tree.depths)
    assert torch.equal(
        tree_position_ids(root[None].expand(3, -1, -1), tree), (8 + tree.depths)[None].expand(3, -1, -1)
    )
