"""Growing trees: equal to a naive best-first expansion, even if the heads return NaN."""

from copy import deepcopy

import pytest
import torch
from support.batches import batch_of, greedy
from support.heads import random_heads
from support.stubs import TABLE_VOCAB as VOCAB
from support.stubs import TableHead
from support.targets import plain, prompt, shared_target
from support.trees import path_of

from hf_specheads.cache.draft import DraftCache
from hf_specheads.generation.drafting import grow as drafting
from hf_specheads.generation.drafting.chains import favourites, grow_at_once, grow_links
from hf_specheads.generation.drafting.grow import grow_tree


def naive_tree(head: TableHead, row: int) -> dict[tuple[int, ...], float]:
    """EAGLE-2 in plain Python: expand the K best nodes of a level with K children each, keep the best N - 1 of all."""
    config = head.tree_config
    width = 1 if config.kind == "chain" else min(config.top_k, VOCAB)
    frontier, candidates = {(): 0.0}, {}
    for _ in range(config.depth):
        level = {}
        for path, score in frontier.items():
            values, tokens = torch.log_softmax(head.logits_after(row, path), -1).topk(width)
            level |= {(*path, t): score + v for t, v in zip(tokens.tolist(), values.tolist(), strict=True)}
        candidates |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(candidates.items(), key=lambda item: -item[1])[: config.num_nodes - 1])


