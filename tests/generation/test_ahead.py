"""Drafts that begin before the host knows what was accepted: they are the same drafts, and none is made in vain."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.graphs import ReplayedGraphs
from support.heads import random_heads
from support.targets import VOCAB, own_target, plain, prompt
from support.trees import TREES, random_tree

from hf_specheads.generation.ahead import DraftAhead, rows_of_choices
from hf_specheads.generation.committed import PackedPaths
from hf_specheads.generation.loop import RoundLoop
from hf_specheads.generation.pace.pace import PLAIN, Pace
from hf_specheads.generation.sampling import TokenSampler
from hf_specheads.generation.verification import accepted
from hf_specheads.generation.verification.accepted import agreed_paths
from hf_specheads.heads.auto import METHODS
from hf_specheads.tree.draft_tree import DraftTree
from hf_specheads.tree.shape import fixed_shape

NEW, FEW = 24, 12


# ---------------------------------------------------------------------- rows
def tree_of(kind: str, seed: int, batch: int) -> DraftTree:
    """Makes a chain or a static tree that knows its shape, or a tree of another shape in every sequence."""
    if kind == "random":
        return random_tree(seed, batch=batch)
    shape = fixed_shape(TREES[kind].paths, TREES[kind].depth, torch.device("cpu"))
    nodes, generator = shape.parents.shape[1], torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(90, generator=generator)[:nodes] for _ in range(batch)])
    parents, depths = (one.expand(batch, -1) for one in (shape.parents, shape.depths))
    return DraftTree(ids, parents, depths, torch.zeros(ids.shape), TREES[kind].depth, shape=shape)


def choices_at(tree: DraftTree, seed: int) -> torch.Tensor:
    """Chooses tokens at the nodes, often one of the node's children."""
    rng, choices = random.Random(seed), torch.full_like(tree.token_ids, 98)
    for sequence, parents in enumerate(tree.parents.tolist()):
        for node, parent in enumerate(parents):
            if parent >= 0 and rng.random() < 0.6:
                choices[sequence, parent] = tree.token_ids[sequence, node]
    return choices


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["chain", "static", "random"]), st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_rows_are_those_of_the_paths_that_the_host_finds(kind, seed, batch, reads_features):
    tree = tree_of(kind, seed, batch)
    choices, features = choices_at(tree, seed), torch.randn(*tree.token_ids.shape, 3) if reads_features else None
    longest = tree.max_depth + 2
    results = agreed_paths(tree, choices, None)
    paths = PackedPaths.of(results, tree.token_ids[:, 0].tolist(), torch.device("cpu"), longest)
    expected, got = paths.rows(features).with_validity(), rows_of_choices(tree, choices, features, longest)
    assert torch.equal(got.valid, expected.valid)
    real = torch.nn.functional.pad(expected.valid, (1, 0))
    real[:, :-1] |= expected.valid  # the root lies before the first of these rows
    assert torch.equal(got.token_ids[real], expected.token_ids[real])
    if features is not None:
        assert torch.equal(got.features[got.valid], expected.features[expected.valid])


# ---------------------------------------------------------------------- drafts
class Watched:
    """What calls have drafted and verified.

    Attributes:
        trees: Tokens and scores of every tree that was verified.
        ahead, undone: Number of drafts that began early, and of those among them that were undone.
    """

    def __init__(self) -> None:
        self.trees: list[list] = []
        self.ahead = self.undone = 0


@contextmanager
def watched(ahead: bool = True):
    seen, verify, undo, begin = Watched(), RoundLoop.verify, DraftAhead.undo, DraftAhead.begin

    def verified(self, tree):
        seen.trees.append([tree.token_ids.tolist(), [[round(one, 4) for one in row] for row in tree.scores.tolist()]])
        return verify(self, tree)

    def undone(self):
        seen.undone += self._tree is not None
        undo(self)

    def begun(self, *call):
        begin(self, *call)
        seen.ahead += self._tree is not None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundLoop, "verify", verified)
        patch.setattr(DraftAhead, "undo", undone)
        patch.setattr(DraftAhead, "begin", begun if ahead else lambda *_: None)
        yield seen


