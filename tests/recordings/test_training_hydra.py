"""Hydra's three losses and their gradients against a recording of the original authors' training code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specheads import load_heads
from hf_specheads.checkpoints.layouts.fields import Source
from hf_specheads.checkpoints.layouts.hydra import read as hydra
from hf_specheads.trainer import Unroll
from hf_specheads.trainer.unroll.losses import IGNORED

FOLDER = Path(__file__).resolve().parents[1] / "recordings" / "goldens" / "training_hydra_prefix"
# The recorded config of the heads, plus what their file does not tell about the prefix layer.
CONFIG = {
    "hydra_num_heads": 4, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp", "grounded_heads": True,
    "hidden_state_offset": 0, "rms_norm_eps": 1e-5, "num_attention_heads": 4,
}  # fmt: skip
HEADS = 4


@pytest.fixture
def recording(tmp_path):
    """Heads, recorded batch, expected losses, recorded gradients and outputs."""
    inputs, outputs = load_file(FOLDER / "inputs.safetensors"), load_file(FOLDER / "outputs.safetensors")
    state = {k.removeprefix("hydra_head."): v for k, v in inputs.items() if k.startswith("hydra_head.")}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, tmp_path / "hydra_lm_head.pt")
    inputs["embedding"] = state["input_embed_fn.weight"]
    return load_heads(tmp_path).train(), inputs, json.loads((FOLDER / "expected.json").read_text()), outputs


def start(heads, inputs, ahead, losses, **options):
    """Rows of the recorded batch, supervised where the token `ahead` rows later has a label."""
    ids, features = inputs["input_ids"], inputs["base_hidden_states"]
    rows, logits = features.flatten(0, 1).double(), inputs["orig_logits"].flatten(0, 1).double()
    lm_head = torch.linalg.lstsq(rows, logits).solution  # as many rows as columns: gives back these very logits
    torch.testing.assert_close(rows @ lm_head, logits, rtol=0, atol=1e-5)
    known = torch.nn.functional.pad(inputs["labels"][:, ahead:] != IGNORED, (0, ahead - 1))
    return Unroll(
        heads,
        features=features[:, :-1],
        next_token_ids=ids[:, 1:],
        target_features=features[:, 1:],
        loss_mask=known,
        attention_mask=inputs["attention_mask"][:, :-1],
        embed_tokens=inputs["embedding"],
        lm_head=lm_head.T.float(),
        num_passes=HEADS,
        losses=losses,
        **options,
    )


def unrolls(heads, inputs, **options):
    """The authors count a head's label for two losses, but for the reconstruction the token before it."""
    return (
        start(heads, inputs, 2, ("next_token", "token"), **options),
        start(heads, inputs, 1, ("feature",), **options),
    )


def weighted(losses, weights):
    return losses.weighted(
        next_token=weights["lm_loss_weight"],
        token=weights["teacher_loss_weight"],
        feature=weights["reconstruction_loss_weight"],
    )


def check_gradients(heads, outputs):
    recorded = {k.removeprefix("grad."): v for k, v in outputs.items() if k.startswith("grad.")}
    expected = hydra.convert(Source(CONFIG, recorded, "gradients")).tensors
    parameters = dict(heads.named_parameters())
    assert parameters.keys() == expected.keys() and len(expected) == len(recorded)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=2e-6, msg=name)


def test_losses_and_gradients(recording):
    heads, inputs, expected, outputs = recording
    labelled, reconstructed = unrolls(heads, inputs)
    total = 0
    for index in range(HEADS):
        ours, theirs = labelled.next_pass(), reconstructed.next_pass()
        for name, loss in (
            ("lm", ours.values["next_token"]),
            ("teacher", ours.values["token"]),
            ("reconstruct", theirs.values["feature"]),
        ):
            assert float(loss.detach()) == pytest.approx(expected["log"][f"hydra{index}_{name}_loss"], rel=1e-5)
        recorded = outputs["hydra_hidden_states"][index][:, : -1 - index]  # later rows read wrapped embeddings
        real = inputs["attention_mask"][:, : -1 - index].bool()
        torch.testing.assert_close(ours.drafted[:, : recorded.shape[1]][real], recorded[real], rtol=1e-4, atol=1e-5)
        total = total + weighted(ours, expected["weights"]) + weighted(theirs, expected["weights"])
    assert float(total.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    total.backward()
    check_gradients(heads, outputs)


def test_gradients_of_one_backward_per_pass(recording):
    heads, inputs, expected, outputs = recording
    assert heads.passes_are_detached
    for unroll in unrolls(heads, inputs, separate_backward=True):
        for _ in range(HEADS):
            weighted(unroll.next_pass(), expected["weights"]).backward()
        unroll.finish_backward()
    check_gradients(heads, outputs)
