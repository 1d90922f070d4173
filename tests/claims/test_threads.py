"""Several threads with one target: texts equal those of one thread, and nothing visible to other threads changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support.batches import batch_of, greedy
from support.families import tiny_target
from support.faults import hooks_of
from support.heads import random_heads
from support.images import image_inputs, image_target
from support.targets import own_target, plain, prompt
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specheads import DraftHead, DraftLanguageModel, generate_stream
from hf_specheads.heads import draft_lm
from hf_specheads.target.features import FeatureReader

NEW, TURNS = 12, 2
KEPT = torch.arange(3, 60)


class Threads:
    """Runs jobs at the same time, repeatedly. Each must give what it gives alone."""

    def __init__(self, jobs: dict[str, Callable[[], torch.Tensor]]):
        self.jobs = jobs
        self.expected = {name: job() for name, job in jobs.items()}
        self.wrong: list[str] = []

    def run(self) -> None:
        start = threading.Barrier(len(self.jobs))

        def work(name: str) -> None:
            start.wait()
            for _ in range(TURNS):
                try:
                    if not torch.equal(self.jobs[name](), self.expected[name]):
                        self.wrong.append(name)
                except Exception as error:
                    self.wrong.append(f"{name}: {error!r}")

        threads = [threading.Thread(target=work, args=(name,)) for name in self.jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def seen_by_others(*models) -> list:
    """Returns everything whose change other threads would notice."""
    return [
        dict(os.environ),
        dict(ALL_ATTENTION_FUNCTIONS.items()),
        [(model.config.to_dict(), model.generation_config.to_dict(), hooks_of(model)) for model in models],
        [(name, id(module)) for model in models for name, module in model.named_modules()],
    ]


def test_threads_of_one_target_do_not_notice_each_other():
    target, model = own_target("mistral"), own_target(seed=1)
    for each in (target, model):
        each(prompt(3), output_hidden_states=True)  # transformers adds its own hooks once
    shared, other = random_heads(target, "eagle"), random_heads(target, "poss", kind="chain")
    adaptive = random_heads(target, "eagle", seed=4)
    adaptive.adaptive = True
    pruned = DraftLanguageModel.from_model(model, tree_config={"depth": 3, "top_k": 3, "total_tokens": 9})
    pruned.prune_draft_vocabulary(KEPT)
    inputs, _ = batch_of((9, 4, 12))
    jobs = {
        "plain": lambda: plain(target, prompt(), NEW),
        "heads": lambda: plain(target, prompt(), NEW, assistant_model=shared),
        "the same heads": lambda: plain(target, prompt(13, seed=2), NEW, assistant_model=shared),
        "the same heads, another tree": lambda: plain(
            target, prompt(13, seed=3), NEW, assistant_model=shared.with_tree(depth=2)
        ),
        "other heads": lambda: plain(target, prompt(25, seed=5), NEW, assistant_model=other),
        "heads that may step plainly": lambda: plain(target, prompt(), NEW, assistant_model=adaptive),
        "and in another thread": lambda: plain(target, prompt(8), NEW, assistant_model=adaptive),
        "batch": lambda: greedy(target, inputs, max_new_tokens=NEW, assistant_model=shared),
        "chunked": lambda: plain(target, prompt(), NEW, prefill_chunk_size=5, assistant_model=other),
        "pruned draft model": lambda: plain(target, prompt(), NEW, assistant_model=pruned),
        "the draft model itself": lambda: plain(model, prompt(), NEW),
    }
    threads = Threads(jobs)
    before = seen_by_others(target, model)
    threads.run()
    assert not threads.wrong
    assert seen_by_others(target, model) == before


class Watched:
    """Checks the models whenever a layer of one of them begins its forward."""

    def __init__(self, *models):
        self.models, self.changes = models, 0
        self.hooks = [m.register_forward_pre_hook(self.look) for model in models for m in layers_of(model)]
        self.before = seen_by_others(*models)

    def look(self, module, args) -> None:
        self.changes += seen_by_others(*self.models) != self.before

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def layers_of(model) -> list[torch.nn.Module]:
    return list(model.get_decoder().layers)


def changes_during(call: Callable, *models) -> int:
    watched = Watched(*models)
    try:
        call()
    finally:
        watched.close()
    return watched.changes


def pruned_call() -> tuple[Callable, tuple]:
    target, model = own_target(), own_target(seed=1)
    target(prompt(3), output_hidden_states=True)
    heads = DraftLanguageModel.from_model(model, tree_config={"kind": "chain"}).prune_draft_vocabulary(KEPT)
    return lambda: plain(target, prompt(), 8, assistant_model=heads), (target, model)


def chunked_call() -> tuple[Callable, tuple]:
    target = own_target()
    target(prompt(3), output_hidden_states=True)
    heads = random_heads(target)
    return lambda: plain(target, prompt(), 8, prefill_chunk_size=5, assistant_model=heads), (target,)


@pytest.mark.parametrize("make", [pruned_call, chunked_call])
def test_no_model_is_changed_even_for_a_moment(make):
    call, models = make()
    assert changes_during(call, *models) == 0


def test_hooks_of_accelerate_stay_where_they_are():
    _, (_, model) = pruned_call()
    expected = plain(model, prompt(), 8)
    hooked = own_target(seed=1)
    for module in (hooked, hooked.lm_head):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    forwards = [vars(module)["forward"] for module in (hooked, hooked.lm_head)]
    target = own_target()
    heads = DraftLanguageModel.from_model(hooked, tree_config={"kind": "chain"}).prune_draft_vocabulary(KEPT)
    assert torch.equal(plain(target, prompt(), 8, assistant_model=heads), plain(target, prompt(), 8))
    assert [vars(module).get("forward") for module in (hooked, hooked.lm_head)] == forwards
    assert torch.equal(plain(hooked, prompt(), 8), expected)
    unhooked = DraftLanguageModel.from_model(model, tree_config={"kind": "chain"}).prune_draft_vocabulary(KEPT)
    plain(target, prompt(), 8, assistant_model=unhooked)
    assert heads.last_stats.num_accepted == unhooked.last_stats.num_accepted


def test_wrapping_a_model_leaves_its_modes_alone():
    model = own_target(seed=1).train()
    model.model.layers[0].eval()
    DraftLanguageModel.from_model(model)
    assert model.training and not model.model.layers[0].training


# ---------------------------------------------------------------------- one heads object, several targets
def trees_of(heads) -> list:
    return [tree.token_ids.tolist() for tree in heads.last_stats.trees]


class CallsBetween:
    """A streamer that lets the same heads generate for another target after every token."""

    def __init__(self, call: Callable[[], torch.Tensor]):
        self.call, self.texts = call, []

    def put(self, value):
        self.texts.append(self.call())

    def end(self):
        pass


def interleaved(method: str) -> tuple[list, list, int]:
    """Returns the draft trees of a call interrupted by calls for another target, those of the call alone, and the
    number of wrong texts."""
    target, other = own_target(), own_target(seed=1)
    heads = random_heads(target, method)
    heads.config.target = None  # the heads are made for no particular target
    heads.trace = True
    plain(target, prompt(), NEW, assistant_model=heads)
    alone, expected = trees_of(heads), plain(other, prompt(), 3)
    between = CallsBetween(lambda: plain(other, prompt(), 3, assistant_model=heads.with_tree(depth=2)))
    same_object = CallsBetween(lambda: plain(other, prompt(), 3, assistant_model=heads))
    wrong = 0
    for streamer in (between, same_object):
        stats: list = []
        text = plain(target, prompt(), NEW, assistant_model=heads, streamer=Recording(streamer, heads, stats))
        wrong += not torch.equal(text, plain(target, prompt(), NEW))
        wrong += sum(not torch.equal(inner, expected) for inner in streamer.texts)
    return [tree.token_ids.tolist() for tree in stats[0].trees], alone, wrong


class Recording:
    """Keeps the statistics of the outer call, which the inner calls replace."""

    def __init__(self, streamer, heads, stats: list):
        self.streamer, self.heads, self.stats = streamer, heads, stats

    def put(self, value):
        if value.dim() == 1 and not self.stats:
            self.stats.append(self.heads.last_stats)
        self.streamer.put(value)

    def end(self):
        pass


@pytest.mark.parametrize("method", ["eagle", *(pytest.param(m, marks=pytest.mark.slow) for m in ("poss", "hydra"))])
def test_calls_inside_a_call_for_another_target(method):
    within, alone, wrong = interleaved(method)
    assert wrong == 0
    assert within == alone


def test_planted_bug_heads_are_bound_anew_in_mid_call(monkeypatch):
    monkeypatch.setattr(DraftHead, "for_call", DraftHead.bind)
    within, alone, wrong = interleaved("eagle")
    assert wrong == 0
    assert within != alone


def test_threads_of_different_targets_share_heads():
    targets = [own_target(seed=seed) for seed in range(3)]
    for target in targets:
        target(prompt(3), output_hidden_states=True)
    heads = random_heads(targets[0], "poss")
    heads.config.target = None
    jobs = {
        f"{seed}": lambda target=target: plain(target, prompt(), NEW, assistant_model=heads)
        for seed, target in enumerate(targets)
    }
    pruned = random_heads(targets[0], "eagle")
    pruned.config.target = None
    pruned.prune_draft_vocabulary(KEPT)
    jobs |= {
        f"pruned {seed}": lambda target=target: plain(target, prompt(), NEW, assistant_model=pruned)
        for seed, target in enumerate(targets)
    }
    threads = Threads(jobs)
    threads.run()
    assert not threads.wrong


def test_threads_of_recurrent_and_multimodal_targets():
    recurrent, multimodal = tiny_target("qwen3_next"), image_target("qwen2_5_vl")
    chains = random_heads(recurrent, "eagle", kind="chain", depth=3)
    trees = random_heads(multimodal, "eagle")
    first, second = image_inputs(multimodal), image_inputs(multimodal, (9,), seed=1)
    options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": trees}
    for target in (recurrent, multimodal):
        target(prompt(3), output_hidden_states=True)
    jobs = {
        "a chain": lambda: plain(recurrent, prompt(), NEW, assistant_model=chains),
        "another chain": lambda: plain(recurrent, prompt(9), NEW, assistant_model=chains.with_tree(depth=5)),
        "an image": lambda: multimodal.generate(**first, **options),
        "another image": lambda: multimodal.generate(**second, **options),
    }
    threads = Threads(jobs)
    threads.run()
    assert not threads.wrong


def streamed(target, heads, alone: list[torch.Tensor]) -> torch.Tensor:
    """Returns the texts of a stream of two sequences at a time, in the order of its requests."""
    found = generate_stream(target, heads, alone, 2, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return torch.tensor([one.token_ids for one in sorted(found, key=lambda one: one.index)])


@pytest.mark.parametrize("model_type", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_threads_share_heads_of_a_recurrent_target(model_type):
    """States that are kept, restored and moved between places of a batch belong to one call each."""
    target = tiny_target(model_type)
    target(prompt(3), output_hidden_states=True)
    heads = random_heads(target, "eagle", kind="chain", depth=3)
    adaptive = random_heads(target, "eagle", seed=4, kind="chain", depth=3)
    adaptive.adaptive = True
    inputs, alone = batch_of((9, 4, 12), vocab=90)
    jobs = {
        "plain": lambda: plain(target, prompt(), NEW),
        "a chain": lambda: plain(target, prompt(), NEW, assistant_model=heads),
        "another chain": lambda: plain(target, prompt(9), NEW, assistant_model=heads.with_tree(depth=5)),
        "heads that may step plainly": lambda: plain(target, prompt(), NEW, assistant_model=adaptive),
        "batch": lambda: greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads),
        "stream": lambda: streamed(target, heads, alone),
        "another stream": lambda: streamed(target, heads, alone[::-1]),
    }
    threads = Threads(jobs)
    threads.run()
    assert not threads.wrong


# ---------------------------------------------------------------------- planted
def test_planted_bug_the_users_model_is_patched(monkeypatch):
    class Patching:
        def __init__(self, model, lm_head, project):
            self.model, self.project = model, project
            lm_head.forward = project

    monkeypatch.setattr(draft_lm, "StandIn", Patching)
    call, models = pruned_call()
    assert changes_during(call, *models) > 0


def test_planted_bug_features_are_read_by_hooks(monkeypatch):
    prefill = FeatureReader.prefill

    def hooked(self, target, *args):
        hook = target.get_decoder().register_forward_hook(lambda *args: None)
        try:
            return prefill(self, target, *args)
        finally:
            hook.remove()

    monkeypatch.setattr(FeatureReader, "prefill", hooked)
    call, models = chunked_call()
    assert changes_during(call, *models) > 0
