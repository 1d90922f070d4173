"""Config and tensors together: names, copies, fields that must be said, the authors' own files, and the one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import transformers
from support.checkpoints import eagle_tensors, medusa_tensors, write_checkpoint
from support.layouts import LAYOUTS, TINY_MEDUSA

from hf_specheads import load_heads
from hf_specheads.checkpoints.read import SILENT_FIELDS
from hf_specheads.errors import (
    CheckpointKeysError,
    CheckpointValueError,
    CorruptCheckpointError,
    HeadConfigError,
    MissingArgumentError,
)

GOLDENS = Path(__file__).resolve().parents[1] / "recordings" / "goldens"


# ------------------------------------------------------------------ our own config
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("ours")])
def test_fields_of_our_own_that_no_tensor_betrays(name: str, tmp_path: Path) -> None:
    """Without one of them the default would be another function."""
    files = LAYOUTS[name].files()
    silent = [field for field in SILENT_FIELDS if field in files["config.json"]]
    assert len(silent) > 1
    for field in silent:
        config = {key: value for key, value in files["config.json"].items() if key != field}
        with pytest.raises(HeadConfigError, match=f"lacks .*{field}"):
            load_heads(LAYOUTS[name].write(tmp_path / field, files | {"config.json": config}))


@pytest.mark.parametrize(
    "change",
    [{"quantization_config": {"load_in_4bit": True}}, {"quantization_config": 0}, {"target": 3},
     {"target": {"name": 3}}, {"target": {"fingerprint": -1}}, {"target": {"fingerprint": ["x"]}},
     {"save_pretrained": 1}, {"_name": "x"}, {"num_specialists": 500}],
)  # fmt: skip
def test_fields_of_our_own_that_are_refused(change: dict, tmp_path: Path) -> None:
    files = LAYOUTS["ours-poss"].files()
    files["config.json"] |= change
    with pytest.raises(HeadConfigError, match=r"config\.json (has|says)"):
        load_heads(LAYOUTS["ours-poss"].write(tmp_path, files))


# ------------------------------------------------------------------ names of tensors
def test_prefixes(tmp_path: Path) -> None:
    tensors = {f"module.model.{key}": tensor for key, tensor in eagle_tensors().items()}
    assert load_heads(write_checkpoint(tmp_path / "a", tensors)).config.method == "eagle"
    tensors = eagle_tensors()
    clash = {f"model.{key}": tensor for key, tensor in tensors.items()}
    clash |= {name: tensors["fc.bias"].clone() for name in ("model.d2t", "d2t")}
    with pytest.raises(CorruptCheckpointError, match=r"model\.d2t and d2t"):
        load_heads(write_checkpoint(tmp_path / "b", clash))


def test_two_spellings_of_one_tensor(tmp_path: Path) -> None:
    files = LAYOUTS["eagle3-specforge"].files()
    tensors = files["model.safetensors"]
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"] + 1
    with pytest.raises(CheckpointKeysError, match="two spellings"):
        load_heads(LAYOUTS["eagle3-specforge"].write(tmp_path, files))


@pytest.mark.parametrize("name", ["medusa-v1", "medusa-vllm"])
def test_a_lost_bias_is_no_bias_of_zero(name: str, tmp_path: Path) -> None:
    files = LAYOUTS[name].files()
    tensors = files.get("medusa_lm_head.pt") or files["model.safetensors"]
    del tensors[next(key for key in tensors if key.endswith("bias"))]
    with pytest.raises(CheckpointKeysError, match="blocks have no bias"):
        load_heads(LAYOUTS[name].write(tmp_path, files))


@pytest.mark.parametrize("name", ["hydra", "hydra-plus", "medusa-v1"])
def test_a_damaged_copy_does_not_make_another_kind_of_heads(name: str, tmp_path: Path) -> None:
    """Files list a block once per use; one that differs is no block of its own."""
    files = LAYOUTS[name].files() if name != "medusa-v1" else {
        "config.json": TINY_MEDUSA, "medusa_lm_head.pt": medusa_tensors(3, 2)}  # fmt: skip
    tensors = next(content for file, content in files.items() if file.endswith(".pt"))
    keys = {"hydra": "hydra_mlp.1.2.linear.bias", "hydra-plus": "hydra_mlp.1.5.linear.bias"}
    key = keys.get(name, "1.1.linear.bias")
    tensors[key][3] += 1
    with pytest.raises(CheckpointValueError, match="repeat either all blocks or none"):
        load_heads(LAYOUTS[name].write(tmp_path, files))


# ------------------------------------------------------------------ the authors' own files
@pytest.mark.parametrize("folder", sorted(GOLDENS.glob("*/draft")), ids=lambda folder: folder.parent.name)
def test_the_authors_own_files_need_no_argument(folder: Path) -> None:
    """But for how many positions a PosS specialist serves, which no file says."""
    case = folder.parent.name
    if "poss" not in case:
        method = load_heads(folder).config.method
        assert method in case or (method == "eagle" and "hass" in case)  # a folder `draft` does not tell HASS
        return
    with pytest.raises(MissingArgumentError, match="positions_per_specialist=n"):
        load_heads(folder)
    settings = json.loads(next(folder.parent.glob("*.json")).read_text()).get("settings", {})
    assert load_heads(folder, positions_per_specialist=settings.get("position_per_layer", 3)).config.method == "poss"


# ------------------------------------------------------------------ the one line
def test_the_line_is_seen_unless_it_is_turned_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python's and transformers' logging as they are by default, and without any of it set up."""
    folder = write_checkpoint(tmp_path / "PosS3-x", eagle_tensors(2))
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()  # the default

    def lines() -> list[str]:
        caplog.clear()
        load_heads(folder)
        return [record.getMessage() for record in caplog.records if record.name.startswith("hf_specheads")]

    (line,) = lines()
    assert "poss heads in PosS's layout" in line and "positions_per_specialist=3 from the name" in line
    with caplog.at_level(logging.INFO):
        assert lines() == [line] and caplog.records[-1].levelno == logging.INFO
    with caplog.at_level(logging.ERROR, logger="hf_specheads"):
        assert lines() == []
    transformers.logging.set_verbosity_error()
    assert lines() == []
    transformers.logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    load_heads(folder)
    assert line in capsys.readouterr().err
    monkeypatch.setattr(logging.getLogger("hf_specheads"), "level", logging.INFO)
    load_heads(folder)
    assert line in capsys.readouterr().err
    transformers.logging.set_verbosity(verbosity)
