"""What heads hold of their target: nothing that keeps it alive, is copied or saved."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator

import pytest
import torch
from support.heads import METHODS_BY_KIND, random_heads
from support.targets import own_target, plain, prompt, shared_target
from support.trees import TREES
from transformers import CompileConfig

from hf_specheads.errors import UnsupportedGenerationError, WrongTargetError
from hf_specheads.generation.pace.pace import PLAIN, Pace

KEPT = torch.arange(3, 99, 3)
NEW = 12


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed must be freed without the garbage collector: a GPU's memory does not wait for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of_target(target) -> list[weakref.ref]:
    parts = (target, target.lm_head.weight, target.get_input_embeddings().weight, target.model.layers[0])
    return [weakref.ref(part) for part in parts]


@pytest.mark.covering(1)
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_a_deleted_target_is_gone(method, pruned, no_collector):
    target = own_target()
    heads = random_heads(target, method, TREES["dynamic"])
    if pruned:
        heads.prune_draft_vocabulary(KEPT)
    plain(target, prompt(), NEW, assistant_model=heads)
    copies = [heads.with_tree(depth=2), copy.deepcopy(heads), heads.bind(target)]
    parts = of_target(target)
    del target
    assert not any(part() is not None for part in parts)
    assert not heads.memory and not heads._binding.copied
    for one in copies:
        with pytest.raises(RuntimeError, match="bound to a target that is gone"):
            _ = one.borrowed


def test_a_deleted_target_of_compiled_rounds_is_gone():
    target = own_target(num_hidden_layers=1)
    heads = random_heads(target, kind="chain")
    heads.compiled = True
    target.generation_config.compile_config = CompileConfig(backend="eager", mode=None)
    plain(target, prompt(), NEW, assistant_model=heads)
    assert heads.memory[target]
    parts = of_target(target)
    del target
    gc.collect()
    assert not any(part() is not None for part in parts) and not heads.memory


def test_other_heads_of_the_target_stay_bound():
    target, other = shared_target(), own_target(seed=5)
    heads = random_heads(target).prune_draft_vocabulary(KEPT).bind(target)
    heads.config.target = None
    second = heads.with_tree(depth=2).bind(other)
    assert heads.borrowed.embed_tokens is target.model.embed_tokens
    assert second.borrowed.embed_tokens is other.model.embed_tokens
    rows, theirs = heads._binding.copied["rows"][0].weight, second._binding.copied["rows"][0].weight
    assert torch.equal(rows, target.lm_head.weight[KEPT]) and torch.equal(theirs, other.lm_head.weight[KEPT])


def test_deep_copies_share_the_target_and_nothing_else():
    target, ids = shared_target(), prompt()
    heads = random_heads(target).prune_draft_vocabulary(KEPT)
    heads.adaptive = True
    expected = plain(target, ids, NEW, assistant_model=heads)
    other = copy.deepcopy(heads)
    assert other.borrowed.embed_tokens is target.model.embed_tokens and not other.memory and not other._binding.copied
    assert other.fc.weight is not heads.fc.weight
    assert torch.equal(plain(target, ids, NEW, assistant_model=other), expected)
    unbound = copy.deepcopy(random_heads(target))
    with pytest.raises(RuntimeError, match="not bound to a target yet"):
        _ = unbound.borrowed


@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_saved_whole_heads_hold_nothing_of_the_target(method):
    target, ids = own_target(), prompt()
    heads = random_heads(target, method)
    sizes = []
    for bound in (False, True):
        if bound:
            plain(target, ids, NEW, assistant_model=heads)
            heads.last_stats = None
        file = io.BytesIO()
        torch.save(heads, file)
        sizes.append(file.tell())
    assert sizes[1] < sizes[0] + 4096
    file.seek(0)
    again = torch.load(file, weights_only=False)
    with pytest.raises(RuntimeError, match="not bound to a target yet"):
        _ = again.borrowed
    assert torch.equal(plain(target, ids, NEW, assistant_model=again), plain(target, ids, NEW))


def test_what_is_known_of_speeds_is_found_by_every_copy(monkeypatch):
    """Copies of heads that were never bound themselves, as every call through `custom_generate` makes one."""
    target, ids = shared_target(), prompt()
    heads = random_heads(target)
    heads.adaptive = True
    plain(target, ids, NEW, assistant_model=heads.with_tree())
    ((key, pace),) = heads.memory[target].items()
    plain(target, ids, NEW, assistant_model=heads.with_tree())
    assert isinstance(pace, Pace) and heads.memory[target] == {key: pace}
    assert pace.costs.rounds(PLAIN) > 2


def test_a_target_loaded_under_inference_mode():
    """Its weights do not count their changes."""
    with torch.inference_mode():
        target = own_target()
    assert target.lm_head.weight.is_inference()
    ids = prompt()
    heads = random_heads(shared_target(), kind="chain").prune_draft_vocabulary(KEPT)
    expected = plain(target, ids, NEW)
    for _ in range(2):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
    with torch.inference_mode():
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)


# ---------------------------------------------------------------------- targets that are not what they were
@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [96, 128])
@pytest.mark.parametrize("method", METHODS_BY_KIND)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_resized_vocabulary_is_refused_whenever_it_was_resized(when, method, size):
    """Heads have weights of their own vocabulary, and rows that were added have no draft."""
    target = own_target()
    vocabulary, heads = target.config.vocab_size, random_heads(own_target(), method)
    if when == "after":
        plain(target, prompt(), 4, assistant_model=heads)
    target.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(WrongTargetError, match=rf"{vocabulary}\D.*{size}"):
        plain(target, prompt(vocab=size), 4, assistant_model=heads)
    assert heads.last_stats is None or when == "after"


def test_a_vocabulary_that_was_resized_back_is_served():
    target = own_target()
    heads = random_heads(target)
    expected = plain(target, prompt(), NEW, assistant_model=heads)
    vocabulary = target.config.vocab_size
    target.resize_token_embeddings(vocabulary + 29, mean_resizing=False)
    with pytest.raises(WrongTargetError, match=rf"undo `resize_token_embeddings` with {vocabulary}"):
        plain(target, prompt(), NEW, assistant_model=heads)
    target.resize_token_embeddings(vocabulary)
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), expected)


# ---------------------------------------------------------------------- the meta device
@pytest.mark.parametrize("follow", [True, False])
def test_heads_without_weights_are_refused(follow):
    target = own_target()
    heads = random_heads(target).to("meta")
    with pytest.raises(UnsupportedGenerationError, match=r"on the meta device.*`load_heads`"):
        heads.bind(target, follow=follow)
    with pytest.raises(UnsupportedGenerationError, match=r"on the meta device.*`load_heads`"):
        plain(target, prompt(), 4, assistant_model=heads)


def test_a_target_without_weights_is_refused():
    heads = random_heads(own_target())
    heads.remember_target(own_target())
    with pytest.raises(ValueError, match=r"on the meta device.*load it with its weights"):
        heads.bind(own_target().to("meta"))
