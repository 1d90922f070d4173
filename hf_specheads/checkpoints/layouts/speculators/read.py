"""The layouts of the library `speculators`: EAGLE-3 heads, and EAGLE and HASS heads of its older versions.

    eagle3   keys as in `eagle3.py`, with `layers.0.*`; `config.json` holds the layer's fields in an object of its own,
             `transformer_layer_config`, and the target's name in `speculators_config.verifier`
    eagle    `fusion_fc.*` (versions up to 0.6), `transformer.*`; with `layernorms` also `embedding_layernorm`,
             `transformer.input_layernorm` and `pre_lm_head_layernorm`, the norms of a variant of HASS

Both are rewritten in the spelling of their authors' layout and read by its module. In the second, the embedding's norm
stands before `fc`, the input norm before attention, and the last one before the target's `lm_head`.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ....errors import CheckpointKeysError, HeadConfigError, UnknownFormatError
from ..eagle import read as eagle
from ..eagle3 import read as eagle3
from ..fields import Converted, boolean, renamed

EAGLE, EAGLE3 = "eagle", "eagle3"
KIND = "speculators_model_type"
# Fields that stand beside `transformer_layer_config`.
EAGLE3_FIELDS = ("draft_vocab_size", "target_hidden_size", *eagle3.FLAGS, eagle3.LEVELS)
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
LAYER_TYPES = ("llama", "qwen3")
EAGLE_KEYS = {
    "embedding_layernorm.weight": "embed_layernorm.weight",
    "transformer.input_layernorm.weight": "hidden_layernorm.weight",
    "pre_lm_head_layernorm.weight": "lm_head_layernorm.weight",
}


def recognises(shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> bool:
    """Whether config or keys are those of `speculators`."""
    return KIND in config or "fusion_fc.weight" in shapes


def convert(
    raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str, positions_per_specialist: int | None
) -> Converted:
    """Builds config and weights of heads in a layout of `speculators`.

    Args:
        raw_config: The checkpoint's `config.json`.
        tensors: Its tensors.
        name: Repository or folder name, for messages; also tells HASS from EAGLE.
        positions_per_specialist: Has no meaning here.

    Raises:
        CheckpointKeysError: for missing or unknown keys, and norms or biases that the config does not say.
        CheckpointShapeError: if shapes contradict one another or the config.
        CheckpointValueError: if `d2t` and `t2d` are no draft vocabulary.
        HeadConfigError: if a field is missing or impossible.
        UnknownFormatError: for other models of the library.
    """
    kind = raw_config.get(KIND, EAGLE)
    if kind not in (EAGLE, EAGLE3):
        raise UnknownFormatError(f"these are a `speculators` model of type {kind!r}; types eagle and eagle3 are read.")
    layer = raw_config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise HeadConfigError(f"config.json has transformer_layer_config={layer!r}, expected an object.")
    if layer.get("model_type", LAYER_TYPES[0]) not in LAYER_TYPES:
        raise HeadConfigError(f"config.json describes a layer of {layer['model_type']!r}, expected {LAYER_TYPES}.")
    flat = {**layer, **_rope_of(raw_config, layer)}
    if kind == EAGLE:
        converted = eagle.convert(flat, _eagle_tensors(raw_config, tensors), name, None)
    else:
        flat |= {field: raw_config[field] for field in EAGLE3_FIELDS if field in raw_config}
        converted = eagle3.convert(_with_residual(flat), tensors, name, None)
    if verifier := _verifier(raw_config):
        converted.config.target = {**(converted.config.target or {}), "name": verifier}
    return converted


def _rope_of(raw_config: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Rope fields, which some writers repeat beside the layer's; both must say the same."""
    outside = {name: raw_config[name] for name in ROPE_FIELDS if raw_config.get(name) is not None}
    for name, value in outside.items():
        if layer.get(name, value) != value:
            raise HeadConfigError(
                f"config.json says {name}={value!r} and, in transformer_layer_config, {layer[name]!r}; correct one."
            )
    return outside


def _with_residual(config: dict[str, Any]) -> dict[str, Any]:
    """`norm_before_residual` must be said: the library itself and vLLM take opposite values for granted."""
    if boolean(config, "norm_before_residual") is None:
        raise HeadConfigError(
            "config.json does not say `norm_before_residual`, and readers of this layout disagree about what that "
            "means; add it, false for heads trained by EAGLE's, SpecForge's or ModelOpt's code."
        )
    return config


def _verifier(raw_config: dict[str, Any]) -> str | None:
    """Name of the target, if it is said."""
    inner = raw_config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) and name else None


def _eagle_tensors(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the names of EAGLE's own layout."""
    for field, key in (("fusion_bias", "fusion_fc.bias"), ("layernorms", "pre_lm_head_layernorm.weight")):
        stated = boolean(raw_config, field)
        if stated is not None and stated != (key in tensors):
            raise CheckpointKeysError(
                f"config.json says {field}={str(stated).lower()}, and the file has {'a' if key in tensors else 'no'} "
                f"tensor {key}; one of the two is damaged."
            )
    return renamed(tensors, _eagle_name)


def _eagle_name(key: str) -> str:
    return EAGLE_KEYS.get(key) or re.sub(r"^transformer\.", "layers.0.", re.sub(r"^fusion_fc\.", "fc.", key))
