"""A small Hub on this machine. Serves the requests of huggingface_hub over real HTTP, with faults on demand.

It keeps repositories in memory, with commits, branches, tags and pull requests. Regular files are part of the commit
request. Large files go through LFS and are served from a second host name, as by the real Hub's storage. Written to
match the requests of huggingface_hub 2.4. Use it through the fixture `hub` (conftest.py):

    hub.publish("lab/heads", folder)                      # a repository as if it had been there
    hub.run(load_digest, "lab/heads", revision="main")    # in a process whose Hub this is (HF_ENDPOINT)
    hub.fail("GET .*safetensors", cut_after=100)          # the next download breaks off after 100 bytes

`python tests/support/hub/endpoint.py 7007` serves on port 7007 until it is stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

WRITER, READER = "hf_writer", "hf_reader"  # tokens of user `lab`, who may write to `lab/...`, and of user `guest`
USERS = {WRITER: "lab", READER: "guest"}
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".png")
FIRST_COMMIT = "initial commit"


@dataclass(frozen=True)
class Blob:
    """A file's content. The API calls it by its `oid`: SHA-256 for an LFS file, git's SHA-1 for a regular file."""

    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(f"blob {len(self.data)}\0".encode() + self.data).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    """The state of all files of a repository."""

    sha: str
    title: str
    files: dict[str, Blob]
    parent: str | None = None


@dataclass
class Repo:
    """A repository; `refs` maps full names (`refs/heads/main`) to commits."""

    name: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, title: str, files: dict[str, Blob]) -> Commit:
        """Adds a commit that contains exactly these files, and moves the ref to it."""
        parent = self.refs.get(ref)
        content = [self.name, ref, title, parent, len(self.commits), sorted((p, b.oid) for p, b in files.items())]
        sha = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        self.commits[sha] = Commit(sha, title, files, parent)
        self.refs[ref] = sha
        return self.commits[sha]

    def find(self, revision: str) -> Commit | None:
        """Finds the commit of a branch, tag, `refs/pr/1` or hash."""
        for name in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if name in self.refs:
                return self.commits[self.refs[name]]
        return self.commits.get(revision)

    def history(self, revision: str) -> list[Commit]:
        """Returns the commits that led to a revision, newest first."""
        commits, commit = [], self.find(revision)
        while commit is not None:
            commits.append(commit)
            commit = self.commits.get(commit.parent or "")
        return commits


@dataclass
class Fault:
    """A fault of the next `times` requests whose `"METHOD /path"` matches `pattern`."""

    pattern: str
    status: int | None = None
    cut_after: int | None = None
    delay: float = 0.0
    times: int = 1


@dataclass(frozen=True)
class Seen:
    """A request that was answered."""

    method: str
    path: str
    headers: dict[str, str]
    status: int

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.status}"


class HubEndpoint:
    """The server in a thread, and a process that talks to it.

    Attributes:
        url: Value for `HF_ENDPOINT` or `endpoint=`.
        repos: Repositories by name.
        seen: Requests in the order of their answers.
    """

    def __init__(self, home: Path, port: int = 0):
        from support.hub.requests import HubRequests

        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # LFS objects, by SHA-256
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self.home = home
        handler = type("Handler", (HubRequests,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._client: ProcessPoolExecutor | None = None
        self._names = itertools.count()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def storage_url(self) -> str:
        """Returns the address of LFS files. Its host name differs, and no token may be sent there."""
        return f"http://localhost:{self._server.server_port}/storage"

    def environment(self, token: str | None = WRITER) -> dict[str, str]:
        """Returns environment variables that make this endpoint the Hub of a process, and hide the user's own cache
        and token.

        Xet, the storage protocol of the real Hub, is switched off, because this endpoint speaks LFS.
        """
        variables = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_TOKEN": token or "",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        }
        return {**os.environ, **variables}

    # ------------------------------------------------------------------ what tests do with it
    def new_name(self, namespace: str = "lab") -> str:
        """Returns a repository name that was never used before, so that no cache knows it."""
        return f"{namespace}/heads-{next(self._names)}"

    def publish(self, name: str, folder: Path, *, private: bool = False, ref: str = "refs/heads/main") -> Commit:
        """Makes the files of a folder the next commit of a repository, without a request."""
        repo = self.repos.get(name) or self.create(name, private)
        files = {
            str(path.relative_to(folder).as_posix()): Blob(path.read_bytes(), path.suffix in LFS_SUFFIXES)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.objects |= {blob.sha256: blob.data for blob in files.values() if blob.lfs}
        return repo.commit(ref, "published", files)

    def create(self, name: str, private: bool = False) -> Repo:
        """Creates a repository whose first commit holds only `.gitattributes`, as the Hub does."""
        repo = self.repos[name] = Repo(name, private)
        repo.commit("refs/heads/main", FIRST_COMMIT, {".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)})
        return repo

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Returns the content of all files of a revision."""
        return {path: blob.data for path, blob in self.repos[name].find(revision).files.items()}

    def fail(self, pattern: str, **how: Any) -> None:
        """Adds a [`Fault`]."""
        self.faults.append(Fault(pattern, **how))

    def take_fault(self, request: str) -> Fault | None:
        """Returns the fault for this request, and counts it down."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None

    def requests(self, pattern: str) -> list[Seen]:
        """Returns the requests whose `"METHOD /path status"` matches."""
        with self.lock:
            return [seen for seen in self.seen if re.search(pattern, str(seen))]

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a module-level function in a process that uses this Hub. Returns or raises what the function does.

        The process lives as long as the session, because importing torch takes seconds.
        """
        if self._client is None:
            self._client = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            saved = dict(os.environ)
            os.environ.update(self.environment())  # the process inherits the environment at its start
            try:
                self._client.submit(time.time).result()
            finally:
                os.environ.clear()
                os.environ.update(saved)
        return self._client.submit(function, *args, **kwargs).result(timeout=120)

    def reset(self) -> None:
        """Forgets repositories, faults and requests."""
        self.repos.clear()
        self.objects.clear()
        self.faults.clear()
        self.seen.clear()

    def close(self) -> None:
        """Stops the process and the server."""
        if self._client is not None:
            self._client.shutdown(wait=True, cancel_futures=True)
        self._server.shutdown()
        self._server.server_close()


def main() -> None:
    """Serves until stopped, and prints the variables that point a client here."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from support.hub.endpoint import HubEndpoint  # imported by its full name, so that both files use the same classes

    with tempfile.TemporaryDirectory() as home:
        endpoint = HubEndpoint(Path(home), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        sys.stdout.write(f"export HF_ENDPOINT={endpoint.url} HF_TOKEN={WRITER} HF_HUB_DISABLE_XET=1\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            endpoint.close()


if __name__ == "__main__":
    main()
