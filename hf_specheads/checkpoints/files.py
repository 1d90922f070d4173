"""Finds the files of a checkpoint and reads its JSON, without trusting either."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CorruptCheckpointError, HeadLoadError
from .layouts.keys import EMBEDDING

CONFIG = "config.json"
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_INDEX = "pytorch_model.bin.index.json"
INDEXES = (SAFETENSORS_INDEX, PICKLE_INDEX)
# Names of weight files, in order of preference: the first that exists is read. Safetensors come before pickles, and in
# each format the common names come before those that only Medusa's and Hydra's code writes.
WEIGHT_FILES = (
    SAFETENSORS, SAFETENSORS_INDEX, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors", "pytorch_model.bin",
    PICKLE_INDEX, "medusa_lm_head.pt", "hydra_lm_head.pt",
)  # fmt: skip
# Weight files of `accelerate`'s training states, the files that mark a state with a second model, and files whose
# presence identifies a training state and that are never read.
STATE_FILES = (SAFETENSORS, "model_0.safetensors", "pytorch_model.bin", "pytorch_model_0.bin")
SECOND_MODEL = ("model_1.safetensors", "pytorch_model_1.bin")
STATE_SIGNS = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
STATE_FOLDER = re.compile(r"(state|checkpoint)_\d+")
# Keys of Medusa heads inside the checkpoint of a whole target. Of the target's own weights only the embedding is read.
IN_TARGET = re.compile(r"(?:module\.)?(?:model\.)?medusa_heads?\.(?=\d|blocks\.|lm_heads\.)")
EMBEDDINGS = (f"model.{EMBEDDING}", EMBEDDING)
MAX_JSON_BYTES = 2**25
NO_JSON = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
MAX_SHARDS = 1000


@dataclass(frozen=True)
class WeightFiles:
    """Weight files of a checkpoint.

    Attributes:
        files: Files to read.
        index: File name of every key, from the index of a sharded checkpoint; `None` without an index.
        notes: Remarks for the user about where the files were found.
    """

    files: tuple[Path, ...]
    index: dict[str, str] | None = None
    notes: tuple[str, ...] = field(default=())


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object whose names are all distinct.

    Infinity and NaN, which JSON lacks, are read in transformers' notation, e.g. `{"__float__": "Infinity"}`.

    Raises:
        CorruptCheckpointError: If the file is missing, too large, not JSON, not an object, or repeats a name.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CorruptCheckpointError(f"{path} has {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}.")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} does not exist; a folder of draft heads needs a {path.name}.") from error
    except CorruptCheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def _once(pairs: list[tuple[str, object]]) -> object:
    value = dict(pairs)
    if value.keys() == {"__float__"}:
        return NO_JSON.get(str(value["__float__"]), value)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return value


# ------------------------------------------------------------------ folders
def config_file(folder: Path) -> Path:
    """Path of a folder's `config.json`; a training state without one uses that of its parent folder."""
    own = folder / CONFIG
    if not own.exists() and _is_state(folder) and (folder.resolve().parent / CONFIG).exists():
        return folder.resolve().parent / CONFIG
    return own


def weight_files(folder: Path) -> WeightFiles:
    """Finds the weight files of a folder.

    They are the first of [`WEIGHT_FILES`] that exists, the shards named by its index, or the files of the only
    training state in the folder.

    Raises:
        HeadLoadError: If there are no weights, several training states or several models, or if the weights are
            scattered over processes (DeepSpeed, FSDP).
        CorruptCheckpointError: If an index is invalid, or a shard is missing.
    """
    if (folder / "pytorch_model").is_dir() or any(folder.glob("pytorch_model_fsdp_*")):
        raise HeadLoadError(
            f"{folder} is a training state whose weights are scattered over processes (DeepSpeed or FSDP); gather "
            "them first, with its zero_to_fp32.py or `accelerate merge-weights`."
        )
    names = WEIGHT_FILES + (STATE_FILES if _is_state(folder) else ())
    first = next((name for name in names if (folder / name).exists()), None)
    if first is None:
        return _files_of_state(folder)
    if _is_state(folder) and (several := [name for name in SECOND_MODEL if (folder / name).exists()]):
        raise HeadLoadError(
            f"{folder} is a training state of several models ({first}, {several[0]}); keep only the weights of the "
            "heads."
        )
    notes = (f"{CONFIG} is taken from the parent folder",) if config_file(folder).parent != folder else ()
    if first not in INDEXES:
        return WeightFiles((folder / first,), notes=notes)
    index = read_index(folder / first)
    files = tuple(folder / name for name in sorted({index[key] for key in needed(index)}))
    if missing := [file.name for file in files if not file.exists()]:
        raise CorruptCheckpointError(f"{folder} lacks the weight file(s) {missing}, which its index names.")
    return WeightFiles(files, index, notes)


def _is_state(folder: Path) -> bool:
    """Whether a folder was written by `accelerator.save_state`."""
    return bool(STATE_FOLDER.fullmatch(folder.resolve().name)) or any((folder / sign).exists() for sign in STATE_SIGNS)


def _files_of_state(folder: Path) -> WeightFiles:
    states = sorted(path.name for path in folder.iterdir() if path.is_dir() and STATE_FOLDER.fullmatch(path.name))
    if len(states) > 1:
        raise HeadLoadError(f"{folder} holds the training states {states}; pass the folder of one of them.")
    if not states:
        raise HeadLoadError(f"{folder} has no weights; expected one of {', '.join(WEIGHT_FILES)}.")
    inner = weight_files(folder / states[0])
    return WeightFiles(inner.files, inner.index, (f"weights of the training state {states[0]}",))


# ------------------------------------------------------------------ shards
def read_index(path: Path) -> dict[str, str]:
    """Reads the file name of every key from an index.

    Raises:
        CorruptCheckpointError: Unless all file names are plain names in the index's folder, with a suffix of the
            index's format, and at most [`MAX_SHARDS`] in number.
    """
    names = read_json(path).get("weight_map")
    suffixes = (".safetensors",) if path.name == SAFETENSORS_INDEX else (".bin", ".pt")
    if not isinstance(names, dict) or not names or not all(_is_plain_name(name, suffixes) for name in names.values()):
        raise CorruptCheckpointError(
            f"{path} has no proper `weight_map`; its values must be names of files in the same folder."
        )
    if len(set(names.values())) > MAX_SHARDS:
        raise CorruptCheckpointError(f"{path} names {len(set(names.values()))} files, expected at most {MAX_SHARDS}.")
    return names


def _is_plain_name(name: object, suffixes: tuple[str, ...]) -> bool:
    return isinstance(name, str) and name.endswith(suffixes) and Path(name).name == name and "\\" not in name


def needed(keys: Iterable[str]) -> list[str]:
    """Returns the keys to read: all, or only heads and embedding if the file is a whole target that contains heads."""
    keys = list(keys)
    inside = [key for key in keys if IN_TARGET.match(key)]
    if not inside or len(inside) == len(keys):
        return keys
    return inside + [key for key in keys if key.removeprefix("module.") in EMBEDDINGS]
