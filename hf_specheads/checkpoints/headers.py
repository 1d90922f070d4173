"""What a safetensors file says of its tensors in its first bytes, and heads of our own layout told from that alone.

Nothing here loads torch or transformers: whoever only asks what a folder holds does not wait for them.
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
# Weights by the names that safetensors gives their types, and what torch calls them.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
METADATA = "__metadata__"
# Fields that saved heads have, and the type of each; heads whose config.json has them otherwise are looked at closely.
FIELDS: dict[str, type] = {
    "architectures": list, "method": str, "vocab_size": int, "hidden_size": int, "feature_size": int,
    "embedding_size": int,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"tree_config": dict, "tuned": list, "target": dict, "pruned_vocab_size": int}


@dataclass(frozen=True)
class Glance:
    """Heads in our own layout as `config.json` and the headers of their files have them, unchecked against each other.

    Attributes:
        head_class: Name of their class.
        config: Fields of `config.json`; `None` for those that may be missing.
        parameters: Weights, counted.
        dtype: That of most weights, in torch's word, e.g. `bfloat16`.
        sizes: Bytes of every weight file.
        notes: Where the weights were found, if that is worth saying.
    """

    head_class: str
    config: SimpleNamespace
    parameters: int
    dtype: str
    sizes: dict[str, int]
    notes: tuple[str, ...]


def read_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor names of a safetensors file, and what its header says of each, as found: dtype, shape, data_offsets.

    Raises:
        CorruptCheckpointError: if it has no proper header.
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > min(MAX_HEADER_BYTES, file.stat().st_size - 8):
                raise ValueError(f"a header of {size} bytes")
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
    """Heads of a folder in our own layout; `None` where something asks for a closer look, [`look.look_at`], which
    says what: another layout, pickled or sharded weights, fields or tensors that are odd.

    Args:
        folder: With config and weights.
        model_types: Of the families that are known.
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
    """Whether a `config.json` has the fields that saved heads have, of the types they have."""
    return (
        all(isinstance(config.get(name), kind) for name, kind in FIELDS.items())
        and all(isinstance(config.get(name), (kind, type(None))) for name, kind in OPTIONAL.items())
        and len(config["architectures"]) == 1
        and all(isinstance(entry, dict) and {"machine", "dtype"} <= set(entry) for entry in config.get("tuned") or ())
        and config.get("quantization_config") is None
    )


def _counted(file: Path) -> dict[str, int] | None:
    """Weights of a file per type; `None` if its header is odd or does not fit its length."""
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
    """Raises [`HeadConfigError`] if the identity of the target, as far as it is there, is none."""
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
