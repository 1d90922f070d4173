"""Memory that is derived, against parameters that are there, and a graph that is kept."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specheads import AutoDraftHead
from hf_specheads.trainer import Unroll
from hf_specheads.trainer.memory import (
    LayerSizes,
    TargetSizes,
    TrainingSizes,
    head_parameters,
    training_bytes,
    unroll_bytes,
)

SIZES = TargetSizes(LayerSizes(64, 176, 64, 32), 3, 512)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_parameters(target) -> None:
    """But for norms and biases, which nobody misses."""
    heads = AutoDraftHead.from_target(target, "poss", num_specialists=2, positions_per_specialist=2)
    counted = sum(parameter.numel() for parameter in heads.parameters())
    assert head_parameters(SIZES, TrainingSizes(specialists=2)) == pytest.approx(counted, rel=0.01)
    parts = training_bytes(SIZES, TrainingSizes(), 1, sharded=False)
    assert parts["target"] == pytest.approx(2 * sum(p.numel() for p in target.parameters()), rel=0.01)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_what_the_passes_keep(target, passes: int) -> None:
    """Tensors that autograd keeps, each once, weights left out."""
    rows = 300
    heads = AutoDraftHead.from_target(target, "poss", num_specialists=2, positions_per_specialist=2).bind(target)
    weights = {x.untyped_storage().data_ptr() for x in (*heads.parameters(), *target.parameters())}
    unroll = Unroll(
        heads.train(), features=torch.randn(1, rows, 64), next_token_ids=torch.randint(0, 512, (1, rows)),
        target_features=torch.randn(1, rows, 64), loss_mask=torch.ones(1, rows), attention_mask=None,
        embed_tokens=target.get_input_embeddings(), lm_head=target.lm_head, num_passes=passes, num_items=1.0,
    )  # fmt: skip
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        drafted = [next(unroll._passes) for _ in range(passes)]
    assert len(drafted) == passes
    assert rows * passes * SIZES.layer.kept * 4 == pytest.approx(sum(kept.values()), rel=0.1)
    sizes = TrainingSizes(specialists=2, passes=passes, length=rows, state_bytes=4)
    assert unroll_bytes(SIZES, sizes)["passes"] >= sum(kept.values())  # and what nobody keeps but is there


def test_shares() -> None:
    whole, shared = (training_bytes(SIZES, TrainingSizes(), 8, sharded)["target"] for sharded in (False, True))
    both = 2 * SIZES.shared_parameters
    assert whole - both == 2 * 3 * SIZES.layer.parameters
    assert shared - both == 2 * (3 * SIZES.layer.parameters // 8 + 2 * SIZES.layer.parameters)
