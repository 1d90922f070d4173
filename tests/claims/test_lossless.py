"""Greedy text with draft heads is the target's own, token for token in fp32: families, trees, good and bad heads."""

import functools

import pytest
import torch
from support.heads import random_heads
from support.stubs import CountForwards, StubHead
from support.targets import FAMILIES, WINDOW, plain, prompt, shared_target

from hf_specheads.cache import target as target_cache
from hf_specheads.cache.masks import additive_mask
from hf_specheads.errors import UnsupportedGenerationError

CHAIN_ONLY = ("bloom", "llama4", "lfm2")
TREE_FAMILIES = [family for family in FAMILIES if family not in CHAIN_ONLY]
NEW, FEW = 24, 12
REPEATING = {"gpt2": 36, "gpt-neox": 36}  # these families repeat themselves, so their texts must be longer
# The true token is sometimes the favourite, sometimes ranked lower, sometimes missing. Accepted paths are then not
# contiguous in the tree, and rounds accept between 0 and `depth` tokens.
MIXED = (0, 1, 0, 2, 0, None, 0, 0, 1)


@functools.cache
def text(family: str, **options) -> tuple:
    """Returns target, prompt and plain output, and checks that the output is varied enough for a mistake to show."""
    target, ids = shared_target(family, **options), prompt()
    expected = plain(target, ids, REPEATING.get(family, NEW))
    distinct = len(set(expected[0, ids.shape[1] :].tolist()))
    assert distinct >= 8, f"plain text of {family} has only {distinct} distinct tokens; the test could not fail"
    return target, ids, expected


def beginning(family: str) -> tuple:
    """Returns the same with a shorter text: heads that know nothing are wrong in every round, so a dozen tokens
    suffice."""
    target, ids, expected = text(family)
    return target, ids, expected[:, : ids.shape[1] + FEW]


def assert_same_text(target, ids, expected, heads) -> None:
    got = plain(target, ids, expected.shape[1] - ids.shape[1], assistant_model=heads)
    assert got[0].tolist() == expected[0].tolist()
    assert sum(n + 1 for n in heads.last_stats.num_accepted[0]) == expected.shape[1] - ids.shape[1] - 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("attention", [None, "eager"], ids=["sdpa where there is one", "eager"])
@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_families(family, attention):
    target, ids, expected = text(family, attention=attention) if attention else text(family)
    stub = StubHead(target, expected, MIXED)
    assert_same_text(target, ids, expected, stub)
    accepted = stub.last_stats.num_accepted[0]
    assert max(accepted) >= 2, "no round accepted enough to exercise the cache"
    assert min(accepted) < 4, "no round rejected anything"


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_untrained_heads_on_every_family(family):
    target, ids, expected = beginning(family)
    assert_same_text(target, ids, expected, random_heads(target, "poss"))


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_chains_on_every_family(family):
    target, ids, expected = text(family)
    assert_same_text(target, ids, expected, StubHead(target, expected, MIXED, kind="chain", depth=5))


TREES = [
    {"depth": 1, "top_k": 2, "total_tokens": 2},
    {"depth": 1, "top_k": 9, "total_tokens": 10},
    {"depth": 3, "top_k": 2, "total_tokens": 5},
    {"depth": 7, "top_k": 3, "total_tokens": 16},
    {"depth": 6, "top_k": 10, "total_tokens": 60},
    {"depth": WINDOW + 3, "top_k": 2, "total_tokens": 20},  # deeper than the sliding window
    {"kind": "chain", "depth": 1},
    {"kind": "chain", "depth": WINDOW + 3},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [(0,), MIXED], ids=["always", "mixed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: "-".join(map(str, tree.values())))
def test_tree_shapes(family, tree, ranks):
    target, ids, expected = text(family)
    assert_same_text(target, ids, expected, StubHead(target, expected, ranks, **tree))


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["eagle", "hass", "poss"])
@pytest.mark.parametrize("tree", [TREES[3], TREES[4], TREES[6]], ids=lambda tree: "-".join(map(str, tree.values())))
def test_untrained_heads(method, tree):
    target, ids, expected = beginning("llama")
    assert_same_text(target, ids, expected, random_heads(target, method, **tree))


@pytest.mark.parametrize("seed", range(6))
def test_random_agreement(seed):
    """The draft is right at random: the true token has random ranks or is missing."""
    target, ids, expected = text("qwen2-window", seed=seed % 2)
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(-1, 4, (23,), generator=generator).tolist()
    ranks = tuple(None if rank < 0 else max(rank - 1, 0) for rank in ranks)
    assert_same_text(target, ids, expected, StubHead(target, expected, ranks, depth=5, top_k=4, total_tokens=24))


@pytest.mark.parametrize("tree", [{"depth": 4, "top_k": 3, "total_tokens": 9}, {"kind": "chain", "depth": 4}], ids=str)
def test_always_right_and_never_right(tree):
    """Checks exact counts: 41 tokens are one from the prefill and 8 rounds of 5, or 40 rounds of 1."""
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, 41)
    for ranks, rounds, accepted in [((0,), 8, 4), ((None,), 40, 0)]:
        stub = StubHead(target, expected, ranks, **tree)
        with CountForwards(target) as forwards:
            assert torch.equal(plain(target, ids, 41, assistant_model=stub), expected)
        stats = stub.last_stats
        assert stats.num_accepted == [[accepted] * rounds]
        assert stats.acceptance_length == accepted + 1
        assert forwards.count == stats.target_forwards == rounds + 1
        # nothing is drafted for the last single token of the budget
        assert len(stub.calls) == rounds - (accepted == 0)
        assert stats.pos_acc == ([1.0] * 4 if accepted else [0.0])


