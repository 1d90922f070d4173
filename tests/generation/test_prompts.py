"""Prompts of different lengths are read in groups without their padding, and texts stay those of plain generation."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import batches
from support.batches import NEW, alone_texts, batch_of, greedy
from support.heads import random_heads, scramble
from support.images import image_inputs, image_target
from support.stubs import StubHead
from support.targets import own_target, shared_target
from transformers import DynamicCache

from hf_specheads.generation import prompts
from hf_specheads.generation.prompts import cheapest_groups

LENGTHS = (19, 4, 18, 5)
RANKS = (0, 0, 1, 0, None)


@pytest.fixture(autouse=True)
def forwards_cost_little(monkeypatch):
    monkeypatch.setattr(prompts, "FORWARD", 1)


def sizes_of(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns a list that collects the shape of the token ids of every later forward."""
    sizes: list[tuple[int, ...]] = []
    forward = target.forward

    @functools.wraps(forward)  # whose signature says that it takes positions
    def noting(*args: Any, **kwargs: Any) -> Any:
        sizes.append(tuple((args[0] if args else kwargs["input_ids"]).shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", noting)
    return sizes


def oracle(target: Any, **tree: Any) -> tuple[dict[str, Any], StubHead, torch.Tensor]:
    """Makes prompts, heads that know their texts, and the new tokens."""
    inputs, alone = batch_of(LENGTHS)
    texts = alone_texts(target, alone)
    return inputs, batches.oracle(target, alone, texts, RANKS, **tree), torch.tensor(texts)


# ---------------------------------------------------------------------- groups
def cost(groups: list[list[int]], lengths: list[int], forward: int) -> int:
    return sum(len(group) * max(lengths[row] for row in group) + forward for group in groups)


def every_division(rows: list[int]) -> list[list[list[int]]]:
    """All ways to divide rows into groups."""
    if not rows:
        return [[]]
    divisions = []
    for others in itertools.chain.from_iterable(itertools.combinations(rows[1:], n) for n in range(len(rows))):
        rest = [row for row in rows[1:] if row not in others]
        divisions += [[[rows[0], *others], *groups] for groups in every_division(rest)]
    return divisions


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 40))
def test_no_division_is_cheaper(lengths, forward):
    groups = cheapest_groups(lengths, forward)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    least = min(cost(division, lengths, forward) for division in every_division(list(range(len(lengths)))))
    assert cost(groups, lengths, forward) == least


# ---------------------------------------------------------------------- texts
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "mistral", "bloom", "lfm2"])
def test_texts_of_mixed_lengths(family):
    target = shared_target(family)
    inputs, heads, texts = oracle(target, kind="chain", depth=4)
    if family == "lfm2":  # its states take in the padding
        texts = greedy(target, inputs)[:, max(LENGTHS) :]
    got = greedy(target, inputs, assistant_model=heads)
    assert torch.equal(got[:, max(LENGTHS) :], texts)
    assert max(map(max, heads.last_stats.num_accepted)) >= 2


@pytest.mark.parametrize("method", ["eagle", "medusa", "poss", "hydra"])
@pytest.mark.parametrize("copies", [1, 2])
def test_drafts_do_not_depend_on_the_groups(method, copies, monkeypatch):
    target = shared_target("llama")
    heads, (inputs, _) = scramble(random_heads(target, method)), batch_of(LENGTHS)
    heads.trace = True
    options = {"assistant_model": heads, "do_sample": True, "top_k": 1, "num_return_sequences": copies}
    sizes, got, trees = sizes_of(target, monkeypatch), [], []
    for forward in (1, 1000):
        monkeypatch.setattr(prompts, "FORWARD", forward)
        sizes.clear()
        got.append(greedy(target, inputs, **options))
        trees.append([tree.token_ids for tree in heads.last_stats.trees])
        read = [(2, 5), (2, 19)] if forward == 1 else [(4, 19)]
        assert sorted(sizes[: len(read)]) == read
        assert heads.last_stats.target_forwards == len(sizes)
    assert torch.equal(*got)
    assert all(torch.equal(*pair) for pair in zip(*trees, strict=True))


