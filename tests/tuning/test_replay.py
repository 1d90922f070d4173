"""Replayed trees accept what grown ones would have, at every place of a text."""

from __future__ import annotations

import pytest
import torch
from support.heads import METHODS_BY_KIND, random_heads
from support.targets import plain, prompt, shared_target

from hf_specheads import DraftTreeConfig
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.target.features import asked_hidden_states, select_hidden_states
from hf_specheads.tuning.replay import (
    NOT_DRAFTED,
    RecordedDrafts,
    accepted_by_ranks,
    favourite_paths,
    record_drafts,
    replay_dynamic,
    walk,
)

NEW, DEPTH, WIDE = 20, 4, 24


def grown_acceptance(target, heads, ids) -> list[int]:
    """How far the true text goes down a tree grown at every place, through the drafting code itself."""
    text = plain(target, ids, NEW)
    features = None
    if heads.feature_layers:
        states = target(text, output_hidden_states=asked_hidden_states(heads.feature_layers)).hidden_states
        features = select_hidden_states(states, heads.feature_layers)
    cache, committed, found = heads.bind(target).new_draft_cache(), 0, []
    for root in range(ids.shape[1], text.shape[1] - 1):
        rows = None if features is None else features[:, committed:root]
        tree = grow_tree(heads, cache, heads.tree_config, text[:, committed : root + 1], rows, heads.tree_config.depth)
        committed, node, length = root, 0, 0
        for token in text[0, root + 1 :].tolist():
            children = [
                c for c in range(tree.num_nodes) if tree.parents[0, c] == node and tree.token_ids[0, c] == token
            ]
            if not children:
                break
            node, length = children[0], length + 1
        found.append(length)
    return found


TREES = {
    "chain": DraftTreeConfig(kind="chain", depth=3),
    "static": DraftTreeConfig(kind="static", choices=((0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 1))),
    "narrow": DraftTreeConfig(depth=4, top_k=3, total_tokens=9),
    "wide": DraftTreeConfig(depth=3, top_k=20, total_tokens=120),
    "stopping": DraftTreeConfig(depth=4, top_k=3, total_tokens=9, stop_below=0.02),
}


@pytest.mark.parametrize("method", METHODS_BY_KIND)
@torch.no_grad()
def test_replayed_is_grown(method):
    """Random heads are right now and then, at some rank: the places of a text and several trees."""
    target, ids = shared_target(), prompt()
    heads = random_heads(target, method, TREES["chain"])
    record = record_drafts(target, heads, [ids], DEPTH, WIDE, NEW)
    assert len(record.true_ranks) == NEW - 1 and record.top_k == WIDE
    reached = 0
    for tree in TREES.values():
        grown = grown_acceptance(target, heads.with_tree(**tree.to_dict()), ids)
        if tree.kind == "dynamic":
            replayed = replay_dynamic(record, tree.depth, tree.top_k).accepted(tree.total_tokens, tree.stop_below)
        else:
            replayed = accepted_by_ranks(record, tree.paths)
        assert replayed.tolist() == grown
        reached += sum(grown)
    assert reached > 0


@torch.no_grad()
def test_pruned_vocabularies_are_replayed():
    target, ids = shared_target(), prompt()
    kept = plain(target, ids, NEW)[0, -10:].unique()
    heads = random_heads(target, **TREES["narrow"].to_dict()).prune_draft_vocabulary(kept)
    record = record_drafts(target, heads, [ids], DEPTH, WIDE, NEW)
    assert record.top_k == len(kept)  # never more children than tokens
    assert bool((record.true_ranks == NOT_DRAFTED).any()) and bool((record.true_ranks < len(kept)).any())
    assert replay_dynamic(record, 4, 3).accepted(9).tolist() == grown_acceptance(target, heads, ids)


def by_hand(ranks: list[list[int]], lengths: tuple[int, ...], top_k: int = 3) -> RecordedDrafts:
    places = len(ranks)
    scores = (torch.zeros(places, 1, top_k), *(torch.zeros(places, top_k, top_k) for _ in ranks[0][1:]))
    return RecordedDrafts(scores, (), torch.zeros(0), torch.tensor(ranks), lengths)


def test_favourite_paths_are_the_most_frequent_ones():
    record = by_hand([[0, 0], [0, 1], [0, 1], [1, 0], [2, 5], [7, 0]], (6,))
    assert favourite_paths(record, 5, 2) == ((0,), (0, 1), (1,), (2,))
    assert favourite_paths(record, 3, 1) == ((0,), (1,))
    assert len(favourite_paths(record, 64, 2)) == 6  # not (7,) or what comes after rank 5
    assert accepted_by_ranks(record, ((0,), (0, 1), (1,))).tolist() == [1, 2, 2, 1, 0, 0]


def test_rounds_follow_one_another():
    """Two texts of 3 and 2 places; rounds begin at each of them in turn."""
    record = by_hand([[0]] * 5, (3, 2))
    length, seconds = walk(record, torch.tensor([1, 0, 0, 0, 3]), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
    # From 0: places 0, 2; from 1: 1, 2; from 2: 2. In the second text from 3: 3, 4; from 4: 4.
    tokens = [2, 1, 1, 1, 1, 1, 4, 4]
    costs = [1, 4, 2, 4, 4, 8, 16, 16]
    assert length == pytest.approx(sum(tokens) / 8) and seconds == pytest.approx(sum(costs) / 8)


def test_refusals():
    target = shared_target()
    with pytest.raises(ValueError, match="nothing can be drafted"):
        record_drafts(target, random_heads(target), [prompt()], max_new_tokens=1)
    with pytest.raises(ValueError, match="depth 1 and top_k 3, which is too small for depth 2 and top_k 3"):
        replay_dynamic(by_hand([[0]], (1,)), 2, 3)