def test_one_host_sync_per_round():
    target, ids, expected = text("llama")
    for heads in (StubHead(target, expected, MIXED), random_heads(target)):
        plain(target, ids, NEW, assistant_model=heads)
        assert heads.last_stats.host_syncs == heads.last_stats.rounds + 1


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize(
    "tree", [{"depth": 6, "top_k": 4, "total_tokens": 20}, {"kind": "chain", "depth": 6}], ids=str
)
def test_prompt_and_output_fill_the_position_embeddings_exactly(family, tree):
    """No node may lie past the target's last position, because its embedding would not exist."""
    limit = 48
    ids = prompt(20)
    size = {"n_positions": limit} if family == "gpt2" else {"max_position_embeddings": limit}
    target = shared_target(family, **size)
    expected = plain(target, ids, limit - 20)
    for ranks in ((0,), MIXED):
        stub = StubHead(target, expected, ranks, **tree)
        assert_same_text(target, ids, expected, stub)
    # A rotary target still generates past its trained positions. Nothing is drafted there, and the text is the same.
    if family == "llama":
        expected = plain(target, ids, limit)
        assert_same_text(target, ids, expected, StubHead(target, expected, MIXED, **tree))


@pytest.mark.parametrize("family", CHAIN_ONLY)
def test_targets_that_take_only_chains(family):
    target, ids, expected = text(family, seed=3)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="chain"):
        plain(target, ids, NEW, assistant_model=StubHead(target, expected))
    assert forwards.count == 0
    for ranks in ((0,), (0, 0, 1, 0, None)):
        assert_same_text(target, ids, expected, StubHead(target, expected, ranks, kind="chain", depth=4))
    assert_same_text(target, ids, expected, random_heads(target, kind="chain"))


def test_heads_serve_prompt_after_prompt():
    """Nothing of one generation carries over to the next."""
    target = shared_target("mistral")
    heads = random_heads(target, "poss")
    for length in (3, 19, 8, 1):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, 20, assistant_model=heads), plain(target, ids, 20))


# ---------------------------------------------------------------------- planted bugs must be seen


_slot_mask = target_cache.slot_mask


def _causal_mask(visible, *others) -> torch.Tensor:
    return _slot_mask(torch.ones_like(visible).tril(), *others)


def _causal_whole(tree, context, dtype) -> torch.Tensor:
    return additive_mask(_causal_mask(tree.ancestor_mask, context, 0, context + tree.num_nodes), dtype)[:, None]


def _forget_the_window(visible, lengths, first, end, window, depths, padding_mask) -> torch.Tensor:
    return _slot_mask(visible, lengths, first, end, None, depths, padding_mask)


def _positions_by_slot(root_positions, tree) -> torch.Tensor:
    return root_positions + torch.arange(tree.num_nodes)


def _plant(monkeypatch, bug: str) -> None:
    if bug == "causal mask":
        monkeypatch.setattr(target_cache, "slot_mask", _causal_mask)
        monkeypatch.setattr(target_cache, "shown_whole", _causal_whole)
    elif bug == "rows stay where they are":
        monkeypatch.setattr(target_cache._Group, "move", lambda self, path, lengths: None)
    elif bug == "slot positions":
        monkeypatch.setattr(target_cache, "tree_position_ids", _positions_by_slot)
    else:
        monkeypatch.setattr(target_cache, "slot_mask", _forget_the_window)


@functools.cache
def stubs_for(family: str, deep: bool) -> list[StubHead]:
    """Makes drafts that reveal the bugs, and checks that their text is right without a bug."""
    target, ids, expected = text(family)
    tree = {"depth": WINDOW + 3, "top_k": 2, "total_tokens": 20} if deep else {}
    stubs = [StubHead(target, expected, ranks, **tree) for ranks in ((0,), MIXED, (0, 1))]
    for stub in stubs:
        assert_same_text(target, ids, expected, stub)
    return stubs


@pytest.mark.parametrize(
    ("family", "bug"),
    [("llama", bug) for bug in ("causal mask", "rows stay where they are", "slot positions")]
    + [("mistral", bug) for bug in ("causal mask", "rows stay where they are", "slot positions", "no window")],
)
def test_planted_bugs_change_the_text(family, bug, monkeypatch):
    target, ids, expected = text(family)
    stubs = stubs_for(family, deep=bug == "no window")
    _plant(monkeypatch, bug)
    assert any(not torch.equal(plain(target, ids, NEW, assistant_model=stub), expected) for stub in stubs)
