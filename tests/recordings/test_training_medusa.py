"""Medusa's loss against a recording of the original authors' training code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specheads import MedusaHead, MedusaHeadConfig
from hf_specheads.trainer import Unroll
from hf_specheads.trainer.unroll.losses import IGNORED

FOLDER = Path(__file__).resolve().parents[1] / "recordings" / "goldens" / "training_medusa"
HEADS, HIDDEN, VOCAB = 5, 48, 64


@pytest.fixture
def recording():
    return load_file(FOLDER / "inputs.safetensors"), json.loads((FOLDER / "expected.json").read_text())


def ours(name: str) -> str:
    """Our name of a recorded parameter: `0.0.linear.bias`, `0.1.weight`."""
    head, index, rest = name.split(".", 2)
    return f"blocks.{head}.{index}.{rest.removeprefix('linear.')}" if "linear" in rest else f"lm_heads.{head}.{rest}"


def recorded_heads(inputs: dict[str, torch.Tensor]) -> MedusaHead:
    config = MedusaHeadConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, feature_size=HIDDEN, embedding_size=HIDDEN, num_heads=HEADS
    )
    heads = MedusaHead(config)
    heads.load_state_dict({ours(k.removeprefix("head.")): v for k, v in inputs.items() if k.startswith("head.")})
    return heads


def start(heads: MedusaHead, inputs: dict[str, torch.Tensor], **options) -> Unroll:
    """Rows of the recorded batch; the authors supervise head i at rows whose token 2 + i later is a label."""
    ids, features, labels = inputs["input_ids"], inputs["hidden_states"], inputs["labels"]
    known = torch.nn.functional.pad(labels[:, 2:] != IGNORED, (0, 1))
    return Unroll(
        heads,
        features=features[:, :-1],
        next_token_ids=ids[:, 1:],
        target_features=features[:, 1:],
        loss_mask=known,
        attention_mask=None,
        embed_tokens=torch.zeros(VOCAB, HIDDEN),
        lm_head=torch.zeros(VOCAB, HIDDEN),
        num_passes=HEADS,
        losses=("next_token",),
        **options,
    )


def test_losses_and_gradients(recording):
    inputs, expected = recording
    heads = recorded_heads(inputs)
    unroll = start(heads, inputs)
    losses = [unroll.next_pass().values["next_token"] for _ in range(HEADS)]
    for index, loss in enumerate(losses):
        assert float(loss.detach()) == pytest.approx(expected["log"][f"medusa{index}_loss"], rel=1e-5)
    total = torch.stack(losses).sum()
    assert float(total.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    total.backward()
    recorded = load_file(FOLDER / "outputs.safetensors")
    parameters = dict(heads.named_parameters())
    assert len(parameters) == len(recorded)
    for name, gradient in recorded.items():
        mine = parameters[ours(name.removeprefix("grad."))].grad
        torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=2e-6, msg=name)


def test_a_head_off_by_one_position_is_seen(recording):
    """The recording tells head i's label from its neighbours'."""
    inputs, expected = recording
    heads = recorded_heads(inputs)
    heads.blocks = torch.nn.ModuleList([*heads.blocks[1:], heads.blocks[0]])
    heads.lm_heads = torch.nn.ModuleList([*heads.lm_heads[1:], heads.lm_heads[0]])
    loss = start(heads, inputs).next_pass().values["next_token"]
    assert abs(float(loss.detach()) / expected["log"]["medusa0_loss"] - 1) > 1e-2
