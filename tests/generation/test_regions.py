"""Layers that are alike are compiled once, and those that only seem so are found out."""

from __future__ import annotations

import pytest
import torch
from support.heads import random_heads
from support.stubs import counted
from support.targets import own_target, plain, prompt
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_specheads.cache.slots import OwnSlots
from hf_specheads.generation import compiled, regions
from hf_specheads.generation.compiled import CompiledRounds
from hf_specheads.tree.config import DraftTreeConfig

NEW = 16
CHAIN = DraftTreeConfig(kind="chain", depth=2, top_k=1, total_tokens=3)
SLOW = pytest.mark.slow
needs_regions = pytest.mark.skipif(regions._region is None, reason="this torch compiles every layer for itself")


def heads_of(target, **options):
    heads = random_heads(target, "eagle", **options)
    heads.tree_config, heads.adaptive = CHAIN, False
    return heads


def calls_of_regions(graphs: list) -> list[int]:
    """Of every graph, how many calls of one piece of code it makes."""
    wanted = torch.ops.higher_order.invoke_subgraph
    return [sum(node.target is wanted for node in graph.graph.nodes) for graph in graphs]


def steps_of(heads, target) -> CompiledRounds:
    return next(value for value in heads.memory[target].values() if isinstance(value, CompiledRounds))


@needs_regions
@pytest.mark.parametrize("family", ["llama", *(pytest.param(other, marks=SLOW) for other in ("gpt2", "mixtral"))])
def test_layers_alike_are_one_piece_of_code(family):
    target = own_target(family, num_hidden_layers=4)
    heads = heads_of(target)
    graphs = counted(target, heads)
    modules = {name: (type(module), set(vars(module))) for name, module in target.named_modules()}
    for length in (9, 12):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert steps_of(heads, target).layers_once
    assert calls_of_regions(graphs)[0] == 4 and len(graphs) == 2, "one verifying forward of four layers, one draft step"
    for name, module in target.named_modules():
        assert type(module) is modules[name][0] and "region" not in vars(module), "the target is not touched"


class CountsItself(LlamaDecoderLayer):
    """A layer whose number is part of what it computes."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) * (1 + self.self_attn.layer_idx)


@needs_regions
def test_layers_that_use_their_number_are_found_out(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(compiled.logger, "warning_once", said.append)
    target = own_target("llama", num_hidden_layers=3)
    for layer in target.model.layers:
        layer.__class__ = CountsItself
    heads, ids = heads_of(target), prompt()
    graphs = counted(target, heads)
    for _ in range(2):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert not steps_of(heads, target).layers_once
    assert len(said) == 1 and "logits" in said[0]
    assert calls_of_regions(graphs).count(3) == 1 and len(graphs) == 3, "found at once, then compiled layer by layer"


@needs_regions
@SLOW
def test_planted_bug_nobody_looks(monkeypatch):
    monkeypatch.setattr(compiled, "difference", lambda *_: None)
    with pytest.raises(AssertionError):
        test_layers_that_use_their_number_are_found_out(monkeypatch)


@needs_regions
@SLOW
def test_a_region_that_cannot_be_traced_is_done_without(monkeypatch):
    def update(self, *args, **kwargs):
        raise RuntimeError("not here")

    monkeypatch.setattr(OwnSlots, "update", update)
    target = own_target("llama", num_hidden_layers=3)
    heads, ids = heads_of(target), prompt()
    graphs = counted(target, heads)
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert not steps_of(heads, target).layers_once and calls_of_regions(graphs) == [0, 0]


def change_a_setting(layer):
    layer.input_layernorm.variance_epsilon = 1e-3


def change_a_tensor(layer):
    layer.mlp.up_proj = torch.nn.Linear(layer.mlp.up_proj.in_features, layer.mlp.up_proj.out_features, bias=True)


def add_a_hook(layer):
    layer.mlp.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [change_a_setting, change_a_tensor, add_a_hook])
def test_layers_that_are_not_alike(change):
    target = own_target("llama", num_hidden_layers=3)
    alike = {regions._signature(layer) for layer in target.model.layers}
    assert len(alike) == 1
    change(target.model.layers[1])
    kinds = [regions._signature(layer) for layer in target.model.layers]
    assert kinds[0] == kinds[2] != kinds[1]
