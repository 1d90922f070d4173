"""Reads weight files without trusting them: no code in a file is executed, and every claim of a file is checked."""

from __future__ import annotations

import math
import pickle
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointShapeError, CheckpointValueError, CorruptCheckpointError
from .files import WeightFiles, needed
from .headers import read_entries
from .layouts.keys import D2T, LM_HEAD, T2D

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# Maps safetensors' names of dtypes to torch's. Only a few are valid for weights; error messages name the others.
DTYPE_NAMES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
COMMON_PREFIXES = ("module.", "model.")
# Tensors that lie outside the decoder, so they have no prefix even where all keys of the decoder have one.
BESIDE_DECODER = (LM_HEAD, D2T, T2D)
# A converter of `speculators` writes a copy of the target's `lm_head` next to MTP layers, and fills the copy with NaN.
NEVER_READ = ("verifier_lm_head.weight",)
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 8
MAX_DIMENSION = 2**24
MAX_WEIGHT = 65504.0  # largest fp16 number: draft heads are published in fp16, so a larger value means damaged bytes
UNREADABLE = (
    OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError,
    ImportError, OverflowError, MemoryError, RecursionError, NotImplementedError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
UNREADABLE_ARCHIVE = (OSError, EOFError, RuntimeError, OverflowError, struct.error, zipfile.BadZipFile, UnicodeError)


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a checkpoint; common prefixes (`module.`, `model.`) are removed from the keys.

    Attributes:
        tensors: Tensors by key, on the CPU, or on the device `meta` if only headers were read.
        files: Files that the tensors were read from.
        notes: Remarks for the user about where the files were found.
    """

    tensors: dict[str, torch.Tensor]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}


def read_checkpoint(weights: WeightFiles, *, headers_only: bool = False) -> Checkpoint:
    """Reads all tensors of a checkpoint and checks each of them.

    Args:
        weights: Files of the checkpoint.
        headers_only: Read only names, shapes and dtypes; the tensors are then on the device `meta`.

    Raises:
        CorruptCheckpointError: If a file is truncated, cannot be parsed, holds something other than tensors, or holds
            other tensors than its index says.
        CheckpointShapeError: If a size is impossible.
        CheckpointValueError: If a tensor holds NaN or infinities, or has a dtype that weights do not have.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in weights.files:
        part = (
            _read_safetensors(file, headers_only)
            if file.suffix == ".safetensors"
            else _read_pickle(file, headers_only)
        )
        if twice := sorted(set(part) & set(tensors)):
            raise CorruptCheckpointError(
                f"{file} repeats {twice[:3]}, which another shard already holds; download all shards again."
            )
        _check_index(weights, file, part)
        tensors |= part
    tensors = {key: tensors[key] for key in needed(tensors)}
    check_tensors(tensors, weights.files[0])
    return Checkpoint(without_common_prefix(tensors), weights.files, weights.notes)


def _check_index(weights: WeightFiles, file: Path, keys: Iterable[str]) -> None:
    if weights.index is None:
        return
    promised = set(needed([key for key, name in weights.index.items() if name == file.name]))
    if promised != set(keys):
        wrong = sorted(promised ^ set(keys))
        raise CorruptCheckpointError(f"the index and {file.name} disagree about {wrong[:3]}; download both again.")


# ------------------------------------------------------------------ safetensors
def read_header(file: Path) -> dict[str, torch.Tensor]:
    """Reads names, shapes and dtypes of a safetensors file, as tensors on the device `meta`.

    Raises:
        CorruptCheckpointError: If the file has no valid header.
        CheckpointShapeError, CheckpointValueError: See [`header_tensor`].
    """
    return {
        key: header_tensor(key, entry.get("dtype"), entry.get("shape"), file.name)
        for key, entry in read_entries(file).items()
    }


def header_tensor(key: str, dtype: object, shape: object, where: str) -> torch.Tensor:
    """Makes a tensor without data, on the device `meta`, from its entry in a header.

    Raises:
        CheckpointShapeError: If the shape is impossible.
        CheckpointValueError: If the dtype is unknown.
    """
    known = DTYPE_NAMES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        raise CheckpointValueError(f"{key} in {where} is of type {dtype!r}; weights are fp16, bf16 or fp32.")
    sizes = [size for size in shape if type(size) is int] if isinstance(shape, list) else []
    plain = isinstance(shape, list) and len(sizes) == len(shape) <= MAX_DIMENSIONS
    if not plain or not all(0 <= size <= MAX_DIMENSION for size in sizes) or math.prod(sizes) >= 2**48:
        raise CheckpointShapeError(f"{key} in {where} has the impossible shape {shape!r}.")
    return torch.empty(sizes, dtype=known, device="meta")


def _read_safetensors(file: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    header = read_header(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:  # also checks sizes and offsets against the file
            wanted = needed(reader.keys())
            if headers_only:
                return {key: header[key] for key in wanted}
            return {key: reader.get_tensor(key) for key in wanted}
    except (SafetensorError, *UNREADABLE) as error:
        raise CorruptCheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or no safetensors file: {error}; download it again."
        ) from error


# ------------------------------------------------------------------ pickles
def _read_pickle(file: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    _check_archive(file, checksums=not headers_only)
    mapped = headers_only and _is_archive(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(file, map_location="meta" if mapped else "cpu", mmap=mapped or None, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptCheckpointError(
            f"{file} is not a plain file of tensors, and none of its code was executed. Ask its author for a "
            f"safetensors file. ({str(error).splitlines()[0]})"
        ) from error
    except UNREADABLE as error:
        raise CorruptCheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or damaged: {str(error).splitlines()[0:1]}; "
            "download it again."
        ) from error
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise CorruptCheckpointError(f"{file} holds a {type(value).__name__}, expected a dict of tensors by name.")
    if odd := sorted(key for key, tensor in value.items() if not isinstance(tensor, torch.Tensor)):
        raise CorruptCheckpointError(f"{file} holds entries that are not tensors: {odd[:5]}; expected weights only.")
    tensors = {key: value[key].detach() for key in needed(value)}
    if not mapped:
        _check_storages(tensors, file)
    return tensors


def _check_archive(file: Path, *, checksums: bool) -> None:
    """Refuses archives that `torch.save` would not have written, and verifies checksums, which torch does not do.

    A small compressed archive could unpack to any size. For entries with attributes, torch's reader returns
    uninitialised memory.

    Raises:
        CorruptCheckpointError: If the archive is not of torch's form, or a checksum is wrong.
    """
    if not _is_archive(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            plain = all(_is_plain_entry(entry) for entry in entries)
            fits = sum(entry.file_size for entry in entries) <= file.stat().st_size
            if not plain or not fits or len({entry.filename for entry in entries}) != len(entries):
                raise CorruptCheckpointError(
                    f"{file} is not an archive as `torch.save` writes it; ask its author for a safetensors file."
                )
            damaged = archive.testzip() if checksums else None
    except UNREADABLE_ARCHIVE as error:
        raise CorruptCheckpointError(f"{file} is a damaged archive ({error}); download it again.") from error
    if damaged:
        raise CorruptCheckpointError(f"{damaged} in {file} does not match its checksum; download the file again.")


def _is_archive(file: Path) -> bool:
    """Whether torch or Python's `zipfile` would treat the file as an archive."""
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04" or zipfile.is_zipfile(file)


def _is_plain_entry(entry: zipfile.ZipInfo) -> bool:
    attributes = (entry.external_attr, entry.internal_attr, entry.volume, entry.flag_bits & 1)
    stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
    return stored and not entry.is_dir() and not any(attributes)


def _check_storages(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Refuses tensors that claim more memory than the file has bytes."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors.values() if tensor.layout == torch.strided and tensor.device.type == "cpu"
    }  # fmt: skip
    if sum(storages.values()) > file.stat().st_size:
        raise CorruptCheckpointError(
            f"{file} has {file.stat().st_size} bytes but claims {sum(storages.values())} bytes of weights; it is "
            "damaged, download it again."
        )


# ------------------------------------------------------------------ checks
def check_tensors(tensors: dict[str, torch.Tensor], where: Path) -> None:
    """Refuses tensors that cannot be weights: impossible sizes, views larger than their storage, NaN, absurd values.

    Raises:
        CheckpointShapeError, CheckpointValueError: The message names the tensor.
    """
    if not tensors or len(tensors) > MAX_TENSORS:
        raise CheckpointShapeError(f"{where} holds {len(tensors)} tensors, expected between 1 and {MAX_TENSORS}.")
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "meta"):
            raise CheckpointShapeError(f"{key} in {where} is not a dense tensor ({tensor.layout}, {tensor.device}).")
        too_large = tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        if tensor.dtype not in WEIGHT_DTYPES + INTEGER_DTYPES:
            raise CheckpointValueError(_no_weight(key, tensor, where))
        if 0 in tensor.shape or max(tensor.shape, default=1) > MAX_DIMENSION or too_large:
            raise CheckpointShapeError(f"{key} in {where} has the impossible shape {tuple(tensor.shape)}.")
        if tensor.dtype in WEIGHT_DTYPES and not tensor.is_meta and key not in NEVER_READ:
            _check_values(key, tensor, where)


def _check_values(key: str, tensor: torch.Tensor, where: Path) -> None:
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if not math.isfinite(low) or not math.isfinite(high):  # with a NaN in the tensor, both bounds are NaN
        raise CheckpointValueError(
            f"{key} in {where} holds NaN or infinities; such heads cannot draft. Use an undamaged checkpoint."
        )
    if max(-low, high) > MAX_WEIGHT:
        raise CheckpointValueError(
            f"{key} in {where} holds {low if -low > high else high:.3g}, and no fp16 number is above {MAX_WEIGHT:g}; "
            "the file is damaged, download it again."
        )


def check_dtypes(
    tensors: dict[str, torch.Tensor], where: Path, integer_tensors: Mapping[str, torch.dtype] | None = None
) -> None:
    """Refuses weights that are not fp16, bf16, fp32 or fp64, and files that mix fp16 with bf16, which nobody trains.

    Args:
        tensors: Tensors by key.
        where: File of the tensors, for messages.
        integer_tensors: Required dtypes of the tensors that are not weights, by key.

    Raises:
        CheckpointValueError: The message names the tensor and its dtype.
    """
    for key, tensor in tensors.items():
        if (wanted := (integer_tensors or {}).get(key)) is not None:
            if tensor.dtype != wanted:
                raise CheckpointValueError(f"{key} in {where} is of type {tensor.dtype}, expected {wanted}.")
        elif tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointValueError(_no_weight(key, tensor, where))
    by_type = {tensor.dtype: key for key, tensor in tensors.items()}
    if torch.float16 in by_type and torch.bfloat16 in by_type:
        raise CheckpointValueError(
            f"{by_type[torch.float16]} in {where} is fp16 and {by_type[torch.bfloat16]} is bf16; draft heads do not "
            "mix the two, so the file is damaged."
        )


def _no_weight(key: str, tensor: torch.Tensor, where: Path) -> str:
    return (
        f"{key} in {where} is of type {tensor.dtype}; weights of draft heads are fp16, bf16 or fp32. Quantised heads "
        "are not supported."
    )


def usual_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Returns the dtype of most weights, counted in elements; float32 if there are none."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def without_common_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Removes the prefixes that all keys share; keys of [`BESIDE_DECODER`] may lack them.

    Raises:
        CorruptCheckpointError: If two keys become the same.
    """
    for prefix in COMMON_PREFIXES:
        inside = [key.startswith(prefix) for key in tensors]
        if any(inside) and all(key.startswith(prefix) or key in BESIDE_DECODER for key in tensors):
            if twice := [key for key in tensors if prefix + key in tensors]:
                raise CorruptCheckpointError(
                    f"the file holds both {prefix}{twice[0]} and {twice[0]}; remove one of them."
                )
            tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors
