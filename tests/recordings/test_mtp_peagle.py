"""MTP layers, P-EAGLE and DeepSpec's EAGLE-3 against recordings of their code: text, accepted counts, drafts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specheads import load_heads
from hf_specheads.unroll.rows import TrainingRows, row_positions

GOLDENS = Path(__file__).resolve().parent / "goldens"
DEPTHS = {"mtp_qwen_k4": 4, "mtp_glm4moe_2": 2, "peagle_k5_d2t": 5, "eagle3_deepspec_ttt5": 5}


@cache
def recorded(name: str) -> tuple[dict[str, Any], PreTrainedModel, Any]:
    """A case, its target, and heads of it that draft chains."""
    case = json.loads((GOLDENS / name / "case.json").read_text())
    folder = (GOLDENS / name / case["target"]).resolve()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    method = {"method": "mtp"} if case["method"] == "mtp" else {}
    heads = load_heads(
        folder if method else GOLDENS / name / case["draft"], kind="chain", depth=DEPTHS[name], **method
    )
    heads.trace, heads.adaptive = True, False
    return case, target, heads.bind(target)


@pytest.mark.parametrize("name", DEPTHS)
def test_chains(name: str) -> None:
    case, target, heads = recorded(name)
    ids = torch.tensor([case["prompt_ids"]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    text = target.generate(ids, assistant_model=heads, max_new_tokens=len(case["output_ids"]), **options)
    assert text[0, ids.shape[1] :].tolist() == case["output_ids"]
    rounds = len(case["accept_lengths"]) - 2  # the last ones run past the text there
    assert heads.last_stats.num_accepted[0][:rounds] == case["accept_lengths"][:rounds]
    for theirs, tree in zip(case["rounds"], heads.last_stats.trees, strict=False):
        assert tree.token_ids[0, 1:].tolist() == theirs["drafted"]


def test_mtp_of_speculators() -> None:
    """The same layer as that library's converter saves it, with its copy of `lm_head` full of NaN."""
    folder = GOLDENS / "mtp_qwen_k4" / "draft_speculators"
    _, _, native = recorded("mtp_qwen_k4")
    heads = load_heads(folder)
    assert not heads.config.native and heads.state_dict().keys() == native.state_dict().keys()
    assert all(torch.equal(value, native.state_dict()[key]) for key, value in heads.state_dict().items())
    assert heads.config.layer_config["rope_parameters"] == native.config.layer_config["rope_parameters"]


@torch.no_grad()
def test_slots_of_peagle() -> None:
    """Logits of all slots in the first rounds, from the recorded features."""
    case, _, heads = recorded("peagle_k5_d2t")
    tensors = load_file(GOLDENS / "peagle_k5_d2t" / "tensors.safetensors")
    text = case["prompt_ids"] + case["output_ids"]
    for index, theirs in enumerate(case["rounds"][:3]):
        features = tensors[f"r{index}.target_features"][None]
        ids = torch.tensor([text[: theirs["committed"] + 1]])
        cache = heads.new_draft_cache()
        state, logits = heads.start_draft(cache, ids, features)
        found = [logits] + [heads.extend_draft(cache, d, ids[:, :1], state, None)[1] for d in range(1, 5)]
        expected = tensors[f"r{index}.slot_logits"]
        torch.testing.assert_close(torch.cat(found, dim=1)[0], expected, rtol=1e-4, atol=1e-4)


def test_training_of_peagle() -> None:
    """Logits, loss (KL to the target's distribution over the draft vocabulary) and gradients at the recorded rows."""
    folder = GOLDENS / "training_peagle_kl"
    inputs, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    target = load_file(folder / expected["target"] / "model.safetensors")
    heads = load_heads(folder / expected["draft"]).train()
    documents = torch.zeros_like(inputs["input_ids"])
    places = {"documents": documents, "position_ids": row_positions(documents)}
    rows = TrainingRows(inputs["target_features"], None, inputs["input_ids"], embed=None, lm_head=None, **places)
    passes = [drafted.logits(drafted.hidden)[0] for drafted in heads.unroll(rows, 5)]
    roots, depths = torch.tensor(expected["anchor_pos"]), torch.tensor(expected["depth"])
    logits = torch.stack([passes[depth][root] for root, depth in zip(roots.tolist(), depths.tolist(), strict=True)])
    torch.testing.assert_close(logits, outputs["logits"][0], rtol=1e-4, atol=1e-5)
    states = inputs["verifier_last_hidden_pre_norm"][0]
    normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * target["model.norm.weight"]
    says = (normed @ target["lm_head.weight"][heads.trained_vocabulary].T).log_softmax(-1)[roots + depths]
    supervised = inputs["loss_mask"][0][roots + depths] > 0
    loss = (says.exp() * (says - logits.log_softmax(-1))).sum(-1)[supervised].mean()
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-5)
    loss.backward()
    gradients = {key.removeprefix("grad."): value for key, value in outputs.items() if key.startswith("grad.")}
    assert {name for name, _ in heads.named_parameters()} == set(gradients)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
