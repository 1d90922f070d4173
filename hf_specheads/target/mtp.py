"""Finding and reading MTP layers in a target's own checkpoint, under one set of names.

Targets with multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next and later; GLM-4.5) come
with layers that plain decoding does not load. Two layouts are in use:

    Qwen       mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0.*, mtp.norm
    DeepSeek   model.layers.{N + k}.* of a target with N layers: the decoder layer's own names, and
               eh_proj, enorm, hnorm, shared_head.norm

Here layer k is named `layers.{k}.` + `fc`, `embedding_norm`, `hidden_norm`, `norm`, and `block.*` for the decoder
layer. Copies of the target's embedding and `lm_head` are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ..errors import (
    CheckpointShapeError,
    CheckpointValueError,
    CorruptCheckpointError,
    HeadLoadError,
    UnknownFormatError,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
QWEN = re.compile(r"(?:.*\.)?mtp\.(.+)")
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
QWEN_NAMES = {
    "fc": "fc",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "norm": "norm",
}
DEEPSEEK_NAMES = {"eh_proj": "fc", "enorm": "embedding_norm", "hnorm": "hidden_norm", "shared_head.norm": "norm"}
OF_THE_TARGET = ("embed_tokens", "shared_head.head", "lm_head")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def our_name(key: str, num_layers: int) -> str | None:
    """Returns our name of a tensor in a target's checkpoint; `None` if it belongs to no MTP layer.

    Args:
        key: Name of the tensor in the checkpoint.
        num_layers: Number of layers N of the target that plain decoding runs.

    Raises:
        UnknownFormatError: if the checkpoint has more than one MTP layer in Qwen's layout.
    """
    if (qwen := QWEN.fullmatch(key)) is not None:
        return _qwen_name(qwen[1])
    layer = LAYER.fullmatch(key)
    if layer is None or int(layer[1]) < num_layers:
        return None
    number, rest = int(layer[1]) - num_layers, layer[2]
    module, _, kind = rest.rpartition(".")
    if module in OF_THE_TARGET:
        return None
    return f"layers.{number}.{DEEPSEEK_NAMES[module]}.{kind}" if module in DEEPSEEK_NAMES else (
        f"layers.{number}.block.{rest}"
    )  # fmt: skip


def _qwen_name(rest: str) -> str | None:
    module, _, kind = rest.rpartition(".")
    if module in OF_THE_TARGET:
        return None
    if module in QWEN_NAMES:
        return f"layers.0.{QWEN_NAMES[module]}.{kind}"
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", rest)
    if layer is None or layer[1] != "0":
        raise UnknownFormatError(
            f"the checkpoint has a tensor mtp.{rest}, but only one layer of MTP in Qwen's layout can be read, "
            "`mtp.layers.0`."
        )
    return f"layers.0.block.{layer[2]}"


def joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacks experts that are stored one by one, into the form that transformers uses.

    For E experts of intermediate size I this is `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I].
    All other tensors are returned unchanged.

    Raises:
        CheckpointShapeError: if an expert is missing or differs from the others in size.
    """
    parts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    joined = {}
    for key, tensor in tensors.items():
        if (expert := EXPERT.fullmatch(key)) is None:
            joined[key] = tensor
        else:
            parts.setdefault(expert[1], {})[int(expert[2]), expert[3]] = tensor
    for name, found in parts.items():
        experts = range(1 + max(number for number, _ in found))
        try:
            pairs = [torch.cat([found[number, "gate_proj"], found[number, "up_proj"]]) for number in experts]
            joined[f"{name}.gate_up_proj"] = torch.stack(pairs)
            joined[f"{name}.down_proj"] = torch.stack([found[number, "down_proj"] for number in experts])
        except (KeyError, RuntimeError) as error:
            raise CheckpointShapeError(f"the experts {name} are incomplete or of different sizes: {error}.") from error
    return joined


def separate_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits stacked experts into single ones, as checkpoints store them: the inverse of [`joined_experts`]."""
    separate = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition(".")
        if not name.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            separate[key] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            separate |= {f"{name}.{number}.{part}.weight": weight for part, weight in parts.items()}
    return separate


# ------------------------------------------------------------------ files
def read_mtp(source: str | os.PathLike[str], num_layers: int, **hub: Any) -> dict[str, torch.Tensor]:
    """Reads the MTP layers of a target to the CPU, under our names.

    Of a sharded checkpoint only the shards with MTP layers are read.

    Args:
        source: The target's folder or Hub id.
        num_layers: Number of layers N of the target that plain decoding runs.
        **hub: `revision`, `token` and `local_files_only`, for a Hub id.

    Raises:
        HeadLoadError: (or a subclass) if there are no MTP layers, or if files are missing, damaged or quantised.
    """
    find = _finder(source, hub)
    index = find(INDEX)
    files: Iterable[str] = [SINGLE]
    if index is not None:
        try:
            places = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(
                f"{index} is not an index of weight files: {error}; download it again."
            ) from error
        files = sorted({str(file) for key, file in places.items() if our_name(key, num_layers) is not None})
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        path = find(file)
        if path is None:
            raise HeadLoadError(f"{str(source)!r} has no {file}; MTP layers are read from safetensors files.")
        tensors |= _read(path, num_layers)
    if not tensors:
        raise HeadLoadError(
            f"{str(source)!r} has no MTP layers: neither `mtp.*` tensors nor a layer beyond its {num_layers}. Copies "
            "of targets often lack them; use the original repository."
        )
    return joined_experts(tensors)


def _finder(source: str | os.PathLike[str], hub: dict[str, Any]) -> Callable[[str], str | None]:
    def find(file: str) -> str | None:
        if Path(source).is_dir():
            path = Path(source) / file
            return str(path) if path.is_file() else None
        try:
            return cached_file(str(source), file, _raise_exceptions_for_missing_entries=False, **hub)
        except OSError as error:
            reason = str(error).strip().partition("\n")[0]
            raise HeadLoadError(f"{str(source)!r} is not a folder, and {file} cannot be fetched: {reason}") from error

    return find


def _read(path: str, num_layers: int) -> dict[str, torch.Tensor]:
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = {key: name for key in file.keys() if (name := our_name(key, num_layers)) is not None}  # noqa: SIM118
            for key, name in names.items():
                found[name] = file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(
            f"{path} is truncated or not a safetensors file: {error}; download it again."
        ) from error
    for key, tensor in found.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise HeadLoadError(
                f"the MTP layers in {path} are quantised ({key} is {tensor.dtype}); pass a checkpoint that has them "
                "in fp16, bf16 or fp32."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointValueError(f"{key} in {path} holds NaN or infinities; use an undamaged checkpoint.")
    return found
