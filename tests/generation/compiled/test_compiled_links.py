"""Compiled chains on a CPU: one graph drafts every link, so chains can have any length. Also tests when guards are
checked."""

from __future__ import annotations

import gc

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.heads import random_heads, scrambled_heads
from support.stubs import counted
from support.targets import own_target, plain, prompt

from hf_specheads.generation.compiled import guards, steps
from hf_specheads.generation.compiled.rounds import CompiledRounds
from hf_specheads.generation.drafting.foresight import Reach
from hf_specheads.generation.options import DraftingOptions
from hf_specheads.generation.pace.menu import FARTHEST, largest, menu_of, trees_of_call
from hf_specheads.generation.pace.pace import Pace
from hf_specheads.heads.layers import DraftDecoderLayer
from hf_specheads.tree.config import DraftTreeConfig

NEW = 24
CHAIN = DraftTreeConfig(kind="chain", depth=8)
SLOW = pytest.mark.slow


@pytest.fixture
def target():
    return own_target("llama")


def specialists(target):
    heads = scrambled_heads(target, "poss", num_specialists=2, positions_per_specialist=3)
    heads.tree_config, heads.adaptive = CHAIN, False
    return heads


def free_heads(target, method="eagle", **options):
    """Makes heads without a tree of the user's choice."""
    heads = random_heads(target, method, DraftTreeConfig(kind="chain", depth=6, **options))
    heads.adaptive = True
    return heads


@pytest.mark.parametrize("lengths", [(9,), pytest.param((9, 4), marks=SLOW)])
def test_links_of_all_positions_are_one_graph(target, lengths):
    inputs, alone = batch_of(lengths)
    heads, texts = specialists(target), alone_texts(target, alone, max_new_tokens=NEW)
    graphs = counted(target, heads)
    assert_rows(greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads), max(lengths), texts)
    drafted = heads.last_stats.pos_acc
    if len(lengths) == 1:
        assert len(graphs) == 2, "links after the first, the verifying forward"
    greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads)
    if len(lengths) == 1:
        assert len(graphs) == 4, "and where specialists start"
    known = len(graphs)
    assert_rows(greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads), max(lengths), texts)
    assert len(graphs) == known
    heads.compiled = False
    greedy(target, inputs, max_new_tokens=NEW, assistant_model=heads)
    assert heads.last_stats.pos_acc == drafted, "the drafts are those of rounds that are not compiled"


