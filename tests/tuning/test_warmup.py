"""What `heads.warmup` compiles is found by later calls, and nothing else of it is left."""

from __future__ import annotations

import pytest
import torch
from support.batches import batch_of, greedy
from support.heads import random_heads
from support.stubs import counted
from support.targets import own_target, plain, prompt, shared_target

from hf_specheads.generation.pace.pace import Pace
from hf_specheads.tree.config import DraftTreeConfig
from hf_specheads.tuning.warmup import _capacities

CHAIN = DraftTreeConfig(kind="chain", depth=2, top_k=1, total_tokens=3)


def warm_heads(target, adaptive):
    heads = random_heads(target, "eagle")
    heads.tree_config, heads.adaptive = CHAIN, adaptive
    return heads, counted(target, heads)


@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_later_calls_compile_nothing(adaptive):
    target = own_target("llama", num_hidden_layers=1)
    heads, graphs = warm_heads(target, adaptive)
    assert heads.warmup(target) > 0
    assert len(graphs) == 3, "a first and a further link, and a verifying forward, which plain steps take as well"
    assert heads.last_stats is None and heads.on_round is None and heads.adaptive is adaptive
    assert not any(isinstance(value, Pace) for value in heads.memory[target].values())
    for length in (5, 21):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, 16, assistant_model=heads), plain(target, ids, 16))
    assert len(graphs) == 3


@pytest.mark.slow
def test_batches():
    target = own_target("llama", num_hidden_layers=1)
    heads, graphs = warm_heads(target, False)
    heads.warmup(target, batch_sizes=(2, 1))
    known = len(graphs)
    greedy(target, batch_of((9, 4))[0], assistant_model=heads)
    greedy(target, batch_of((9, 9))[0], assistant_model=heads)
    assert len(graphs) == known == 2 * 3, "with and without padding, and what is left of a batch when others end"


def test_what_was_learnt_is_kept():
    target = own_target("llama", num_hidden_layers=1)
    heads, _ = warm_heads(target, True)
    heads.compiled = False
    plain(target, prompt(), 16, assistant_model=heads)
    known = {key: value for key, value in heads.memory[target].items() if isinstance(value, Pace)}
    assert known
    heads.compiled, rounds = True, heads.last_stats
    heads.warmup(target)
    assert {key: value for key, value in heads.memory[target].items() if isinstance(value, Pace)} == known
    assert heads.last_stats is rounds


def test_capacities():
    assert _capacities(CHAIN, None) == [256]
    assert _capacities(CHAIN, 253) == [256]
    assert _capacities(CHAIN, 254) == [256, 512], "the nodes of a tree take slots too"
    assert _capacities(CHAIN, 1000) == [256, 512, 1024]


@pytest.mark.parametrize(
    ("compiled", "options", "said"),
    [
        (False, {}, "load_heads"),
        (True, {"batch_sizes": ()}, "batch_sizes"),
        (True, {"batch_sizes": (0,)}, r"\[0\]"),
        (True, {"max_length": 0}, "max_length"),
    ],
)
def test_refusals(compiled, options, said):
    target = shared_target("llama")
    heads = random_heads(target)
    heads.compiled = compiled
    with pytest.raises(ValueError, match=said):
        heads.warmup(target, **options)