TREES = [
    {"depth": 4, "top_k": 3, "total_tokens": 12},
    {"depth": 1, "top_k": 5, "total_tokens": 4},
    {"depth": 3, "top_k": 4, "total_tokens": 500},  # more nodes than there are candidates
    {"depth": 2, "top_k": 40, "total_tokens": 30},  # more children than the vocabulary has tokens
    {"kind": "chain", "depth": 5},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_grown_tree_equals_naive_expansion(tree, rows):
    head = TableHead(4, rows, **tree)
    roots = torch.arange(rows)[:, None] + 20
    grown = grow_tree(head, DraftCache(0), head.tree_config, roots, torch.zeros(rows, 1, 2), head.tree_config.depth)
    for row in range(rows):
        tokens, parents = grown.token_ids[row].tolist(), grown.parents[row].tolist()
        expected = naive_tree(head, row)
        paths = {tuple(tokens[n] for n in path_of(parents, node)[1:]): node for node in range(1, grown.num_nodes)}
        assert tokens[0] == row + 20
        assert set(paths) == set(expected)
        for path, node in paths.items():
            assert grown.scores[row, node].item() == pytest.approx(expected[path], abs=1e-5)
            assert grown.depths[row, node].item() == len(path)


def test_a_chain_is_the_greedy_path():
    head = TableHead(9, 1, kind="chain", depth=5)
    grown = grow_tree(head, DraftCache(0), head.tree_config, torch.tensor([[3]]), torch.zeros(1, 1, 2), 5)
    path = ()
    for _ in range(5):
        path = (*path, head.logits_after(0, path).argmax().item())
    assert grown.token_ids[0].tolist() == [3, *path]
    assert grown.parents[0].tolist() == [-1, 0, 1, 2, 3, 4]


def _assert_connected(grown):
    for parents, depths in zip(grown.parents.tolist(), grown.depths.tolist(), strict=True):
        for node in range(1, grown.num_nodes):
            assert 0 <= parents[node] < node
            assert depths[node] == depths[parents[node]] + 1


@pytest.mark.parametrize("total_tokens", [3, 5, 9, 20])
def test_children_of_probability_one_do_not_tear_the_tree(total_tokens):
    head = TableHead(1, 1, tied=True, depth=5, top_k=3, total_tokens=total_tokens)
    _assert_connected(grow_tree(head, DraftCache(0), head.tree_config, torch.tensor([[3]]), torch.zeros(1, 1, 2), 5))


@pytest.mark.parametrize("broken_level", [0, 1, 2])
def test_a_head_that_overflows_to_nan_does_not_tear_the_tree(broken_level):
    head = TableHead(1, 2, broken_level=broken_level, depth=4, top_k=3, total_tokens=9)
    grown = grow_tree(head, DraftCache(0), head.tree_config, torch.tensor([[3], [4]]), torch.zeros(2, 1, 2), 4)
    _assert_connected(grown)
    assert ((grown.token_ids >= 0) & (grown.token_ids < VOCAB)).all()


def test_nan_heads_do_not_change_the_text():
    target, ids = shared_target(), prompt()
    heads = random_heads(target, "poss")
    with torch.no_grad():
        heads.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    assert torch.equal(plain(target, ids, assistant_model=heads), plain(target, ids))
    with torch.no_grad():
        heads.fc.weight.fill_(torch.nan)
    assert torch.equal(plain(target, ids, assistant_model=heads), plain(target, ids))


def test_depth_of_a_round_may_be_less_than_configured():
    head = TableHead(4, 1, depth=6, top_k=3, total_tokens=30)
    grown = grow_tree(head, DraftCache(0), head.tree_config, torch.tensor([[3]]), torch.zeros(1, 1, 2), 2)
    assert grown.max_depth == 2
    assert grown.depths.max().item() == 2


AT_ONCE = ["dflash", "jetspec", "peagle"]  # positions that are drafted in one forward, independently of each other


def adaptive(target, method):
    heads = random_heads(target, method)
    heads.forget_tree()
    heads.adaptive = True
    return heads


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", AT_ONCE)
def test_chains_known_at_once_end_where_those_do_that_are_made_link_by_link(method, rows, monkeypatch):
    seen = []

    def checked(tree, root, logits, vocabulary, shape, reach):
        def link(position, *_):
            return root, *favourites(logits[:, position], tree.draft_temperature, vocabulary)

        twin = deepcopy(reach)
        expected = grow_links(tree, root, link(0), link, shape, twin)
        found = grow_at_once(tree, root, logits, vocabulary, shape, reach)
        for name in ("token_ids", "parents", "depths"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        torch.testing.assert_close(found.scores, expected.scores)
        assert (found.max_depth, found.shape) == (expected.max_depth, expected.shape)
        if reach is not None:
            for name in ("levels", "drafted", "ended", "next_chance", "likely"):
                assert getattr(reach, name) == pytest.approx(getattr(twin, name))
            assert reach.offered is None or len(reach.offered) == reach.levels
        seen.append(found.max_depth)
        return found

    monkeypatch.setattr(drafting, "grow_at_once", checked)
    target = shared_target("llama")
    inputs, _ = batch_of((9, 4, 14)[:rows])
    heads = adaptive(target, method)
    for assistant in (heads, random_heads(target, method).with_tree(kind="chain", depth=3)):
        assert torch.equal(greedy(target, inputs, assistant_model=assistant), greedy(target, inputs))
    assert len(seen) > 8 and len(set(seen)) > 1


@pytest.mark.parametrize("method", AT_ONCE)
def test_draft_logits_of_all_positions_are_computed_together_and_of_no_more_than_the_rounds_tree_has(
    method, monkeypatch
):
    target, ids, asked, levels = shared_target("llama"), prompt(), [], []
    heads = adaptive(target, method)
    logits, start = type(heads).draft_logits, type(heads).start_draft

    def counted(self, hidden):
        asked.append(hidden.shape[1])
        return logits(self, hidden)

    def started(self, cache, *args):
        levels.append(cache.levels)
        return start(self, cache, *args)

    monkeypatch.setattr(type(heads), "draft_logits", counted)
    monkeypatch.setattr(type(heads), "start_draft", started)
    assert torch.equal(plain(target, ids, 60, assistant_model=heads), plain(target, ids, 60))
    assert len(set(levels)) > 2, "trees of several depths"
    most = heads.max_draft_positions or 99
    assert asked == [min(max(depth, 2 if method == "peagle" else 1), most) for depth in levels]
