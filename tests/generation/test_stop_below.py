"""Rounds that stop drafting when the draft becomes too improbable (`stop_below`): shallower trees, the same text."""

from collections import Counter

import pytest
import torch
from support.distributions import chi_square, critical_value, five_token_target, sample, target_distribution
from support.heads import random_heads
from support.stubs import TableHead
from support.targets import plain, prompt, shared_target
from support.trees import TREES

from hf_specheads import DraftTreeConfig
from hf_specheads.cache.draft import DraftCache
from hf_specheads.generation.drafting.grow import gives_up, grow_tree


@pytest.mark.parametrize("kind", TREES)
def test_levels_after_an_improbable_frontier_are_left_out(kind):
    """The tree equals the one without the option, cut at the level that the rule determines."""
    # large enough that no candidate is left out
    config = TREES[kind] if kind != "dynamic" else TREES[kind].replace(total_tokens=500)
    cut = Counter()
    for seed in range(12):
        heads = [TableHead(seed, 1, **config.replace(stop_below=stop).to_dict()) for stop in (0.0, 0.05)]
        whole, tree = (
            grow_tree(one, DraftCache(0), one.tree_config, torch.zeros(1, 2).long(), torch.zeros(1, 1, 2), 4)
            for one in heads
        )
        levels = 1
        while levels < 4 and expanded_scores(whole, levels, kind).exp().max() >= 0.05:
            levels += 1
        assert tree.max_depth == levels
        cut[levels] += 1
        assert torch.equal(tree.token_ids, whole.token_ids[:, whole.depths[0] <= levels])
    assert len(cut) > 1


def expanded_scores(tree, depth, kind):
    at = tree.depths[0] == depth
    if kind != "dynamic":
        inner = torch.zeros_like(at)
        inner[tree.parents[0, 1:]] = True
        at = at & inner
    return tree.scores[0, at]


def test_the_rule():
    scores = torch.tensor([[0.1, 0.01], [0.04, 0.02]]).log()
    heads, cache, tokens = random_heads(shared_target()), DraftCache(0), torch.zeros(2, 2, dtype=torch.long)

    def stops(stop: float, scores: torch.Tensor, position: int = 1) -> bool:
        return gives_up(heads, cache, DraftTreeConfig(stop_below=stop), position, tokens, scores)

    for stop, expected in ((0.0, False), (0.05, False), (0.1, False), (0.2, True)):
        assert stops(stop, scores) is expected
    assert stops(0.05, scores[1:])
    assert not stops(0.2, scores, 0), "without predicted acceptance a first level is always drafted"


@pytest.mark.parametrize("kind", TREES)
def test_greedy_text_is_the_targets(kind):
    target, ids = shared_target(), prompt()
    heads = random_heads(target, **TREES[kind].replace(stop_below=0.1).to_dict())
    heads.trace = True
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), plain(target, ids, 24))
    depths = [tree.max_depth for tree in heads.last_stats.trees]
    assert len(set(depths)) > 1 and heads.last_stats.draft_forwards == sum(depths)


def test_drawn_children_follow_the_target():
    target, samples = five_token_target(), 150
    heads = random_heads(target, children="sampled", kind="chain", depth=3, stop_below=0.25)
    counts = Counter(tuple(sample(target, heads).tolist()) for _ in range(samples))
    statistic, freedom = chi_square(counts, target_distribution(target, {}, 3), samples)
    assert statistic < critical_value(freedom)
