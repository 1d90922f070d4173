"""Looked-up tokens: found where naive search finds them, and exact in every kind of round."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.distributions import chi_square, critical_value, five_token_target, sample, target_distribution
from support.heads import random_heads
from support.stubs import StubHead
from support.targets import plain, prompt, shared_target
from support.trees import TREES
from transformers import CompileConfig, DynamicCache, set_seed

from hf_specheads import DraftHead, DraftTreeConfig, UnsupportedGenerationError, generate_stream
from hf_specheads.generation import refusals
from hf_specheads.generation.drafting.foresight import Reach
from hf_specheads.generation.drafting.lookup import TextIndex, TextLookup
from hf_specheads.generation.options import DraftingOptions
from hf_specheads.generation.pace.menu import COPIES, menu_of
from hf_specheads.generation.pace.pace import Pace
from hf_specheads.generation.refusals import with_copies

NEW = 24
LOOKUP = 5


def naive_match(text: list[int], longest: int, shortest: int) -> int | None:
    for size in range(longest, shortest - 1, -1):
        places = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if places and size <= len(text):
            return places[-1]
    return None


@settings(deadline=None, max_examples=100)
@given(text=st.lists(st.integers(0, 3), max_size=40), longest=st.integers(1, 4), cuts=st.integers(0, 40))
def test_the_last_place_of_the_longest_ngram(text, longest, cuts):
    index = TextIndex(text[:cuts], longest, min(2, longest))
    index.extend(text[cuts:])
    expected = naive_match(text, longest, min(2, longest))
    assert index.match() == expected
    if expected is None:
        assert index.continuation(4) is None
        return
    continued = list(text)
    for token in index.continuation(50):  # a text in a loop continues as before
        assert token == continued[expected + len(continued) - len(text)]
        continued.append(token)


def test_padding_is_no_text_and_sequences_leave():
    lookup = TextLookup(2, 2)
    lookup.begin(
        torch.tensor([[0, 0, 1, 2], [5, 6, 5, 6], [0, 0, 0, 0]]), torch.tensor([[0, 0, 1, 1], [1] * 4, [1] * 4])
    )
    assert [text.token_ids for text in lookup.texts] == [[1, 2], [5, 6, 5, 6], [0] * 4]
    assert lookup.continuations(3, torch.device("cpu")).tolist() == [[2, 2, 2], [5, 6, 5], [0, 0, 0]]
    lookup.select_sequences([0])
    assert not lookup.found and lookup.continuations(3, torch.device("cpu")) is None
    lookup.extend([[1, 2]])
    assert lookup.continuations(2, torch.device("cpu")).tolist() == [[1, 2]]


@pytest.fixture
def known(monkeypatch):
    """Texts that a call finds before its own, as if the prompt had contained them."""
    texts: list[list[int]] = []
    begin = TextLookup.begin

    def after_known_texts(lookup: TextLookup, token_ids: torch.Tensor, *args: Any) -> None:
        begin(lookup, token_ids, *args)
        lookup.texts = [TextIndex([*itertools.chain(*texts), *text.token_ids]) for text in lookup.texts]

    monkeypatch.setattr(TextLookup, "begin", after_known_texts)
    return texts


def emitted_before(num_accepted: list[int]) -> list[int]:
    """Returns the new tokens before every round; the first one is the prefill's. The remaining budget decides whether
    trees are whole."""
    return list(itertools.accumulate((number + 1 for number in num_accepted[:-1]), initial=1))


@pytest.mark.parametrize("kind", TREES)
def test_greedy_text_is_the_targets(kind, known):
    """Drafts are wrong, right or right within the tree, and so are the copied paths."""
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW)
    text = expected[0].tolist()
    known += [text[:-8], [5, *text[-12:-3], 7]]  # right for a while, then wrong
    tree = TREES[kind].replace(lookup=LOOKUP)
    for ranks in ((None,), (0, 1, None, 0, 2)):
        heads = StubHead(target, expected, ranks, **tree.to_dict())
        heads.trace = True
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
        rounds = zip(heads.last_stats.trees, emitted_before(heads.last_stats.num_accepted[0]), strict=True)
        sizes = {drafted.num_nodes for drafted, emitted in rounds if NEW - emitted > tree.depth}
        assert sizes <= {1, tree.num_nodes, tree.most_nodes} and tree.most_nodes in sizes
        assert max(heads.last_stats.num_accepted[0]) >= LOOKUP


@pytest.mark.parametrize("method", ["eagle", "lookup"])
def test_a_batch(method):
    target = shared_target("llama")
    inputs, alone = batch_of((19, 4, 12))
    heads = random_heads(target, method, kind="chain", depth=2, lookup=3)
    heads.adaptive = False
    got = greedy(target, inputs, assistant_model=heads, max_new_tokens=24)
    assert_rows(got, inputs["input_ids"].shape[1], alone_texts(target, alone, max_new_tokens=24))


@pytest.mark.slow
def test_compiled_rounds(known):
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW)
    known += [expected[0].tolist()]
    heads = random_heads(target, "eagle", kind="chain", depth=2, lookup=3)
    heads.compiled, heads.adaptive = True, False
    got = plain(target, ids, NEW, assistant_model=heads, compile_config=CompileConfig(backend="eager", mode=None))
    assert torch.equal(got, expected)
    assert max(heads.last_stats.num_accepted[0]) >= 3


@pytest.mark.parametrize("method", ["eagle", "lookup"])
def test_seeded_samples(method, known):
    target, ids = shared_target("llama"), prompt()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.3}
    set_seed(5)
    expected = target.generate(ids, **options)
    known += [expected[0].tolist()]
    heads = random_heads(target, method, lookup=LOOKUP)
    set_seed(5)
    assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)
    assert max(heads.last_stats.num_accepted[0]) >= LOOKUP


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("eagle", {"depth": 1, "top_k": 2, "total_tokens": 3, "lookup": 2}),
        pytest.param("lookup", {"kind": "chain", "depth": 3, "children": "sampled"}, marks=pytest.mark.slow),
    ],
)
def test_sampled_distribution(method, tree):
    """With a vocabulary of five, copies are found in most rounds."""
    samples, length, setting = 80, 4, {"temperature": 0.8, "top_k": 4}
    target = five_token_target()
    heads = random_heads(target, method, **tree)
    heads.exact_seed = heads.adaptive = False
    late, expected = slice(-3, -1), {}
    for output, probability in target_distribution(target, setting, length).items():
        expected[output[late]] = expected.get(output[late], 0.0) + probability
    torch.manual_seed(77)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(samples):
        counts[tuple(sample(target, heads, length, **setting)[late].tolist())] += 1
        accepted += sum(heads.last_stats.num_accepted[0])
    assert accepted > samples / 4
    statistic, freedom = chi_square(counts, expected, samples)
    assert freedom >= 4
    assert statistic < critical_value(freedom)


# ---------------------------------------------------------------------- without being asked
def free_heads(heads: DraftHead) -> DraftHead:
    """The heads as if they had been saved with a chain without copies: they choose their trees themselves."""
    heads.config.tree_config = DraftTreeConfig(kind="chain", depth=2, top_k=1, total_tokens=3).to_dict()
    heads.forget_tree()
    heads.adaptive = True
    return heads


@pytest.mark.parametrize("ranks", [(None,), (0,), (0, None, None)])
def test_chains_copy_by_default(ranks, known, monkeypatch):
    """Copies beside a wrong chain, or after a right one, are no accepted drafts."""
    target, ids, rounds = shared_target("llama"), prompt(), []
    expected = plain(target, ids, NEW)
    known += [expected[0].tolist()[:-4]]

    def record(pace: Pace, choice: int, seconds: float, accepted: list[int], reach: Reach, *told: Any) -> None:
        rounds.append((accepted[0], told[-1][0], reach.levels))

    monkeypatch.setattr(Pace, "choose", lambda pace, *_: [bool(tree.lookup) for tree in pace.menu].index(True))
    monkeypatch.setattr(Pace, "record_round", record)
    heads = free_heads(StubHead(target, expected, ranks))
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
    assert max(accepted for accepted, _, _ in rounds) > LOOKUP
    assert all(drafted <= min(levels, accepted) for accepted, drafted, levels in rounds)
    if ranks == (None,):
        assert not any(drafted for _, drafted, _ in rounds)
    if ranks == (0,):
        assert all(drafted == levels for accepted, drafted, levels in rounds if accepted >= levels)


def test_who_may_copy(monkeypatch):
    def copies(target: Any, **settings: Any) -> bool:
        heads = free_heads(StubHead(target, prompt()))
        for name, value in settings.items():
            setattr(heads, name, value)
        options, cache = DraftingOptions.of(heads), DynamicCache(config=target.config)
        options = with_copies(target, heads, options, 1, cache)
        menu, _ = menu_of(heads, target, options)
        assert {tree.lookup for tree in menu} == ({0, COPIES} if options.takes_trees else {0})
        return options.takes_trees

    llama = shared_target("llama")
    assert copies(llama) and copies(llama, probe=True)
    assert not copies(llama, adaptive=False) and not copies(llama, loop="transformers")
    assert not copies(llama, compiled=True) and not copies(llama, tree_config=TREES["chain"])
    assert not any(copies(shared_target(family)) for family in ("lfm2", "bloom"))
    monkeypatch.setattr(refusals, "probe_problem", lambda *_: "the logits differ")
    assert copies(llama) and not copies(llama, probe=True), "not refused: the chain alone is exact"


def test_a_batch_and_a_stream_copy_by_default(known, monkeypatch):
    target = shared_target("llama")
    inputs, alone = batch_of((19, 4, 12))
    texts = alone_texts(target, alone, max_new_tokens=NEW)
    known += [list(itertools.chain.from_iterable(texts))]
    monkeypatch.setattr(Pace, "choose", lambda pace, *_: [bool(tree.lookup) for tree in pace.menu].index(True))
    heads = free_heads(random_heads(target, "eagle"))
    got = greedy(target, inputs, assistant_model=heads, max_new_tokens=NEW)
    assert_rows(got, inputs["input_ids"].shape[1], texts)
    assert max(map(max, heads.last_stats.num_accepted)) > LOOKUP
    found = list(generate_stream(target, heads, alone, 2, max_new_tokens=NEW, do_sample=False))
    assert [one.token_ids for one in sorted(found, key=lambda one: one.index)] == texts
    assert max(max(one.num_accepted) for one in found) > LOOKUP


# ---------------------------------------------------------------------- settings
def test_drawn_children_are_refused():
    with pytest.raises(ValueError, match="copied, not drawn"):
        DraftTreeConfig(kind="chain", children="sampled", lookup=2)
    with pytest.raises(ValueError, match="`lookup` of a draft tree must be an integer of at least 0"):
        DraftTreeConfig(lookup=-1)


def test_the_other_loop_and_targets_without_trees_are_refused():
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, "eagle", kind="chain", depth=2, lookup=2)
    heads.loop = "transformers"
    with pytest.raises(UnsupportedGenerationError, match=r"a chain tree with looked-up tokens.*lookup=0"):
        plain(target, ids, NEW, assistant_model=heads)
