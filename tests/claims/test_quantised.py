"""Heads of a full-precision target with its quantised copy: the text is the quantised target's own."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.heads import METHODS_BY_KIND, OPTIONS, random_heads
from support.targets import own_target, plain, prompt
from support.trees import TREES
from torch import nn

from hf_specheads import AutoDraftHead

NEW = 16
KEPT = torch.arange(3, 99, 3)


def wide_target():
    return own_target("llama", hidden_size=64, intermediate_size=96, initializer_range=0.2)


def missing(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed (pip install 'hf-specheads[quant]')")


class PackedLinear(nn.Module):
    """A linear layer as in GPTQ and AWQ: no `weight` and no `in_features`, but 8-bit integers and scales."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.qweight.to(self.scales.dtype) * self.scales)


def packed(target, lm_head: bool):
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear) and (lm_head or name != "lm_head"):
            parent, _, leaf = name.rpartition(".")
            setattr(target.get_submodule(parent), leaf, PackedLinear(module))
    return target


def with_torchao(target, lm_head: bool, bits: int):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    config = Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(torch.int4, PerGroup(32))
    quantize_(target, config, lambda module, name: isinstance(module, nn.Linear) and (lm_head or name != "lm_head"))
    return target


QUANTISERS = [
    pytest.param(lambda target, lm_head: packed(target, lm_head), id="packed"),
    pytest.param(
        lambda target, lm_head: with_torchao(target, lm_head, 8), id="torchao-int8", marks=missing("torchao")
    ),
    pytest.param(
        lambda target, lm_head: with_torchao(target, lm_head, 4), id="torchao-int4", marks=missing("torchao")
    ),
]


@pytest.mark.parametrize("lm_head", [False, True], ids=["", "lm_head"])
@pytest.mark.parametrize("kind", ["chain", "dynamic"])
@pytest.mark.parametrize("quantise", QUANTISERS)
def test_greedy_text_is_the_quantised_targets(quantise, kind, lm_head):
    """Heads made for the full-precision target recognise the copy by its token embedding."""
    target, ids = wide_target(), prompt()
    full = target(ids).logits
    heads = [random_heads(target, method, TREES[kind]) for method in ("poss", "medusa")]
    target = quantise(target, lm_head)
    expected = plain(target, ids, NEW)
    assert not torch.equal(target(ids).logits, full), "nothing was quantised"
    for one in heads:
        assert torch.equal(plain(target, ids, NEW, assistant_model=one), expected)
        assert one.last_stats.draft_forwards > 0
        one.prune_draft_vocabulary(KEPT)
        assert torch.equal(plain(target, ids, NEW, assistant_model=one), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS_BY_KIND)
@pytest.mark.parametrize("quantise", QUANTISERS[:2])
def test_heads_in_bfloat16(quantise, method):
    """Features for the heads, and drafts for the target's `lm_head`, are converted to the dtype that each of them
    needs."""
    target, ids = quantise(wide_target(), True), prompt()
    options = {**OPTIONS, "draft-lm": {"num_hidden_layers": 1, "head_dim": 16}}.get(method, {})
    heads = AutoDraftHead.from_target(target, method, dtype=torch.bfloat16, **options).eval()
    assert heads.dtype == torch.bfloat16
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))


@pytest.mark.parametrize("quantise", QUANTISERS)
def test_logits_go_through_the_quantised_module(quantise):
    target = quantise(wide_target(), True)
    heads = random_heads(target, "eagle", TREES["chain"]).bind(target)
    features = torch.randn(1, 3, 64)
    with torch.no_grad():
        expected = target.lm_head(features)
        torch.testing.assert_close(heads.draft_logits(features), expected)
        heads.prune_draft_vocabulary(KEPT)
        torch.testing.assert_close(heads.draft_logits(features), expected[..., KEPT], atol=1e-4, rtol=1e-4)


@missing("bitsandbytes")
@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(bits, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    target, ids = wide_target(), prompt()
    target.save_pretrained(tmp_path)
    options = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**options), device_map="cpu"
    )
    quantised.generation_config.eos_token_id, quantised.generation_config.pad_token_id = None, 0
    expected = plain(quantised, ids, NEW)
    for kind in ("chain", "dynamic"):
        heads = random_heads(target, "poss", TREES[kind])
        assert torch.equal(plain(quantised, ids, NEW, assistant_model=heads), expected)
