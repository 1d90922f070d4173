"""`load_heads`: round trips, the Hub's cache, and every kind of damaged or dangerous file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import LLAMA_CONFIG, VOCAB, eagle_tensors, write_checkpoint
from support.heads import scrambled_heads
from support.targets import deep_target

from hf_specheads import DraftTreeConfig, PossHead, load_heads
from hf_specheads.errors import (
    CheckpointKeysError,
    CheckpointShapeError,
    CheckpointValueError,
    CorruptCheckpointError,
    HeadConfigError,
    HeadLoadError,
    UnknownFormatError,
)


@pytest.fixture
def saved(poss_heads: PossHead, tmp_path: Path) -> Path:
    """POSS heads in this package's own layout."""
    poss_heads.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def change_config(folder: Path, **changes: object) -> None:
    """Rewrites fields of config.json; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, **changes: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors") | {key.replace("__", "."): t for key, t in changes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------ what works
def test_round_trip(saved: Path, poss_heads: PossHead) -> None:
    again = load_heads(saved)
    assert type(again) is PossHead and not again.training
    assert all(torch.equal(again.state_dict()[k], tensor) for k, tensor in poss_heads.state_dict().items())
    assert again.tree_config == poss_heads.tree_config
    assert again.config.target == poss_heads.config.target
    assert again.name_or_path == str(saved)


def test_the_tree_in_force_is_saved(poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.tree_config = DraftTreeConfig(kind="chain", depth=5)
    poss_heads.save_pretrained(tmp_path)
    assert load_heads(tmp_path).tree_config == DraftTreeConfig(kind="chain", depth=5)


def test_tree_overrides(saved: Path) -> None:
    heads = load_heads(saved, kind="chain", depth=2)
    assert (heads.tree_config.kind, heads.tree_config.depth) == ("chain", 2)
    with pytest.raises(ValueError, match="depth"):
        load_heads(saved, depth=0)
    with pytest.raises(ValueError, match="unknown draft tree option"):
        load_heads(saved, width=3)


def test_authors_layout_becomes_ours(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "PosS2-heads", eagle_tensors(3), pickled=True)
    heads = load_heads(source)
    heads.save_pretrained(tmp_path / "ours")
    again = load_heads(tmp_path / "ours")
    assert again.config.positions_per_specialist == 2
    assert all(torch.equal(again.state_dict()[k], tensor) for k, tensor in heads.state_dict().items())


def test_shards(saved: Path, poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    again = load_heads(tmp_path / "shards")
    assert all(torch.equal(again.state_dict()[k], tensor) for k, tensor in poss_heads.state_dict().items())
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(CorruptCheckpointError, match="lacks the weight file"):
        load_heads(tmp_path / "shards")


def test_dtype_and_device(saved: Path) -> None:
    heads = load_heads(saved, dtype=torch.bfloat16, device_map="cpu")
    assert heads.dtype == torch.bfloat16 and heads.device.type == "cpu"


def test_positions_of_own_heads_are_not_overridden(saved: Path) -> None:
    assert load_heads(saved, positions_per_specialist=2).config.positions_per_specialist == 2
    with pytest.raises(HeadConfigError, match="positions_per_specialist=2, the argument says 3"):
        load_heads(saved, positions_per_specialist=3)


# ------------------------------------------------------------------ what is refused
def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HeadLoadError, match=r"is not a folder, its config\.json is not in the local cache"):
        load_heads("no-such-lab/no-such-heads")
    for name in ("./nowhere", "nowhere", str(tmp_path / "nowhere"), "a/b/c", ""):
        with pytest.raises(HeadLoadError):
            load_heads(name)
    (tmp_path / "file.safetensors").touch()
    with pytest.raises(HeadLoadError, match="is a file"):
        load_heads(tmp_path / "file.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    with pytest.raises(HeadLoadError, match="no weights"):
        load_heads(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, b"\xff\xfe"])
def test_damaged_config(saved: Path, text: str | bytes) -> None:
    (saved / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        load_heads(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, 2000, -1])
def test_truncated_safetensors(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*truncated"):
        load_heads(saved)


@pytest.mark.parametrize("keep", [0, 4, 1000, -100])
def test_truncated_bin(tmp_path: Path, keep: int) -> None:
    folder = write_checkpoint(tmp_path, eagle_tensors(), pickled=True)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpointError, match=r"pytorch_model\.bin"):
        load_heads(folder)


class Malicious:
    """Writes a file when unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.marker, "executed")


@pytest.mark.parametrize("plain_pickle", [False, True])
def test_malicious_pickles_are_refused_and_not_executed(tmp_path: Path, plain_pickle: bool) -> None:
    marker = tmp_path / "marker"
    content = eagle_tensors() | {"fc.weight": Malicious(marker)}
    folder = write_checkpoint(tmp_path / "heads", content, pickled=True)
    if plain_pickle:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(CorruptCheckpointError, match="none of its code was executed"):
        load_heads(folder)
    assert not marker.exists()


