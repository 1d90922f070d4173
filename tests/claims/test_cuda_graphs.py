"""Compiled rounds as CUDA graphs would replay them: nothing reads memory that a replay has overwritten, and graphs
that were captured once serve later calls."""

from __future__ import annotations

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.faults import At, Fault, forward_fault
from support.graphs import ReplayedGraphs
from support.heads import random_heads
from support.targets import own_target, plain, prompt
from support.trees import TREES
from transformers import DynamicCache

from hf_specheads.cache.draft import DraftCache
from hf_specheads.cache.rooms import MOST_IDLE, Room, Rooms

NEW = 16


class Pair:
    """A target, and heads whose compiled steps are replayed."""

    def __init__(self, family: str, method: str, kind: str, patch: pytest.MonkeyPatch):
        self.target = own_target(family)
        self.heads = random_heads(self.target, method, TREES[kind])
        self.graphs = ReplayedGraphs(self.target, self.heads, patch)

    def same_text(self, length: int, **options) -> bool:
        ids = prompt(length, seed=length)
        expected = plain(self.target, ids, NEW)
        return torch.equal(plain(self.target, ids, NEW, assistant_model=self.heads, **options), expected)


@pytest.fixture(scope="module")
def pair():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_specheads.DraftHead.adaptive", False)
        patch.setattr("hf_specheads.DraftHead.probe", False)
        yield Pair("llama", "poss", "dynamic", patch)


def test_calls_of_one_shape_share_their_graphs(pair):
    for length in (19, 7, 12):
        assert pair.same_text(length)
        assert pair.graphs.captures == 2, "one draft step, one verifying forward"
    assert not pair.graphs.loose


def test_interrupted_calls_leave_their_buffers_too(pair):
    assert pair.same_text(19)
    before = pair.graphs.captures
    with forward_fault(pair.target, At(2)), pytest.raises(Fault):
        pair.same_text(7, past_key_values=DynamicCache(config=pair.target.config))
    with pytest.raises(Fault):
        pair.same_text(7, streamer=Raising())
    assert pair.same_text(12)
    assert pair.graphs.captures == before == 2


class Raising:
    def put(self, value):
        if value.dim() == 1:
            raise Fault

    def end(self):
        pass


def test_a_call_inside_a_call_has_buffers_of_its_own(pair):
    class CallsBetween:
        same: list[bool] = []

        def put(self, value):
            self.same.append(pair.same_text(9)) if len(self.same) < 3 else None

        def end(self):
            pass

    inner = CallsBetween()
    assert pair.same_text(19, streamer=inner) and all(inner.same) and len(inner.same) == 3


def test_what_is_returned_is_no_buffer(pair):
    cache = DynamicCache(config=pair.target.config)
    assert pair.same_text(19, past_key_values=cache)
    rows = [layer.keys.clone() for layer in cache.layers]
    assert pair.same_text(12)
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, rows, strict=True))


def test_planted_bug_buffers_lie_elsewhere_in_every_call(pair, monkeypatch):
    monkeypatch.setattr(Rooms, "take", lambda self, kind: Room())
    before = pair.graphs.captures
    assert pair.same_text(19) and pair.same_text(7)
    assert pair.graphs.captures >= before + 2


def test_planted_bug_lengths_stay_in_the_graphs_memory(pair, monkeypatch):
    monkeypatch.setattr(DraftCache, "outlive_step", lambda self: None)
    with pytest.raises((IndexError, RuntimeError)):
        pair.same_text(19)


def test_buffers_of_all_shapes_begin_at_the_same_place():
    room, like = Room(), torch.ones(1, dtype=torch.bfloat16)
    whole = room.buffer("0.keys", like, 3, 2, 8, 4).fill_(torch.nan)
    for shape in ((2, 2, 8, 4), (1, 2, 4, 4)):
        part = room.buffer("0.keys", like, *shape)
        assert part.data_ptr() == whole.data_ptr() and part.shape == shape and not part.any()
    assert room.buffer("0.values", like, 1, 2, 8, 4).data_ptr() != whole.data_ptr()
    assert room.buffer("0.keys", torch.ones(1), 1, 2, 8, 4).dtype == torch.float32


def test_few_rooms_are_kept():
    rooms, used = Rooms(), [Room() for _ in range(MOST_IDLE + 2)]
    for room in used:
        rooms.leave(DraftCache, room)
    taken = [rooms.take(DraftCache) for _ in used]
    assert sum(room in used for room in taken) == MOST_IDLE and len(set(map(id, taken))) == len(used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "kind"),
    [("mistral", "eagle", "chain"), ("gemma3", "eagle3", "static"), ("llama", "mtp", "chain"),
     ("llama", "medusa", "dynamic"), ("llama", "hydra", "dynamic"), ("llama", "draft-lm", "dynamic"),
     ("llama", "dflash", "dynamic")],
)  # fmt: skip
def test_other_pairs(family, method, kind, monkeypatch):
    pair = Pair(family, method, kind, monkeypatch)
    for length in (19, 7):
        assert pair.same_text(length)
        assert pair.graphs.captures == 2
    assert not pair.graphs.loose


@pytest.mark.slow
def test_a_batch_whose_sequences_end_one_by_one(monkeypatch):
    target = own_target("llama")
    inputs, alone = batch_of((9, 4, 14))
    heads = random_heads(target, "poss")
    graphs, texts, known = ReplayedGraphs(target, heads, monkeypatch), alone_texts(target, alone), []
    for _ in range(2):
        assert_rows(greedy(target, inputs, assistant_model=heads), 14, texts)
        known.append(graphs.captures)
    assert known[0] == known[1] <= 2 * 3, "two graphs per number of rows that are left"
    assert not graphs.loose
