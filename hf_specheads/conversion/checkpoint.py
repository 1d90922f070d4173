"""Reading weight files without trusting them: nothing is executed, nothing is believed before it is checked."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointShapeError, CheckpointValueError, CorruptCheckpointError, HeadLoadError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
# Files weights are looked for in, the first that exists; the last ones are the names some authors' code writes.
WEIGHT_FILES = (
    SAFETENSORS, SAFETENSORS_INDEX, "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)  # fmt: skip
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMMON_PREFIXES = ("module.", "model.")
MAX_TENSORS = 20_000
MAX_DIMENSION = 2**24


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a checkpoint, on the CPU, with common prefixes (`module.`, `model.`) taken off the keys.

    Attributes:
        tensors: Key to tensor.
        files: Where they come from.
    """

    tensors: dict[str, torch.Tensor]
    files: tuple[Path, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}


def read_json(path: Path) -> dict:
    """A JSON object.

    Raises:
        CorruptCheckpointError: if the file is missing, no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{path} does not exist; a folder of draft heads needs a {path.name}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder: the first of [`WEIGHT_FILES`] that exists, or the shards its index names.

    Raises:
        HeadLoadError: if there is none, or a shard is missing.
    """
    found = next((name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if found is None:
        raise HeadLoadError(f"{folder} has no weights; expected one of {', '.join(WEIGHT_FILES)}.")
    if found != SAFETENSORS_INDEX:
        return [folder / found]
    names = read_json(folder / SAFETENSORS_INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(_is_plain_name(name) for name in names.values()):
        raise CorruptCheckpointError(f"{folder / SAFETENSORS_INDEX} has no proper `weight_map` of file names.")
    files = [folder / name for name in sorted(set(names.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise CorruptCheckpointError(f"{folder} lacks the weight file(s) {missing} its index names.")
    return files


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def read_checkpoint(folder: Path) -> Checkpoint:
    """All tensors of a folder, checked one by one.

    Raises:
        CorruptCheckpointError: for files that are truncated, not parseable, or hold more than tensors.
        CheckpointShapeError: for absurd sizes.
        CheckpointValueError: for NaN, infinities, and types no weight has.
    """
    files = weight_files(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        part = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
        if twice := sorted(set(part) & set(tensors)):
            raise CorruptCheckpointError(f"{file} holds {twice[:3]} a second time; the shards contradict one another.")
        tensors |= part
    check_tensors(tensors, files[0])
    return Checkpoint(_without_common_prefix(tensors), tuple(files))


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            return {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise CorruptCheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or no safetensors file: {error}; download it again."
        ) from error


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptCheckpointError(
            f"{file} is not a plain file of tensors; nothing of it was executed. Ask its author for safetensors. "
            f"({str(error).splitlines()[0]})"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError,
            zipfile.BadZipFile) as error:  # fmt: skip
        raise CorruptCheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or damaged: {str(error).splitlines()[0:1]}; "
            "download it again."
        ) from error
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise CorruptCheckpointError(f"{file} holds a {type(value).__name__}, expected tensors by name.")
    if odd := sorted(key for key, tensor in value.items() if not isinstance(tensor, torch.Tensor)):
        raise CorruptCheckpointError(f"{file} holds things that are no tensors: {odd[:5]}; expected weights only.")
    return dict(value)


def check_tensors(tensors: dict[str, torch.Tensor], where: Path) -> None:
    """Refuses tensors no weights look like: absurd sizes, views larger than their memory, NaN, integers.

    Raises:
        CheckpointShapeError, CheckpointValueError: naming the tensor.
    """
    if not tensors or len(tensors) > MAX_TENSORS:
        raise CheckpointShapeError(f"{where} holds {len(tensors)} tensors, expected between 1 and {MAX_TENSORS}.")
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointShapeError(f"{key} in {where} is no dense tensor ({tensor.layout}, {tensor.device}).")
        too_large = tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        if 0 in tensor.shape or max(tensor.shape, default=1) > MAX_DIMENSION or too_large:
            raise CheckpointShapeError(f"{key} in {where} has the impossible shape {tuple(tensor.shape)}.")
        if tensor.dtype in WEIGHT_DTYPES and not bool(torch.isfinite(tensor).all()):
            raise CheckpointValueError(
                f"{key} in {where} holds NaN or infinities; such heads cannot draft. Use an undamaged checkpoint."
            )


def check_dtypes(
    tensors: dict[str, torch.Tensor], where: Path, integer_tensors: Mapping[str, torch.dtype] | None = None
) -> None:
    """Refuses weights of a type other than fp16, bf16, fp32, fp64.

    Args:
        tensors: Key to tensor.
        where: Their file.
        integer_tensors: Tensors that are no weights, and their types.

    Raises:
        CheckpointValueError: naming the tensor and its type.
    """
    for key, tensor in tensors.items():
        if (wanted := (integer_tensors or {}).get(key)) is not None:
            if tensor.dtype != wanted:
                raise CheckpointValueError(f"{key} in {where} is of type {tensor.dtype}, expected {wanted}.")
        elif tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointValueError(
                f"{key} in {where} is of type {tensor.dtype}; weights of draft heads are fp16, bf16 or fp32. "
                "Quantised heads are not supported."
            )


def _without_common_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for prefix in COMMON_PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors
