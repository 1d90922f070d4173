"""Nothing of a call outlives it except what it returns, and that owns no more memory than it needs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from support.batches import batch_of, greedy
from support.faults import At, Fault, forward_fault
from support.heads import random_heads
from support.stubs import StubHead, counted
from support.targets import deep_target, own_target, plain, prompt, shared_target
from torch._subclasses.fake_tensor import FakeTensor

from hf_specheads.cache import slots
from hf_specheads.cache import target as target_cache
from hf_specheads.cache.chain import ChainCache
from hf_specheads.cache.target import TENSORS_PER_GROUP, _Group
from hf_specheads.generation.loop import RoundLoop
from hf_specheads.generation.stopping import StopRule

NEW = 4


class Alive:
    """Tracks the living objects of some classes that are made after the tracker."""

    def __init__(self, monkeypatch, *classes: type):
        self.objects: weakref.WeakSet = weakref.WeakSet()
        for each in classes:
            init = each.__init__

            def remember(this, *args, init=init, **kwargs):
                self.objects.add(this)
                init(this, *args, **kwargs)

            monkeypatch.setattr(each, "__init__", remember)


@contextmanager
def without_collector() -> Iterator[None]:
    """Switches the garbage collector off, because a GPU is full long before it runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interrupted(target, heads) -> None:
    with forward_fault(target, At(3)), pytest.raises(Fault):
        plain(target, prompt(), NEW, assistant_model=heads)


def calls(compiled: bool = False) -> list:
    """Returns one call of every kind, which can be repeated."""
    target, bloom = own_target(), shared_target("bloom")
    heads, chain, twin = random_heads(target), random_heads(bloom, kind="chain"), random_heads(target, "poss")
    draft_model = random_heads(target, "draft-lm").prune_draft_vocabulary(range(3, 60))
    inputs, _ = batch_of((9, 4, 12))
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    kinds = [
        lambda: plain(target, prompt(), NEW, assistant_model=heads),
        lambda: plain(target, prompt(), NEW, assistant_model=twin.with_tree(kind="chain"), **everything),
        lambda: greedy(target, inputs, max_new_tokens=NEW, assistant_model=twin),
        lambda: plain(bloom, prompt(), NEW, assistant_model=chain),
        lambda: plain(target, prompt(), NEW, assistant_model=draft_model, prefill_chunk_size=4),
        lambda: interrupted(target, heads),
        lambda: interrupted(bloom, chain),
    ]
    if not compiled:
        return kinds
    fixed = random_heads(target)
    counted(target, fixed)
    return [*kinds, lambda: plain(target, prompt(), NEW, assistant_model=fixed)]


