"""The right class for every file, and fresh heads of the right sizes for every target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.targets import own_target, shared_target
from transformers import AutoConfig, AutoModel

from hf_specheads import AutoDraftHead, DraftTreeConfig, EagleHead, PossHead, WrongTargetError
from hf_specheads.errors import CheckpointKeysError, WarmStartError
from hf_specheads.heads.auto import HEADS, head_class_of
from hf_specheads.target.identity import target_sizes


@pytest.mark.parametrize("auto", [AutoModel, AutoDraftHead], ids=["AutoModel", "AutoDraftHead"])
@pytest.mark.parametrize(("method", "head_class"), [("eagle", EagleHead), ("hass", EagleHead), ("poss", PossHead)])
def test_saved_heads_come_back_as_they_were(target, tmp_path: Path, auto, method: str, head_class: type) -> None:
    heads = AutoDraftHead.from_target(target, method)
    heads.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is head_class and again.config.method == method
    assert isinstance(AutoConfig.from_pretrained(tmp_path), head_class.config_class)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())
    torch.testing.assert_close(again.rotary_emb.inv_freq, heads.rotary_emb.inv_freq)
    again.check_target(target)


def test_nothing_of_the_target_is_saved(target, poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.bind(target)
    poss_heads.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    saved = load_file(tmp_path / "model.safetensors")
    assert all(key.startswith(("fc.", "layers.")) for key in saved)
    assert target.config.vocab_size not in {size for tensor in saved.values() for size in tensor.shape}


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_loading_is_strict(poss_heads: PossHead, tmp_path: Path, change: str) -> None:
    poss_heads.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors["layers.1.mlp.up_proj.weight"]
    else:
        tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointKeysError, match=change):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-tied", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "gpt-neox", "gpt2", "opt"],
)
def test_sizes_follow_the_target(family: str) -> None:
    target = shared_target(family)
    heads = AutoDraftHead.from_target(target, num_specialists=2, positions_per_specialist=3)
    for name, value in target_sizes(target).items():
        assert getattr(heads.config, name) == value
    assert heads.config.target["model_type"] == target.config.get_text_config().model_type
    heads.bind(target)
    rows = heads.fuse(target.get_input_embeddings()(torch.tensor([[5, 6, 7]])), torch.randn(1, 3, 32))
    drafted = heads(rows, torch.arange(3)[None], None)
    assert heads.draft_logits(drafted).shape == (1, 3, heads.config.vocab_size)


def test_options(target) -> None:
    heads = AutoDraftHead.from_target(
        target, num_specialists=3, positions_per_specialist=2, tree_config=DraftTreeConfig(kind="chain", depth=3),
        fc_bias=False, rope_theta=5e5, dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    assert len(heads.layers) == 3 and heads.fc.bias is None and heads.dtype == torch.bfloat16
    assert heads.tree_config == DraftTreeConfig(kind="chain", depth=3)
    assert heads.config.positions_per_specialist == 2
    partial = AutoDraftHead.from_target(target, tree_config={"depth": 2})
    assert partial.tree_config == DraftTreeConfig(depth=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "crystal-ball"}, "must be one of"),
        ({"method": "magic"}, "magic"),
        ({"num_specialist": 3}, "num_specialist"),
        ({"num_specialists": 0}, "num_specialists"),
        ({"tree_config": {"width": 3}}, "width"),
        ({"method": "eagle", "num_specialists": 2}, "PossHeadConfig"),
    ],
)
def test_wrong_options_are_refused(target, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoDraftHead.from_target(target, **options)


def test_warm_start_copies_and_fills_up(target) -> None:
    eagle = AutoDraftHead.from_target(target, "eagle", intermediate_size=48, fc_bias=False, tree_config={"depth": 3})
    poss = AutoDraftHead.from_target(target, num_specialists=3, positions_per_specialist=2, from_heads=eagle)
    assert torch.equal(poss.fc.weight, eagle.fc.weight) and poss.fc.bias is None
    assert poss.config.intermediate_size == 48 and poss.tree_config.depth == 3
    for layer in poss.layers:
        for key, tensor in layer.state_dict().items():
            assert torch.equal(tensor, eagle.layers[0].state_dict()[key])
    assert poss.layers[0].mlp.up_proj.weight.data_ptr() != poss.layers[1].mlp.up_proj.weight.data_ptr()

    more = AutoDraftHead.from_target(target, num_specialists=4, from_heads=poss)
    assert torch.equal(more.layers[3].mlp.up_proj.weight, poss.layers[2].mlp.up_proj.weight)
    fewer = AutoDraftHead.from_target(target, "hass", from_heads=poss)
    assert torch.equal(fewer.layers[0].mlp.up_proj.weight, poss.layers[0].mlp.up_proj.weight)


def test_warm_starts_that_do_not_fit_are_refused(target, eagle_heads: EagleHead) -> None:
    with pytest.raises(WarmStartError, match="mlp"):
        AutoDraftHead.from_target(target, from_heads=eagle_heads, intermediate_size=48)
    with pytest.raises(WarmStartError, match=r"fc|bias"):
        AutoDraftHead.from_target(target, from_heads=eagle_heads, fc_bias=False)
    with pytest.raises(WarmStartError, match="load_heads"):
        AutoDraftHead.from_target(target, from_heads="some/heads")
    with pytest.raises(WrongTargetError, match="fingerprint"):
        AutoDraftHead.from_target(own_target("llama", seed=1), from_heads=eagle_heads)


def test_fresh_heads_are_reproducible(target) -> None:
    torch.manual_seed(3)
    first = AutoDraftHead.from_target(target)
    torch.manual_seed(3)
    second = AutoDraftHead.from_target(target)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_only_draft_heads(target) -> None:
    with pytest.raises(ValueError, match="llama"):
        head_class_of(target.config)
    with pytest.raises(OSError, match="from_pretrained"):
        AutoDraftHead()
    assert all(head_class.config_class.model_type == model_type for model_type, head_class in HEADS.items())
