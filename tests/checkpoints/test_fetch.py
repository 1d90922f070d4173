"""`load_heads` and `from_pretrained` by repository id, over real HTTP: revisions, caches, and a Hub that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import is_offline_mode
from safetensors.torch import load_file
from support.checkpoints import eagle_tensors, write_checkpoint
from support.hub.client import error_of
from support.hub.endpoint import READER, HubEndpoint
from support.targets import own_target, plain, prompt
from transformers import AutoConfig, AutoModel

from hf_specheads import AutoDraftHead, PossHead, load_heads
from hf_specheads.errors import HeadLoadError
from hf_specheads.target.adapter import add_adapter


# ------------------------------------------------------------------ what runs in the client's process
def weights(name: str, **options: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in load_heads(name, **options).state_dict().items()}


def facts(name: str, **options: Any) -> tuple[str, Any, str]:
    heads = load_heads(name, **options)
    return heads.name_or_path, heads.config.positions_per_specialist, heads.config.method


def auto(kind: str, name: str, **options: Any) -> tuple[str, str, str]:
    model = {"model": AutoModel, "config": AutoConfig, "heads": AutoDraftHead}[kind].from_pretrained(name, **options)
    return type(model).__name__, str(model.dtype), str(getattr(model, "device", ""))


def adapted_text(name: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Text of a target with the adapter that lies beside the heads in their repository."""
    target = own_target("llama")
    heads = load_heads(name, **options)
    heads.load_target_adapter(target)
    found = plain(target, ids, 20, assistant_model=heads)
    assert torch.equal(found, plain(target, ids, 20))
    return found


@pytest.fixture
def folder(poss_heads: PossHead, tmp_path: Path) -> Path:
    poss_heads.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def same(found: dict[str, torch.Tensor], folder: Path) -> bool:
    expected = load_file(folder / "model.safetensors")
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


# ------------------------------------------------------------------ what works
def test_revisions(hub: HubEndpoint, folder: Path, poss_heads: PossHead) -> None:
    name = hub.new_name()
    first = hub.publish(name, folder)
    before = load_file(folder / "model.safetensors")
    with torch.no_grad():
        poss_heads.fc.weight.add_(1)
    poss_heads.save_pretrained(folder)
    hub.publish(name, folder, ref="refs/heads/next")
    hub.repos[name].refs["refs/tags/v1"] = first.sha
    assert same(hub.run(weights, name, revision="next"), folder)
    for revision in (None, "main", "v1", first.sha):
        found = hub.run(weights, name, revision=revision)
        assert torch.equal(found["fc.weight"], before["fc.weight"])
    assert "Revision Not Found" in hub.run(error_of, weights, name, revision="v2")
    assert hub.run(facts, name, revision="v1", depth=2) == (name, 2, "poss")


def test_all_files_are_of_one_commit(hub: HubEndpoint, folder: Path) -> None:
    """A repository that changes between two requests: the weights are those of the config."""
    name = hub.new_name()
    commit = hub.publish(name, folder)
    assert same(hub.run(weights, name), folder)
    assert hub.requests(f"HEAD /{name}/resolve/main/config.json")
    asked = hub.requests("HEAD .*model.safetensors")
    assert asked and all(f"/resolve/{commit.sha}/" in seen.path for seen in asked)


def test_authors_layouts(hub: HubEndpoint, tmp_path: Path) -> None:
    """Positions per specialist come from the repository's name; pickled weights are asked for last."""
    write_checkpoint(tmp_path / "bin", eagle_tensors(2), pickled=True)
    hub.publish("lab/PosS3-x", tmp_path / "bin")
    assert hub.run(facts, "lab/PosS3-x") == ("lab/PosS3-x", 3, "poss")
    asked = [seen.path.rsplit("/", 1)[1] for seen in hub.requests("HEAD .*/resolve/")]
    assert asked[0] == "config.json" and asked[-1] == "pytorch_model.bin" and "model.safetensors" in asked


def test_what_is_no_heads_is_refused_before_its_weights(hub: HubEndpoint, tmp_path: Path) -> None:
    name = hub.new_name()
    (tmp_path / "config.json").write_text(json.dumps({"hydra_num_heads": 1, "hydra_head_arch": "cross-attn"}))
    (tmp_path / "model.safetensors").write_bytes(b"large")
    hub.publish(name, tmp_path)
    assert "Hydra" in hub.run(error_of, weights, name)
    assert not hub.requests(".*safetensors")


def test_shards(hub: HubEndpoint, poss_heads: PossHead, folder: Path, tmp_path: Path) -> None:
    poss_heads.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    name = hub.new_name()
    hub.publish(name, tmp_path / "shards")
    assert same(hub.run(weights, name), folder)


