"""Reads the authors' layout of EAGLE-1/2, HASS and PosS, which share one set of keys. PosS has a layer per specialist.

A variant of HASS has three more norms: `embed_layernorm`, `hidden_layernorm` and `lm_head_layernorm`. SGLang's packs
of EAGLE-1 differ only in their `architectures` and in a copy of the target's `lm_head`. Sizes, biases and the number
of specialists are taken from the tensors. The number of attention heads, the norm epsilon and the rope, which tensors
do not reveal, are taken from `config.json`. (arXiv 2401.15077, 2406.16858, 2408.15766, 2506.03566)
"""

from __future__ import annotations

import re
from typing import Any

from ....errors import CheckpointKeysError, CheckpointShapeError, MissingArgumentError, refuse_wrong_keys
from ....heads import EagleHeadConfig, PossHeadConfig
from ..fields import (
    Conversion,
    RawConfig,
    Source,
    Tensors,
    attention_sizes,
    boolean,
    config_of,
    integer,
    layer_fields,
    matrix_shape,
    refuse_contradiction,
    special_tokens,
    target_of,
)
from ..keys import (
    EMBEDDING,
    FC,
    FC_BIAS,
    FIRST_LAYER,
    GATE_PROJ,
    K_PROJ,
    LAYER_WEIGHTS,
    LM_HEAD,
    POST_NORM,
    Q_PROJ,
    attention_bias,
)
from .keys import EXTRA_NORMS


def convert(source: Source) -> Conversion:
    """Builds config and weights of EAGLE, HASS or POSS heads.

    Raises:
        CheckpointKeysError: If keys are missing or unknown.
        CheckpointShapeError: If sizes contradict one another or the config.
        HeadConfigError: If a field is missing or impossible; [`MissingArgumentError`] if `positions_per_specialist`
            cannot be known.
    """
    raw_config, notes = source.raw_config, list[str]()
    tensors = _without_lm_head(raw_config, source.tensors, notes)
    num_layers = _count_layers(tensors)
    fields: dict[str, Any] = {
        **_sizes(raw_config, tensors, notes),
        "fc_bias": FC_BIAS in tensors,
        "attention_bias": FIRST_LAYER + attention_bias("q") in tensors,
        "extra_norms": any(key in tensors for key in EXTRA_NORMS),
        **layer_fields(raw_config, notes),
        **special_tokens(raw_config),
    }
    config_class: type[EagleHeadConfig] = EagleHeadConfig
    if num_layers > 1:
        config_class = PossHeadConfig
        fields |= {"method": "poss", "num_specialists": num_layers}
        fields["positions_per_specialist"] = _positions(source, num_layers, notes)
        fields["trained_positions"] = num_layers * fields["positions_per_specialist"]
    else:
        fields["method"] = "hass" if "hass" in source.name.lower() else "eagle"
        notes.append(f"method {fields['method']!r} from the name (EAGLE and HASS share one layout)")
    _check_keys(tensors, num_layers, fields)
    _note_bias(raw_config, fields, notes)
    fields["target"] = target_of(None, tensors.get(EMBEDDING))
    config = config_of(config_class, fields, source.name)
    kept = {EXTRA_NORMS.get(key, key): tensor for key, tensor in tensors.items() if key != EMBEDDING}
    return Conversion(config, kept, notes)


