"""The local Hub answers huggingface_hub as the real one does: the fixture other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file
from support.hub.endpoint import READER, WRITER, HubEndpoint

TENSOR = torch.arange(3000.0)


# ------------------------------------------------------------------ what runs in the client's process
def upload(name: str, folder: Path, **options: object) -> str:
    api = HfApi()
    name = api.create_repo(name, exist_ok=True).repo_id
    return api.upload_folder(repo_id=name, folder_path=folder, **options).oid


def test_it_is_started_by_hand(tmp_path: Path) -> None:
    """As the documents do, from any folder and without further paths."""
    program = [sys.executable, str(Path(__file__).parents[1] / "support" / "hub" / "endpoint.py")]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(program, cwd=tmp_path, env=without, stdout=subprocess.PIPE, text=True) as server:
        told = server.stdout.readline()
        server.terminate()
    assert told.startswith("export HF_ENDPOINT=http://127.0.0.1:") and f"HF_TOKEN={WRITER}" in told


def download(name: str, file: str, **options: object) -> bytes:
    return Path(HfApi().hf_hub_download(name, file, **options)).read_bytes()


def change(name: str, *operations: object, **options: object) -> str:
    return HfApi().create_commit(name, list(operations), commit_message="changed", **options).oid


def call(method: str, *args: object, **kwargs: object) -> object:
    return getattr(HfApi(), method)(*args, **kwargs)


def listed(name: str, **options: object) -> dict[str, int | None]:
    entries = HfApi().list_repo_tree(name, recursive=True, **options)
    return {entry.path: getattr(entry, "size", None) for entry in entries}


def error_of(function, *args: object, **kwargs: object) -> tuple[str, str]:
    """Kind and text of the error; the errors themselves hold connections, which no pipe carries."""
    try:
        function(*args, **kwargs)
    except (HfHubHTTPError, OSError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A regular and an LFS file, and one in a subfolder."""
    (tmp_path / "source" / "deep").mkdir(parents=True)
    (tmp_path / "source" / "config.json").write_text('{"a": 1}')
    (tmp_path / "source" / "deep" / "note.txt").write_text("a note")
    save_file({"weight": TENSOR}, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "source"


# ------------------------------------------------------------------ tests
def test_what_is_uploaded_comes_back(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    oid = hub.run(upload, name, folder)
    assert hub.repos[name].refs["refs/heads/main"] == oid
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert {path: data for path, data in hub.files(name).items() if path != ".gitattributes"} == files
    for path, data in files.items():
        assert hub.run(download, name, path) == data
    assert len(hub.requests("PUT /storage/")) == 1  # the weights through LFS, the rest with the commit
    assert not any("authorization" in seen.headers for seen in hub.requests("/storage/"))
    assert hub.run(listed, name) == {".gitattributes": 25, "deep": None} | {p: len(d) for p, d in files.items()}


def test_a_published_folder_is_a_repository(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    commit = hub.publish(name, folder)
    info = hub.run(call, "model_info", name, files_metadata=True)
    assert info.sha == commit.sha and {s.rfilename for s in info.siblings} == set(commit.files)
    metadata = hub.run(call, "get_safetensors_metadata", name)
    assert metadata.files_metadata["model.safetensors"].tensors["weight"].shape == [3000]
    assert all("range" in seen.headers for seen in hub.requests("GET /storage/"))
    (path,) = hub.run(call, "get_paths_info", name, ["config.json", "nothing"])
    assert path.size == 8


def test_revisions(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    first = hub.run(upload, name, folder)
    hub.run(call, "create_tag", name, tag="v1")
    hub.run(call, "create_branch", name, branch="next")
    (folder / "config.json").write_text('{"a": 2}')
    second = hub.run(upload, name, folder, revision="next")
    assert hub.run(download, name, "config.json", revision="next") == b'{"a": 2}'
    assert hub.run(download, name, "config.json", revision="v1") == b'{"a": 1}'
    assert hub.run(download, name, "config.json", revision=second) == b'{"a": 2}'
    request = hub.run(upload, name, folder, create_pr=True)
    assert hub.run(download, name, "config.json", revision="refs/pr/1") == b'{"a": 2}'
    refs = hub.run(call, "list_repo_refs", name, include_pull_requests=True)
    assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": first, "next": second}
    assert refs.pull_requests[0].target_commit == request and refs.tags[0].target_commit == first
    assert [c.commit_id for c in hub.run(call, "list_repo_commits", name, revision="next")][:2] == [second, first]
    assert hub.run(error_of, download, name, "config.json", revision="v9")[0] == RevisionNotFoundError.__name__


def test_commits_change_and_delete(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.publish(name, folder)
    addition = CommitOperationAdd("new.txt", b"new")
    hub.run(change, name, addition, CommitOperationDelete("config.json"), CommitOperationDelete("deep/"))
    assert set(hub.files(name)) == {"model.safetensors", "new.txt"}
    stale = hub.repos[name].history("main")[-1].sha
    kind, text = hub.run(error_of, change, name, CommitOperationAdd("x", b"x"), parent_commit=stale)
    assert kind == HfHubHTTPError.__name__ and "412" in text


def test_rights(hub: HubEndpoint, folder: Path) -> None:
    public, private, missing = hub.new_name(), hub.new_name(), hub.new_name()
    hub.publish(public, folder)
    hub.publish(private, folder, private=True)
    assert hub.run(call, "whoami")["name"] == "lab" and hub.run(call, "whoami", token=READER)["name"] == "guest"
    assert hub.run(download, public, "config.json", token=False) == hub.run(download, private, "config.json")
    for name, token in ((private, False), (private, READER), (missing, WRITER)):
        kind, _ = hub.run(error_of, call, "model_info", name, token=token)
        assert kind == RepositoryNotFoundError.__name__
    assert "Invalid user token" in hub.run(error_of, call, "whoami", token="hf_wrong")[1]
    assert "401" in hub.run(error_of, call, "model_info", public, token="hf_wrong")[1]
    assert "403" in hub.run(error_of, change, public, CommitOperationAdd("x", b"x"), token=READER)[1]
    assert "403" in hub.run(error_of, call, "create_repo", "lab/other", token=READER)[1]
    assert "401" in hub.run(error_of, call, "create_repo", "lab/other", token=False)[1]
    assert "409" in hub.run(error_of, call, "create_repo", public)[1]
    assert hub.run(error_of, download, public, "nothing")[0] == RemoteEntryNotFoundError.__name__


def test_metadata_is_checked(hub: HubEndpoint, folder: Path) -> None:
    (folder / "README.md").write_text("---\n- a list\n---\n")
    kind, text = hub.run(error_of, upload, hub.new_name(), folder)
    assert kind == "ValueError" and "must be a mapping" in text


def test_faults(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.publish(name, folder)
    hub.fail("HEAD .*config.json", status=501)  # unlike 500, an error no client tries again
    assert hub.run(error_of, download, name, "config.json")[0] == LocalEntryNotFoundError.__name__
    hub.fail("HEAD .*config.json", status=500)
    hub.fail("HEAD .*config.json", delay=2.4)  # longer than the client waits
    assert hub.run(download, name, "config.json") == b'{"a": 1}'
    assert [seen.status for seen in hub.requests("HEAD .*config.json")][:3] == [501, 500, 200]
    hub.fail("POST .*/commit/", status=500)
    assert "500" in hub.run(error_of, change, name, CommitOperationAdd("x", b"x"))[1]
    assert "x" not in hub.files(name)


def test_a_cut_download_goes_on(hub: HubEndpoint, tmp_path: Path) -> None:
    """The client writes 10 MiB at a time: what a cut connection brought of the last piece is asked for again."""
    content = os.urandom(11 << 20)
    (tmp_path / "big.bin").write_bytes(content)
    name = hub.new_name()
    hub.publish(name, tmp_path)
    hub.fail("GET /storage/", cut_after=len(content) - 100)
    assert hub.run(download, name, "big.bin") == content
    assert [seen.headers.get("range") for seen in hub.requests("GET /storage/")] == [None, f"bytes={10 << 20}-"]


def test_the_client_is_another_process(hub: HubEndpoint) -> None:
    assert hub.run(os.getpid) != os.getpid()
    assert hub.run(os.getenv, "HF_ENDPOINT") == hub.url
