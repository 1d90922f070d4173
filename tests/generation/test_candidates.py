"""Rounds draft at most as much as there is room for."""

import pytest
import torch
from support.heads import random_heads
from support.targets import plain, prompt, shared_target

TREES = [{"kind": "chain", "depth": 6}, {"kind": "dynamic", "depth": 5, "top_k": 3, "total_tokens": 12}]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["kind"])
def test_no_round_drafts_more_than_its_budget_has_room_for(tree):
    target, ids, new = shared_target("llama"), prompt(), 12
    heads = random_heads(target).with_tree(**tree)
    heads.trace = True
    assert torch.equal(plain(target, ids, new, assistant_model=heads), plain(target, ids, new))
    left = new - 1
    for drafted, number in zip(heads.last_stats.trees, heads.last_stats.num_accepted[0], strict=True):
        assert drafted.max_depth == min(tree["depth"], left - 1)
        left -= number + 1
    assert left == 0
