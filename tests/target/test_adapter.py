"""Heads that were trained with an adapter of their target: found, loaded, saved along, and missed where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from support.targets import own_target, plain, prompt

from hf_specheads import AutoDraftHead, DraftHead, WrongTargetError, load_heads
from hf_specheads.errors import HeadLoadError
from hf_specheads.publishing.card.facts import collect_facts
from hf_specheads.publishing.card.render import render_card
from hf_specheads.target.adapter import (
    ADAPTER_NAME,
    active_fingerprints,
    adapter_parameters,
    add_adapter,
    has_adapters,
    without_adapter,
)


def adapted_target(seed: int = 1):
    """A target with an adapter that changes its text."""
    target = own_target("llama")
    add_adapter(target, rank=4, alpha=8, modules="q_proj, v_proj,down_proj")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(target):
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return target


def switch_off(target) -> None:
    """As transformers' `disable_adapters`."""
    for module in target.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Folder of Medusa heads with an adapter beside them."""
    target = adapted_target()
    heads = AutoDraftHead.from_target(target, "medusa", lm_head="target").bind(target)
    heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def test_the_text_is_the_adapted_targets(saved: Path) -> None:
    ids, base, adapted = prompt(), own_target("llama"), adapted_target()
    expected, target = plain(adapted, ids, 20), own_target("llama")
    assert not torch.equal(expected, plain(base, ids, 20)), "the adapter changes nothing; the test could not fail"
    heads = load_heads(saved)
    heads.load_target_adapter(target)
    assert torch.equal(plain(target, ids, 20), expected)
    assert torch.equal(plain(target, ids, 20, assistant_model=heads), expected)
    with without_adapter(target):
        assert torch.equal(plain(target, ids, 20), plain(base, ids, 20))
    assert torch.equal(plain(target, ids, 20), expected)


def test_files_are_pefts_own(saved: Path) -> None:
    assert sorted(os.listdir(saved)) == ["README.md", "config.json", "model.safetensors", "target_adapter"]
    assert sorted(os.listdir(saved / "target_adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    ids = prompt()
    wrapped = PeftModel.from_pretrained(own_target("llama"), saved / "target_adapter")
    heads = load_heads(saved)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(wrapped.generate(**inputs, assistant_model=heads), plain(adapted_target(), ids, 12))


@pytest.mark.parametrize("state", ["none", "other", "switched off"])
def test_a_target_without_the_adapter_is_refused(saved: Path, state: str) -> None:
    heads = load_heads(saved)
    target = {"none": lambda: own_target("llama"), "other": lambda: adapted_target(seed=2)}.get(
        state, adapted_target
    )()
    if state == "switched off":
        switch_off(target)
    words = "has another adapter" if state == "other" else "has no active adapter"
    with pytest.raises(WrongTargetError, match=rf"{words}; call `heads\.load_target_adapter\(target\)`"):
        plain(target, prompt(), 4, assistant_model=heads)
    heads.config.target_adapter = None  # as the message says, for an adapter that is merged into the weights
    heads.check_target(target)


def test_an_adapter_of_the_embedding_is_no_other_target_as_those_elsewhere() -> None:
    target = own_target("llama")
    heads = AutoDraftHead.from_target(target, "eagle").eval()
    assert heads.config.target["fingerprint"]
    for modules in (["q_proj"], ["embed_tokens"], ["lm_head", "embed_tokens"]):
        adapted = own_target("llama")
        config = LoraConfig(r=4, lora_alpha=64, target_modules=modules, init_lora_weights=False)
        inject_adapter_in_model(config, adapted)
        adapted.eval()
        ids = prompt()
        text = plain(adapted, ids, 12, assistant_model=heads)
        assert torch.equal(text, adapted.generate(ids, max_new_tokens=12, do_sample=False))
    other = own_target("llama", seed=1)
    inject_adapter_in_model(LoraConfig(target_modules=["embed_tokens"]), other)
    with pytest.raises(WrongTargetError, match="fingerprint of the token embedding"):
        heads.check_target(other)


def test_half_precision_is_no_other_adapter(saved: Path) -> None:
    heads, target = load_heads(saved), own_target("llama").to(torch.bfloat16)
    heads.load_target_adapter(target)
    heads.check_target(target)
    assert adapter_parameters(target)[0].dtype == torch.bfloat16


def test_another_target_is_named_before_its_adapter(saved: Path) -> None:
    with pytest.raises(WrongTargetError, match="fingerprint of the token embedding"):
        load_heads(saved).check_target(own_target("llama", seed=1))


def test_an_adapter_goes_on_once(saved: Path) -> None:
    heads, target = load_heads(saved), adapted_target()
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        heads.load_target_adapter(target)
    target = own_target("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), target, "mine")
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        add_adapter(target, 4, 8, "all-linear")


@pytest.mark.parametrize("other", [{"hidden_size": 96}, {"num_hidden_layers": 1}], ids=str)
def test_nothing_is_put_on_a_target_that_an_adapter_does_not_fit(saved: Path, other: dict) -> None:
    target = own_target("llama", **other)
    names = [name for name, _ in target.named_modules()]
    with pytest.raises(HeadLoadError, match="belongs to another target: LlamaForCausalLM has no layer that fits"):
        load_heads(saved).load_target_adapter(target)
    assert [name for name, _ in target.named_modules()] == names and not has_adapters(target)


def test_heads_without_adapter_have_none_to_load(tmp_path: Path) -> None:
    target = own_target("llama")
    heads = AutoDraftHead.from_target(target, "medusa")
    assert heads.config.target_adapter is None and active_fingerprints(target) == []
    heads.save_pretrained(tmp_path)
    assert not (tmp_path / "target_adapter").exists()
    with pytest.raises(HeadLoadError, match="no adapter to load"):
        load_heads(tmp_path).load_target_adapter(target)


def test_a_missing_folder_is_named(saved: Path) -> None:
    (saved / "target_adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(HeadLoadError, match=r"no target_adapter/ with adapter_model\.safetensors"):
        load_heads(saved).load_target_adapter(own_target("llama"))


def test_the_adapter_is_saved_along(saved: Path, tmp_path: Path) -> None:
    """From where it lies if the heads were only loaded, and refused if it lies nowhere."""
    load_heads(saved).save_pretrained(tmp_path / "copy")
    heads, target = load_heads(tmp_path / "copy"), own_target("llama")
    heads.load_target_adapter(target)
    heads.check_target(target)
    heads.save_pretrained(tmp_path / "copy")  # onto itself
    lost: DraftHead = AutoDraftHead.from_target(adapted_target(), "medusa")
    with pytest.raises(HeadLoadError, match=r"heads\.bind\(target\)"):
        lost.save_pretrained(tmp_path / "lost")


def test_heads_of_an_adapted_target_remember_it() -> None:
    target = adapted_target()
    heads = AutoDraftHead.from_target(target, "eagle")
    assert ADAPTER_NAME in target.peft_config
    assert heads.config.target_adapter["fingerprint"] == active_fingerprints(target)[0]
    warm = AutoDraftHead.from_target(target, "poss", from_heads=heads)
    assert warm.config.target_adapter == heads.config.target_adapter


def test_the_card_says_so(saved: Path, tmp_path: Path) -> None:
    card = render_card(collect_facts(saved))
    assert "heads.load_target_adapter(target)" in card and "**with** this adapter" in card
    AutoDraftHead.from_target(own_target("llama"), "medusa").save_pretrained(tmp_path / "plain")
    assert "adapter" not in render_card(collect_facts(tmp_path / "plain"))
