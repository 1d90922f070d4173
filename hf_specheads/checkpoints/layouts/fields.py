"""What every layout's module needs: the result of a conversion, and fields of a `config.json` nobody vouches for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...configuration import DraftHeadConfig
from ...errors import CheckpointKeysError, CheckpointValueError, HeadConfigError
from ...target.identity import weight_fingerprint

SUPPORTED_ROPES = ("linear", "dynamic")
# What scaled ropes need besides the base.
ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
KNOWN_ROPE_FIELDS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *sum(ROPE_FIELDS.values(), ())}
DEFAULT_ROPE_BASE = 10000.0
MAX_NUMBER = 1e30


@dataclass
class Converted:
    """Heads read from the authors' layout: config, weights under our names, and what had to be assumed."""

    config: DraftHeadConfig
    tensors: dict[str, torch.Tensor]
    assumptions: list[str] = field(default_factory=list)


def integer(raw_config: dict[str, Any], name: str, notes: list[str], default: int | None = None) -> int:
    """A positive integer field; a missing one is the default, noted, or refused where there is none."""
    value = number(raw_config, name, notes, default)
    if int(value) != value or not 0 < value < 2**31:
        raise HeadConfigError(f"config.json has {name}={value!r}, expected a positive integer.")
    return int(value)


def number(raw_config: dict[str, Any], name: str, notes: list[str], default: float | None = None) -> float:
    """A positive number field; as [`integer`]."""
    value = raw_config.get(name)
    if value is None:
        if default is None:
            raise HeadConfigError(f"config.json lacks `{name}`, which the weights do not tell; add it.")
        notes.append(f"{name}={default} (not in config.json)")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_NUMBER:
        raise HeadConfigError(f"config.json has {name}={value!r}, expected a positive number.")
    return value


def boolean(raw_config: dict[str, Any], name: str) -> bool | None:
    """A field that is true, false, or not said."""
    value = raw_config.get(name)
    if value is not None and not isinstance(value, bool):
        raise HeadConfigError(f"config.json has {name}={value!r}, expected true or false.")
    return value


def activation(raw_config: dict[str, Any], notes: list[str]) -> Any:
    """`hidden_act`, SwiGLU's where it is missing; noted."""
    if raw_config.get("hidden_act") is None:
        notes.append("hidden_act='silu' (not in config.json)")
    return raw_config.get("hidden_act") or "silu"


def special_tokens(raw_config: dict[str, Any]) -> dict[str, Any]:
    """Ids of special tokens, as far as they are there."""
    return {key: raw_config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id") if key in raw_config}


def target_of(name: object, embedding: torch.Tensor | None) -> dict[str, Any] | None:
    """What a file tells of the heads' target: its name, and a fingerprint from a copy of its embedding [V, E]."""
    name = name if isinstance(name, str) and name else None
    if embedding is None:
        return {"name": name} if name else None
    return {"name": name, "fingerprint": None if embedding.is_meta else weight_fingerprint(embedding)}


def renamed(tensors: dict[str, torch.Tensor], new_name: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """The tensors under other names.

    Raises:
        CheckpointKeysError: if two come to the same name, which are then two spellings of one.
    """
    result: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if (name := new_name(key)) in result:
            raise CheckpointKeysError(f"{key} is in the file twice, in two spellings; the file is damaged.")
        result[name] = tensor
    return result


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same in type, shape and numbers."""
    return a.dtype == b.dtype and torch.equal(a, b)


def are_copies(blocks: list[list[dict[str, torch.Tensor]]]) -> bool:
    """Whether the blocks of every head are copies of one, as the authors' code saves a module that it uses again.

    Args:
        blocks: Weights of the blocks of every head, by the names of their parts.

    Raises:
        CheckpointValueError: if some are copies and others are not: then one of them is damaged.
    """
    pairs = [(block, head[0]) for head in blocks for block in head[1:]]
    if pairs and any(tensor.is_meta for tensor in pairs[0][0].values()):  # only headers were read
        return False
    copies = [all(equal(block[part], first[part]) for part in first) for block, first in pairs]
    if any(copies) and not all(copies):
        raise CheckpointValueError(
            f"{sum(copies)} of {len(copies)} blocks repeat the first one of their head, the others do not; files have "
            "copies of one block, or all different ones, so this one is damaged. Download it again."
        )
    return all(copies)


def rope(raw_config: dict[str, Any], notes: list[str], supported: tuple[str, ...] = SUPPORTED_ROPES) -> dict[str, Any]:
    """The **draft** config's rope base, else 10000, never the target's; scaling as the authors' code knows it."""
    parameters = raw_config.get("rope_parameters") or {}
    scaling = raw_config.get("rope_scaling") or parameters
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise HeadConfigError(f"config.json has rope_scaling={scaling!r}, expected an object.")
    if unknown := sorted((set(parameters) | set(scaling)) - KNOWN_ROPE_FIELDS):
        raise HeadConfigError(f"config.json has {unknown[:3]} among its rope parameters; these heads know none such.")
    source = parameters if parameters.get("rope_theta") is not None else raw_config
    stated = {config.get("rope_theta") for config in (parameters, raw_config) if _is_number(config.get("rope_theta"))}
    if len(stated) > 1:
        raise HeadConfigError(
            f"config.json says rope_theta={sorted(stated)}, flat and nested; correct one of the two."
        )
    base = float(number(source, "rope_theta", notes, DEFAULT_ROPE_BASE))
    kind = _kind(scaling, "default")
    if kind != _kind(parameters, kind):
        raise HeadConfigError(
            f"config.json says rope scaling {kind!r}, and {_kind(parameters, kind)!r} in rope_parameters; correct one."
        )
    for config in (parameters, raw_config):
        if config.get("partial_rotary_factor", 1) not in (1, None):
            raise HeadConfigError(
                f"config.json has partial_rotary_factor={config['partial_rotary_factor']!r}; these heads rotate whole "
                "attention heads."
            )
    if kind == "default":
        return {"rope_type": "default", "rope_theta": base}
    if kind not in supported:
        raise HeadConfigError(f"config.json asks for rope scaling {kind!r}; these heads know {list(supported)}.")
    values = {name: number(scaling, name, notes) for name in ROPE_FIELDS[kind]}
    values = {name: int(value) if name.startswith("original") else float(value) for name, value in values.items()}
    return {"rope_type": kind, "rope_theta": base, **values}


def _kind(scaling: dict[str, Any], default: str) -> Any:
    return scaling.get("rope_type") or scaling.get("type") or default


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
