"""Helpers that all layouts share: input and result of a conversion, and checked access to untrusted `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...configuration import DraftHeadConfig
from ...errors import CheckpointKeysError, CheckpointShapeError, CheckpointValueError, HeadConfigError
from ...heads.auto import build_config
from ...target.identity import weight_fingerprint
from .keys import SPECIAL_TOKENS

Tensors = dict[str, torch.Tensor]
RawConfig = dict[str, Any]  # untrusted JSON: the type of a value is unknown until it has been checked

# Scaled ropes that the authors' code of a layout, or other readers of the layout, support.
EAGLE_ROPES, EAGLE3_ROPES = ("linear", "dynamic"), ("linear", "dynamic", "llama3")
# Fields that scaled ropes need in addition to the base.
ROPE_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
KNOWN_ROPE_FIELDS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *sum(ROPE_FIELDS.values(), ())}
DEFAULT_ROPE_BASE = 10000.0
MAX_NUMBER = 1e30


@dataclass(frozen=True)
class Source:
    """Input of a layout's `convert`.

    Attributes:
        raw_config: Contents of the checkpoint's `config.json`.
        tensors: Tensors of the checkpoint, by the layout's names.
        name: Name of the repository or folder. It is used in messages, to distinguish HASS from EAGLE, and to learn
            the number of draft positions of a PosS specialist.
        positions_per_specialist: Draft positions per PosS specialist; overrides the number in `name`.
        anchor_slot: `"idle"` or `"drafts"`, for block drafters whose files do not say.
    """

    raw_config: RawConfig
    tensors: Tensors
    name: str
    positions_per_specialist: int | None = None
    anchor_slot: str | None = None


@dataclass
class Conversion:
    """Heads converted from another layout: config, weights under this package's names, and assumptions made."""

    config: DraftHeadConfig
    tensors: Tensors
    assumptions: list[str] = field(default_factory=list)


def config_of(config_class: type[DraftHeadConfig], fields: dict[str, Any], name: str) -> DraftHeadConfig:
    """Builds the config of the converted heads.

    Raises:
        HeadConfigError: If fields contradict one another.
    """
    try:
        return build_config(config_class, fields)
    except ValueError as error:
        raise HeadConfigError(f"config.json of {name!r} does not fit its weights: {error}") from error


def integer(raw_config: RawConfig, name: str, notes: list[str], default: int | None = None) -> int:
    """Reads a positive integer. If missing, returns the default and adds a note; without a default, refuses."""
    value = number(raw_config, name, notes, default)
    if int(value) != value or not 0 < value < 2**31:
        raise HeadConfigError(f"config.json has {name}={value!r}, expected a positive integer.")
    return int(value)


def number(raw_config: RawConfig, name: str, notes: list[str], default: float | None = None) -> float:
    """Reads a positive number; missing values are handled as in [`integer`]."""
    value = raw_config.get(name)
    if value is None:
        if default is None:
            raise HeadConfigError(f"config.json lacks `{name}`, which cannot be derived from the weights; add it.")
        notes.append(f"{name}={default} (not in config.json)")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_NUMBER:
        raise HeadConfigError(f"config.json has {name}={value!r}, expected a positive number.")
    return value


def boolean(raw_config: RawConfig, name: str) -> bool | None:
    """Reads a field that is true, false or missing."""
    value = raw_config.get(name)
    if value is not None and not isinstance(value, bool):
        raise HeadConfigError(f"config.json has {name}={value!r}, expected true or false.")
    return value


def layer_fields(raw_config: RawConfig, notes: list[str], ropes: tuple[str, ...] = EAGLE_ROPES) -> dict[str, Any]:
    """Fields of a decoder layer that no tensor reveals; missing ones get the authors' default and a note."""
    fields = {"rms_norm_eps": number(raw_config, "rms_norm_eps", notes, default=1e-6)}
    if raw_config.get("hidden_act") is None:
        notes.append("hidden_act='silu' (not in config.json)")
    return fields | {
        "hidden_act": raw_config.get("hidden_act") or "silu",
        "rope_parameters": rope(raw_config, notes, ropes),
        "max_position_embeddings": integer(raw_config, "max_position_embeddings", notes, default=2048),
    }


def special_tokens(raw_config: RawConfig) -> RawConfig:
    """Ids of the special tokens that the config has."""
    return {key: raw_config[key] for key in SPECIAL_TOKENS if key in raw_config}


def target_of(name: object, embedding: torch.Tensor | None) -> dict[str, Any] | None:
    """Identity of the target, from its name and the fingerprint of a copy of its embedding [V, E], if known."""
    name = name if isinstance(name, str) and name else None
    if embedding is None:
        return {"name": name} if name else None
    return {"name": name, "fingerprint": None if embedding.is_meta else weight_fingerprint(embedding)}


# ------------------------------------------------------------------ sizes
def matrix_shape(tensors: Tensors, key: str) -> tuple[int, int]:
    """Rows and columns of a weight.

    Raises:
        CheckpointShapeError: If the weight is not a matrix.
    """
    shape = tuple(tensors[key].shape)
    if len(shape) != 2:
        raise CheckpointShapeError(f"{key} must be a matrix, got the shape {list(shape)}; download the file again.")
    return shape


