"""Errors at any moment of a call: the cache comes back in the state of plain decoding at the last emitted token,
nothing is left on the target, and the next call works."""

from __future__ import annotations

import copy

import pytest
import torch
from support.faults import (
    At,
    Fault,
    FaultyCriterion,
    FaultyProcessor,
    FaultyStreamer,
    assert_same_contents,
    count_of,
    forward_fault,
)
from support.heads import random_heads
from support.scenes import CHAINS, NEW, Scene
from support.stubs import StubHead, counted
from support.targets import own_target, plain, prompt
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

from hf_specheads.cache import chain
from hf_specheads.cache import target as target_cache
from hf_specheads.cache.chain import ChainCache
from hf_specheads.cache.target import TreeCache, _Group
from hf_specheads.generation.compiled.rounds import CompiledRounds

TREES = ("llama", "mistral", "gemma3")  # slots; windows that have taken effect; both
FAMILIES = (*TREES, *CHAINS)


def every(run, *scene_options) -> int:
    """Runs a scene with a fault at every moment at which it can occur."""
    scene = Scene(*scene_options)
    scene.attempt = copy.deepcopy(scene.cache)
    count = count_of(lambda at: run(scene, at, None))
    assert scene.heads.last_stats.acceptance_length > 1.3, "nothing is accepted: a weak test"
    for k in range(1, count + 1):
        run(scene, At(k), Fault)
        if k in (1, 2, count):
            scene.check_next_call()
    return count


def in_target_forward(scene, at, error):
    with forward_fault(scene.target, at):
        scene.call(assistant_model=scene.heads) if error is None else scene.interrupted(at)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", [None, 0, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kth_forward_of_the_target_fails(family, tokens):
    assert every(in_target_forward, family, tokens) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kth_forward_fails_in_its_midst(family):
    """Some layers have written their rows, others have not."""

    def run(scene, at, error):
        layers = next(part for part in scene.target.modules() if isinstance(part, torch.nn.ModuleList))
        # a fault in the prompt's forward would break plain decoding, too
        late = At(None if at.k is None else at.k + 1, at.error)
        with forward_fault(layers[1], late):
            scene.call(assistant_model=scene.heads) if error is None else scene.interrupted(late)
        at.calls = late.calls - 1

    assert every(run, family, 30) > 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("family", ["mistral", "lfm2"])
def test_the_kth_draft_fails(family, error, monkeypatch):
    def run(scene, at, fault):
        start = StubHead.start_draft
        at.error = error
        with monkeypatch.context() as patch:
            patch.setattr(StubHead, "start_draft", lambda self, *args: (at(), start(self, *args))[1])
            scene.call(assistant_model=scene.heads) if fault is None else scene.interrupted(at, error)

    assert every(run, family, 30) > 3


OPTIONS = {
    "streamer": lambda at: {"streamer": FaultyStreamer(at)},
    "criterion": lambda at: {"stopping_criteria": StoppingCriteriaList([FaultyCriterion(at)])},
    "processor": lambda at: {"logits_processor": LogitsProcessorList([FaultyProcessor(at)])},
}


def in_option(option):
    def run(scene, at, error):
        options = OPTIONS[option](at)
        if error is None:
            scene.call(assistant_model=scene.heads, **options)
        else:
            scene.interrupted(at, **options)

    return run


@pytest.mark.covering(1)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", ["mistral", "bloom", "llama4", "lfm2"])
def test_what_the_caller_hands_in_fails(family, option):
    assert every(in_option(option), family, 30) == NEW