class CountsLinks(DraftDecoderLayer):
    """A specialist whose computation depends on its index."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * (1 + self.self_attn.layer_idx)


def test_links_that_use_their_number_are_graphs_of_their_own(target):
    heads, ids = specialists(target), prompt()
    for layer in heads.layers:
        layer.__class__ = CountsLinks
    plain(target, ids, NEW, assistant_model=heads)
    expected = heads.last_stats.pos_acc
    graphs = counted(target, heads)
    for known in (3, 5, 5):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
        assert heads.last_stats.pos_acc == expected
        assert len(graphs) == known


@pytest.mark.parametrize("lookup", [0, 4])
def test_chains_end_where_they_like_and_share_their_graphs(target, monkeypatch, lookup):
    """Nothing is compiled again, however many links are drafted, copied and verified."""
    levels = []

    def goes_on(self):
        self.ended, self.node = len(self._links) >= wanted[0], 0.0
        return not self.ended

    def record(step):
        wanted[0] = wanted[0] % 5 + 1
        if step.tree is not None and step.tree.num_nodes > 1:
            levels.append(step.tree.max_depth)

    wanted = [1]
    monkeypatch.setattr(Reach, "goes_on", goes_on)
    monkeypatch.setattr(Pace, "choose", lambda *_: 0)
    heads, ids = free_heads(target, "poss", lookup=lookup), prompt()
    graphs = counted(target, heads)
    heads.on_round = record
    for length in (19, 7):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert len(set(levels)) >= 4, "chains of many lengths"
    assert len(graphs) == 4


def test_chains_of_favourites_alone(target):
    """Chains with drawn links would need graphs of their own, and so would trees of other kinds."""
    heads = free_heads(target)
    heads.compiled = True
    options = DraftingOptions.of(heads)
    menu, farthest = menu_of(heads, target, options, drawn=True)
    assert farthest == FARTHEST and [tree.depth for tree in menu] == [FARTHEST]
    assert largest(trees_of_call(heads, target, options)) == menu[0]
    heads = random_heads(target, "eagle", DraftTreeConfig(depth=3, top_k=3, total_tokens=7))
    heads.compiled = True
    menu, _ = menu_of(heads, target, DraftingOptions.of(heads))
    assert menu[0] == heads.tree_config and [tree.kind for tree in menu] == ["dynamic", "chain"]
    assert menu_of(heads, target, DraftingOptions.of(heads.with_tree(depth=2))) == (
        (heads.tree_config.replace(depth=2),),
        0,
    )
    medusa = random_heads(target, "medusa", DraftTreeConfig(kind="chain", depth=2))
    medusa.compiled = True
    assert menu_of(medusa, target, DraftingOptions.of(medusa)) == ((medusa.tree_config,), 0)


# ---------------------------------------------------------------------- guards
def changed_between_calls(target, change):
    heads, ids = free_heads(target), prompt()
    counted(target, heads)
    before = plain(target, ids, NEW, assistant_model=heads)
    change(target)
    expected = plain(target, ids, NEW)
    assert not torch.equal(before, expected), "the change is one"
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)


def other_activation(target):
    for layer in target.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()


def setting(target):
    for layer in target.model.layers:
        layer.self_attn.scaling, layer.input_layernorm.variance_epsilon = 9.0, 100.0


def other_module(target):
    torch.manual_seed(5)
    target.lm_head = torch.nn.Linear(target.lm_head.in_features, target.lm_head.out_features)


def hook_outside_the_layers(target):
    target.model.norm.register_forward_hook(lambda module, args, output: output.flip(-1))


def hook_before_embedding(target):
    target.model.embed_tokens.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % module.num_embeddings,))


CHANGES = [other_activation, other_module, setting, hook_outside_the_layers, hook_before_embedding]


@pytest.mark.parametrize("change", CHANGES)
def test_a_target_that_changes_between_calls_is_compiled_anew(target, change):
    changed_between_calls(target, change)


def test_what_changes_with_every_call_runs_uncompiled_in_the_end(target, caplog):
    heads, ids = free_heads(target), prompt()
    counted(target, heads)
    expected, seen = plain(target, ids, NEW), []
    for call in range(12):
        hook = target.model.norm.register_forward_hook(lambda *_, call=call: seen.append(call))
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
        hook.remove()
    assert seen[-1] == 11
    assert "changes from call to call" in caplog.text


def test_guards_are_asked_once_a_call(target, monkeypatch):
    asked = []
    real = steps.without_guards
    monkeypatch.setattr(steps, "without_guards", lambda step: asked.append(step) or real(step))
    heads, ids = specialists(target), prompt()
    counted(target, heads)
    for others in (1, 3):
        asked.clear()
        plain(target, ids, NEW, assistant_model=heads)
        assert heads.last_stats.target_forwards > 6
        assert len(asked) == others + len(heads.layers), "verifying, every specialist's links; then first ones"


def test_what_is_several_graphs_keeps_its_guards():
    def step(numbers):
        return numbers + 1

    torch._dynamo.reset()
    step = guards.own_copy(step)
    several = torch.compile(step, backend="eager", dynamic=False)
    several(torch.ones(2))
    assert torch.equal(guards.without_guards(step)(torch.ones(2)), torch.full((2,), 2.0))
    several(torch.ones(3))
    assert guards.without_guards(step) is None


@SLOW
def test_planted_bug_guards_are_never_asked_again(target, monkeypatch):
    monkeypatch.setattr(CompiledRounds, "begin_call", lambda self: None)
    with pytest.raises(AssertionError):
        changed_between_calls(target, other_activation)


def test_no_garbage_is_looked_for_while_compiling(target):
    """Garbage collection is switched on again afterwards, if it was on before."""
    heads, ids, seen = specialists(target), prompt(), []
    counted(target, heads)
    backend = target.generation_config.compile_config.backend
    target.generation_config.compile_config.backend = lambda *args: seen.append(gc.isenabled()) or backend(*args)
    try:
        for before in (True, False):
            gc.enable() if before else gc.disable()
            torch._dynamo.reset()
            heads.memory.clear()
            plain(target, ids, NEW, assistant_model=heads)
            assert gc.isenabled() == before
    finally:
        gc.enable()
    assert seen == [False] * 4
