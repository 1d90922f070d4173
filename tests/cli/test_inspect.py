"""`specheads inspect`: what heads are from headers alone, of folders and over HTTP, and after loading them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import VOCAB, eagle_tensors, write_checkpoint
from support.heads import random_heads
from support.hub.endpoint import HubEndpoint
from support.layouts import LAYOUTS
from support.targets import deep_target

from hf_specheads import AutoDraftHead, load_heads
from hf_specheads.checkpoints.files import WEIGHT_FILES
from hf_specheads.checkpoints.headers import glance_at
from hf_specheads.checkpoints.layouts.detect import TITLES
from hf_specheads.checkpoints.look import look_at
from hf_specheads.cli import main
from hf_specheads.cli.inspect import describe_glance, describe_look
from hf_specheads.errors import CheckpointValueError, HeadLoadError
from hf_specheads.heads.auto import METHODS
from hf_specheads.registration import MODEL_TYPES


def inspect(capsys: pytest.CaptureFixture, *arguments: object) -> dict[str, Any]:
    assert main(["inspect", *(str(argument) for argument in arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def poisoned(folder: Path) -> Path:
    """The folder with weights that are no numbers: whoever reads them notices."""
    for file in folder.rglob("*.safetensors"):
        size = int.from_bytes(file.read_bytes()[:8], "little") + 8
        file.write_bytes(file.read_bytes()[:size] + b"\xff" * (file.stat().st_size - size))
    return folder


# Native layers are a part of their target, which is no repository of heads.
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.kind != "native"])
def test_headers_tell_what_loading_tells(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    layout = LAYOUTS[name]
    folder = layout.write(tmp_path)
    facts = inspect(capsys, folder)
    heads = load_heads(folder, **layout.arguments)
    assert facts["layout"] == TITLES[layout.kind] and facts["class"] == type(heads).__name__
    assert facts["method"] == layout.method and facts["dtype"] == str(heads.dtype).removeprefix("torch.")
    tied = 1 if "hydra" not in name else 2  # of repeated blocks, headers count every copy
    assert heads.num_parameters() <= facts["parameters"] <= tied * heads.num_parameters()
    for field, value in facts["sizes"].items():
        ours = getattr(heads.config, field, None)
        assert value == (list(ours) if isinstance(ours, tuple) else ours), field
    needed = [argument for argument in layout.arguments if argument != "anchor_slot"]  # which has a default
    assert facts["load_heads_needs"] == [f"{argument}=..." for argument in needed]
    known = hasattr(heads.config, "positions_per_specialist") and not layout.arguments
    assert (facts["positions_per_specialist"] is not None) == known
    assert "only with --check" in facts["checked"]


def test_no_weight_is_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """NaN is not noticed, but by `--check`."""
    folder = poisoned(LAYOUTS["eagle3-specforge"].write(tmp_path))
    assert inspect(capsys, folder)["method"] == "eagle3"
    assert main(["inspect", str(folder), "--check"]) == 2
    assert "NaN or infinities" in capsys.readouterr().err
    with pytest.raises(CheckpointValueError):
        main(["--debug", "inspect", str(folder), "--check"])


def write_heads(method: str, folder: Path, **changes: Any) -> Path:
    """Heads of a method as this package saves them, with fields of their config.json changed."""
    random_heads(deep_target(), method).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"draft-lm", "lookup"}))  # which have no weights
def test_a_glance_tells_what_a_closer_look_tells(method: str, tmp_path: Path) -> None:
    """Without torch, of heads as this package saves them."""
    folder = write_heads(method, tmp_path)
    glance, look = glance_at(folder, MODEL_TYPES), look_at(folder)
    assert glance is not None
    told, looked = describe_glance(glance), json.loads(json.dumps(describe_look(look)))
    assert told | {"checked": ""} == looked | {"checked": ""}
    assert list(told) == list(looked) and "only with --check" in told["checked"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"vocab_size": "many"}, "config.json"), ({"model_type": "specheads_next"}, "newer version"),
     ({"quantization_config": {}}, "quantis"), ({"target": {"name": 3}}, "expected a name"),
     ({"tuned": [{}]}, ""), ({"tree_config": []}, "")],
)  # fmt: skip
def test_what_is_odd_gets_a_closer_look(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_heads("eagle", tmp_path, **changes)
    assert glance_at(folder, MODEL_TYPES) is None
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 2
    assert said in (told := capsys.readouterr().err) and told.count("\n") == 1


@pytest.mark.parametrize("damage", ["cut short", "longer", "no header"])
def test_damaged_files_get_a_closer_look(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = write_heads("eagle", tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"cut short": whole[:-100], "longer": whole + b"x", "no header": whole[:5]}[damage])
    assert glance_at(tmp_path, MODEL_TYPES) is None
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no safetensors file" in capsys.readouterr().err


def test_after_loading(target, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    heads = AutoDraftHead.from_target(target, "poss", num_specialists=2, positions_per_specialist=2)
    heads.save_pretrained(tmp_path)
    facts = inspect(capsys, tmp_path, "--check")
    assert facts["num_specialists"] == 2 and facts["sizes"]["vocab_size"] == VOCAB
    assert facts["target"]["fingerprint"] == "stored" and facts["checked"] == "all tensors"
    assert facts["parameters"] == heads.num_parameters() and facts["layout"] == TITLES["specheads"]
    assert main(["inspect", str(tmp_path)]) == 0
    assert "PossHead" in capsys.readouterr().out


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_checkpoint(tmp_path / "draft", eagle_tensors(4))
    facts = inspect(capsys, folder)
    assert facts["load_heads_needs"] == ["positions_per_specialist=..."] and facts["trained_positions"] is None
    given = inspect(capsys, folder, "--positions_per_specialist", 3)
    assert given["load_heads_needs"] == [] and given["trained_positions"] == 12
    assert main(["inspect", str(folder), "--check"]) == 2
    assert "positions_per_specialist" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["fc.weight", "layers.0.mlp.up_proj.weight"])
def test_wrong_shapes_and_keys_are_seen_in_headers(key: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tensors = eagle_tensors()
    assert main(["inspect", str(write_checkpoint(tmp_path / "a", tensors | {key: torch.zeros(7, 7)}))]) == 2
    assert "7" in capsys.readouterr().err
    del tensors[key]
    assert main(["inspect", str(write_checkpoint(tmp_path / "b", tensors))]) == 2
    assert "fc.weight" in (words := capsys.readouterr().err) or key in words


# ------------------------------------------------------------------ over HTTP
def look_over_http(repo: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `specheads inspect`, in a process whose Hub is the local one."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["inspect", repo, *arguments])
    return code, out.getvalue()


def over_http(hub: HubEndpoint, repo: str, *arguments: str, code: int = 0) -> str:
    found, text = hub.run(look_over_http, repo, *arguments)
    assert found == code, text
    return text


@pytest.mark.parametrize("name", ["ours-poss", "eagle-fp16-shards", "medusa-2-whole-model", "speculators-eagle3"])
def test_repositories(name: str, tmp_path: Path, hub: HubEndpoint) -> None:
    """Only the first bytes of weight files travel: behind the header all weights here are NaN."""
    repo = hub.new_name()
    hub.publish(repo, poisoned(LAYOUTS[name].write(tmp_path)))
    facts = json.loads(over_http(hub, repo, "--json"))
    assert (facts["layout"], facts["method"]) == (TITLES[LAYOUTS[name].kind], LAYOUTS[name].method)
    asked = hub.requests(r"GET .*(\.safetensors |/storage/)")
    assert asked and all(request.headers.get("range") == "bytes=0-100000" for request in asked)
    named = {str(request).split()[1].rsplit("/", 1)[-1] for request in asked if ".safetensors" in str(request)}
    assert set(facts["files"]) == named and all(size.endswith(" bytes") for size in facts["files"].values())
    assert "NaN or infinities" in over_http(hub, repo, "--download", code=2)


def test_pickled_repositories(tmp_path: Path, hub: HubEndpoint) -> None:
    repo = hub.new_name()
    hub.publish(repo, LAYOUTS["medusa-v1"].write(tmp_path))
    facts = json.loads(over_http(hub, repo, "--json"))
    assert "--download" in facts["layout"] and facts["config.json"]["medusa_num_heads"] == 2
    assert list(facts["files"]) == ["medusa_lm_head.pt"] and not hub.requests(r"GET .*(\.pt|/storage/)")
    text = over_http(hub, repo, "--download")
    assert "a layout of Medusa" in text and "num_heads=5" in text and "all tensors" in text


def test_repositories_that_cannot_be_looked_at(tmp_path: Path, hub: HubEndpoint) -> None:
    assert "cannot be fetched" in over_http(hub, "lab/nothing-here", code=2)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    (empty := hub.new_name(), hub.publish(empty, tmp_path))
    assert f"expected one of {WEIGHT_FILES[0]}" in over_http(hub, empty, code=2)
    private = hub.new_name()
    hub.publish(private, LAYOUTS["eagle-qkv-bias"].write(tmp_path / "x"), private=True)
    assert '"method": "eagle"' in over_http(hub, private, "--json")
    (tmp_path / "model.safetensors").write_bytes(b"<!doctype html>" * 10)
    (broken := hub.new_name(), hub.publish(broken, tmp_path))
    assert "not a safetensors file" in over_http(hub, broken, code=2)


def test_a_hub_that_fails(tmp_path: Path, hub: HubEndpoint) -> None:
    repo = hub.new_name()
    hub.publish(repo, LAYOUTS["eagle-qkv-bias"].write(tmp_path))
    hub.fail(r"GET .*\.safetensors", status=500, times=50)
    assert "cannot be read" in over_http(hub, repo, code=2)


def test_offline_nothing_is_asked() -> None:
    with pytest.raises(HeadLoadError, match="local cache"):
        look_at("lab/heads", local_files_only=True)
