"""Gets files of a folder or a Hub repository: downloads, and headers of weight files by range requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, Unpack, cast

from huggingface_hub import _CACHED_NO_EXIST, HfApi, hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    SafetensorsParsingError,
)

from ..errors import CorruptCheckpointError, HeadLoadError, UnknownFormatError
from ..publishing.card.facts import is_hub_id
from .files import CONFIG, INDEXES, SAFETENSORS_INDEX, WEIGHT_FILES, needed, read_index, read_json
from .layouts.detect import detect_from_config
from .tensors import Checkpoint, check_tensors, header_tensor, without_common_prefix

# Errors of the Hub and of the HTTP client that huggingface_hub uses. The client differs between versions of
# huggingface_hub, so its error class is taken from the bases of HfHubHTTPError.
HUB_ERRORS = (HfHubHTTPError, cast("type[Exception]", HfHubHTTPError.__bases__[0]), OSError)


class HubOptions(TypedDict):
    """Arguments of `load_heads` that say which revision to read and whether the Hub may be accessed."""

    revision: str | None
    token: str | bool | None
    local_files_only: bool


# ------------------------------------------------------------------ files
def local_folder(repo_or_path: str | os.PathLike[str], **hub: Unpack[HubOptions]) -> Path:
    """Returns the folder itself, or the local copy of a Hub repository after downloading its config and weights."""
    if Path(repo_or_path).is_dir():
        return Path(repo_or_path)
    repo, config = str(repo_or_path), config_of(repo_or_path, **hub)
    # All files are fetched from one commit, because the repository may change meanwhile, and caches of a commit need
    # fewer requests.
    hub["revision"] = config.parent.name
    for file in WEIGHT_FILES:
        path = download_file(repo, file, **hub)
        if path is None:
            continue
        if file in INDEXES:
            index = read_index(Path(path))
            for shard in sorted({index[key] for key in needed(index)}):
                download_file(repo, shard, **hub)
        break
    return config.parent


def config_of(repo_or_path: str | os.PathLike[str], **hub: Unpack[HubOptions]) -> Path:
    """Downloads the config of a Hub repository and returns its local path.

    Raises:
        HeadLoadError: If there is no such repository, or its config names a layout that is not supported.
    """
    if Path(repo_or_path).exists():
        raise HeadLoadError(f"{str(repo_or_path)!r} is a file; pass the folder that contains it and its config.json.")
    repo = str(repo_or_path)
    if not is_hub_id(repo):
        raise HeadLoadError(f"{repo!r} is neither an existing folder nor a Hub id of the form 'user/name'.")
    config = download_file(repo, CONFIG, **hub)
    if config is None:
        raise HeadLoadError(f"{repo!r} has no config.json on the Hub, so it does not hold draft heads.")
    try:
        detect_from_config(read_json(Path(config)))
    except UnknownFormatError as error:
        raise UnknownFormatError(f"cannot load draft heads from {repo!r}: {error}") from error
    return Path(config)


def name_of(repo_or_path: str | os.PathLike[str]) -> str:
    """Name of a folder or repository; it reveals some facts that no file states."""
    return Path(repo_or_path).resolve().name if os.path.isdir(repo_or_path) else str(repo_or_path)


def download_file(repo: str, file: str, **hub: Unpack[HubOptions]) -> str | None:
    """Downloads a file of a repository and returns its local path, or `None` if the repository does not have it.

    Raises:
        HeadLoadError: If the file cannot be fetched, although the repository may have it.
    """
    if file != CONFIG and try_to_load_from_cache(repo, file, revision=hub["revision"]) is _CACHED_NO_EXIST:
        return None
    try:
        return hf_hub_download(repo, file, **hub)
    except LocalEntryNotFoundError as error:
        if file != CONFIG and (hub["local_files_only"] or is_offline_mode()):
            return None
        raise HeadLoadError(
            f"{repo!r} is not a folder, its {file} is not in the local cache, and the Hub was not asked or did not "
            "answer; check the name, the connection and `local_files_only`."
        ) from error
    except EntryNotFoundError:
        return None
    except (*HUB_ERRORS, HFValidationError, OfflineModeIsEnabled) as error:
        reason = " ".join(line for line in str(error).splitlines()[:3] if line)
        raise HeadLoadError(f"{repo!r} cannot be fetched: {reason}") from error


def remote_headers(
    repo: str,
    download: Callable[[str], str | None],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> tuple[dict[str, int], Checkpoint | None]:
    """Reads the sizes of a repository's weight files, and the headers of their tensors, without downloading them.

    Args:
        repo: Hub id.
        download: Downloads a small file (an index) and returns its path.
        revision, token, local_files_only: As for `load_heads`.

    Returns:
        Bytes by file name, and the tensors on the device `meta`; `None` instead of the tensors if the weights are
        pickled, because pickles have no header.

    Raises:
        HeadLoadError: If there are no weights, or the Hub does not answer.
        CorruptCheckpointError: If a header or an index is invalid.
    """
    if local_files_only:
        raise HeadLoadError(
            f"{repo!r} can be inspected only on the Hub; leave out local_files_only, or pass the folder of a local "
            "copy."
        )
    api = HfApi(token=token)
    try:
        listed = {file.rfilename: file.size or 0
                  for file in api.model_info(repo, revision=revision, files_metadata=True).siblings or ()}  # fmt: skip
    except HUB_ERRORS as error:
        raise HeadLoadError(f"{repo!r} cannot be requested from the Hub: {str(error).splitlines()[0]}") from error
    first = next((name for name in WEIGHT_FILES if name in listed), None)
    if first is None:
        raise HeadLoadError(f"{repo!r} has no weights; expected one of {', '.join(WEIGHT_FILES)}.")
    index = read_index(Path(download(first) or "")) if first in INDEXES else None
    names = [first] if index is None else sorted({index[key] for key in needed(index)})
    sizes = {name: listed.get(name, 0) for name in names}
    if not first.endswith(".safetensors") and first != SAFETENSORS_INDEX:
        return sizes, None
    tensors = {}
    for name in names:
        try:
            header = api.parse_safetensors_file_metadata(repo, name, revision=revision, token=token).tensors
        except (SafetensorsParsingError, NotASafetensorsRepoError) as error:
            raise CorruptCheckpointError(f"{name} of {repo!r} is not a safetensors file: {error}") from error
        except HUB_ERRORS as error:
            raise HeadLoadError(f"the header of {name} of {repo!r} cannot be read: {error}") from error
        for key in needed(header):
            tensors[key] = header_tensor(key, header[key].dtype, list(header[key].shape), name)
    check_tensors(tensors, Path(names[0]))
    return sizes, Checkpoint(without_common_prefix(tensors), tuple(Path(name) for name in names))