def live_bytes() -> int:
    """Returns the bytes in the storages of all tensors. Fake tensors of a compilation hold nothing and do not
    count."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for tensor in gc.get_objects()
                if issubclass(type(tensor), torch.Tensor) and not issubclass(type(tensor), FakeTensor)}  # fmt: skip
    return sum(storages.values())


def left_after(times: int, monkeypatch, compiled: bool) -> tuple[int, list[int]]:
    """Returns the number of caches and loops that are alive after repeated calls of all kinds, and the bytes of
    tensors along the way."""
    kinds, known = calls(compiled), []
    for call in kinds * 2:
        call()  # by now everything exists that is kept for later calls
    alive = Alive(monkeypatch, slots.SlotCache, ChainCache, RoundLoop)
    with without_collector():
        for index in range(times):
            kinds[index % len(kinds)]()
            if index + 1 in (times // 10, times // 2, times):
                known.append(live_bytes())
        return len(alive.objects), known


@pytest.mark.parametrize("times", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_calls_leave_nothing_and_memory_is_flat(times, monkeypatch):
    left, known = left_after(times, monkeypatch, compiled=True)
    assert left == 0
    assert len(known) == 3 and len(set(known)) == 1


def test_planted_bug_layers_hold_their_cache(monkeypatch):
    monkeypatch.setattr(slots, "weakref", SimpleNamespace(ref=lambda cache: lambda: cache))
    left, known = left_after(20, monkeypatch, compiled=False)
    assert left > 0 and known[0] < known[2]


# ---------------------------------------------------------------------- what is returned
def tensors_of(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for each in value if isinstance(value, list | tuple) else ():
        yield from tensors_of(each)


def cache_tensors(cache) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        yield from tensors_of(list(vars(layer).values()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom", "llama4", "lfm2"])
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_returned_owns_just_its_rows(family, sampled):
    target, ids = shared_target(family), prompt()
    tree = {"kind": "chain", "depth": 4} if family in ("bloom", "llama4", "lfm2") else {}
    heads = StubHead(target, plain(target, ids, 24), (0, 0, None, 1), **tree)
    result = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=21, do_sample=sampled, assistant_model=heads,
        return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
    )  # fmt: skip
    returned = [*tensors_of([result.scores, result.logits, result.hidden_states[1:]])]
    returned += cache_tensors(result.past_key_values)
    assert len(returned) > 2 * 21
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in returned)


@pytest.mark.parametrize("heads", [True, False], ids=["with heads", "plain"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_batch_returns_a_cache_that_can_be_handed_in_again(family, heads):
    target = shared_target(family)
    inputs, _ = batch_of((8, 8))
    drafts = {"assistant_model": random_heads(target)}
    first = greedy(target, inputs, max_new_tokens=9, return_dict_in_generate=True, **drafts)
    assert first.past_key_values.get_seq_length() == 8 + 8
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in cache_tensors(first.past_key_values))
    ids = torch.cat([first.sequences, prompt(4).expand(2, -1)], dim=1)
    again = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = drafts if heads else {}
    got = greedy(target, again, max_new_tokens=9, past_key_values=first.past_key_values, **options)
    assert torch.equal(got, greedy(target, again, max_new_tokens=9))


# ---------------------------------------------------------------------- taking a prompt over
def most_tensors_held_twice(monkeypatch) -> int:
    """Returns the largest number of the prompt's key and value tensors that exist twice while they are taken over."""
    target, most = deep_target(), 0
    originals: list[weakref.ref] = []
    init = _Group.__init__

    def counting(self, members, *args):
        nonlocal most
        originals.extend(weakref.ref(getattr(stock, name)) for _, stock, name in members)
        init(self, members, *args)
        most = max(most, sum(each() is not None for each in originals))

    with monkeypatch.context() as patch, without_collector():
        patch.setattr(_Group, "__init__", counting)
        plain(target, prompt(), NEW, assistant_model=random_heads(target))
    assert len(originals) == 16
    return most


def test_a_prompt_is_never_held_twice_in_full(monkeypatch):
    assert most_tensors_held_twice(monkeypatch) == TENSORS_PER_GROUP


def test_planted_bug_a_prompt_is_held_twice(monkeypatch):
    monkeypatch.setattr(target_cache, "TENSORS_PER_GROUP", 100)
    assert most_tensors_held_twice(monkeypatch) == 16


def test_a_chain_holds_no_second_copy_of_its_rows():
    """A chain can be rolled back without a copy, because rows that were only appended can be cut off again."""
    target, ids = shared_target("bloom"), prompt()
    held: list[torch.Tensor] = []
    heads = StubHead(target, plain(target, ids, 12), (0, None), kind="chain", depth=3)
    forward_inputs = ChainCache.forward_inputs

    def looked_at(self, tree):
        inputs = forward_inputs(self, tree)
        held.extend(tensors_of([value for contents in self._before for value in contents.values()]))
        return inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainCache, "forward_inputs", looked_at)
        plain(target, ids, 12, assistant_model=heads)
    assert heads.last_stats.rounds > 2 and not held


# ---------------------------------------------------------------------- how much a call holds
def most_slots(monkeypatch, length: int, new: int, heads) -> int:
    """Returns the slots of the largest buffers that a call had for the target's keys and values."""
    most = 0
    show = _Group._show

    def counting(self):
        nonlocal most
        most = max(most, self.buffer.shape[3])
        show(self)

    with monkeypatch.context() as patch:
        patch.setattr(_Group, "_show", counting)
        target = own_target("llama", max_position_embeddings=1024)
        plain(target, prompt(length), new, assistant_model=heads(target))
    return most


@pytest.mark.parametrize(("length", "new"), [(30, 20), (300, 40), pytest.param(20, 300, marks=pytest.mark.slow)])
def test_a_call_holds_plain_rows_and_a_tree(length, new, monkeypatch):
    """A call whose length is known holds as many rows as plain decoding at its end, plus the nodes of one tree."""
    nodes = 3
    heads = lambda target: random_heads(target, kind="chain", depth=nodes - 1)  # noqa: E731
    assert most_slots(monkeypatch, length, new, heads) <= length + new + nodes


def test_planted_bug_nobody_knows_the_length(monkeypatch):
    monkeypatch.setattr(StopRule, "left", lambda self, length: None)
    with pytest.raises(AssertionError):
        test_a_call_holds_plain_rows_and_a_tree(30, 20, monkeypatch)
