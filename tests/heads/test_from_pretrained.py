"""`from_pretrained(..., dtype, device_map, quantization_config)` of heads behaves as for any transformers model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import OPTIONS
from support.targets import own_target, plain, prompt
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, TorchAoConfig

from hf_specheads import AutoDraftHead, load_heads
from hf_specheads.heads.auto import METHODS

METHODS_SHOWN = ("poss", "eagle3", "medusa", "draft-lm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of several families for the tiny Llama, saved in bf16 by method."""
    torch.manual_seed(0)
    saved, target = {}, own_target("llama")
    for method in METHODS:
        heads = AutoDraftHead.from_target(target, method, **OPTIONS.get(method, {})).to(torch.bfloat16)
        saved[method] = tmp_path_factory.mktemp(method)
        heads.save_pretrained(saved[method])
    return saved


def assert_exact(heads: Any, target: Any = None) -> None:
    """Greedy text is the target's, and the heads took part."""
    target, ids = target or own_target("llama"), prompt()
    assert torch.equal(plain(target, ids, 20, assistant_model=heads.eval()), plain(target, ids, 20))
    assert heads.last_stats is not None


@pytest.mark.parametrize("method", METHODS_SHOWN)
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, torch.bfloat16),  # as saved, which is what transformers does since its version 5
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": torch.float32}, torch.float32),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": torch.float16}, torch.float16),
    ],
    ids=str,
)
def test_dtype(folders: dict[str, Path], method: str, asked: dict[str, Any], expected: torch.dtype) -> None:
    heads = AutoModel.from_pretrained(folders[method], **asked)
    assert heads.dtype == expected
    assert {p.dtype for p in heads.parameters() if p.is_floating_point()} == {expected}
    assert load_heads(folders[method], **asked).dtype == expected


@pytest.mark.parametrize("method", METHODS_SHOWN)
def test_the_text_is_exact_in_any_dtype(folders: dict[str, Path], method: str) -> None:
    assert_exact(AutoModel.from_pretrained(folders[method], dtype=torch.float32))
    assert_exact(AutoModel.from_pretrained(folders[method], dtype="auto"))


@pytest.mark.parametrize("method", ("poss", "medusa"))
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")], ids=str)
def test_device_map(folders: dict[str, Path], method: str, device_map: Any) -> None:
    heads = AutoModel.from_pretrained(folders[method], device_map=device_map, dtype=torch.float32)
    assert heads.device == torch.device("cpu")
    if device_map == "auto":
        assert_exact(heads)
    assert load_heads(folders[method], device_map=device_map).device == torch.device("cpu")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("method", METHODS_SHOWN)
def test_quantization_config(folders: dict[str, Path], method: str) -> None:
    """Heads in int8: the draft changes, the text does not."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    heads = AutoModel.from_pretrained(folders[method], quantization_config=config, dtype=torch.float32)
    kinds = {type(p.data).__name__ for p in heads.parameters()} | {type(p).__name__ for p in heads.parameters()}
    assert any("Int8" in kind or "AffineQuantized" in kind for kind in kinds), kinds
    assert_exact(heads)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_auto_classes_know_every_family(folders: dict[str, Path], method: str) -> None:
    config, heads = AutoConfig.from_pretrained(folders[method]), AutoModel.from_pretrained(folders[method])
    assert type(heads) is METHODS[method] and type(heads.config) is type(config) and config.method == method
    assert AutoModel.from_config(config).config.method == method


def test_heads_are_no_language_model(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(folders["poss"])


def test_loading_information_and_options_of_transformers(folders: dict[str, Path]) -> None:
    heads, info = AutoModel.from_pretrained(folders["poss"], output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"] and heads.config._attn_implementation == "eager"
    assert_exact(heads.float())