def test_private_repositories(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.publish(name, folder, private=True)
    for token in (False, READER):
        assert "cannot be fetched" in hub.run(error_of, weights, name, token=token)
    assert same(hub.run(weights, name), folder)


def test_the_adapter_comes_along(hub: HubEndpoint, tmp_path: Path) -> None:
    """Of the commit the heads are of, also where the branch has moved on."""
    target, name, ids = own_target("llama"), hub.new_name(), prompt()
    add_adapter(target, rank=2, alpha=4, modules="q_proj")
    texts = [plain(target, ids, 20)]
    for revision in ("v1", "v2"):
        for key, parameter in target.named_parameters():
            if "lora_B" in key:
                parameter.data.normal_()
        AutoDraftHead.from_target(target, "medusa").bind(target).save_pretrained(tmp_path)
        commit = hub.publish(name, tmp_path)
        hub.repos[name].refs[f"refs/tags/{revision}"] = commit.sha
        texts.append(plain(target, ids, 20))
    assert not any(torch.equal(texts[i], texts[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(hub.run(adapted_text, name, ids), texts[2])
    assert torch.equal(hub.run(adapted_text, name, ids, revision="v1"), texts[1])


def test_auto_classes(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.publish(name, folder)
    assert hub.run(auto, "config", name)[0] == "PossHeadConfig"
    assert hub.run(auto, "model", name) == ("PossHead", "torch.float32", "cpu")
    options = {"revision": "main", "dtype": torch.bfloat16, "device_map": "cpu"}
    assert hub.run(auto, "heads", name, **options) == ("PossHead", "torch.bfloat16", "cpu")


# ------------------------------------------------------------------ caches
def test_the_second_load_fetches_nothing(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    commit = hub.publish(name, folder)
    hub.run(weights, name)
    hub.seen.clear()
    assert same(hub.run(weights, name), folder)
    assert [str(seen) for seen in hub.seen] == [f"HEAD /{name}/resolve/main/config.json 200"]  # is it still current?
    hub.seen.clear()
    assert same(hub.run(weights, name, revision=commit.sha), folder)
    assert same(hub.run(weights, name, local_files_only=True), folder)
    assert hub.seen == []
    hub.fail("HEAD", status=501, times=9)  # a Hub that does not answer is no obstacle either
    assert same(hub.run(weights, name), folder)


def test_offline(hub: HubEndpoint, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which runs offline as all tests do, with the cache that the other one filled."""
    assert os.environ["HF_HUB_OFFLINE"] == "1" and is_offline_mode()
    name, other = hub.new_name(), hub.new_name()
    hub.publish(name, folder)
    hub.publish(other, folder)
    hub.run(weights, name)
    hub.seen.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.home / "hub"))
    assert same(dict(load_heads(name).state_dict()), folder)
    with pytest.raises(HeadLoadError, match=r"is not a folder, its config\.json is not in the local cache"):
        load_heads(other)
    assert hub.seen == []


# ------------------------------------------------------------------ a Hub that fails
def test_a_cut_connection_goes_on(hub: HubEndpoint, target, tmp_path: Path) -> None:
    """What came before the cut is kept: the rest is asked for by its range."""
    heads = AutoDraftHead.from_target(target, "eagle", intermediate_size=30_000)
    heads.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    name = hub.new_name()
    hub.publish(name, tmp_path)
    hub.fail("GET /storage/", cut_after=size - 1000)
    assert same(hub.run(weights, name), tmp_path)
    assert [seen.headers.get("range") for seen in hub.requests("GET /storage/")] == [None, f"bytes={10 << 20}-"]


def test_what_was_fetched_is_not_fetched_again(hub: HubEndpoint, poss_heads, folder: Path, tmp_path: Path) -> None:
    """A download that was given up: the next one takes the finished shards from the cache."""
    poss_heads.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    shards = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    name = hub.new_name()
    hub.publish(name, tmp_path / "shards")
    hub.fail(f"HEAD .*{shards[-1]}", status=501)
    assert "HeadLoadError" in hub.run(error_of, weights, name)
    before = len(hub.requests("GET /storage/"))
    assert before == len(shards) - 1
    assert same(hub.run(weights, name), folder)
    assert len(hub.requests("GET /storage/")) == len(shards)


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 503}, {"delay": 2.4}], ids=str)
def test_a_passing_failure_is_survived(hub: HubEndpoint, folder: Path, how: dict[str, Any]) -> None:
    name = hub.new_name()
    hub.publish(name, folder)
    hub.fail("HEAD .*model.safetensors", **how)
    assert same(hub.run(weights, name), folder)


@pytest.mark.covering(1)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("status", [401, 403, 501])
def test_a_lasting_failure_is_named(hub: HubEndpoint, folder: Path, file: str, status: int) -> None:
    """And is no reason to look for weights under another name: a file that cannot be had is not a missing one."""
    name = hub.new_name()
    hub.publish(name, folder)
    (folder / "pytorch_model.bin").write_bytes(b"not these")
    hub.fail(f"HEAD .*{file}", status=status, times=99)
    message = hub.run(error_of, weights, name)
    assert message.startswith("HeadLoadError") and name in message
    assert not hub.requests(r"HEAD .*\.bin")


def test_what_is_not_there(hub: HubEndpoint, tmp_path: Path) -> None:
    name = hub.new_name()
    assert "cannot be fetched" in hub.run(error_of, weights, name)
    (tmp_path / "README.md").write_text("nothing else")
    hub.publish(name, tmp_path)
    assert "has no config.json" in hub.run(error_of, weights, name)
