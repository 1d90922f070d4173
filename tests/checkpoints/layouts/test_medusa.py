"""Medusa heads in their authors' layouts and those of serving engines: read exactly, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import HIDDEN, LLAMA_CONFIG, VOCAB, medusa_tensors, write_checkpoint
from support.targets import own_target, plain, prompt

from hf_specheads import MedusaHead, WrongTargetError, load_heads
from hf_specheads.errors import CheckpointKeysError, CheckpointShapeError, CorruptCheckpointError, HeadConfigError

TINY_CONFIG = {"base_model_name_or_path": "org/target", "medusa_num_heads": 2, "medusa_num_layers": 1}


def write_medusa(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None, name: str = "medusa_lm_head.pt"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG if config is None else config))
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    return folder


def assert_same_function(heads: MedusaHead, tensors: dict[str, torch.Tensor], blocks: int, target: Any = None) -> None:
    """Logits against the authors' arithmetic on their own tensors."""
    features = torch.randn(2, HIDDEN)
    for head in range(heads.config.num_heads):
        hidden = features
        for index in range(blocks):
            weight, bias = tensors[f"{head}.{index}.linear.weight"], tensors[f"{head}.{index}.linear.bias"]
            hidden = hidden + torch.nn.functional.silu(hidden @ weight.T + bias)
        lm_head = tensors[f"{head}.{blocks}.weight"] if target is None else target.lm_head.weight
        torch.testing.assert_close(heads.position_logits(features, head), hidden @ lm_head.T)


# ---------------------------------------------------------------------- layouts
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
@pytest.mark.parametrize(("blocks", "tied"), [(1, True), (3, True), (2, False)])
def test_v1(tmp_path: Path, name: str, blocks: int, tied: bool) -> None:
    tensors = medusa_tensors(5, blocks, tied=tied)
    heads = load_heads(write_medusa(tmp_path, tensors, name=name))
    config = heads.config
    assert type(heads) is MedusaHead and config.method == "medusa"
    assert config.num_heads == 5 and config.num_blocks == blocks  # config.json says 2 heads of one block
    assert config.tied_blocks == tied and config.lm_head == "own" and config.vocab_size == VOCAB
    assert config.target["name"] == "org/target"
    assert heads.published_tree.kind == "static" and heads.published_tree.depth == 4
    assert_same_function(heads, tensors, blocks)


def test_version_2_shares_the_targets_lm_head(tmp_path: Path) -> None:
    tensors = medusa_tensors(projections=False)
    config = TINY_CONFIG | {"version": "2", "vocab_size": VOCAB}
    target = own_target("llama")
    heads = load_heads(write_medusa(tmp_path, tensors, config)).bind(target)
    assert heads.config.lm_head == "target" and heads.lm_heads is None
    assert_same_function(heads, tensors, 1, target)
    with pytest.raises(HeadConfigError, match="lacks `vocab_size`"):
        load_heads(write_medusa(tmp_path, tensors, TINY_CONFIG | {"version": "2"}))


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads.", "model.medusa_head."])
def test_heads_inside_of_a_whole_target(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """Medusa-2 and ModelOpt: only the heads are read, and the target in the same file is the one they belong to."""
    tensors, target = medusa_tensors(), own_target("llama")
    target.save_pretrained(tmp_path)
    whole = target.state_dict() | {prefix + key: tensor for key, tensor in tensors.items()}
    with caplog.at_level("INFO", logger="hf_specheads"):
        heads = load_heads(write_checkpoint(tmp_path, whole, json.loads((tmp_path / "config.json").read_text())))
    assert "load the target from" in caplog.text
    assert sorted(heads.state_dict()) == sorted(MedusaHead(heads.config).state_dict())
    assert_same_function(heads, tensors, 1)
    ids = prompt()
    assert torch.equal(plain(target, ids, 12, assistant_model=heads), plain(target, ids, 12))
    with pytest.raises(WrongTargetError, match="fingerprint"):
        heads.check_target(own_target("llama", seed=1))


@pytest.mark.parametrize("bias", [True, False])
def test_vllm(tmp_path: Path, bias: bool) -> None:
    theirs = medusa_tensors(4, 2, tied=False)
    tensors = {}
    for key, tensor in theirs.items():
        head, index, rest = key.split(".", 2)
        if "linear" not in rest:
            tensors[f"lm_heads.{head}.weight"] = tensor
        elif bias or "weight" in rest:
            tensors[f"blocks.{head}.layers.{index}.{rest.removeprefix('linear.')}"] = tensor
        else:
            theirs[key].zero_()
    config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 4}
    heads = load_heads(write_medusa(tmp_path, tensors, config, "model.safetensors"))
    assert heads.config.num_heads == 4 and not heads.config.tied_blocks
    assert_same_function(heads, theirs, 2)


