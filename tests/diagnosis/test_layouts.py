"""What converters change without changing a shape is undone by an alternative, and heads are left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.heads import scrambled_heads
from support.targets import prompt

from benchmarks.diagnosis.lab import Case
from benchmarks.diagnosis.plantings import (
    as_gguf,
    backwards,
    gates_exchanged,
    tokens_before,
    transposed_squares,
    weights,
)
from benchmarks.diagnosis.tiny import fresh_heads, scaling_target
from hf_specheads import DraftHead, load_heads
from hf_specheads.diagnosis.alternative import put_into_force, tried
from hf_specheads.diagnosis.hypotheses import alternatives
from hf_specheads.diagnosis.layouts import attention_shapes, embedding_scales, layouts
from hf_specheads.tree.config import DraftTreeConfig


def stirred(heads: DraftHead) -> DraftHead:
    """No two weights alike, as after a training."""
    generator = torch.Generator().manual_seed(0)
    for weight in heads.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return heads


@pytest.mark.parametrize(
    "method, plant, setting",
    [
        ("eagle", weights(lambda one: as_gguf(one, 8), "q_proj.weight", "k_proj.weight"), "rows of queries and keys"),
        ("eagle3", gates_exchanged, "gate and up"),
        ("eagle3", weights(lambda one: one - 1, "norm.weight"), "weights of norms"),
        ("eagle3", weights(lambda one: one + 1, "norm.weight"), "weights of norms"),
        ("poss", backwards("layers"), "order of layers"),
        ("medusa", backwards("blocks", "lm_heads"), "order of layers"),
        ("medusa", weights(transposed_squares, ".weight"), "square matrices"),
        ("hydra", tokens_before, "inputs of blocks"),
    ],
)
def test_one_alternative_undoes_it(deep, method: str, plant: Callable[[Case], None], setting: str) -> None:
    heads = stirred(fresh_heads(deep, method))
    before = copy.deepcopy(heads.state_dict())
    plant(Case(deep, heads, [], 0))
    planted = copy.deepcopy(heads.state_dict())
    assert any(not torch.equal(before[name], planted[name]) for name in before)
    undone = []
    for one in (one for one in layouts(heads, deep) if one.setting == setting):
        with tried(heads, one):
            now = heads.state_dict()
            undone.append(all(torch.allclose(before[name], now[name], atol=1e-6) for name in before))
        assert all(torch.equal(planted[name], weight) for name, weight in heads.state_dict().items())
    assert sum(undone) == 1, undone


def test_sizes_of_attention_that_fit_the_same_matrices(deep) -> None:
    heads = stirred(fresh_heads(deep, "eagle"))
    rows, positions = torch.randn(1, 5, 32), torch.arange(5)[None]
    right = heads(rows, positions)
    narrow, wide = attention_shapes(heads)
    put_into_force(heads, narrow.changes)
    assert (heads.config.num_attention_heads, heads.config.num_key_value_heads, heads.config.head_dim) == (8, 4, 4)
    assert not torch.allclose(heads(rows, positions), right, atol=1e-3)
    (back,) = (one for one in attention_shapes(heads) if one.changes["head_dim"] == 8)
    with tried(heads, back):
        assert torch.allclose(heads(rows, positions), right, atol=1e-6)
    assert wide.changes == {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def test_scales_of_embeddings_only_where_a_target_has_one(deep) -> None:
    assert list(embedding_scales(fresh_heads(deep, "eagle"), deep)) == []
    target = scaling_target()
    (one,) = embedding_scales(fresh_heads(target, "eagle"), target)
    assert one.embedding == pytest.approx(32**-0.5)


@pytest.mark.parametrize("method", ["eagle", "poss", "eagle3", "poss-eagle3", "dflash", "hydra", "peagle"])
def test_what_is_tried_on_live_heads_is_what_loaded_ones_do(deep, method: str, tmp_path) -> None:
    """Heads may keep copies of config fields; none may be forgotten when a field is changed."""
    original = scrambled_heads(deep, method)
    levels = tuple(getattr(original.config, "feature_layers", None) or (-1,))
    tried_ones = [one for one in alternatives(original, deep, deep.config.num_hidden_layers, levels)
                  if one.changes and "feature_layers" not in one.changes]  # fmt: skip
    names = {name for one in tried_ones for name in one.changes}
    assert "inputs" in names or method not in ("eagle", "poss")
    for number, one in enumerate(tried_ones):
        heads = copy.deepcopy(original)
        put_into_force(heads, one.changes)
        heads.save_pretrained(tmp_path / str(number))
        loaded = load_heads(tmp_path / str(number))
        live, anew = (drafted(deep, each) for each in (heads, loaded))
        assert live == anew, f"{one.changes} is not in force"


def drafted(target, heads) -> list:
    """Token ids of all drafts of a generation."""
    heads.tree_config, heads.adaptive, heads.trace = DraftTreeConfig(kind="chain", depth=3), False, True
    target.generate(prompt(), assistant_model=heads, max_new_tokens=12, do_sample=False)
    return [tree.token_ids.tolist() for tree in heads.last_stats.trees]