@pytest.mark.parametrize("family", ["mistral", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_a_streamer_that_fails_leaves_what_it_leaves_in_plain_decoding(family):
    scene = Scene(family, 30)
    for k in range(1, NEW + 1):
        theirs = copy.deepcopy(scene.cache)
        with pytest.raises(Fault):
            plain(scene.target, scene.ids, NEW, past_key_values=theirs, streamer=FaultyStreamer(At(k)))
        scene.interrupted(None, streamer=FaultyStreamer(At(k)))
        assert_same_contents(scene.attempt, theirs)


@pytest.mark.slow
def test_compiled_rounds(monkeypatch):
    scene = Scene("llama", 30)
    scene.heads = random_heads(scene.target)
    counted(scene.target, scene.heads)
    verify = CompiledRounds.verify
    scene.attempt = copy.deepcopy(scene.cache)
    assert torch.equal(scene.call(assistant_model=scene.heads), scene.text)
    for k in (1, 3, 6):
        at = At(k)
        monkeypatch.setattr(CompiledRounds, "verify", lambda self, *args, at=at: (at(), verify(self, *args))[1])
        scene.interrupted(at)
    scene.check_next_call()


def test_a_batch_that_is_interrupted_leaves_an_empty_cache():
    target = own_target("mistral")
    ids, cache = torch.cat([prompt(9), prompt(9, seed=2)]), DynamicCache(config=target.config)
    heads = random_heads(target)
    with forward_fault(target, At(3)), pytest.raises(Fault):
        plain(target, ids, NEW, past_key_values=cache, assistant_model=heads)
    assert cache.get_seq_length() == 0
    expected = plain(target, ids, NEW)
    assert torch.equal(plain(target, ids, NEW, past_key_values=cache, assistant_model=heads), expected)


# ---------------------------------------------------------------------- memory runs out
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["__init__", "grow"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_running_out_of_memory_loses_no_rows(family, name, monkeypatch):
    monkeypatch.setattr(target_cache, "TENSORS_PER_GROUP", 1)
    monkeypatch.setattr(target_cache, "FIRST_SLOTS", 1)
    method = getattr(_Group, name)

    def run(scene, at, error):
        def failing(self, *args):
            at()
            method(self, *args)

        at.error = torch.OutOfMemoryError
        with monkeypatch.context() as patch:
            patch.setattr(_Group, name, failing)
            if error is None:
                scene.call(assistant_model=scene.heads)
            else:
                scene.interrupted(at, torch.OutOfMemoryError)

    assert every(run, family, 30) >= 4


def test_without_memory_for_copies_rows_stay_in_the_buffers(monkeypatch):
    scene = Scene("mistral", 30)
    clone = torch.Tensor.clone

    def no_copies(self, *args, **kwargs):
        if self.dim() == 4 and self.shape[2] > 8:
            raise torch.OutOfMemoryError("injected")
        return clone(self, *args, **kwargs)

    scene.attempt = copy.deepcopy(scene.cache)
    monkeypatch.setattr(torch.Tensor, "clone", no_copies)
    scene.call(assistant_model=scene.heads)
    monkeypatch.undo()
    assert_same_contents(scene.attempt, scene.plain_cache(scene.ids.shape[1] + NEW - 1))


# ---------------------------------------------------------------------- planted
def fails(run, *scene_options) -> bool:
    try:
        every(run, *scene_options)
    except (AssertionError, RuntimeError, IndexError, ValueError):
        return True
    return False


@pytest.mark.parametrize("family", ["bloom", "llama4", "lfm2"])
def test_planted_bug_chains_keep_what_was_drafted(family, monkeypatch):
    monkeypatch.setattr(chain, "restore", lambda layer, contents: None)
    assert fails(in_option("criterion"), family, 30)


def test_planted_bug_a_cache_knows_nothing_of_what_was_emitted(monkeypatch):
    for cache in (TreeCache, ChainCache):
        give_back = cache.give_back
        monkeypatch.setattr(cache, "give_back", lambda self, tokens, old=give_back: old(self, self.counts[0]))
    for family in ("mistral", "lfm2"):
        assert fails(in_option("streamer"), family, 30)


def test_planted_bug_the_switch_of_sliding_layers_is_left_on(monkeypatch):
    give_back = ChainCache.give_back

    def left_on(self, tokens):
        give_back(self, tokens)
        self.stock.activate_past_recording()

    monkeypatch.setattr(ChainCache, "give_back", left_on)
    assert fails(in_target_forward, "llama4", 30)


def test_planted_bug_rows_are_freed_before_all_are_copied(monkeypatch):
    def eager(self, members, *args):
        for _, stock, name in members:
            setattr(stock, name, getattr(stock, name)[:, :, :0])
        raise torch.OutOfMemoryError("injected")

    scene = Scene("llama", 30)
    monkeypatch.setattr(_Group, "__init__", eager)
    with pytest.raises(AssertionError):
        scene.interrupted(None, torch.OutOfMemoryError)