def test_scores_and_cache_of_the_caller():
    target = shared_target("llama")
    inputs, heads, _ = oracle(target)
    cache, more = DynamicCache(config=target.config), {"return_dict_in_generate": True, "output_scores": True}
    expected = greedy(target, inputs, **more)
    got = greedy(target, inputs, assistant_model=heads, past_key_values=cache, **more)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.scores, expected.scores, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert got.past_key_values is cache
    real = inputs["attention_mask"].bool()
    for ours, theirs in zip(cache.layers, expected.past_key_values.layers, strict=True):
        for name in ("keys", "values"):
            states = [getattr(layer, name).transpose(1, 2)[:, : max(LENGTHS)][real] for layer in (ours, theirs)]
            assert torch.allclose(*states, atol=1e-4)


# ---------------------------------------------------------------------- when prompts are read together
def groups_read(target: Any, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], **options: Any) -> int:
    """Number of groups in which a call reads its prompts."""
    found: list[int] = []
    grouping = prompts.groups_of_prompts

    def noting(*args: Any) -> list[list[int]]:
        found.append(len(groups := grouping(*args)))
        return groups

    monkeypatch.setattr("hf_specheads.generation.loop.groups_of_prompts", noting)
    target.generate(**inputs, max_new_tokens=2, do_sample=False, assistant_model=random_heads(target), **options)
    return found[0]


def test_which_calls_read_groups(monkeypatch):
    target, (inputs, alone) = shared_target("llama"), batch_of(LENGTHS)
    assert groups_read(target, monkeypatch, inputs) == 2
    assert groups_read(target, monkeypatch, inputs, prefill_chunk_size=7) == 1
    assert groups_read(target, monkeypatch, inputs, cache_implementation="static") == 1
    assert groups_read(target, monkeypatch, {"input_ids": alone[0]}) == 1
    monkeypatch.setattr(prompts, "FORWARD", 100)
    assert groups_read(target, monkeypatch, inputs) == 1


@pytest.mark.parametrize("family", ["gemma2", "mistral", "bloom"])
def test_targets_that_read_all_prompts_together(family, monkeypatch):
    """Their caches forget old tokens, or they find out positions by themselves."""
    assert groups_read(shared_target(family), monkeypatch, batch_of(LENGTHS)[0]) == 1


def test_half_precision_keeps_the_shape_of_plain_generation(monkeypatch):
    target = own_target().to(torch.bfloat16)
    assert groups_read(target, monkeypatch, batch_of(LENGTHS)[0]) == 1


def test_prompts_with_images(monkeypatch):
    target = image_target("gemma3")
    assert groups_read(target, monkeypatch, image_inputs(target, (15, 9))) == 1


def test_a_target_that_drops_positions(monkeypatch):
    """It counts the padding of its rows, so the prompts are read once more, together."""
    target = own_target("gpt2")  # whose positions are not relative
    prepare = target.prepare_inputs_for_generation

    def dropping(*args: Any, **kwargs: Any) -> dict[str, Any]:
        prepared = prepare(*args, **kwargs)
        prepared.pop("position_ids", None)
        return prepared

    monkeypatch.setattr(target, "prepare_inputs_for_generation", dropping)
    inputs, _ = batch_of(LENGTHS)
    expected = greedy(target, inputs)
    heads, sizes = random_heads(target), sizes_of(target, monkeypatch)
    assert torch.equal(greedy(target, inputs, assistant_model=heads), expected)
    assert len(sizes[0]) == 2 and sizes[1] == (4, 19), "the first group, then all prompts"
    assert heads.last_stats.target_forwards == len(sizes)


def test_planted_bug_groups_in_the_wrong_order(monkeypatch):
    """Control: without restoring the order, sequences continue from another prompt."""
    target = shared_target("llama")
    inputs, heads, texts = oracle(target)
    join = prompts._all_rows

    def in_order_of_groups(parts: Any, groups: list[list[int]], tokens: int) -> torch.Tensor:
        rows = iter(range(len(LENGTHS)))
        return join(parts, [[next(rows) for _ in group] for group in groups], tokens)

    monkeypatch.setattr(prompts, "_all_rows", in_order_of_groups)
    got = greedy(target, inputs, assistant_model=heads)
    assert got.shape[1] == max(LENGTHS) + NEW
    assert not torch.equal(got[:, max(LENGTHS) :], texts)
