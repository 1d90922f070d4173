"""Layers that are alike are compiled once, and layers that only look alike are detected."""

from __future__ import annotations

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.heads import random_heads, scrambled_heads
from support.stubs import counted
from support.targets import own_target, plain, prompt
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from hf_specheads.cache.slots import OwnSlots
from hf_specheads.generation.compiled import regions
from hf_specheads.generation.compiled import rounds as compiled
from hf_specheads.generation.compiled.rounds import CompiledRounds
from hf_specheads.heads.layers import DraftDecoderLayer
from hf_specheads.tree.config import DraftTreeConfig
from hf_specheads.tree.shape import fixed_shape

NEW = 16
CHAIN = DraftTreeConfig(kind="chain", depth=2, top_k=1, total_tokens=3)
SLOW = pytest.mark.slow
needs_regions = pytest.mark.skipif(regions._region is None, reason="this torch compiles every layer for itself")


def heads_of(target, **options):
    heads = random_heads(target, "eagle", **options)
    heads.tree_config, heads.adaptive = CHAIN, False
    return heads


def calls_of_regions(graphs: list) -> list[int]:
    """Returns for every graph how many calls of shared code it makes."""
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
    assert sorted(calls_of_regions(graphs)) == [0, 0, 4], "a verifying forward of four layers; two steps that draft"
    for name, module in target.named_modules():
        assert type(module) is modules[name][0] and "region" not in vars(module), "the target is not touched"


def regions_called(graph) -> list[str]:
    """Returns the pieces of shared code that a graph calls, in order."""
    wanted = torch.ops.higher_order.invoke_subgraph
    return [node.args[1] for node in graph.graph.nodes if node.target is wanted]


@pytest.fixture
def whole_chains(monkeypatch):
    """Compiles a chain as one graph, as on accelerators."""
    monkeypatch.setattr(CompiledRounds, "link_by_link", False)


def chain_heads(target, method="poss", depth=8, **options):
    heads = scrambled_heads(target, method, **options)
    heads.tree_config, heads.adaptive = DraftTreeConfig(kind="chain", depth=depth), False
    return heads


@needs_regions
@pytest.mark.parametrize("lengths", [(9,), pytest.param((9, 4), marks=SLOW)])
@pytest.mark.parametrize(
    ("method", "late"), [("poss", 1), *(pytest.param(*each, marks=SLOW) for each in (("eagle", 0), ("eagle3", 0),
    ("poss-eagle3", 1)))],
)  # fmt: skip
def test_links_alike_are_one_piece_of_code(method, late, lengths, whole_chains):
    """Specialists with weights of their own share code, too. A specialist that starts later first takes in several
    rows."""
    target = own_target("llama")
    inputs, alone = batch_of(lengths)
    specialists = {"num_specialists": 2, "positions_per_specialist": 3} if late else {}
    levels = {"feature_layers": (0, 1, -1)} if "eagle3" in method else {}
    heads = chain_heads(target, method, **specialists, **levels)
    texts = alone_texts(target, alone, max_new_tokens=NEW)
    fixed_shape.cache_clear()  # as in a new process, in which no uncompiled round has used these shapes before tracing
    graphs = counted(target, heads)
    assert_rows(greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads), max(lengths), texts)
    assert steps_of(heads, target).links_once, "and draft what uncompiled steps draft"
    drafting = [called for graph in graphs if len(set(called := regions_called(graph))) == 2]
    assert drafting
    for called in drafting:
        assert sorted(map(called.count, set(called))) == [7 - late, 8], "links, and best children of every level"


class CountsLinks(DraftDecoderLayer):
    """A specialist whose computation depends on its index."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * (1 + self.self_attn.layer_idx)


@needs_regions
def test_links_that_use_their_number_are_found_out(monkeypatch, whole_chains):
    said: list[str] = []
    monkeypatch.setattr(compiled.logger, "warning_once", said.append)
    target = own_target("llama")
    heads, ids = chain_heads(target, num_specialists=2, positions_per_specialist=3), prompt()
    for layer in heads.layers:
        layer.__class__ = CountsLinks
    graphs = counted(target, heads)
    for _ in range(2):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert not steps_of(heads, target).links_once
    assert len(said) == 1 and "log-probabilities" in said[0]
    assert len(graphs) == 3, "found at once, then compiled link by link"


@needs_regions
@SLOW
def test_planted_bug_nobody_looks_at_links(monkeypatch, whole_chains):
    monkeypatch.setattr(compiled, "drafts_problem", lambda *_: None)
    with pytest.raises(AssertionError):
        test_links_that_use_their_number_are_found_out(monkeypatch, whole_chains)


@pytest.mark.parametrize("lengths", [(9,), pytest.param((9, 4), marks=SLOW)])
def test_trees_of_all_sizes_share_a_graph(lengths):
    target = own_target("llama")
    inputs, alone = batch_of(lengths)
    heads = heads_of(target)
    texts = alone_texts(target, alone, max_new_tokens=NEW)
    graphs, known = counted(target, heads), []
    for tree in (CHAIN, CHAIN, CHAIN.replace(depth=5), DraftTreeConfig(depth=3, top_k=3, total_tokens=7), CHAIN):
        heads.tree_config = tree
        assert_rows(greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads), max(lengths), texts)
        known.append(len(graphs))
    assert steps_of(heads, target).rows_once
    assert known[4] == known[3]
    if len(lengths) == 1:
        assert known == [2, 3, 4, 5, 5], "chains share the step of their further links"


class LooksRowsUp(LlamaRMSNorm):
    """A module that needs to know the number of rows."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * dict.fromkeys(range(100), 1.0)[hidden_states.shape[1]]


@SLOW
def test_a_target_without_code_for_any_number_of_rows(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(compiled.logger, "warning_once", said.append)
    target = own_target("llama")

    target.model.norm.__class__ = LooksRowsUp
    heads, ids = heads_of(target), prompt()
    graphs = counted(target, heads)
    for depth in (2, 4):
        heads.tree_config = CHAIN.replace(depth=depth)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert not steps_of(heads, target).rows_once and steps_of(heads, target).layers_once
    assert len(said) == 1 and "any number of rows" in said[0]
    given_up, link, start, verifying = 1, 1, 1, 2  # the first link is compiled in the second call
    assert len(graphs) == given_up + link + start + verifying


class CountsItself(LlamaDecoderLayer):
    """A layer whose computation depends on its index."""

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
    assert calls_of_regions(graphs).count(3) == 1 and len(graphs) == 4, "found at once, then compiled layer by layer"


@needs_regions
@SLOW
def test_planted_bug_nobody_looks(monkeypatch):
    monkeypatch.setattr(compiled, "difference", lambda *_: None)
    with pytest.raises(AssertionError):
        test_layers_that_use_their_number_are_found_out(monkeypatch)


@needs_regions
@SLOW
def test_a_region_that_cannot_be_traced_is_done_without(monkeypatch, whole_chains):
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


def test_the_whole_slice_of_layers_is_themselves():
    """Models loop over `self.layers[:n]`. The compiler must not trace a list that is made for this."""
    layers = regions._Layers([torch.nn.Identity() for _ in range(3)])
    assert layers[:3] is layers and layers[1] is list(layers)[1]
    for part in (slice(2), slice(1, 3), slice(None, 3, 2), slice(4)):
        assert list(layers[part]) == list(layers)[part]
