"""The answers of [`endpoint.HubEndpoint`]: one method per request of huggingface_hub."""

from __future__ import annotations

import base64
import json
import re
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from support.hub.endpoint import LFS_SUFFIXES, USERS, Blob, Commit, Fault, Repo, Seen

if TYPE_CHECKING:
    from support.hub.endpoint import HubEndpoint

REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
API = rf"/api/(?:models|datasets)/{REPO}"
# method, path, name of the method that answers, whether the request changes the repository
ROUTES = (
    ("GET", r"/api/whoami-v2", "whoami", False),
    ("POST", r"/api/repos/create", "create_repo", False),
    ("POST", r"/api/validate-yaml", "validate_yaml", False),
    ("GET", rf"{API}", "model_info", False),
    ("GET", rf"{API}/revision/(?P<revision>[^/]+)", "model_info", False),
    ("GET", rf"{API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree", False),
    ("POST", rf"{API}/paths-info/(?P<revision>[^/]+)", "paths_info", False),
    ("GET", rf"{API}/refs", "list_refs", False),
    ("GET", rf"{API}/commits/(?P<revision>[^/]+)", "list_commits", False),
    ("POST", rf"{API}/branch/(?P<name>[^/]+)", "create_branch", True),
    ("POST", rf"{API}/tag/(?P<revision>[^/]+)", "create_tag", True),
    ("POST", rf"{API}/preupload/(?P<revision>[^/]+)", "preupload", True),
    ("POST", rf"{API}/commit/(?P<revision>[^/]+)", "commit", True),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch", True),
    ("PUT", r"/storage/(?P<oid>[0-9a-f]{64})", "store", False),
    ("GET", r"/storage/(?P<oid>[0-9a-f]{64})", "serve", False),
    ("HEAD", rf"(?:/datasets)?/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve", False),
    ("GET", rf"(?:/datasets)?/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve", False),
)


