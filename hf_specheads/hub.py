"""`load_heads`: draft heads from a folder or the Hub, in this package's own layout or their authors'."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from .auto import HEADS, build_config
from .configuration import DraftHeadConfig
from .conversion import LAYOUTS, OURS, detect_from_config, detect_from_keys
from .conversion.checkpoint import (
    SAFETENSORS_INDEX,
    WEIGHT_FILES,
    Checkpoint,
    check_dtypes,
    read_checkpoint,
    read_json,
)
from .errors import CheckpointShapeError, HeadConfigError, HeadLoadError, UnknownFormatError, refuse_wrong_keys
from .modeling import DraftHead

logger = logging.getLogger(__name__)

MAX_SPECIALISTS = 1024


def load_heads(
    repo_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    positions_per_specialist: int | None = None,
    **tree_overrides: Any,
) -> DraftHead:
    """Loads draft heads, ready for `target.generate(..., assistant_model=heads)`.

    The layout is recognised by `config.json` and the tensors' names: this package's own, or the authors' of EAGLE-1/2,
    HASS, PosS, EAGLE-3, Medusa and Hydra. What had to be assumed is logged in one line.

    Args:
        repo_or_path: Hub id or folder.
        revision: Branch, tag or commit on the Hub.
        dtype: Type of the weights; default as stored.
        device_map: As in transformers.
        token: Hub token for private repositories.
        local_files_only: Never ask the network.
        positions_per_specialist: Draft positions per specialist of PosS heads in the authors' layout, which store it
            nowhere; default from a name such as `PosS3-...`.
        **tree_overrides: Fields of [`DraftTreeConfig`] (`kind`, `depth`, `top_k`, `total_tokens`, `choices`) that
            replace the saved ones.

    Returns:
        Heads in eval mode.

    Raises:
        HeadLoadError: (a `ValueError`) one of its subclasses, see `hf_specheads.errors`: unknown layout, damaged
            file, missing or unknown keys, contradicting shapes, NaN, missing config fields.
        ValueError: for impossible tree options.
    """
    name = Path(repo_or_path).resolve().name if os.path.isdir(repo_or_path) else str(repo_or_path)
    folder = _local_folder(repo_or_path, revision=revision, token=token, local_files_only=local_files_only)
    try:
        heads = _load_folder(folder, name, dtype, device_map, positions_per_specialist)
    except HeadLoadError as error:
        raise type(error)(f"cannot load draft heads from {str(repo_or_path)!r}: {error}") from error
    heads.config.name_or_path = heads.name_or_path = str(repo_or_path)
    if tree_overrides:
        heads.tree_config = heads.tree_config.replace(**tree_overrides)
    return heads.eval()


def _load_folder(
    folder: Path, name: str, dtype: torch.dtype | str | None, device_map: Any, positions: int | None
) -> DraftHead:
    raw_config = read_json(folder / "config.json")
    layout = detect_from_config(raw_config)
    config = _own_config(raw_config, positions) if layout == OURS else None
    checkpoint = read_checkpoint(folder)
    if config is not None:
        tensors, notes = checkpoint.tensors, []
        _check_against_config(checkpoint, config)
    else:
        layout = detect_from_keys(checkpoint.shapes, raw_config)
        converted = LAYOUTS[layout].convert(raw_config, checkpoint.tensors, name, positions)
        config, tensors, notes = converted.config, converted.tensors, converted.assumptions
    head_class = HEADS[config.model_type]
    check_dtypes(tensors, checkpoint.files[0], head_class.integer_tensors)
    _log_found(name, layout, config, notes)
    if dtype in (None, "auto"):
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point)
    return head_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, device_map=device_map)


# ------------------------------------------------------------------ our own layout
def _own_config(raw_config: dict[str, Any], positions: int | None) -> DraftHeadConfig:
    """The saved config, refused if a field is missing (the defaults are another model's) or impossible."""
    model_type = raw_config["model_type"]
    if model_type not in HEADS:
        raise UnknownFormatError(
            f"config.json has model_type={model_type!r}, known are {sorted(HEADS)}; a newer version of this "
            "package may know it."
        )
    config_class = HEADS[model_type].config_class
    if missing := [field for field in config_class.required_fields if raw_config.get(field) is None]:
        raise HeadConfigError(f"config.json lacks {missing}; restore the field(s) from the original file.")
    specialists = raw_config.get("num_specialists", 1)
    if not isinstance(specialists, int) or not 1 <= specialists <= MAX_SPECIALISTS:
        raise HeadConfigError(f"config.json has num_specialists={specialists!r}, expected 1 to {MAX_SPECIALISTS}.")
    saved = raw_config.get("positions_per_specialist")
    if positions is not None and saved != positions:
        raise HeadConfigError(
            f"the heads say positions_per_specialist={saved}, the argument says {positions}; leave the argument out."
        )
    fields = {key: value for key, value in raw_config.items() if key not in ("model_type", "transformers_version")}
    try:
        return build_config(config_class, fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise HeadConfigError(f"config.json is not usable: {error}") from error


def _check_against_config(checkpoint: Checkpoint, config: DraftHeadConfig) -> None:
    """Compares keys and shapes with what the config promises, before a model of those sizes is built."""
    head_class = HEADS[config.model_type]
    try:
        with torch.device("meta"):
            heads = head_class(config)
        tied = heads.all_tied_weights_keys  # saved once, under the other name
        expected = {key: tuple(tensor.shape) for key, tensor in heads.state_dict().items() if key not in tied}
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise HeadConfigError(f"config.json describes heads that cannot be built: {error}") from error
    found = checkpoint.shapes
    refuse_wrong_keys(missing=set(expected) - set(found), unknown=set(found) - set(expected))
    for key, shape in expected.items():
        if found[key] != shape:
            raise CheckpointShapeError(
                f"{key} has shape {list(found[key])}, config.json promises {list(shape)}; one of the two is damaged."
            )


def _log_found(name: str, layout: str, config: DraftHeadConfig, notes: list[str]) -> None:
    count = getattr(config, "num_specialists", 1)
    specialists = f", {count} specialists of {config.positions_per_specialist} draft position(s)" if count > 1 else ""
    logger.info(
        "%s: %s heads in %s layout (%s%s)%s",
        name,
        config.method,
        "this package's own" if layout == OURS else "the authors'",
        f"V={config.vocab_size}, H={config.feature_size}",
        specialists,
        f"; assumed: {'; '.join(notes)}" if notes else "",
    )


# ------------------------------------------------------------------ files
def _local_folder(repo_or_path: str | os.PathLike, **hub: Any) -> Path:
    """The folder itself, or the local copy of a Hub repository with its config and weights."""
    path = Path(repo_or_path)
    if path.is_dir():
        return path
    if path.exists():
        raise HeadLoadError(f"{str(repo_or_path)!r} is a file; pass the folder it is in, with its config.json.")
    repo = str(repo_or_path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or repo.startswith("."):
        raise HeadLoadError(f"{repo!r} is no existing folder and no Hub id of the form 'user/name'.")
    config = _download(repo, "config.json", **hub)
    if config is None:
        raise HeadLoadError(f"{repo!r} has no config.json on the Hub; it holds no draft heads.")
    if refused := _refused_early(Path(config)):
        raise UnknownFormatError(f"cannot load draft heads from {repo!r}: {refused}")
    for file in WEIGHT_FILES:
        found = _download(repo, file, **hub)
        if found is None:
            continue
        if file == SAFETENSORS_INDEX:
            for shard in sorted(set(read_json(Path(found)).get("weight_map", {}).values())):
                _download(repo, str(shard), **hub)
        break
    return Path(config).parent


def _refused_early(config: Path) -> str | None:
    try:
        detect_from_config(read_json(config))
    except UnknownFormatError as error:
        return str(error)
    return None


def _download(repo: str, file: str, **hub: Any) -> str | None:
    """Local path of a file of a repository, `None` if the repository does not have it."""
    try:
        return hf_hub_download(repo, file, **hub)
    except LocalEntryNotFoundError as error:
        if file != "config.json":
            return None
        raise HeadLoadError(
            f"{repo!r} is neither a folder nor in the local cache, and the Hub was not asked or not reached; check "
            "the name, the connection and `local_files_only`."
        ) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise HeadLoadError(f"{repo!r} cannot be fetched: {str(error).splitlines()[0]}") from error
