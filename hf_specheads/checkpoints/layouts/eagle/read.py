"""The authors' layout of EAGLE-1/2, HASS and PosS, which share one set of keys; PosS has one layer per specialist.

A variant of HASS has three norms more: `embed_layernorm`, `hidden_layernorm` and `lm_head_layernorm`. SGLang's packs
of EAGLE-1 differ by their `architectures` only, and by a copy of the target's `lm_head`. What the keys tell is taken
from the keys: sizes, biases, the number of specialists. `config.json` gives what they cannot: number of attention
heads, norm epsilon, rope. (arXiv 2401.15077, 2406.16858, 2408.15766, 2506.03566)
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ....errors import (
    CheckpointKeysError,
    CheckpointShapeError,
    HeadConfigError,
    MissingArgumentError,
    refuse_wrong_keys,
)
from ....heads import EagleHeadConfig, PossHeadConfig
from ....heads.auto import build_config
from ..fields import Converted, activation, boolean, integer, number, rope, special_tokens, target_of

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
# The norms of the variant, and their names in our heads.
EXTRA_NORMS = {
    "embed_layernorm.weight": "embed_layernorm.weight",
    "hidden_layernorm.weight": "layers.0.input_layernorm.weight",
    "lm_head_layernorm.weight": "lm_head_layernorm.weight",
}


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
        HeadConfigError: if a field is missing or impossible; [`MissingArgumentError`] if `positions_per_specialist`
            cannot be known.
    """
    notes: list[str] = []
    tensors = _without_lm_head(raw_config, tensors, notes)
    num_layers = _count_layers(tensors)
    sizes = _sizes(raw_config, tensors, notes)
    fields: dict[str, Any] = {
        **sizes,
        "fc_bias": "fc.bias" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "rms_norm_eps": number(raw_config, "rms_norm_eps", notes, default=1e-6),
        "extra_norms": any(key in tensors for key in EXTRA_NORMS),
        "hidden_act": activation(raw_config, notes),
        "rope_parameters": rope(raw_config, notes),
        "max_position_embeddings": integer(raw_config, "max_position_embeddings", notes, default=2048),
    }
    fields |= special_tokens(raw_config)
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
    _note_bias(raw_config, fields, notes)
    fields["target"] = target_of(None, tensors.get(EMBEDDING))
    try:
        config = build_config(config_class, fields)
    except ValueError as error:
        raise HeadConfigError(f"config.json of {name!r} does not fit its weights: {error}") from error
    _check_shapes(tensors, config)
    kept = {EXTRA_NORMS.get(key, key): tensor for key, tensor in tensors.items() if key != EMBEDDING}
    return Converted(config, kept, notes)


# ------------------------------------------------------------------ what the keys tell
def _without_lm_head(
    raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], notes: list[str]
) -> dict[str, torch.Tensor]:
    """SGLang skips an `lm_head` in its packs and uses the target's; elsewhere such a tensor is unknown."""
    architectures = raw_config.get("architectures")
    packed = isinstance(architectures, list) and any(str(name).endswith("ForCausalLMEagle") for name in architectures)
    if not packed or LM_HEAD not in tensors:
        return tensors
    shape, width = tuple(tensors[LM_HEAD].shape), tensors["fc.weight"].shape[0] if "fc.weight" in tensors else 0
    if len(shape) != 2 or shape[1] != width or raw_config.get("vocab_size", shape[0]) != shape[0]:
        raise CheckpointShapeError(f"{LM_HEAD} has shape {list(shape)}, expected the target's [V, {width}].")
    notes.append(f"{LM_HEAD} in the file is left out, as SGLang does: the target's own is used")
    return {key: tensor for key, tensor in tensors.items() if key != LM_HEAD}


def _note_bias(raw_config: dict[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    """The field `bias` means one thing or another, so the keys decide; a contradiction is worth a word."""
    stated = boolean(raw_config, "bias")
    if stated is not None and stated != fields["fc_bias"]:
        notes.append(f"fc with{'' if fields['fc_bias'] else 'out'} bias, as the keys say (config.json: bias={stated})")
    if fields["extra_norms"]:
        notes.append("the drafted feature is fed back before its norm, which belongs to the target's lm_head")


def _count_layers(tensors: dict[str, torch.Tensor]) -> int:
    indices = {int(match[1]) for key in tensors if (match := re.match(r"layers\.(\d{1,4})\.", key))}
    if indices != set(range(len(indices))):
        raise CheckpointKeysError(f"layers are numbered {sorted(indices)}, expected 0 to {len(indices) - 1}.")
    return len(indices)


def _check_keys(tensors: dict[str, torch.Tensor], num_layers: int, fields: dict[str, Any]) -> None:
    expected = {"fc.weight"} | ({"fc.bias"} if fields["fc_bias"] else set())
    expected |= set(EXTRA_NORMS) if fields["extra_norms"] else set()
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
        EMBEDDING: (config.vocab_size, hidden), **dict.fromkeys(EXTRA_NORMS, (hidden,)),
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
    raise MissingArgumentError(
        f"{name!r} holds {num_layers} POSS specialists, but neither its files nor its name say how many draft "
        f"positions each serves; pass load_heads(..., positions_per_specialist=n)."
    )
