"""The authors' layout of EAGLE-1/2, HASS and PosS, which share one set of keys; PosS has one layer per specialist.

What the keys tell is taken from the keys: sizes, biases, the number of specialists. `config.json` gives what they
cannot: number of attention heads, norm epsilon, rope. (arXiv 2401.15077, 2406.16858, 2408.15766, 2506.03566)
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ..auto import build_config
from ..errors import CheckpointKeysError, CheckpointShapeError, HeadConfigError, refuse_wrong_keys
from ..features import weight_fingerprint
from ..heads import EagleHeadConfig, PossHeadConfig
from .fields import Converted, integer, number, rope

EMBEDDING = "embed_tokens.weight"


def convert(
    raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str, positions_per_specialist: int | None
) -> Converted:
    """Builds config and weights of EAGLE, HASS or POSS heads.

    Args:
        raw_config: The checkpoint's `config.json`.
        tensors: Its tensors.
        name: Repository or folder name: tells HASS from EAGLE, and how many positions a PosS specialist has.
        positions_per_specialist: Overrides what `name` tells.

    Raises:
        CheckpointKeysError: for missing or unknown keys.
        CheckpointShapeError: if shapes contradict one another or the config.
        HeadConfigError: if a field is missing or impossible, or `positions_per_specialist` cannot be known.
    """
    notes: list[str] = []
    num_layers = _count_layers(tensors)
    sizes = _sizes(raw_config, tensors, notes)
    fields: dict[str, Any] = {
        **sizes,
        "fc_bias": "fc.bias" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "rms_norm_eps": number(raw_config, "rms_norm_eps", notes, default=1e-6),
        "hidden_act": raw_config.get("hidden_act", "silu"),
        "rope_parameters": rope(raw_config, notes),
        "max_position_embeddings": integer(raw_config, "max_position_embeddings", notes, default=2048),
    }
    fields |= {key: raw_config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id") if key in raw_config}
    config_class: type[EagleHeadConfig] = EagleHeadConfig
    if num_layers > 1:
        config_class = PossHeadConfig
        fields |= {"method": "poss", "num_specialists": num_layers}
        fields["positions_per_specialist"] = _positions(name, positions_per_specialist, num_layers, notes)
        fields["trained_positions"] = num_layers * fields["positions_per_specialist"]
    else:
        fields["method"] = "hass" if "hass" in name.lower() else "eagle"
        notes.append(f"method {fields['method']!r} from the name (EAGLE and HASS share one layout)")
    _check_keys(tensors, num_layers, fields)
    if EMBEDDING in tensors:
        fields["target"] = {"name": None, "fingerprint": weight_fingerprint(tensors[EMBEDDING])}
    try:
        config = build_config(config_class, fields)
    except ValueError as error:
        raise HeadConfigError(f"config.json of {name!r} does not fit its weights: {error}") from error
    _check_shapes(tensors, config)
    return Converted(config, {key: tensor for key, tensor in tensors.items() if key != EMBEDDING}, notes)


# ------------------------------------------------------------------ what the keys tell
def _count_layers(tensors: dict[str, torch.Tensor]) -> int:
    indices = {int(match[1]) for key in tensors if (match := re.match(r"layers\.(\d{1,4})\.", key))}
    if indices != set(range(len(indices))):
        raise CheckpointKeysError(f"layers are numbered {sorted(indices)}, expected 0 to {len(indices) - 1}.")
    return len(indices)


def _check_keys(tensors: dict[str, torch.Tensor], num_layers: int, fields: dict[str, Any]) -> None:
    expected = {"fc.weight"} | ({"fc.bias"} if fields["fc_bias"] else set())
    for index in range(num_layers):
        prefix = f"layers.{index}."
        expected |= {f"{prefix}self_attn.{x}_proj.weight" for x in "qkvo"}
        expected |= {f"{prefix}mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
        expected.add(f"{prefix}post_attention_layernorm.weight")
        if fields["attention_bias"]:
            expected |= {f"{prefix}self_attn.{x}_proj.bias" for x in "qkv"}
    found = set(tensors) - {EMBEDDING}
    refuse_wrong_keys(missing=expected - found, unknown=found - expected)


def _sizes(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], notes: list[str]) -> dict[str, int]:
    """Sizes from the shapes of layer 0; only the number of attention heads needs the config."""
    wanted = ("fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
              "layers.0.mlp.gate_proj.weight")  # fmt: skip
    refuse_wrong_keys(missing=set(wanted) - set(tensors), unknown=set())
    fc, q_proj, k_proj, gate = (tuple(tensors[key].shape) for key in wanted)
    if any(len(shape) != 2 for shape in (fc, q_proj, k_proj, gate)):
        raise CheckpointShapeError(f"projections must be matrices, got fc {fc}, q {q_proj}, k {k_proj}, gate {gate}.")
    hidden = fc[0]
    if fc[1] != 2 * hidden:
        raise CheckpointShapeError(f"fc.weight must be [H, 2H] for [embedding ; feature], got {list(fc)}.")
    heads = integer(raw_config, "num_attention_heads", notes)
    if q_proj[0] % heads:
        raise CheckpointShapeError(f"{q_proj[0]} rows of q_proj do not divide into num_attention_heads={heads}.")
    head_dim = q_proj[0] // heads
    if k_proj[0] % head_dim or head_dim % 2:
        raise CheckpointShapeError(f"{k_proj[0]} rows of k_proj do not divide into heads of an even width {head_dim}.")
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": gate[0],
        "num_key_value_heads": k_proj[0] // head_dim,
        "vocab_size": _vocab_size(raw_config, tensors, hidden, notes),
    }
    for key, value in sizes.items():
        stated = raw_config.get(key)
        if stated is not None and stated != value:
            raise CheckpointShapeError(f"config.json says {key}={stated!r}, the weights say {value}; one is damaged.")
    same_width = {"feature_size": hidden, "embedding_size": hidden}
    return {**sizes, **same_width, "num_attention_heads": heads, "head_dim": head_dim}


def _vocab_size(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], hidden: int, notes: list[str]) -> int:
    if EMBEDDING not in tensors:
        return integer(raw_config, "vocab_size", notes)
    shape = tuple(tensors[EMBEDDING].shape)
    if len(shape) != 2 or shape[1] != hidden:
        raise CheckpointShapeError(f"{EMBEDDING} must be [V, {hidden}] to fit fc.weight, got {list(shape)}.")
    return shape[0]


def _check_shapes(tensors: dict[str, torch.Tensor], config: EagleHeadConfig) -> None:
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    expected = {
        "fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, hidden), "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (middle, hidden), "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle), "post_attention_layernorm.weight": (hidden,),
        EMBEDDING: (config.vocab_size, hidden),
    }  # fmt: skip
    for key, tensor in tensors.items():
        wanted = expected[re.sub(r"^layers\.\d+\.", "", key)]
        if tuple(tensor.shape) != wanted:
            raise CheckpointShapeError(f"{key} has shape {list(tensor.shape)}, expected {list(wanted)}.")


def _positions(name: str, argument: int | None, num_layers: int, notes: list[str]) -> int:
    """Positions per specialist: the argument, else the `PosS3` of a repository name; no file stores it."""
    if argument is not None:
        return argument
    if match := re.search(r"PosS-?(\d{1,2})(?!\d)", name, flags=re.IGNORECASE):
        notes.append(f"positions_per_specialist={match[1]} from the name {name!r}")
        return int(match[1])
    raise HeadConfigError(
        f"{name!r} holds {num_layers} POSS specialists, but neither its files nor its name say how many draft "
        f"positions each serves; pass load_heads(..., positions_per_specialist=n)."
    )
