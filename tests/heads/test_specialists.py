"""Heads with decoder layers: what the levels of a round share."""

import pytest
import torch
from support.heads import random_heads
from support.targets import plain, prompt, shared_target

from hf_specheads.heads import specialists

TREES = [
    {"kind": "chain", "depth": 5},
    {"kind": "dynamic", "depth": 4, "top_k": 3, "total_tokens": 12},
    {"kind": "static", "choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["kind"])
@pytest.mark.parametrize("method", ["eagle", "poss", "eagle3"])
def test_positions_are_rotated_once_a_round(method, tree, monkeypatch):
    """And drafts are those of levels that are each rotated for themselves, as ropes want it that move."""
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, method).with_tree(**tree)
    heads.adaptive, heads.trace = False, True
    rotate, calls = heads.rotary_emb.forward, []

    def counted(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(positions)
        return rotate(rows, positions)

    monkeypatch.setattr(heads.rotary_emb, "forward", counted)
    drafted = []
    for moving in ((), ("default",)):
        monkeypatch.setattr(specialists, "MOVING_ROPES", moving)
        calls.clear()
        plain(target, ids, 12, assistant_model=heads)
        drafted.append([tree.token_ids for tree in heads.last_stats.trees])
        rounds = heads.last_stats.rounds
        assert (len(calls) > 2 * rounds) if moving else (len(calls) <= 2 * rounds)
    assert all(torch.equal(once, each) for once, each in zip(*drafted, strict=True))
