"""The dynamic programme against all trees there are, and the search end to end."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.heads import random_heads
from support.stubs import StubHead
from support.targets import plain, prompt, shared_target

from hf_specheads import AutoDraftHead, DraftTreeConfig
from hf_specheads.tuning.measure import RoundCosts
from hf_specheads.tuning.search import BestTrees, expected_length, optimal_tree, search_tree

Shape = tuple  # a node's children, each a shape


@functools.cache
def shapes(nodes: int, depth: int, children: int) -> list[Shape]:
    """All ordered trees of exactly that many nodes, with at most that many levels and children per node."""
    return list(forests(nodes - 1, depth, children, children))


@functools.cache
def forests(nodes: int, depth: int, children: int, trees: int) -> list[Shape]:
    """All rows of at most `trees` trees with `nodes` nodes together."""
    if nodes == 0:
        return [()]
    if depth == 0 or trees == 0:
        return []
    return [
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in shapes(size, depth - 1, children)
        for rest in forests(nodes - size, depth, children, trees - 1)
    ]


def paths(shape: Shape, prefix: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = []
    for rank, child in enumerate(shape):
        found += [(*prefix, rank), *paths(child, (*prefix, rank))]
    return found


def test_there_are_as_many_trees_as_catalan_says():
    assert [len(shapes(nodes, 9, 9)) for nodes in range(1, 9)] == [1, 1, 2, 5, 14, 42, 132, 429]


def probabilities(children: int):
    """p of one draft position: any order, some of them 0, together at most 1."""
    weights = st.lists(st.floats(0, 1), min_size=children, max_size=children)
    return weights.map(lambda row: [value / max(sum(row), 1) for value in row])


tables = st.integers(1, 4).flatmap(lambda children: st.lists(probabilities(children), min_size=1, max_size=3))


@settings(max_examples=40, deadline=None)
@given(table=tables, nodes=st.integers(2, 8), depth=st.integers(1, 4))
def test_no_tree_is_better(table, nodes, depth):
    everything = shapes(nodes, depth, len(table[0]))
    best = BestTrees(table, nodes, depth)
    if not everything:
        assert best.expected_length(nodes) == -float("inf")
        return
    wanted = max(expected_length(paths(shape), table) for shape in everything)
    assert best.expected_length(nodes) == pytest.approx(wanted, abs=1e-12)
    choices = best.choices(nodes)
    assert len(choices) == nodes - 1
    assert expected_length(choices, table) == pytest.approx(wanted, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(table=tables, depth=st.integers(1, 5))
def test_trees_are_trees_and_more_nodes_are_never_worse(table, depth):
    best, before = BestTrees(table, 20, depth), 1.0
    for nodes in range(2, 21):
        length = best.expected_length(nodes)
        if length == -float("inf"):
            break
        assert length >= before - 1e-12
        before = length
        choices = best.choices(nodes)
        known = {(), *choices}
        assert len(known) == nodes
        for path in choices:
            assert len(path) <= depth
            assert path[:-1] in known
            assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in known
        DraftTreeConfig(kind="optimal", choices=choices, children="sampled")  # which needs ranks without gaps


costs_of_forwards = st.builds(
    lambda target, draft, start, overhead: RoundCosts(
        {1: target[0], 4: sum(target[:2]), 8: sum(target)}, {1: draft[0], 4: sum(draft)}, start, overhead
    ),
    st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
    st.floats(0, 1),
    st.floats(0, 1),
)


@settings(max_examples=25, deadline=None)
@given(table=tables, costs=costs_of_forwards)
def test_no_tree_takes_less_time_per_token(table, costs):
    """Draft forwards cost the same whatever their rows, as in Sequoia, so that the longest trees are the best."""
    costs = RoundCosts(costs.target, {1: costs.draft[1]}, costs.start, costs.overhead)
    found = optimal_tree(table, costs, max_nodes=6, max_depth=3)
    fastest = min(
        costs.of(paths(shape)) / expected_length(paths(shape), table)
        for nodes in range(2, 7)
        for shape in shapes(nodes, 3, len(table[0]))
    )
    assert found.seconds_per_token == pytest.approx(fastest, rel=1e-9)
    assert found.acceptance_length == pytest.approx(expected_length(found.tree.paths, table))
    assert found.seconds_per_round == pytest.approx(costs.of(found.tree.paths))


def test_cheap_forwards_want_many_nodes_and_dear_ones_few():
    table = [[0.6, 0.2, 0.1]]
    flat = optimal_tree(table, RoundCosts({1: 1.0}, {1: 0.0}), max_nodes=30, max_depth=6)
    steep = optimal_tree(table, RoundCosts({1: 1.0, 30: 30.0}, {1: 0.1}), max_nodes=30, max_depth=6)
    dear_drafts = optimal_tree(table, RoundCosts({1: 1.0}, {1: 5.0}), max_nodes=30, max_depth=6)
    assert flat.tree.total_tokens == 30
    assert steep.tree.total_tokens == 2
    assert dear_drafts.tree.depth == 1
    assert flat.speed_up == pytest.approx(flat.acceptance_length)


def test_costs_count_draft_forwards_by_their_rows():
    costs = RoundCosts({1: 10.0, 5: 30.0}, {1: 1.0, 3: 2.0}, start=0.5, overhead=0.25)
    assert costs.of([(0,)]) == 15 + 0.5 + 0.25  # two nodes, and no draft forward after the first
    assert costs.of([(0,), (1,), (0, 0), (1, 0)]) == 30 + 0.5 + 0.25 + 1.5  # two rows
    assert costs.of([(0,), (0, 0), (0, 0, 0)]) == 25 + 0.5 + 0.25 + 2 * 1.0
    assert costs.of([(rank,) for rank in range(6)]) == 40 + 0.5 + 0.25  # past the last point


def test_positions_may_differ():
    """The second child is worthless at the first position, and the favourite at the second."""
    table = [[0.9, 0.0], [0.0, 0.9]]
    found = optimal_tree(table, RoundCosts({1: 1.0}, {1: 0.0}), max_nodes=4, max_depth=2)
    assert found.tree.choices == ((0,), (0, 0), (0, 1))
    assert found.acceptance_length == pytest.approx(1 + 0.9 + 0.81)


@pytest.mark.parametrize(
    ("acceptance", "options", "message"),
    [
        ([], {}, "at least one child"),
        ([[]], {}, "at least one child"),
        ([0.7, 0.6], {}, "sum to at most 1"),
        ([-0.1], {}, "sum to at most 1"),
        ([0.5], {"max_nodes": 1}, "max_nodes >= 2"),
        ([0.5], {"max_depth": 0}, "max_depth >= 1"),
    ],
)
def test_impossible_searches_are_refused(acceptance, options, message):
    with pytest.raises(ValueError, match=message):
        optimal_tree(acceptance, RoundCosts({1: 1.0}, {}), **options)


def test_a_large_search_looks_at_few_trees(monkeypatch):
    """At one per depth and number of nodes, of all that there are."""
    of, asked = RoundCosts.of, []
    monkeypatch.setattr(RoundCosts, "of", lambda self, choices: (asked.append(choices), of(self, choices))[1])
    table = [[0.5 / 2**child for child in range(10)]]
    optimal_tree(table, RoundCosts({1: 1.0, 64: 2.0}, {1: 0.05}), max_nodes=64, max_depth=10)
    assert 10 < len(asked) <= 10 * 63


LIMITS = {"max_nodes": 7, "max_depth": 3, "num_children": 3, "max_new_tokens": 12}


@pytest.mark.parametrize("method", ["eagle", "poss", "medusa", "draft-lm"])
def test_search_end_to_end(method):
    """Any family: a tree within the limits, and the text is still the target's."""
    target = shared_target()
    heads = small_heads(target, method)
    found = search_tree(target, heads, [prompt(9), prompt(6, seed=1)[0].tolist()], **LIMITS)
    assert found.tree.kind == "optimal"
    assert 2 <= found.tree.total_tokens <= 7
    assert found.tree.depth <= min(3, heads.max_draft_positions or 3)
    assert 1 <= found.acceptance_length <= 4
    assert found.costs.overhead >= 0 < found.seconds_per_round
    assert found.acceptance.tree.kind == "static"
    ids = prompt()
    heads = heads.with_tree(**found.tree.to_dict())
    assert plain(target, ids, 16, assistant_model=heads).equal(plain(target, ids, 16))


def small_heads(target, method):
    tree = {"depth": 2, "top_k": 2, "total_tokens": 4}
    options = {
        "medusa": {"num_heads": 2},
        "draft-lm": {"hidden_size": 16, "num_attention_heads": 2, "tree_config": tree},
    }.get(method, {"tree_config": tree})
    return AutoDraftHead.from_target(target, method, **options).eval()


def test_the_search_finds_what_the_heads_are_good_at():
    """Right at the second rank, always: no tree without it is worth anything."""
    target, ids = shared_target(), prompt()
    truth = plain(target, ids, 60)
    found = search_tree(target, StubHead(target, truth, ranks=(1,)), [ids], **{**LIMITS, "max_new_tokens": 40})
    assert found.acceptance.pooled == [0.0, 1.0, 0.0]
    assert (1,) in found.tree.choices
    assert found.acceptance_length > 1.9


def test_sampled_children_stay_sampled():
    target = shared_target()
    heads = random_heads(target, kind="chain", depth=2, children="sampled", draft_temperature=0.7)
    found = search_tree(target, heads, [prompt(8)], **LIMITS, do_sample=True, temperature=0.9)
    assert (found.tree.children, found.tree.draft_temperature) == ("sampled", 0.7)
