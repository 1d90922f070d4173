"""What every layout's module needs: the result of a conversion, and fields of a `config.json` nobody vouches for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..configuration import DraftHeadConfig
from ..errors import HeadConfigError

SUPPORTED_ROPES = ("linear", "dynamic")
# What scaled ropes need besides the base.
ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DEFAULT_ROPE_BASE = 10000.0


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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise HeadConfigError(f"config.json has {name}={value!r}, expected a positive number.")
    return value


def rope(raw_config: dict[str, Any], notes: list[str], supported: tuple[str, ...] = SUPPORTED_ROPES) -> dict[str, Any]:
    """The **draft** config's rope base, else 10000, never the target's; scaling as the authors' code knows it."""
    parameters = raw_config.get("rope_parameters") or {}
    scaling = raw_config.get("rope_scaling") or parameters
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise HeadConfigError(f"config.json has rope_scaling={scaling!r}, expected an object.")
    source = parameters if parameters.get("rope_theta") is not None else raw_config
    base = float(number(source, "rope_theta", notes, DEFAULT_ROPE_BASE))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return {"rope_type": "default", "rope_theta": base}
    if kind not in supported:
        raise HeadConfigError(f"config.json asks for rope scaling {kind!r}; these heads know {list(supported)}.")
    values = {name: number(scaling, name, notes) for name in ROPE_FIELDS[kind]}
    values = {name: int(value) if name.startswith("original") else float(value) for name, value in values.items()}
    return {"rope_type": kind, "rope_theta": base, **values}
