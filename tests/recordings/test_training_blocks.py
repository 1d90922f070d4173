"""Block drafters against losses and gradients recorded from the authors' training code, at its anchors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_specheads import load_heads
from hf_specheads.target.borrowed import as_embedding
from hf_specheads.trainer import unroll_losses
from hf_specheads.trainer.methods import method_defaults
from hf_specheads.trainer.unroll.losses import LOSSES, DraftedRows, TargetDistribution
from hf_specheads.unroll.rows import TrainingRows, row_positions

GOLDENS = Path(__file__).resolve().parent / "goldens"


def recorded(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Arguments of the unroll, what the authors' code computed, and its gradients.

    An anchor there is the root, one after our row; a slot is supervised if its own token is, one after our row's.
    """
    folder = GOLDENS / name
    inputs, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    target = load_file(folder / expected["target"] / "model.safetensors")
    loss_mask = torch.zeros_like(inputs["loss_mask"][:, 1:])
    loss_mask[:, :-1] = inputs["loss_mask"][:, 2:]
    weight = target["lm_head.weight"]
    says = inputs.get("target_logits", torch.zeros(*inputs["input_ids"].shape, len(weight)))
    arguments = {
        "features": inputs["target_features"][:, :-1],
        "next_token_ids": inputs["input_ids"][:, 1:],
        "target_features": says[:, 1:],
        "lm_head": lambda states: (
            states if states.shape[-1] == says.shape[-1] else states @ target["lm_head.weight"].T
        ),
        "loss_mask": loss_mask,
        "attention_mask": None,
        "embed_tokens": target["model.embed_tokens.weight"],
        "anchors": torch.tensor(expected["anchors"]) - 1,
        "num_items": 1.0,
    }
    if "target_last_hidden" in inputs:
        arguments["last_hidden"] = inputs["target_last_hidden"][:, 1:]
    return arguments, expected, {key.removeprefix("grad."): g for key, g in outputs.items() if key.startswith("grad.")}


def rows_of(arguments: dict[str, Any]) -> TrainingRows:
    documents = torch.zeros_like(arguments["next_token_ids"])
    return TrainingRows(
        features=arguments["features"],
        token_ids=None,
        next_token_ids=arguments["next_token_ids"],
        documents=documents,
        position_ids=row_positions(documents),
        embed=as_embedding(arguments["embed_tokens"]),
        lm_head=arguments["lm_head"],
        anchors=arguments["anchors"],
    )


def check(heads: Any, loss: torch.Tensor, expected: dict[str, Any], gradients: dict[str, torch.Tensor]) -> None:
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    loss.backward()
    assert {name for name, _ in heads.named_parameters()} == set(gradients)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_dflash() -> None:
    """Cross-entropy on the labels, weighted exp(-k / gamma) and divided by the sum of all weights."""
    arguments, expected, gradients = recorded("training_dflash_b8")
    heads = load_heads(GOLDENS / "dflash_zlab_b8" / "draft").train()
    passes = unroll_losses(heads, **arguments, num_passes=7, losses=("next_token",))
    decay = math.exp(-1 / expected["settings"]["loss_decay_gamma"])
    total = sum(decay**position * losses.values["next_token"] for position, losses in enumerate(passes))
    check(heads, total / expected["terms"]["loss_weight"], expected, gradients)


def test_jetspec() -> None:
    """KL to the target's distribution, which is the token loss less the target's entropy; all positions alike."""
    arguments, expected, gradients = recorded("training_jetspec_b7")
    heads = load_heads(GOLDENS / "jetspec_chain_b7" / "draft").train()
    passes = unroll_losses(heads, **arguments, num_passes=6, losses=("token",))
    probs = arguments["target_features"].softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    rows = [(b, a + i) for b, row in enumerate(arguments["anchors"].tolist()) for a in row for i in range(6)]
    rows = [(b, s) for b, s in rows if s < 35 and arguments["loss_mask"][b, s]]
    assert len(rows) == expected["terms"]["loss_weight"]
    total = sum(losses.values["token"] for losses in passes) - sum(entropy[row] for row in rows)
    check(heads, total / len(rows), expected, gradients)


def test_dflash2() -> None:
    """DFlash's loss on unary logits, and half the selector's mean over slots whose label is a candidate."""
    arguments, expected, gradients = recorded("training_dflash2_b8")
    heads, settings = load_heads(GOLDENS / "dflash2_b8_swa" / "draft").train(), expected["settings"]
    rows, anchors = rows_of(arguments), arguments["anchors"]
    base, selector, found_weight = 0.0, 0.0, 0.0
    for position, drafted in enumerate(heads.unroll(rows, 7)):
        at, weight = anchors + position, math.exp(-position / settings["loss_decay_gamma"])
        kept = (at < 34) & (arguments["loss_mask"].gather(1, at.clamp_max(34)) > 0)
        labels = arguments["next_token_ids"].gather(1, (at + 1).clamp_max(34))[kept]
        hidden = drafted.hidden[kept]
        logits = drafted.logits(hidden)
        target = TargetDistribution.from_logits(torch.zeros_like(logits), 0, labels=labels)
        found = DraftedRows(logits, target, selected=drafted.selected(hidden, logits))
        base = base + weight * LOSSES["next_token"](found).sum()
        selector = selector + weight * LOSSES["selector"](found).sum()
        found_weight += weight * int((found.selected[0] == labels[:, None]).sum())
    base, selector = base / expected["terms"]["loss_weight"], selector / found_weight
    assert float(base.detach()) == pytest.approx(expected["terms"]["base_loss"], rel=1e-5)
    assert float(selector.detach()) == pytest.approx(expected["terms"]["selector_loss"], rel=1e-5)
    check(heads, base + settings["selector_loss_weight"] * selector, expected, gradients)


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_dspark(kind: str) -> None:
    """All three losses at the recorded slots: theirs end at the first slot of a block that is not supervised."""
    arguments, expected, gradients = recorded(f"training_dspark_{kind}")
    settings, outputs = expected["settings"], load_file(GOLDENS / f"training_dspark_{kind}" / "outputs.safetensors")
    heads = load_heads(GOLDENS / f"dspark_{kind}_b7" / "draft").train()
    rows = rows_of(arguments)
    sums = dict.fromkeys(("next_token", "total_variation", "confidence"), 0.0)
    for position, drafted in enumerate(heads.unroll(rows, settings["block_size"])):
        kept = outputs["eval_mask"][:, :, position].bool()
        at = (arguments["anchors"] + position).clamp(0, 34)
        says = arguments["last_hidden"].gather(1, at[..., None].expand(-1, -1, 48))[kept]
        target = TargetDistribution.from_logits(
            rows.lm_head(says), 0, labels=outputs["target_ids"][:, :, position][kept]
        )
        hidden = drafted.hidden[kept]
        found = DraftedRows(drafted.logits(hidden), target, confidence=drafted.confidence(hidden))
        for name in sums:
            sums[name] = sums[name] + math.exp(-position / settings["loss_decay_gamma"]) * LOSSES[name](found).sum()
    terms = expected["terms"]
    assert float(sums["next_token"]) == pytest.approx(terms["ce_loss_num"], rel=1e-5)
    assert 2 * float(sums["total_variation"]) == pytest.approx(terms["l1_loss_num"], rel=1e-5)
    assert float(sums["confidence"]) == pytest.approx(terms["confidence_loss_num"], rel=1e-5)
    weights = method_defaults(heads).losses
    total = sum(weights[name] * value for name, value in sums.items())
    check(heads, total / terms["ce_loss_den"], expected, gradients)