def attention_sizes(raw_config: RawConfig, queries: int, keys: int, notes: list[str]) -> dict[str, int]:
    """Computes number and width of attention heads from the numbers of rows of `q_proj` and `k_proj`.

    Raises:
        CheckpointShapeError: If the rows do not divide into the config's number of attention heads.
        HeadConfigError: If the config has no valid number of attention heads.
    """
    heads = integer(raw_config, "num_attention_heads", notes)
    if queries % heads:
        raise CheckpointShapeError(
            f"q_proj has {queries} rows, which is not a multiple of num_attention_heads={heads}."
        )
    width = queries // heads
    if keys % width or width % 2:
        raise CheckpointShapeError(
            f"k_proj has {keys} rows, expected a multiple of the attention heads' width {width}, which must be even."
        )
    return {"num_attention_heads": heads, "num_key_value_heads": keys // width, "head_dim": width}


def refuse_contradiction(raw_config: RawConfig, sizes: dict[str, int]) -> None:
    """Raises [`CheckpointShapeError`] if the config states another size than the weights have."""
    for name, value in sizes.items():
        if (stated := raw_config.get(name)) is not None and stated != value:
            raise CheckpointShapeError(
                f"config.json says {name}={stated!r}, but the weights say {value}; one of the two is wrong."
            )


# ------------------------------------------------------------------ tensors
def renamed(tensors: Tensors, new_name: Callable[[str], str]) -> Tensors:
    """Renames tensors.

    Raises:
        CheckpointKeysError: If two tensors get the same name, i.e. the file has one tensor in two spellings.
    """
    result: Tensors = {}
    for key, tensor in tensors.items():
        if (name := new_name(key)) in result:
            raise CheckpointKeysError(f"{key} is in the file twice, in two spellings; the file is damaged.")
        result[name] = tensor
    return result


def with_our_prefix(prefixes: dict[str, str], key: str) -> str:
    """Replaces the layout's prefix of a key by this package's, if the key begins with one of `prefixes`."""
    for theirs, ours in prefixes.items():
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return key


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and values."""
    return a.dtype == b.dtype and torch.equal(a, b)


def are_copies(blocks: list[list[Tensors]]) -> bool:
    """Whether all blocks of a head are copies of its first, as the authors' code saves a module used several times.

    Args:
        blocks: For every Medusa or Hydra head, the weights of its blocks, by the names of their parts.

    Raises:
        CheckpointValueError: If only some are copies, which means that the file is damaged.
    """
    pairs = [(block, head[0]) for head in blocks for block in head[1:]]
    if pairs and any(tensor.is_meta for tensor in pairs[0][0].values()):  # headers have no values to compare
        return False
    copies = [all(equal(block[part], first[part]) for part in first) for block, first in pairs]
    if any(copies) and not all(copies):
        raise CheckpointValueError(
            f"{sum(copies)} of {len(copies)} blocks repeat the first block of their head, but the others do not; "
            "undamaged files repeat either all blocks or none. Download the file again."
        )
    return all(copies)


# ------------------------------------------------------------------ ropes
def rope(raw_config: RawConfig, notes: list[str], supported: tuple[str, ...]) -> dict[str, Any]:
    """Reads the rope parameters of the **draft** config.

    A missing base is 10000, never the target's. Only scaling that the authors' code supports is accepted.
    """
    parameters = raw_config.get("rope_parameters") or {}
    scaling = raw_config.get("rope_scaling") or parameters
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise HeadConfigError(f"config.json has rope_scaling={scaling!r}, expected an object.")
    if unknown := sorted((set(parameters) | set(scaling)) - KNOWN_ROPE_FIELDS):
        raise HeadConfigError(f"config.json has the rope parameters {unknown[:3]}, which these heads do not support.")
    source = parameters if parameters.get("rope_theta") is not None else raw_config
    bases = (config.get("rope_theta") for config in (parameters, raw_config))
    stated = {base for base in bases if isinstance(base, (int, float)) and not isinstance(base, bool)}
    if len(stated) > 1:
        raise HeadConfigError(
            f"config.json has two values of rope_theta, {sorted(stated)}, at the top level and in rope_parameters; "
            "correct one of the two."
        )
    base = float(number(source, "rope_theta", notes, DEFAULT_ROPE_BASE))
    kind = _kind(scaling, "default")
    if kind != _kind(parameters, kind):
        raise HeadConfigError(
            f"config.json says rope scaling {kind!r}, but {_kind(parameters, kind)!r} in rope_parameters; correct one "
            "of the two."
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
        raise HeadConfigError(f"config.json asks for rope scaling {kind!r}; these heads support {list(supported)}.")
    values = {name: number(scaling, name, notes) for name in ROPE_FIELDS[kind]}
    values = {name: int(value) if name.startswith("original") else float(value) for name, value in values.items()}
    return {"rope_type": kind, "rope_theta": base, **values}


def _kind(scaling: dict[str, Any], default: str) -> Any:
    return scaling.get("rope_type") or scaling.get("type") or default