class Pair:
    """A target with a small vocabulary, so that some drafts are accepted, and heads whose steps are replayed."""

    def __init__(self, method: str, kind: str, patch: pytest.MonkeyPatch, vocab: int = FEW):
        self.target = own_target("llama", vocab_size=vocab, seed=2)
        self.heads = random_heads(self.target, method, TREES[kind])
        patch.setattr("hf_specheads.DraftHead.adaptive", False)
        patch.setattr("hf_specheads.DraftHead.probe", False)
        self.graphs = ReplayedGraphs(self.target, self.heads, patch)
        self.ids = prompt(9, vocab=FEW)

    def text(self, ids: torch.Tensor | None = None, **options) -> torch.Tensor:
        return plain(self.target, self.ids if ids is None else ids, NEW, **options)

    def both_ways(self, generate):
        """Returns the result of a call and what was recorded, with and without drafts that begin early."""
        found = []
        for ahead in (True, False):
            torch.manual_seed(3)
            with watched(ahead) as seen:
                found.append((generate(), seen))
        return found


@pytest.fixture
def pair(monkeypatch):
    return Pair("poss", "chain", monkeypatch)


CASES = [("poss", "chain"), ("eagle", "dynamic"), ("medusa", "static"), ("dflash", "chain")]


@pytest.mark.parametrize(
    ("method", "kind"),
    [*CASES, *(pytest.param(method, kind, marks=pytest.mark.slow) for method in METHODS for kind in TREES)],
)
def test_drafts_are_the_same(method, kind, monkeypatch):
    if method == "lookup" or (method == "domino" and kind != "chain"):
        pytest.skip("has no such drafts to begin early")
    pair = Pair(method, kind, monkeypatch)
    (got, early), (later, late) = pair.both_ways(lambda: pair.text(assistant_model=pair.heads))
    assert got.tolist() == later.tolist() == pair.text().tolist()
    assert early.trees == late.trees and len(early.trees) > 3
    assert early.ahead > 0 and early.undone == 0 and late.ahead == 0
    assert (method, kind) != ("eagle", "dynamic") or sum(pair.heads.last_stats.num_accepted[0]) > 0, "longer paths too"


def batch_both_ways(pair: Pair):
    """Runs a batch in which one sequence ends early. Returns the plain texts and the results of [`Pair.both_ways`]."""
    inputs, alone = batch_of((9, 4, 14))
    texts = alone_texts(pair.target, alone, max_new_tokens=NEW)
    eos = next(token for token in texts[0][4:12] if token not in texts[1] + texts[2])
    texts = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    assert len({len(text) for text in texts}) > 1
    ends = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": NEW}
    return texts, *pair.both_ways(lambda: greedy(pair.target, inputs, assistant_model=pair.heads, **ends))


def test_a_batch_whose_sequences_end_one_by_one(monkeypatch):
    texts, (got, early), (later, late) = batch_both_ways(Pair("poss", "chain", monkeypatch, VOCAB))
    assert_rows(got, 14, texts)
    assert got.tolist() == later.tolist() and early.trees == late.trees
    assert early.ahead > 0 and early.undone > 0


def test_sampled_texts_are_the_same(pair):
    pair.heads.exact_seed = False
    (got, early), (later, late) = pair.both_ways(
        lambda: pair.target.generate(pair.ids, attention_mask=torch.ones_like(pair.ids), max_new_tokens=NEW,
                                     do_sample=True, assistant_model=pair.heads)
    )  # fmt: skip
    assert got.tolist() == later.tolist() and early.trees == late.trees and early.ahead > 0


def test_rounds_that_choose_otherwise(monkeypatch):
    """Some rounds choose a plain step after a draft has begun. The first such step waited for the draft, so its time
    must not count as that of a plain step."""
    pair, clocked, record = Pair("eagle", "dynamic", monkeypatch), [], Pace.record_plain
    chosen = iter([0, 0, PLAIN, PLAIN, 0, PLAIN] * 20)
    monkeypatch.setattr(Pace, "choose", lambda *_: next(chosen))
    monkeypatch.setattr(Pace, "record_plain", lambda self, seconds: clocked.append(seconds) or record(self, seconds))
    pair.heads.adaptive = True
    with watched() as seen:
        got = pair.text(assistant_model=pair.heads)
    assert got.tolist() == pair.text().tolist() and seen.ahead > 0 and seen.undone > 0
    budget_left = 1  # for the last token, a round that drafts nothing counts as a plain step
    assert 0 < len(clocked) <= pair.heads.last_stats.plain_steps - seen.undone + budget_left


