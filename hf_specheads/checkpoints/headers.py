"""Reads the headers of safetensors files, and describes heads in our own layout from headers and `config.json` alone.

Nothing here imports torch or transformers, so that a command that only inspects a folder starts quickly.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

from ..errors import CorruptCheckpointError, HeadConfigError, HeadLoadError
from .files import config_file, read_json, weight_files

MAX_HEADER_BYTES = 2**25
# Floating-point dtypes, by safetensors' names, with torch's names.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
METADATA = "__metadata__"
# Fields of the `config.json` of saved heads, and their types. If a field differs, `glance_at` leaves the folder to
# the full check.
FIELDS: dict[str, type] = {
    "architectures": list, "method": str, "vocab_size": int, "hidden_size": int, "feature_size": int,
    "embedding_size": int,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"tree_config": dict, "tuned": list, "target": dict, "pruned_vocab_size": int}


@dataclass(frozen=True)
class Glance:
    """Heads in our own layout, as described by `config.json` and file headers; the two are not checked for agreement.

    Attributes:
        head_class: Name of the heads' class.
        config: Fields of `config.json`; optional fields that are missing are `None`.
        parameters: Number of floating-point weights.
        dtype: Dtype of most weights, by torch's name, e.g. `bfloat16`.
        sizes: Bytes of every weight file, by file name.
        notes: Remarks for the user about where the weights were found.
    """

    head_class: str
    config: SimpleNamespace
    parameters: int
    dtype: str
    sizes: dict[str, int]
    notes: tuple[str, ...]


def read_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Reads the header of a safetensors file: by tensor name, the unchecked fields dtype, shape and data_offsets.

    Raises:
        CorruptCheckpointError: If the file has no valid header.
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > min(MAX_HEADER_BYTES, file.stat().st_size - 8):
                raise ValueError(f"its header claims to have {size} bytes")
            pairs = json.loads(stream.read(size), object_pairs_hook=list)
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or no safetensors file: {error}; download it again."
        ) from error
    entries: dict[str, dict[str, Any]] = {}
    for key, value in pairs if isinstance(pairs, list) else ():
        if key in entries:
            raise CorruptCheckpointError(f"{file} names the tensor {key} twice; download it again.")
        if key != METADATA:
            pairs_inside = isinstance(value, list) and all(isinstance(pair, tuple) for pair in value)
            entries[key] = dict(value) if pairs_inside else {}
    return entries


def glance_at(folder: Path, model_types: Collection[str]) -> Glance | None:
    """Describes the heads of a folder in our own layout, without checking them.

    Args:
        folder: Folder with config and weights.
        model_types: Values of `model_type` of the known families.

    Returns:
        The heads, or `None` if the folder needs the full check of [`look.look_at`], which names the reason: another
        layout, pickled or sharded weights, unusual fields or tensors.
    """
    try:
        raw_config, weights = read_json(config_file(folder)), weight_files(folder)
        plain = raw_config.get("model_type") in model_types and _is_plain(raw_config)
        if not plain or len(weights.files) > 1 or weights.index or weights.files[0].suffix != ".safetensors":
            return None
        refuse_odd_target(raw_config.get("target"))
        numbers, file = _counted(weights.files[0]), weights.files[0]
    except (HeadLoadError, OSError):
        return None
    if numbers is None:
        return None
    config = SimpleNamespace(**(dict.fromkeys(OPTIONAL) | raw_config))
    usual = FLOATS[max(numbers, key=lambda dtype: numbers[dtype])]
    sizes = {file.name: file.stat().st_size}
    return Glance(raw_config["architectures"][0], config, sum(numbers.values()), usual, sizes, weights.notes)


def _is_plain(config: dict[str, Any]) -> bool:
    """Whether a `config.json` has the fields of saved heads, each of the expected type, and no quantization."""
    return (
        all(isinstance(config.get(name), kind) for name, kind in FIELDS.items())
        and all(isinstance(config.get(name), (kind, type(None))) for name, kind in OPTIONAL.items())
        and len(config["architectures"]) == 1
        and all(isinstance(entry, dict) and {"machine", "dtype"} <= set(entry) for entry in config.get("tuned") or ())
        and config.get("quantization_config") is None
    )


def _counted(file: Path) -> dict[str, int] | None:
    """Counts the weights of a file per dtype; `None` if its header is unusual or does not fit the file's length."""
    entries = read_entries(file)
    with file.open("rb") as stream:
        data = file.stat().st_size - 8 - struct.unpack("<Q", stream.read(8))[0]
    ends, counted = [0], dict.fromkeys(FLOATS, 0)
    for entry in entries.values():
        dtype, shape, offsets = (entry.get(name) for name in ("dtype", "shape", "data_offsets"))
        if dtype not in (*FLOATS, *INTEGERS) or not _is_sizes(shape) or not _is_sizes(offsets):
            return None
        ends.append(offsets[-1])
        if dtype in FLOATS:
            counted[dtype] += math.prod(shape)
    return counted if entries and max(ends) == data else None


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def refuse_odd_target(target: object) -> None:
    """Raises [`HeadConfigError`] if the config's `target` is present but is not the identity of a target."""
    if target is None:
        return
    fingerprint = target.get("fingerprint") if isinstance(target, dict) else None
    plain = fingerprint is None or (
        isinstance(fingerprint, list) and all(isinstance(entry, (int, float)) for entry in fingerprint)
    )
    if not isinstance(target, dict) or not plain or not isinstance(target.get("name"), (str, NoneType)):
        raise HeadConfigError(
            f"config.json has target={str(target)[:80]}, expected a name and a fingerprint, or null."
        )