class Refused(Exception):
    """An answer that reports an error."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        named = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.status, self.headers = status, {**named, **headers}


def _metadata(card: str) -> object:
    """Parses the YAML at the top of a card: an empty mapping if there is none, and the error message if it is
    invalid."""
    match = re.match(r"---\n(.*?)\n---\n", card, flags=re.DOTALL)
    try:
        return yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        return str(error)


class HubRequests(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    hub: HubEndpoint
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Prints nothing."""

    def do_request(self) -> None:
        """Finds the route, answers, and records the request. A pending fault is applied first."""
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.body = self._read_body()
        self.fault = self.hub.take_fault(f"{self.command} {url.path}")
        try:
            self._apply(self.fault)
            self._route(url.path)
        except Refused as refused:
            self._send(refused.status, {"error": str(refused)}, refused.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_request

    def _apply(self, fault: Fault | None) -> None:
        if fault is None:
            return
        time.sleep(fault.delay)
        if fault.status is not None:
            raise Refused(fault.status, f"fault {fault.status}")

    def _route(self, path: str) -> None:
        for method, pattern, name, writes in ROUTES:
            match = re.fullmatch(pattern, path) if method == self.command else None
            if match is None:
                continue
            given = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
            if "repo" in given:
                given["repo"] = self._repo(given["repo"], writes)
            getattr(self, name)(**given)
            return
        raise Refused(404, f"no such route: {self.command} {path}")

    # ------------------------------------------------------------------ HTTP
    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, body: bytes | dict | list = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, status)
        with self.hub.lock:
            self.hub.seen.append(seen)
        self.send_response(status)
        given = {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.fault.cut_after if self.fault is not None else None
        self.wfile.write(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _json(self) -> Any:
        return json.loads(self.body or b"{}")

    # ------------------------------------------------------------------ who may do what
    def _user(self) -> str | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        user = USERS.get(given.removeprefix("Bearer "))
        if user is None:
            raise Refused(401, "Invalid credentials in Authorization header")
        return user

    def _repo(self, name: str, writes: bool) -> Repo:
        """Returns the repository, if this user may see it and, for requests that change it, may write to it."""
        user, repo = self._user(), self.hub.repos.get(name)
        owner = name.split("/")[0]
        if repo is None or (repo.private and user != owner):
            raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        if writes and user is None:
            raise Refused(401, "Invalid username or password.")
        if writes and user != owner and not (self.query.get("create_pr") or self._only_asks()):
            raise Refused(403, f"user {user} may not write to {name}")
        return repo

    def _only_asks(self) -> bool:
        return "/preupload/" in self.path or self.path.endswith("/objects/batch")

    def _find(self, repo: Repo, revision: str) -> Commit:
        commit = repo.find(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # ------------------------------------------------------------------ users, repositories
    def whoami(self) -> None:
        user = self._user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        self._send(200, {"type": "user", "name": user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create_repo(self) -> None:
        user, asked = self._user(), self._json()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        owner = asked.get("organization") or user
        if owner != user:
            raise Refused(403, f"user {user} may not create repositories of {owner}")
        name = f"{owner}/{asked['name']}"
        exists = name in self.hub.repos
        if not exists:
            self.hub.create(name, asked.get("visibility") == "private" or bool(asked.get("private")))
        answer = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        self._send(
            409 if exists else 200, answer | ({"error": "You already created this model repo"} if exists else {})
        )

    def validate_yaml(self) -> None:
        """Checks what the Hub checks first: metadata must be a YAML mapping, and a licence must be a string."""
        metadata = _metadata(self._json()["content"])
        if not isinstance(metadata, dict) or not isinstance(metadata.get("license", ""), str):
            self._send(400, {"errors": [{"message": "metadata must be a mapping"}], "warnings": []})
        else:
            warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
            self._send(200, {"errors": [], "warnings": warnings})

    def model_info(self, repo: Repo, revision: str = "main") -> None:
        commit = self._find(repo, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        if self.query.get("blobs"):
            siblings = [
                {"rfilename": path, "size": len(blob.data), "blobId": blob.git_oid, **self._lfs(blob, "sha256")}
                for path, blob in commit.files.items()
            ]
        readme = commit.files.get("README.md")
        card = _metadata(readme.data.decode()) if readme else {}
        facts = {"id": repo.name, "sha": commit.sha, "private": repo.private, "siblings": siblings, "tags": []}
        self._send(200, facts | ({"cardData": card} if isinstance(card, dict) else {}))

    def _lfs(self, blob: Blob, key: str = "oid") -> dict[str, Any]:
        return {"lfs": {key: blob.sha256, "size": len(blob.data), "pointerSize": 134}} if blob.lfs else {}

    def _entry(self, path: str, blob: Blob) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(blob.data), "oid": blob.git_oid, **self._lfs(blob)}

    def tree(self, repo: Repo, revision: str, path: str = "") -> None:
        files = self._find(repo, revision).files
        inside = {name: blob for name, blob in files.items() if name.startswith(path + "/" if path else "")}
        if path and not inside:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        depth = path.count("/") + bool(path)
        folders = {"/".join(name.split("/")[: depth + 1]) for name in inside if name.count("/") > depth}
        recursive = self.query.get("recursive", "").lower() in ("true", "1")
        shown = [self._entry(name, blob) for name, blob in inside.items() if recursive or name.count("/") == depth]
        self._send(200, [*({"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)), *shown])

    def paths_info(self, repo: Repo, revision: str) -> None:
        files = self._find(repo, revision).files
        asked = parse_qs(self.body.decode()).get("paths", [])
        self._send(200, [self._entry(path, files[path]) for path in asked if path in files])

    # ------------------------------------------------------------------ revisions
    def list_refs(self, repo: Repo) -> None:
        def named(prefix: str) -> list[dict[str, str]]:
            return [
                {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": sha}
                for ref, sha in repo.refs.items()
                if ref.startswith(prefix)
            ]

        requests = {"pullRequests": named("refs/pr/")} if self.query.get("include_prs") else {}
        self._send(200, {"branches": named("refs/heads/"), "tags": named("refs/tags/"), "converts": [], **requests})

    def list_commits(self, repo: Repo, revision: str) -> None:
        self._find(repo, revision)
        shown = [{"id": c.sha, "title": c.title, "message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
                 for c in repo.history(revision)]  # fmt: skip
        self._send(200, shown)

    def create_branch(self, repo: Repo, name: str) -> None:
        if f"refs/heads/{name}" in repo.refs:
            raise Refused(409, f"Reference already exists: refs/heads/{name}")
        repo.refs[f"refs/heads/{name}"] = self._find(repo, self._json().get("startingPoint") or "main").sha
        self._send(200, {})

    def create_tag(self, repo: Repo, revision: str) -> None:
        name = f"refs/tags/{self._json()['tag']}"
        if name in repo.refs:
            raise Refused(409, f"Tag reference exists already: {name}")
        repo.refs[name] = self._find(repo, revision).sha
        self._send(200, {})

    # ------------------------------------------------------------------ upload
    def preupload(self, repo: Repo, revision: str) -> None:
        known = self._find(repo, revision).files
        answers = []
        for file in self._json()["files"]:
            path = file["path"]
            binary = b"\0" in base64.b64decode(file["sample"])
            answer = {"path": path, "shouldIgnore": False}
            answer["uploadMode"] = "lfs" if path.endswith(LFS_SUFFIXES) or binary else "regular"
            if path in known:
                answer["oid"] = known[path].oid
            answers.append(answer)
        self._send(200, {"files": answers})

    def lfs_batch(self, repo: Repo) -> None:
        objects = []
        for wanted in self._json()["objects"]:
            upload = {"href": f"{self.hub.storage_url}/{wanted['oid']}"}
            known = wanted["oid"] in self.hub.objects
            objects.append(wanted if known else {**wanted, "actions": {"upload": upload}})
        self._send(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        blob = Blob(self.body, lfs=True)
        if self.headers.get("Authorization"):
            raise Refused(400, "the storage takes signed addresses, not tokens")
        if blob.sha256 != oid:
            raise Refused(400, f"content has SHA-256 {blob.sha256}, not {oid}")
        self.hub.objects[oid] = self.body
        self._send(200, headers={"ETag": f'"{oid}"'})

    def commit(self, repo: Repo, revision: str) -> None:
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        parent = self._find(repo, revision)
        if header["value"].get("parentCommit", parent.sha) != parent.sha:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for operation in operations:
            self._change(files, operation["key"], operation["value"])
        request = None
        ref = f"refs/heads/{revision}" if f"refs/heads/{revision}" in repo.refs else revision
        if self.query.get("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
            ref, request = f"refs/pr/{number}", f"{self.hub.url}/{repo.name}/discussions/{number}"
            repo.refs[ref] = parent.sha
        elif ref not in repo.refs:
            raise Refused(403, f"{revision} is no branch")
        made = repo.commit(ref, header["value"]["summary"], files)
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo.name}/commit/{made.sha}", "commitOid": made.sha,
                         "success": True, **({"pullRequestUrl": request} if request else {})})  # fmt: skip

    def _change(self, files: dict[str, Blob], kind: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if kind == "file":
            files[path] = Blob(base64.b64decode(value["content"]), lfs=False)
        elif kind == "lfsFile":
            if value["oid"] not in self.hub.objects:
                raise Refused(400, f"LFS pointer of {path} points to an object that was not uploaded")
            files[path] = Blob(self.hub.objects[value["oid"]], lfs=True)
        elif kind == "deletedFile":
            if files.pop(path, None) is None:
                raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        elif kind == "deletedFolder":
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]

    # ------------------------------------------------------------------ download
    def resolve(self, repo: Repo, revision: str, path: str) -> None:
        """Sends regular files at once, and LFS files by a redirect to the storage."""
        commit = self._find(repo, revision)
        blob = commit.files.get(path)
        if blob is None:
            raise Refused(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.sha})
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        if blob.lfs:
            linked = {"X-Linked-Size": str(len(blob.data)), "X-Linked-Etag": f'"{blob.sha256}"'}
            self._send(302, headers={**headers, **linked, "Location": f"{self.hub.storage_url}/{blob.sha256}"})
        else:
            self._send_content(blob.data, headers)

    def serve(self, oid: str) -> None:
        if self.headers.get("Authorization"):
            raise Refused(400, "the storage takes signed addresses, not tokens")
        if oid not in self.hub.objects:
            raise Refused(404, "no such object")
        self._send_content(self.hub.objects[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _send_content(self, data: bytes, headers: dict[str, str]) -> None:
        """Sends all of a file, or the requested range."""
        headers = {**headers, "Content-Type": "application/octet-stream"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self._send(200, data, headers)
            return
        start, stop = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if start >= len(data):
            raise Refused(416, "Requested Range Not Satisfiable", **{"Content-Range": f"bytes */{len(data)}"})
        self._send(206, data[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})
