"""Folders that are written shard by shard and can be resumed: regenerated chats and stored features."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


class OtherManifestError(ValueError):
    """The folder was started with other settings."""


class ShardFolder:
    """A folder of shards, each complete or absent, with a manifest of the settings they were made with.

    A shard is a data file, and a record `shard-00000.json` of its contents that is written after it. Several processes
    may write different shards of one folder.

    Args:
        folder: Path of the folder, created if it does not exist.
        kind: Kind of data, e.g. `"regeneration"`.
        settings: Plain values. A later run with the same settings resumes; one with other settings is refused.

    Raises:
        OtherManifestError: if settings differ, naming old and new values, or if the folder holds other files.
    """

    def __init__(self, folder: str | os.PathLike, kind: str, settings: Mapping[str, Any]):
        self.folder = Path(folder)
        manifest = json.loads(json.dumps({"kind": kind, **settings}, default=str))
        path = self.folder / MANIFEST
        if path.is_file():
            _refuse_other(self.folder, read_manifest(self.folder), manifest)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise OtherManifestError(f"{folder} is not empty and has no {MANIFEST}; write into another folder.")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(manifest, indent=2) + "\n")

    def data_path(self, index: int, suffix: str) -> Path:
        """Returns the path of a shard's data."""
        return self.folder / f"shard-{index:05d}{suffix}"

    def is_done(self, index: int) -> bool:
        """Whether a shard is complete."""
        return self.data_path(index, ".json").is_file()

    def write_lines(self, index: int, lines: Iterable[Mapping[str, Any]], suffix: str = ".jsonl") -> None:
        """Writes rows of a shard as JSON lines."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_whole(self.data_path(index, suffix), text)

    def finish(self, index: int, record: Mapping[str, int]) -> None:
        """Marks a shard as complete by writing its counts as its record."""
        write_whole(self.data_path(index, ".json"), json.dumps(record) + "\n")

    def counts(self) -> Counter[str]:
        """Returns the sums of the records of all complete shards."""
        total: Counter[str] = Counter()
        for path in sorted(self.folder.glob("shard-*.json")):
            total.update(json.loads(path.read_text(encoding="utf-8")))
        return total


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """Reads the settings that the shards of a folder were made with.

    Raises:
        FileNotFoundError: if the folder has no manifest.
    """
    return json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))


def kind_of_folder(folder: str | os.PathLike) -> str | None:
    """Returns the kind of data in a folder of shards, `None` for other folders."""
    try:
        return read_manifest(folder).get("kind")
    except (OSError, ValueError, AttributeError):
        return None


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: the complete text or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _refuse_other(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if names:
        differences = "; ".join(f"{name} was {theirs.get(name)!r} and is now {ours.get(name)!r}" for name in names)
        raise OtherManifestError(
            f"{folder} was started with other settings: {differences}. Give the old ones, or write to another folder."
        )