# ------------------------------------------------------------------ what the keys tell
def _without_lm_head(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> Tensors:
    """Drops the `lm_head` of SGLang's packs, as SGLang does, which uses the target's; elsewhere the key is unknown."""
    architectures = raw_config.get("architectures")
    packed = isinstance(architectures, list) and any(str(name).endswith("ForCausalLMEagle") for name in architectures)
    if not packed or LM_HEAD not in tensors:
        return tensors
    shape, width = tuple(tensors[LM_HEAD].shape), tensors[FC].shape[0] if FC in tensors else 0
    if len(shape) != 2 or shape[1] != width or raw_config.get("vocab_size", shape[0]) != shape[0]:
        raise CheckpointShapeError(f"{LM_HEAD} has shape {list(shape)}, expected the target's [V, {width}].")
    notes.append(f"{LM_HEAD} in the file is ignored, as in SGLang: the target's own is used")
    return {key: tensor for key, tensor in tensors.items() if key != LM_HEAD}


def _note_bias(raw_config: RawConfig, fields: dict[str, Any], notes: list[str]) -> None:
    """Notes contradictions between config and keys. The field `bias` is ambiguous, so the keys decide."""
    stated = boolean(raw_config, "bias")
    if stated is not None and stated != fields["fc_bias"]:
        notes.append(f"fc with{'' if fields['fc_bias'] else 'out'} bias, as the keys say (config.json: bias={stated})")
    if fields["extra_norms"]:
        notes.append(
            "the drafted feature is fed back without the last norm, which is applied only before the target's lm_head"
        )


def _count_layers(tensors: Tensors) -> int:
    indices = {int(match[1]) for key in tensors if (match := re.match(r"layers\.(\d{1,4})\.", key))}
    if indices != set(range(len(indices))):
        raise CheckpointKeysError(f"layers are numbered {sorted(indices)}, expected 0 to {len(indices) - 1}.")
    return len(indices)


def _check_keys(tensors: Tensors, num_layers: int, fields: dict[str, Any]) -> None:
    expected = {FC} | ({FC_BIAS} if fields["fc_bias"] else set())
    expected |= set(EXTRA_NORMS) if fields["extra_norms"] else set()
    parts = [*LAYER_WEIGHTS, POST_NORM, *(attention_bias(x) for x in "qkv" if fields["attention_bias"])]
    expected |= {f"layers.{index}.{part}" for index in range(num_layers) for part in parts}
    found = set(tensors) - {EMBEDDING}
    refuse_wrong_keys(missing=expected - found, unknown=found - expected)


def _sizes(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> dict[str, int]:
    """Reads sizes from the shapes of layer 0; only the number of attention heads needs the config."""
    wanted = (FC, FIRST_LAYER + Q_PROJ, FIRST_LAYER + K_PROJ, FIRST_LAYER + GATE_PROJ)
    refuse_wrong_keys(missing=set(wanted) - set(tensors), unknown=set())
    (hidden, inputs), (queries, _), (keys, _), (middle, _) = (matrix_shape(tensors, key) for key in wanted)
    if inputs != 2 * hidden:
        raise CheckpointShapeError(f"{FC} must be [H, 2H] for [embedding ; feature], got [{hidden}, {inputs}].")
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": middle,
        **attention_sizes(raw_config, queries, keys, notes),
        "vocab_size": _vocab_size(raw_config, tensors, hidden, notes),
    }
    # The authors' code ignores `head_dim`, so a different value there does not mean that the file is damaged.
    refuse_contradiction(raw_config, {name: size for name, size in sizes.items() if name != "head_dim"})
    return {**sizes, "feature_size": hidden, "embedding_size": hidden}


def _vocab_size(raw_config: RawConfig, tensors: Tensors, hidden: int, notes: list[str]) -> int:
    if EMBEDDING not in tensors:
        return integer(raw_config, "vocab_size", notes)
    shape = tuple(tensors[EMBEDDING].shape)
    if len(shape) != 2 or shape[1] != hidden:
        raise CheckpointShapeError(f"{EMBEDDING} must be [V, {hidden}] to fit {FC}, got {list(shape)}.")
    return shape[0]


def _positions(source: Source, num_layers: int, notes: list[str]) -> int:
    """Draft positions per specialist, from the argument or a name such as `PosS3`; no file stores the number."""
    if source.positions_per_specialist is not None:
        return source.positions_per_specialist
    if match := re.search(r"PosS-?(\d{1,2})(?!\d)", source.name, flags=re.IGNORECASE):
        notes.append(f"positions_per_specialist={match[1]} from the name {source.name!r}")
        return int(match[1])
    raise MissingArgumentError(
        f"{source.name!r} holds {num_layers} POSS specialists, but neither its files nor its name say how many draft "
        f"positions each serves; pass load_heads(..., positions_per_specialist=n)."
    )
