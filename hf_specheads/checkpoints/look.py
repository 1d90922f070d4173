"""Inspects a folder or repository without loading weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingArgumentError
from .fetch import HubOptions, config_of, download_file, local_folder, name_of, remote_headers
from .files import config_file, read_json, weight_files
from .read import StoredHeads, identify
from .tensors import Checkpoint, read_checkpoint


# ------------------------------------------------------------------ looking without loading
@dataclass(frozen=True)
class Look:
    """Contents of a folder or repository, as far as headers tell.

    Attributes:
        name: Name of the folder or repository.
        raw_config: Contents of its `config.json`.
        sizes: Bytes of every weight file, by file name.
        found: The draft heads; `None` if the weights have no header that can be read without downloading them.
        needed: Names of arguments that `load_heads` will require.
    """

    name: str
    raw_config: dict[str, Any]
    sizes: dict[str, int]
    found: StoredHeads | None
    needed: tuple[str, ...] = ()


def look_at(
    repo_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    positions_per_specialist: int | None = None,
    download: bool = False,
) -> Look:
    """Inspects a folder or repository without loading weights: reads `config.json` and headers of safetensors files.

    From the Hub, only the first bytes of a weight file are requested. The arguments are those of [`load_heads`]; with
    `download`, a repository's files are downloaded first, so that pickled weights can be inspected too.

    Raises:
        HeadLoadError: (a `ValueError`) one of its subclasses, for problems that headers reveal.
    """
    name, folder = name_of(repo_or_path), Path(repo_or_path)
    hub = HubOptions(revision=revision, token=token, local_files_only=local_files_only)
    checkpoint: Checkpoint | None
    if folder.is_dir() or download:
        folder = local_folder(repo_or_path, **hub)
        raw_config, weights = read_json(config_file(folder)), weight_files(folder)
        sizes = {file.name: file.stat().st_size for file in weights.files}
        checkpoint = read_checkpoint(weights, headers_only=True)
    else:
        repo, raw_config = str(repo_or_path), read_json(config_of(repo_or_path, **hub))
        sizes, checkpoint = remote_headers(repo, lambda file: download_file(repo, file, **hub), **hub)
    if checkpoint is None:
        return Look(name, raw_config, sizes, None)
    try:
        return Look(name, raw_config, sizes, identify(raw_config, checkpoint, name, positions_per_specialist))
    except MissingArgumentError:
        return Look(name, raw_config, sizes, identify(raw_config, checkpoint, name, 1), ("positions_per_specialist",))