def test_round_trip_in_our_own_layout(tmp_path: Path) -> None:
    heads = load_heads(write_medusa(tmp_path / "theirs", medusa_tensors(5, 2)))
    heads.save_pretrained(tmp_path / "ours")
    again = load_heads(tmp_path / "ours")
    assert again.config.num_blocks == 2 and again.config.tied_blocks
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())


# ---------------------------------------------------------------------- damaged and contradicting files
def without(tensors: dict[str, torch.Tensor], *keys: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key not in keys}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {k.replace("1.", "7.", 1) if k.startswith("1.") else k: v for k, v in medusa_tensors().items()},
            r"\[0, 2, 7",
        ),
        (without(medusa_tensors(), "1.0.linear.weight"), "head 1 has the blocks"),
        (without(medusa_tensors(), "1.0.linear.weight", "1.0.linear.bias"), r"numbered \[0, 2\]"),
        (without(medusa_tensors(3, 2), "2.1.linear.weight", "2.1.linear.bias"), "head 2 has the blocks"),
        (without(medusa_tensors(), "2.1.weight"), r"projections .* heads \[0, 1\]"),
        (without(medusa_tensors(), "2.1.weight") | {"2.4.weight": torch.zeros(VOCAB, HIDDEN)}, "projections"),
        ({"blocks.0.layers.0.weight": torch.zeros(4, 4), "token_map": torch.zeros(4)}, "token_map"),
        ({"medusa_head.0.0.linear.weight": torch.zeros(4, 4), "medusa_head.0.norm.weight": torch.zeros(4)}, "norm"),
    ],
)
def test_keys_that_do_not_fit(tmp_path: Path, tensors: dict, words: str) -> None:
    with pytest.raises(CheckpointKeysError, match=words):
        load_heads(write_medusa(tmp_path, tensors, name="medusa_lm_head.safetensors"))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("0.0.linear.weight", (HIDDEN, HIDDEN + 1)),
        ("1.0.linear.weight", (HIDDEN + 1, HIDDEN + 1)),
        ("1.0.linear.bias", (HIDDEN + 1,)),
        ("0.1.weight", (VOCAB, HIDDEN + 1)),
        ("2.1.weight", (VOCAB + 1, HIDDEN)),
    ],
)
def test_shapes_that_contradict_one_another(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointShapeError):
        load_heads(write_medusa(tmp_path, medusa_tensors() | {key: torch.zeros(shape)}))


def test_config_that_contradicts_the_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointShapeError, match="vocab_size"):
        load_heads(write_medusa(tmp_path, medusa_tensors(), LLAMA_CONFIG | {"vocab_size": VOCAB + 1}))


def test_a_pickle_that_is_more_than_tensors_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    write_medusa(tmp_path, medusa_tensors())
    torch.save(medusa_tensors() | {"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CorruptCheckpointError, match="none of its code was executed"):
        load_heads(tmp_path)
    assert not (tmp_path / "executed").exists()
