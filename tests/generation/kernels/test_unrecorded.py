"""Rounds bypass autograd, and code that relies on autograd notices no difference."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from support.heads import random_heads
from support.targets import own_target, plain, prompt
from support.trees import TREES
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specheads import generate_stream
from hf_specheads.generation.kernels import unrecorded
from hf_specheads.generation.kernels.few_rows import FewRows
from hf_specheads.generation.kernels.unrecorded import BELOW_AUTOGRAD, guard_for
from hf_specheads.tuning.measure import measure_costs

NEW = 12


@pytest.fixture
def entered(monkeypatch):
    """Records whether the guard is in force in every forward, including forwards outside of rounds."""
    inside, seen = [], {"target": [], "heads": []}

    @contextmanager
    def watched():
        inside.append(True)
        with BELOW_AUTOGRAD():
            yield
        inside.pop()

    def watch(model, name):
        forward = model.forward

        def watching(*args, **kwargs):
            seen[name].append(bool(inside))
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", watching)

    monkeypatch.setattr(unrecorded, "BELOW_AUTOGRAD", watched)
    return seen, watch


def test_this_torch_has_the_guard():
    assert BELOW_AUTOGRAD is not nullcontext


def test_a_guard_makes_ordinary_tensors_by_the_same_kernels():
    target, ids = own_target(), prompt(11)
    with torch.no_grad():
        expected = target(ids, output_hidden_states=True)
        with BELOW_AUTOGRAD():
            outputs = target(ids, output_hidden_states=True)
    assert torch.equal(outputs.logits, expected.logits)
    state = outputs.hidden_states[1]
    assert torch.equal(state, expected.hidden_states[1]) and not state.is_inference() and not state.requires_grad
    state.add_(1)
    probe = nn.Linear(state.shape[-1], 1)
    probe(state).sum().backward()
    assert probe.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("method", ["poss", "medusa", "dflash", "eagle3"])
def test_every_forward_of_a_call_runs_under_it(method, entered):
    seen, watch = entered
    target = own_target()
    heads = random_heads(target, method, TREES["chain"])
    heads.probe = False  # the probe runs the target before the call begins
    expected = plain(target, prompt(), NEW)
    watch(target, "target")
    watch(heads, "heads")
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), expected)
    assert len(seen["target"]) == heads.last_stats.target_forwards and all(seen["target"])
    assert seen["heads"] and all(seen["heads"])


def test_streams_and_costs_run_under_it(entered):
    seen, watch = entered
    target = own_target()
    heads = random_heads(target)
    heads.probe = False
    watch(target, "target")
    list(generate_stream(target, heads, [prompt(9), prompt(5)], 2, max_new_tokens=6, do_sample=False))
    assert seen["target"] and all(seen["target"])
    seen["target"].clear()
    measure_costs(target, heads, 20, nodes=(1, 4), rows=(1, 2), repeats=1)
    assert sum(seen["target"]) == 4  # two sizes, each twice


def test_what_a_call_hands_over_can_be_changed_and_trained_on():
    target = own_target()
    heads = random_heads(target, "poss", TREES["chain"])
    asked = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    outputs = plain(target, prompt(), NEW, assistant_model=heads, **asked)
    outputs.sequences[:, 0] = 0
    states = torch.cat([step[-1][:, -1] for step in outputs.hidden_states])
    logits, keys = torch.cat(outputs.logits), outputs.past_key_values.layers[0].keys
    for tensor in (states, logits, keys):
        tensor.mul_(2)
        weight = torch.ones(tensor.shape[-1], requires_grad=True)
        (tensor * weight).sum().backward()
        assert weight.grad.abs().sum() > 0
    target.requires_grad_(True)
    target(outputs.sequences, labels=outputs.sequences).loss.backward()
    assert all(parameter.grad is not None for parameter in target.parameters())


def _steered(module, _args, output):
    """A hook that adds a gradient to the output of a layer."""
    states = output[0] if isinstance(output, tuple) else output
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
    steered = states + 0.1 * gradient
    return (steered, *output[1:]) if isinstance(output, tuple) else steered


class _Uphill(LogitsProcessor):
    """A processor that adds the gradient of a sum of squares to the logits."""

    def __call__(self, input_ids, scores):
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(leaf.pow(2).sum(), leaf)
        return scores + gradient


def test_a_hook_that_differentiates_does():
    target = own_target()
    heads = random_heads(target, "poss", TREES["chain"])
    unsteered = plain(target, prompt(), NEW)
    target.model.layers[0].register_forward_hook(_steered)
    expected = plain(target, prompt(), NEW)
    assert not torch.equal(expected, unsteered)
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), expected)


def test_under_the_guard_it_could_not():
    target = own_target()
    target.model.layers[0].register_forward_hook(_steered)
    with torch.no_grad(), BELOW_AUTOGRAD(), pytest.raises(RuntimeError, match="does not require grad"):
        target(prompt())


def test_a_processor_that_differentiates_does():
    target = own_target()
    heads = random_heads(target, "poss", TREES["chain"])
    uphill = {"logits_processor": LogitsProcessorList([_Uphill()])}
    expected = plain(target, prompt(), NEW, **uphill)
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads, **uphill), expected)


class _Packed(nn.Parameter):
    """Weights of a tensor type of their own."""


def _packed(target):
    layer = target.model.layers[0].mlp
    layer.up_proj.weight = _Packed(layer.up_proj.weight.data)


def _compiled_forward(target):
    target.forward = torch.compile(target.forward, backend="eager")


def _compiled_in_place(target):
    target.model.layers[0].compile(backend="eager")


def _compiled_layer(target):
    target.model.layers[0] = torch.compile(target.model.layers[0], backend="eager")


def _attends_by_flex(target):
    target.set_attn_implementation("flex_attention")


def _hooked(target):
    target.model.norm.register_forward_hook(lambda *_: None)


def _hooked_before(target):
    target.model.norm.register_forward_pre_hook(lambda *_: None)


CHANGES = [
    _packed, _compiled_forward, _compiled_in_place, _compiled_layer, _attends_by_flex, _hooked, _hooked_before,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_left_out_where_somebody_may_count_on_it(change):
    target = own_target()
    assert guard_for(target) is BELOW_AUTOGRAD
    change(target)
    assert guard_for(target) is nullcontext
    assert guard_for(own_target(), nn.ModuleList([target])) is nullcontext


def test_hooks_of_all_modules_count_too():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert guard_for(own_target()) is nullcontext
    finally:
        handle.remove()
    assert guard_for(own_target()) is BELOW_AUTOGRAD


def test_hooks_by_which_transformers_reads_hidden_states_change_nothing():
    target = own_target()
    target(prompt(), output_hidden_states=True)
    assert any(module._forward_hooks for module in target.modules()), "else this tests nothing"
    assert guard_for(target) is BELOW_AUTOGRAD


def test_compiled_rounds_run_without_it(entered):
    seen, watch = entered
    target = own_target()
    heads = random_heads(target, "poss", TREES["chain"])
    heads.compiled, heads.probe = True, False
    expected = plain(target, prompt(), NEW)
    watch(target, "target")
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), expected)
    assert not any(seen["target"])


def test_modules_that_torchscript_has_made_are_looked_at_too():
    """The forward of such a module is not a function of its class."""
    activation = torch.jit.script(nn.ReLU())
    assert guard_for(nn.ModuleList([own_target(), activation])) is BELOW_AUTOGRAD
    assert FewRows(nn.Sequential(nn.Linear(16, 16), activation)).layers
