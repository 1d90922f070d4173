"""`load_heads`: draft heads from a folder or the Hub, in this package's own layout or their authors'."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from .auto import HEADS
from .conversion import detect_from_config
from .conversion.checkpoint import read_checkpoint, usual_dtype
from .conversion.files import (
    CONFIG,
    INDEXES,
    WEIGHT_FILES,
    config_file,
    needed,
    read_index,
    read_json,
    weight_files,
)
from .conversion.reading import Found, identify, read_heads, with_note
from .conversion.remote import HUB_ERRORS, remote_headers
from .errors import HeadLoadError, MissingArgumentError, UnknownFormatError
from .modeling import DraftHead

logger = logging.getLogger(__name__)

REPOSITORY = r"[\w.-]+/[\w.-]+"


def load_heads(
    repo_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    positions_per_specialist: int | None = None,
    compile: bool = False,  # noqa: A002 (transformers' word)
    **tree_overrides: Any,
) -> DraftHead:
    """Loads draft heads, ready for `target.generate(..., assistant_model=heads)`.

    The layout is recognised by `config.json` and the tensors' names: this package's own, the authors' of EAGLE-1/2,
    HASS, PosS, EAGLE-3, Medusa and Hydra, and those of SpecForge, SGLang, ModelOpt, vLLM and speculators. One line
    says what was found and what had to be assumed. A folder may also be a training state of `accelerate`.

    Args:
        repo_or_path: Hub id or folder.
        revision: Branch, tag or commit on the Hub.
        dtype: Type of the weights; default as stored.
        device_map: As in transformers.
        token: Hub token for private repositories.
        local_files_only: Never ask the network.
        positions_per_specialist: Draft positions per specialist of PosS heads in the authors' layout, which store it
            nowhere; default from a name such as `PosS3-...`.
        compile: Compile the rounds of `generate` (`heads.compiled`).
        **tree_overrides: Fields of [`DraftTreeConfig`] (`kind`, `depth`, `top_k`, `total_tokens`, `choices`) that
            replace the saved ones.

    Returns:
        Heads in eval mode.

    Raises:
        HeadLoadError: (a `ValueError`) one of its subclasses, see `hf_specheads.errors`: unknown layout, damaged
            file, missing or unknown keys, contradicting shapes, NaN, missing config fields.
        ValueError: for impossible tree options.
    """
    name = name_of(repo_or_path)
    folder = _local_folder(repo_or_path, revision=revision, token=token, local_files_only=local_files_only)
    try:
        found, dtype = _with_dtype(read_heads(folder, name, positions_per_specialist), dtype)
        heads = HEADS[found.config.model_type].from_pretrained(
            None, config=found.config, state_dict=found.tensors, dtype=dtype, device_map=device_map
        )
    except HeadLoadError as error:
        raise type(error)(f"cannot load draft heads from {str(repo_or_path)!r}: {error}") from error
    announce(name, found)
    heads.config.name_or_path = heads.name_or_path = str(repo_or_path)
    heads.compiled = compile
    if not Path(repo_or_path).is_dir():
        heads.config._commit_hash = folder.name  # as transformers does; the adapter of a target is of the same commit
    if tree_overrides:
        heads.tree_config = heads.tree_config.replace(**tree_overrides)
    return heads.eval()


def _with_dtype(found: Found, dtype: torch.dtype | str | None) -> tuple[Found, torch.dtype | str]:
    """The type to load in, by default the one most weights are stored in; others are noted."""
    if dtype not in (None, "auto"):
        return found, dtype
    usual = usual_dtype(found.tensors)
    other = {str(t.dtype) for t in found.tensors.values() if t.dtype.is_floating_point and t.dtype != usual}
    return (with_note(found, f"weights of {', '.join(sorted(other))} become {usual}") if other else found), usual


def announce(name: str, found: Found) -> None:
    """Logs what was found and every assumption, visibly unless logging was turned down.

    The line is information; where nobody shows information, as by default, it is logged as a warning, which Python
    and notebooks print. `logging.getLogger("hf_specheads")` and transformers' verbosity silence it.
    """
    if transformers.utils.logging.get_verbosity() > logging.WARNING:
        return
    shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    logger.log(logging.INFO if shown else logging.WARNING, "%s: %s", name, found)


# ------------------------------------------------------------------ looking without loading
@dataclass(frozen=True)
class Look:
    """What a folder or repository is, as far as headers tell.

    Attributes:
        name: Of the folder or repository.
        raw_config: Its `config.json`.
        sizes: Bytes of every weight file.
        found: The heads; `None` where the weights have no header that can be read without downloading them.
        needed: Arguments `load_heads` must be given.
    """

    name: str
    raw_config: dict[str, Any]
    sizes: dict[str, int]
    found: Found | None
    needed: tuple[str, ...] = ()


def look_at(
    repo_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    positions_per_specialist: int | None = None,
    download: bool = False,
) -> Look:
    """Says what a folder or repository holds without loading weights: from `config.json` and from the headers of
    safetensors files, of which the Hub is asked for the first bytes. Takes the arguments of [`load_heads`]; with
    `download` it looks at a repository's weights on this machine, pickled ones too.

    Raises:
        HeadLoadError: (a `ValueError`) one of its subclasses, as far as headers betray what is wrong.
    """
    name, folder = name_of(repo_or_path), Path(repo_or_path)
    hub = {"revision": revision, "token": token, "local_files_only": local_files_only}
    if folder.is_dir() or download:
        folder = _local_folder(repo_or_path, **hub)
        raw_config, weights = read_json(config_file(folder)), weight_files(folder)
        sizes = {file.name: file.stat().st_size for file in weights.files}
        checkpoint = read_checkpoint(weights, headers_only=True)
    else:
        repo, raw_config = str(repo_or_path), read_json(_config_of(repo_or_path, **hub))
        sizes, checkpoint = remote_headers(repo, lambda file: _download(repo, file, **hub), **hub)
    if checkpoint is None:
        return Look(name, raw_config, sizes, None)
    try:
        return Look(name, raw_config, sizes, identify(raw_config, checkpoint, name, positions_per_specialist))
    except MissingArgumentError:
        return Look(name, raw_config, sizes, identify(raw_config, checkpoint, name, 1), ("positions_per_specialist",))


# ------------------------------------------------------------------ files
def _local_folder(repo_or_path: str | os.PathLike, **hub: Any) -> Path:
    """The folder itself, or the local copy of a Hub repository with its config and weights."""
    if Path(repo_or_path).is_dir():
        return Path(repo_or_path)
    repo, config = str(repo_or_path), _config_of(repo_or_path, **hub)
    hub["revision"] = config.parent.name  # the commit: a repository may change while it is read, and caches ask less
    for file in WEIGHT_FILES:
        found = _download(repo, file, **hub)
        if found is None:
            continue
        if file in INDEXES:
            index = read_index(Path(found))
            for shard in sorted({index[key] for key in needed(index)}):
                _download(repo, shard, **hub)
        break
    return config.parent


def _config_of(repo_or_path: str | os.PathLike, **hub: Any) -> Path:
    """Local copy of a Hub repository's config, of a layout that is read.

    Raises:
        HeadLoadError: if there is no such repository, or it names itself as something else.
    """
    if Path(repo_or_path).exists():
        raise HeadLoadError(f"{str(repo_or_path)!r} is a file; pass the folder it is in, with its config.json.")
    repo = str(repo_or_path)
    if not re.fullmatch(REPOSITORY, repo) or repo.startswith("."):
        raise HeadLoadError(f"{repo!r} is no existing folder and no Hub id of the form 'user/name'.")
    config = _download(repo, CONFIG, **hub)
    if config is None:
        raise HeadLoadError(f"{repo!r} has no config.json on the Hub; it holds no draft heads.")
    try:
        detect_from_config(read_json(Path(config)))
    except UnknownFormatError as error:
        raise UnknownFormatError(f"cannot load draft heads from {repo!r}: {error}") from error
    return Path(config)


def name_of(repo_or_path: str | os.PathLike) -> str:
    """Name of a folder or of a repository, which tells some things that no file says."""
    return Path(repo_or_path).resolve().name if os.path.isdir(repo_or_path) else str(repo_or_path)


def _download(repo: str, file: str, **hub: Any) -> str | None:
    """Local path of a file of a repository, `None` if the repository does not have it.

    Raises:
        HeadLoadError: if it cannot be had, which does not mean that it is missing.
    """
    if file != CONFIG and try_to_load_from_cache(repo, file, revision=hub["revision"]) is _CACHED_NO_EXIST:
        return None
    try:
        return hf_hub_download(repo, file, **hub)
    except LocalEntryNotFoundError as error:
        if file != CONFIG and (hub["local_files_only"] or is_offline_mode()):
            return None
        raise HeadLoadError(
            f"{repo!r} is neither a folder nor, with its {file}, in the local cache, and the Hub was not asked or did "
            "not answer; check the name, the connection and `local_files_only`."
        ) from error
    except EntryNotFoundError:
        return None
    except (*HUB_ERRORS, HFValidationError, OfflineModeIsEnabled) as error:
        reason = " ".join(line for line in str(error).splitlines()[:3] if line)
        raise HeadLoadError(f"{repo!r} cannot be fetched: {reason}") from error
