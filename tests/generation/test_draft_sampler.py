"""Drawing children: in the right order, from the distribution that verification receives, in trees of every fixed
shape."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.distributions import chi_square, critical_value
from support.stubs import TABLE_VOCAB as VOCAB
from support.stubs import TableHead
from support.trees import path_of
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specheads.cache.draft import DraftCache
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.generation.sampling import DraftSampler, TokenSampler

NO_PROCESSORS = LogitsProcessorList()
TREES = [
    {"kind": "chain", "depth": 4},
    {"kind": "static", "choices": ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (2, 0, 0), (2, 0, 1))},
    {"kind": "optimal", "choices": tuple((rank,) for rank in range(14))},  # more children than there are tokens
]


def naive_order_probability(probs: list[float], order: tuple[int, ...]) -> float:
    probability, left = 1.0, 1.0
    for token in order:
        probability, left = probability * probs[token] / left, left - probs[token]
    return probability


def test_draws_are_without_replacement_and_in_order():
    probs = torch.tensor([0.45, 0.3, 0.2, 0.05, 0.0])
    samples = 20000
    drawn = DraftSampler.draw(probs.expand(1, samples, -1), 3)[0].tolist()
    counts = Counter(map(tuple, drawn))
    assert not any(4 in order for order in counts), "a token of probability 0 comes last"
    orders = {order: naive_order_probability(probs.tolist(), order) for order in counts}
    statistic, freedom = chi_square(counts, orders, samples)
    assert freedom >= 20
    assert statistic < critical_value(freedom)
    swapped = {order: orders.get(order[::-1], 0.0) for order in orders}
    assert chi_square(counts, swapped, samples)[0] > critical_value(freedom), "the order matters, and is tested"


def test_surplus_draws_have_probability_zero():
    probs = torch.tensor([[[0.0, 0.7, 0.0, 0.3]]])
    tokens = DraftSampler.draw(probs, 4)[0, 0].tolist()
    assert set(tokens[:2]) == {1, 3}
    assert set(tokens[2:]) == {0, 2}


def test_the_distribution_is_processed_like_the_targets():
    """Processors run per node, along its own path. The reference are the same processors on the target's side."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.7), NoBadWordsLogitsProcessor([[4, 5]], eos_token_id=0),
         TemperatureLogitsWarper(0.6), TopKLogitsWarper(5)]
    )  # fmt: skip
    committed = torch.tensor([[1, 2], [3, 3]])
    paths = torch.tensor([[[4], [5], [6]], [[7], [4], [1]]])
    logits = torch.randn(2, 3, VOCAB)
    probs = DraftSampler(processors, committed).distribution(logits, paths)
    sampler = TokenSampler(processors, True)
    for row in range(2):
        for node in range(3):
            ids = torch.cat([committed[row], paths[row, node]])[None]
            expected = sampler.scores_at_node(ids, logits[row, node][None]).softmax(-1)
            torch.testing.assert_close(probs[row, node], expected[0])
    assert probs[0, 0, 5] == 0, "the bad word is complete after this path only"
    assert probs[1, 1, 5] == 0


class Counting(LogitsProcessor):
    """A user's processor. It may count its calls, so no additional calls are allowed."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


def test_users_processors_are_never_asked_about_drafts():
    def allowed(batch, ids):
        raise AssertionError("must not be called")

    counting = Counting()
    processors = LogitsProcessorList(
        [counting, PrefixConstrainedLogitsProcessor(allowed, 1), TemperatureLogitsWarper(0.5)]
    )
    logits = torch.randn(1, 2, VOCAB)
    probs = DraftSampler(processors, torch.tensor([[1]])).distribution(logits, torch.zeros(1, 2, 0).long())
    torch.testing.assert_close(probs, (logits / 0.5).softmax(-1))
    assert counting.calls == 0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_are_drawn_from_evenly(broken):
    logits = torch.stack([torch.full((VOCAB,), broken), torch.randn(VOCAB)])[None]
    probs = DraftSampler(NO_PROCESSORS, torch.tensor([[1]])).distribution(logits, torch.zeros(1, 2, 0).long())
    torch.testing.assert_close(probs[0, 0], torch.full((VOCAB,), 1 / VOCAB))
    torch.testing.assert_close(probs[0, 1], logits[0, 1].softmax(-1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), tree=st.sampled_from(TREES), rows=st.integers(1, 3), depth=st.integers(1, 4))
def test_grown_trees_carry_what_their_children_were_drawn_from(seed, tree, rows, depth):
    torch.manual_seed(seed)
    head = TableHead(seed, rows, children="sampled", draft_temperature=0.7, **tree)
    depth = min(depth, head.tree_config.depth)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3)])
    roots = torch.full((rows, 1), 20)
    grown = grow_tree(
        head, DraftCache(0), head.tree_config, roots, torch.zeros(rows, 1, 2), depth, DraftSampler(processors, roots)
    )
    drawn, paths = grown.sampled, [path for path in head.tree_config.paths if len(path) <= depth]
    assert grown.num_nodes == 1 + len(paths)
    assert grown.max_depth == depth
    for row in range(rows):
        tokens, parents = grown.token_ids[row].tolist(), grown.parents[row].tolist()
        scores = grown.scores[row].tolist()
        assert [parents[node] for node in range(1, len(tokens))] == [
            0 if len(path) == 1 else 1 + paths.index(path[:-1]) for path in paths
        ]
        for slot, parent in enumerate(drawn.parents.tolist()):
            path = tuple(tokens[node] for node in path_of(parents, parent)[1:])
            expected = (head.logits_after(row, path) / 0.7 / 1.3).softmax(-1)
            torch.testing.assert_close(drawn.probs[row, slot], expected)
            children = [child for child in drawn.children[slot].tolist() if child >= 0]
            assert children == [node for node in range(len(tokens)) if parents[node] == parent]
            first = [tokens[child] for child in children][:VOCAB]
            assert len(set(first)) == len(first), "siblings differ"
            for child in children:
                log_prob = expected[tokens[child]].log().item()
                assert scores[child] == pytest.approx(scores[parent] + log_prob, abs=1e-4)


def test_a_draft_vocabulary_is_spread_over_the_whole():
    class Reduced(TableHead):
        draft_vocabulary = torch.tensor([3, 8, 9])

        def logits_after(self, row, path):
            return super().logits_after(row, path)[:3]

    head = Reduced(1, 1, kind="chain", depth=3, children="sampled")
    head.config = type("Config", (), {"vocab_size": VOCAB})()
    roots = torch.tensor([[20]])
    grown = grow_tree(
        head, DraftCache(0), head.tree_config, roots, torch.zeros(1, 1, 2), 3, DraftSampler(NO_PROCESSORS, roots)
    )
    assert set(grown.token_ids[0, 1:].tolist()) <= {3, 8, 9}
    assert grown.sampled.probs.shape == (1, 3, VOCAB)
    torch.testing.assert_close(grown.sampled.probs[0, 0, [3, 8, 9]], head.logits_after(0, ()).softmax(-1))
    torch.testing.assert_close(grown.sampled.probs.sum(-1), torch.ones(1, 3))


def test_without_a_sampler_children_are_the_most_probable_ones():
    head = TableHead(4, 1, kind="chain", depth=2, children="sampled")
    grown = grow_tree(head, DraftCache(0), head.tree_config, torch.tensor([[3]]), torch.zeros(1, 1, 2), 2)
    assert grown.sampled is None
    assert grown.token_ids[0, 1] == head.logits_after(0, ()).argmax()
