"""Draft trees: masks, paths and pruning by tensor operations equal naive Python, for any tree and any batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import path_of, random_tree

from hf_specheads.tree.draft_tree import DraftTree, select_nodes

seeds = st.integers(0, 10**6)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, nodes=st.integers(1, 30), depth=st.integers(1, 9), batch=st.integers(1, 3))
def test_ancestor_mask_equals_following_the_parents(seed, nodes, depth, batch):
    tree = random_tree(seed, nodes, depth, batch)
    mask = tree.ancestor_mask
    assert mask.shape == (batch, nodes, nodes)
    for index, parents in enumerate(tree.parents.tolist()):
        for node in range(nodes):
            assert mask[index, node].nonzero()[:, 0].tolist() == path_of(parents, node)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, nodes=st.integers(1, 30), depth=st.integers(1, 9), batch=st.integers(1, 3), data=st.data())
def test_path_to_starts_at_the_root_and_repeats_its_end(seed, nodes, depth, batch, data):
    tree = random_tree(seed, nodes, depth, batch)
    ends = [data.draw(st.integers(0, nodes - 1)) for _ in range(batch)]
    paths = tree.path_to(torch.tensor(ends)).tolist()
    for parents, end, path in zip(tree.parents.tolist(), ends, paths, strict=True):
        expected = path_of(parents, end)
        assert path == expected + [end] * (depth + 1 - len(expected))


def test_ancestors_are_found_at_every_depth_of_a_chain():
    """Doubling must not stop a generation early or late: a chain of depth D needs D generations."""
    for depth in range(1, 18):
        ids = torch.arange(depth + 1)[None]
        tree = DraftTree(ids, ids - 1, ids, torch.zeros(ids.shape), depth)
        assert torch.equal(tree.ancestor_mask[0], torch.ones(depth + 1, depth + 1).tril().bool())


def test_root_only_has_no_drafted_nodes():
    tree = DraftTree.root_only(torch.tensor([5, 8]))
    assert tree.token_ids.tolist() == [[5], [8]]
    assert tree.parents.tolist() == [[-1], [-1]]
    assert tree.ancestor_mask.tolist() == [[[True]], [[True]]]
    assert tree.path_to(torch.tensor([0, 0])).tolist() == [[0], [0]]


def _log_probabilities(count: int, levels: int, generator: torch.Generator) -> list[float]:
    return [-float(x) for x in torch.randint(0, levels, (count,), generator=generator)]


def _candidates(seed: int, batch: int, width: int, depth: int, levels: int):
    """Candidates as drafting makes them: K nodes, then K*K children per level, scores never above the parent's.

    `levels` different log-probabilities: few of them means many ties.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, parents, depths, scores = [], [], [], []
    for _ in range(batch):
        row_parents, row_depths = [0] * width, [1] * width
        row_scores = _log_probabilities(width, levels, generator)
        frontier = list(range(1, width + 1))
        for level in range(2, depth + 1):
            first = len(row_parents) + 1
            for parent in frontier:
                row_parents += [parent] * width
                row_depths += [level] * width
                row_scores += [row_scores[parent - 1] + x for x in _log_probabilities(width, levels, generator)]
            children = range(first, len(row_parents) + 1)
            frontier = sorted(children, key=lambda c, s=row_scores: -s[c - 1])[:width]
        tokens.append(torch.randint(0, 99, (len(row_parents),), generator=generator).tolist())
        parents.append(row_parents)
        depths.append(row_depths)
        scores.append(row_scores)
    return torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), torch.tensor(scores)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, batch=st.integers(1, 3), width=st.integers(1, 4), depth=st.integers(1, 4),
       levels=st.sampled_from([1, 2, 50]), kept=st.integers(1, 60))  # fmt: skip
def test_select_nodes_equals_naive_pruning(seed, batch, width, depth, levels, kept):
    tokens, parents, depths, scores = _candidates(seed, batch, width, depth, levels)
    tree = select_nodes(tokens, parents, depths, scores, torch.arange(batch), kept, depth)
    for index in range(batch):
        count = tokens.shape[1]
        ranked = sorted(range(count), key=lambda c, i=index: (-scores[i, c].item(), c))[:kept]
        chosen = sorted(ranked)
        assert tree.token_ids[index].tolist() == [index, *tokens[index, chosen].tolist()]
        number = {0: 0} | {candidate + 1: place for place, candidate in enumerate(chosen, start=1)}
        assert tree.parents[index].tolist() == [-1] + [number[parents[index, c].item()] for c in chosen]
        assert tree.depths[index].tolist() == [0, *depths[index, chosen].tolist()]
        assert tree.scores[index].tolist() == [0.0, *scores[index, chosen].tolist()]


@settings(max_examples=60, deadline=None)
@given(seed=seeds, width=st.integers(1, 4), depth=st.integers(1, 5), levels=st.sampled_from([1, 2, 3, 50]),
       kept=st.integers(1, 40))  # fmt: skip
def test_selection_is_connected_and_parents_precede_children(seed, width, depth, levels, kept):
    """Also when every score ties (`levels=1`), where an unstable sort may keep a child without its parent."""
    tree = select_nodes(*_candidates(seed, 2, width, depth, levels), torch.tensor([1, 2]), kept, depth)
    for parents, depths in zip(tree.parents.tolist(), tree.depths.tolist(), strict=True):
        for node in range(1, tree.num_nodes):
            assert 0 <= parents[node] < node
            assert depths[node] == depths[parents[node]] + 1


def test_rows_of_a_batch_do_not_see_each_other():
    tokens, parents, depths, scores = _candidates(5, 3, 3, 3, 50)
    roots = torch.tensor([7, 8, 9])
    together = select_nodes(tokens, parents, depths, scores, roots, 8, 3)
    ends = torch.tensor([8, 3, 5])
    for index in range(3):
        part = slice(index, index + 1)
        alone = select_nodes(tokens[part], parents[part], depths[part], scores[part], roots[part], 8, 3)
        assert torch.equal(together.token_ids[part], alone.token_ids)
        assert torch.equal(together.parents[part], alone.parents)
        assert torch.equal(together.ancestor_mask[part], alone.ancestor_mask)
        assert torch.equal(together.path_to(ends)[part], alone.path_to(ends[part]))


def test_moving_a_tree_keeps_its_values():
    tree = random_tree(3).to(torch.device("cpu"))
    assert torch.equal(tree.parents, random_tree(3).parents)
    assert tree.max_depth == 4
