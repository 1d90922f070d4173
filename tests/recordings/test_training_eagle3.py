"""EAGLE-3's training-time test against losses and gradients recorded from the authors' training model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specheads import load_heads
from hf_specheads.heads import PossEagle3Head, PossEagle3HeadConfig
from hf_specheads.trainer import unroll_losses

GOLDENS = Path(__file__).resolve().parents[1] / "recordings" / "goldens"
FOLDER = GOLDENS / "training_eagle3"


def recorded() -> tuple[dict, dict, dict]:
    """Arguments of the unroll, what the authors' code computed, and its gradients by our names."""
    inputs, outputs = load_file(FOLDER / "inputs.safetensors"), load_file(FOLDER / "outputs.safetensors")
    expected = json.loads((FOLDER / "expected.json").read_text())
    target = load_file(GOLDENS / "eagle3_gqa_d2t" / "target" / "model.safetensors")  # the one it was trained for
    arguments = {
        "features": inputs["aux_hidden_states"],
        "next_token_ids": inputs["input_ids_shifted"],
        "target_features": inputs["target_logits_shifted"],  # with an identity for `lm_head`
        "lm_head": torch.eye(64),
        "loss_mask": inputs["loss_mask"],
        "attention_mask": inputs["attention_mask"],
        "embed_tokens": target["model.embed_tokens.weight"],
        "num_items": float(inputs["loss_mask"].numel()),  # the authors divide by all positions
    }
    gradients = {key.removeprefix("grad.").replace("midlayer", "layers.0"): g for key, g in outputs.items()}
    return arguments, expected, gradients


def test_losses_and_gradients() -> None:
    arguments, expected, gradients = recorded()
    heads = load_heads(str(FOLDER / "draft")).train()
    passes = unroll_losses(heads, **arguments, num_passes=expected["length"], losses=("token",))
    losses = [losses.token_loss for losses in passes]
    assert [float(loss.detach()) for loss in losses] == pytest.approx(expected["plosses"], rel=1e-5)
    total = sum(weight * loss for weight, loss in zip(expected["loss_weights"], losses, strict=True))
    assert float(total.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    total.backward()
    assert {name for name, _ in heads.named_parameters()} == set(gradients)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_equal_specialists_train_as_one_layer() -> None:
    """POSS on EAGLE-3 with equal specialists: the same losses, and layer gradients that add up to the recorded one."""
    arguments, expected, gradients = recorded()
    eagle3 = load_heads(str(FOLDER / "draft"))
    fields = {key: value for key, value in eagle3.config.to_dict().items() if key not in ("model_type", "method")}
    fields |= {"num_specialists": 3, "positions_per_specialist": 3}
    heads = PossEagle3Head(PossEagle3HeadConfig(**fields))
    heads.start_from(eagle3)
    passes = unroll_losses(heads, **arguments, num_passes=expected["length"], losses=("token",))
    losses = [losses.token_loss for losses in passes]
    assert [float(loss.detach()) for loss in losses] == pytest.approx(expected["plosses"], rel=1e-5)
    sum(weight * loss for weight, loss in zip(expected["loss_weights"], losses, strict=True)).backward()
    found = dict(heads.named_parameters())
    for name, gradient in gradients.items():
        layers = (
            [name.replace("layers.0.", f"layers.{i}.") for i in range(3)] if name.startswith("layers.") else [name]
        )
        together = sum(found[layer].grad for layer in layers)
        torch.testing.assert_close(together, gradient, rtol=1e-4, atol=1e-6, msg=name)