@pytest.mark.parametrize("content", [[1, 2], {"fc.weight": 3}, {1: torch.zeros(2)}, {"a": {"b": torch.zeros(2)}}, {}])
def test_bins_that_hold_something_else(tmp_path: Path, content: object) -> None:
    with pytest.raises(HeadLoadError):
        load_heads(write_checkpoint(tmp_path, content, pickled=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("own", [True, False])
def test_weights_that_are_no_numbers(saved: Path, tmp_path: Path, value: float, own: bool) -> None:
    folder = saved if own else write_checkpoint(tmp_path / "theirs", eagle_tensors())
    bad = load_file(folder / "model.safetensors")["fc.weight"]
    bad[3, 5] = value
    change_tensors(folder, fc__weight=bad)
    with pytest.raises(CheckpointValueError, match=r"fc\.weight.*NaN or infinities"):
        load_heads(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_types_no_weight_has(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = eagle_tensors() | {"fc.bias": torch.ones(32).to(dtype)}
    with pytest.raises(CheckpointValueError, match=r"fc\.bias"):
        load_heads(write_checkpoint(tmp_path, tensors))


def test_absurd_sizes(tmp_path: Path) -> None:
    """A small file can claim a tensor of petabytes as a view of one number."""
    tensors = eagle_tensors() | {"fc.weight": torch.zeros(1).expand(2**23, 2**22)}
    with pytest.raises(CheckpointShapeError, match=r"fc\.weight.*impossible shape"):
        load_heads(write_checkpoint(tmp_path / "a", tensors, pickled=True))
    with pytest.raises(CheckpointShapeError, match="impossible shape"):
        load_heads(write_checkpoint(tmp_path / "b", eagle_tensors() | {"fc.bias": torch.zeros(0)}))


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_attention_heads", "num_specialists",
                                  "positions_per_specialist"])  # fmt: skip
def test_own_config_must_be_complete(saved: Path, name: str) -> None:
    change_config(saved, **{name: ...})
    with pytest.raises(HeadConfigError, match=f"lacks.*{name}"):
        load_heads(saved)


@pytest.mark.parametrize(
    "changes",
    [{"num_specialists": 10**9}, {"num_specialists": 0}, {"num_specialists": "2"}, {"positions_per_specialist": -1},
     {"hidden_size": "wide"}, {"head_dim": 7}, {"tree_config": {"depth": 0}}, {"tree_config": [1]},
     {"intermediate_size": -1}, {"num_attention_heads": 0}, {"num_key_value_heads": 0}, {"head_dim": 0},
     {"head_dim": 10**30}, {"embedding_size": 2**24, "num_attention_heads": 2**23, "head_dim": 2**23},
     {"rms_norm_eps": None}, {"hidden_act": "nonsense"}, {"rope_parameters": {"rope_type": "nonsense"}}],
)  # fmt: skip
def test_impossible_own_configs(saved: Path, changes: dict) -> None:
    change_config(saved, **changes)
    with pytest.raises(HeadLoadError):
        load_heads(saved)


def test_own_config_and_weights_must_agree(saved: Path) -> None:
    change_config(saved, intermediate_size=10**6)
    words = r"gate_proj\.weight has shape \[37, 32\], expected \[1000000, 32\] by config\.json.*download them again"
    with pytest.raises(CheckpointShapeError, match=words):
        load_heads(saved)
    change_config(saved, intermediate_size=37, num_specialists=3)
    with pytest.raises(CheckpointKeysError, match=r"missing.*layers\.2"):
        load_heads(saved)


def test_no_model_of_absurd_size_is_built(tmp_path: Path) -> None:
    """EAGLE-3 heads have a module for each level where levels are normed."""
    heads = scrambled_heads(deep_target(), "eagle3", fc_norm=True, feature_layers=(1, 4))
    heads.save_pretrained(tmp_path)
    change_config(tmp_path, feature_layers=list(range(10**4)))
    with pytest.raises(HeadConfigError, match=r"num_levels=10000, but there are only \d+ tensors"):
        load_heads(tmp_path)


def test_own_layout_is_strict(saved: Path) -> None:
    change_tensors(saved, lm_head__weight=torch.zeros(VOCAB, 32))
    with pytest.raises(CheckpointKeysError, match=r"unknown.*lm_head\.weight"):
        load_heads(saved)


def test_own_layout_of_a_later_version(saved: Path) -> None:
    change_config(saved, model_type="specheads_telepathy")
    with pytest.raises(UnknownFormatError, match="telepathy"):
        load_heads(saved)


def test_a_language_model_is_no_draft_head(target, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    with pytest.raises(UnknownFormatError, match="language model"):
        load_heads(tmp_path)
