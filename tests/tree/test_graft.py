"""Paths grafted into draft trees: nothing is lost, nothing is drafted twice, and the path is whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import path_of, random_tree

from hf_specheads.tree.draft_tree import DraftTree, SampledChildren
from hf_specheads.tree.graft import graft_path


def words(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens on the way to every node of one sequence, the root's left out."""
    parents, tokens = tree.parents[row].tolist(), tree.token_ids[row].tolist()
    return [tuple(tokens[node] for node in path_of(parents, end)[1:]) for end in range(tree.num_nodes)]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000), nodes=st.integers(1, 12), depth=st.integers(1, 5), batch=st.integers(1, 3),
    grafted=st.integers(1, 6), followed=st.integers(0, 6),
)  # fmt: skip
def test_the_path_is_in_the_tree_and_nothing_twice(seed, nodes, depth, batch, grafted, followed):
    """Paths that follow the tree for a while, and then leave it."""
    tree = random_tree(seed, nodes + 1, depth, batch, vocab=40)
    generator = torch.Generator().manual_seed(seed)
    path = torch.randint(3, 40, (batch, grafted + tree.max_depth), generator=generator)
    for row in range(batch):
        way = words(tree, row)[(seed + row) % (nodes + 1)][:followed]
        path[row, : len(way)] = torch.tensor(way, dtype=torch.long)
    found = graft_path(tree, path, grafted)
    assert found.num_nodes == tree.num_nodes + grafted
    for row in range(batch):
        before, after = words(tree, row), words(found, row)
        assert after[: len(before)] == before
        assert len(set(after)) == len(after), "a node that was there already"
        known = max(length for length in range(tree.max_depth + 1) if tuple(path[row, :length].tolist()) in before)
        new = {tuple(path[row, : known + step].tolist()) for step in range(1, grafted + 1)}
        assert set(after) - set(before) == new
    assert all(found.parents[row, node] < node for row in range(batch) for node in range(found.num_nodes))
    assert found.depths.tolist() == [[len(way) for way in words(found, row)] for row in range(batch)]
    assert int(found.depths.max()) <= found.max_depth
    assert found.ancestor_mask.sum(-1).tolist() == (found.depths + 1).tolist()
    last = torch.full((batch,), found.num_nodes - 1)
    ways = found.token_ids.gather(1, found.path_to(last))
    depths = found.depths[:, -1].tolist()
    assert [ways[row, 1 : d + 1].tolist() for row, d in enumerate(depths)] == [
        path[row, :d].tolist() for row, d in enumerate(depths)
    ]


def test_a_root_alone():
    found = graft_path(DraftTree.root_only(torch.tensor([7, 8])), torch.tensor([[1, 2], [3, 4]]), 2)
    assert found.token_ids.tolist() == [[7, 1, 2], [8, 3, 4]]
    assert found.parents.tolist() == [[-1, 0, 1]] * 2 and found.max_depth == 2
    assert found.num_copied == found.of_sequence(1).num_copied == 2


def test_what_cannot_be_grafted():
    tree = random_tree(0, 6, 3)
    with pytest.raises(ValueError, match="need a path of 5 tokens, got 4"):
        graft_path(tree, torch.zeros(1, 4, dtype=torch.long), 2)
    drawn = SampledChildren(torch.ones(1, 1, 99), torch.tensor([0]), torch.tensor([[1]]))
    sampled = DraftTree(tree.token_ids, tree.parents, tree.depths, tree.scores, tree.max_depth, drawn)
    with pytest.raises(ValueError, match="drawn children"):
        graft_path(sampled, torch.zeros(1, 8, dtype=torch.long), 2)
