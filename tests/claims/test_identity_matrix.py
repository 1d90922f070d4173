"""Every method with every kind of draft tree: greedy text, and sampled text with a seed, are the target's own."""

import pytest
import torch
from support.heads import METHODS_BY_KIND, random_heads
from support.stubs import StubHead
from support.targets import DIFFERENT_FAMILIES, plain, prompt, shared_target
from support.trees import TREES
from transformers import set_seed

from hf_specheads.heads.auto import METHODS

NEW, LONGER = 16, 24


# Methods that share drafting code with others run below by default, and greedily in tests/heads/test_pruning.py.
@pytest.mark.covering(2)
@pytest.mark.parametrize("family", DIFFERENT_FAMILIES)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_greedy(method, kind, family):
    target, ids = shared_target(family), prompt()
    heads = random_heads(target, method, TREES[kind])
    assert plain(target, ids, NEW, assistant_model=heads)[0].tolist() == plain(target, ids, NEW)[0].tolist()
    stats = heads.last_stats
    assert stats.draft_forwards > 0
    # The first token comes from the prefill. Heads that copy have nothing to draft in some rounds.
    assert sum(n + 1 for n in stats.num_accepted[0]) + stats.plain_steps == NEW - 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("method", METHODS)
def test_sampled_with_a_seed(method, kind):
    target, ids = shared_target("llama"), prompt()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    heads = random_heads(target, method, TREES[kind])
    set_seed(11)
    expected = target.generate(ids, **options)
    set_seed(11)
    got = target.generate(ids, assistant_model=heads, **options)
    assert got[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize("kind", ["static", "optimal"])
@pytest.mark.parametrize("family", DIFFERENT_FAMILIES)
def test_long_paths_of_fixed_trees(family, kind):
    """Drafts know the text, at ranks that the tree offers and at others. Rounds accept few tokens or whole paths."""
    target, ids = shared_target(family), prompt()
    expected = plain(target, ids, LONGER)
    heads = StubHead(target, expected, (0, 0, 1, 0, None, 0, 0, 0, 2), **TREES[kind].to_dict())
    assert plain(target, ids, LONGER, assistant_model=heads)[0].tolist() == expected[0].tolist()
    accepted = heads.last_stats.num_accepted[0]
    assert min(accepted) < 2 and max(accepted) >= 3