def test_a_call_inside_a_call(pair):
    """The inner call overwrites what a draft of the outer call has left."""

    class CallsBetween:
        same: list[bool] = []

        def put(self, value):
            if value.dim() == 1 and len(self.same) < 3:
                other = prompt(7, seed=3, vocab=FEW)
                self.same.append(torch.equal(pair.text(other, assistant_model=pair.heads), pair.text(other)))

        def end(self):
            pass

    inner = CallsBetween()
    with watched() as seen:
        got = pair.text(assistant_model=pair.heads, streamer=inner)
    assert got.tolist() == pair.text().tolist() and inner.same == [True] * 3 and seen.undone > 0


@pytest.mark.parametrize("name", ["trace", "profile", "on_round", "scores"])
def test_nothing_is_written_over_that_somebody_looks_at(name, pair):
    options = {"return_dict_in_generate": True, "output_scores": True} if name == "scores" else {}
    if name != "scores":
        setattr(pair.heads, name, (lambda seen: seen.nodes()) if name == "on_round" else True)
    with watched() as seen:
        got = pair.text(assistant_model=pair.heads, **options)
    expected = pair.text(**options)
    if name == "scores":
        assert all(
            torch.allclose(one, other, atol=1e-4) for one, other in zip(got.scores, expected.scores, strict=True)
        )
        got, expected = got.sequences, expected.sequences
    assert got.tolist() == expected.tolist() and seen.ahead == 0 and len(seen.trees) > 3


def test_the_host_sends_for_the_choices_first_drafts_and_reads_them_then(pair, monkeypatch):
    order, begin, sent = [], DraftAhead.begin, accepted._sent

    def watched_sent(numbers):
        read = sent(numbers)
        order.append("sent")
        return lambda: order.append("read") or read()

    monkeypatch.setattr(accepted, "_sent", watched_sent)
    monkeypatch.setattr(DraftAhead, "begin", lambda self, *call: order.append("draft") or begin(self, *call))
    pair.text(assistant_model=pair.heads)
    assert len(order) > 9 and order == ["sent", "draft", "read"] * (len(order) // 3)


def test_a_distribution_that_is_none_is_refused_as_ever(pair, monkeypatch):
    """An invalid token must be caught before an embedding looks it up, because a device does not survive that."""
    calls, scores_at = iter(range(99)), TokenSampler.scores_at_node

    def overflows(self, input_ids, logits):
        return scores_at(self, input_ids, logits) if next(calls) < 4 else torch.full_like(logits, torch.nan)

    monkeypatch.setattr(TokenSampler, "scores_at_node", overflows)
    pair.heads.exact_seed = False
    with watched() as seen, pytest.raises(RuntimeError, match="hold NaN or inf"):
        pair.target.generate(pair.ids, attention_mask=torch.ones_like(pair.ids), max_new_tokens=NEW, do_sample=True,
                             assistant_model=pair.heads)  # fmt: skip
    assert seen.ahead > 1


# ---------------------------------------------------------------------- the tests can fail
def test_planted_bug_a_draft_is_not_undone(monkeypatch):
    monkeypatch.setattr(DraftAhead, "undo", lambda self: setattr(self, "_tree", None))
    _, (_, early), (_, late) = batch_both_ways(Pair("poss", "chain", monkeypatch, VOCAB))
    assert early.trees != late.trees


def test_planted_bug_no_features(pair, monkeypatch):
    def without(*call):
        rows = rows_of_choices(*call)
        return replace(rows, features=torch.zeros_like(rows.features))

    monkeypatch.setattr("hf_specheads.generation.ahead.rows_of_choices", without)
    (_, early), (_, late) = pair.both_ways(lambda: pair.text(assistant_model=pair.heads))
    assert early.trees != late.trees
