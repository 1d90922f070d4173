"""Reads the layouts of the library `speculators`; those of EAGLE and HASS come from its older versions.

    eagle3   keys as in `eagle3`, with `layers.0.*`; `config.json` holds the layer's fields in a nested object,
             `transformer_layer_config`, and the target's name in `speculators_config.verifier`
    peagle   as `eagle3`, with the tensors and fields of P-EAGLE
    dflash, dspark, dflash2
             keys as in `dflash`, with copies of the target's embedding and of drafted rows of its `lm_head`; taps are
             indices of transformers' `hidden_states`, windows count from the root
    mtp      `mtp_layers.0.*`; the layer's fields are those of the whole target
    eagle    `fusion_fc.*` (versions up to 0.6), `transformer.*`; with `layernorms` also `embedding_layernorm`,
             `transformer.input_layernorm` and `pre_lm_head_layernorm`, the norms of a variant of HASS

All but `mtp` are renamed to their authors' layout and read by its module. In `eagle`, the norm of the embedding is
applied before `fc`, the input norm before attention, and the last norm before the target's `lm_head`.
"""

from __future__ import annotations

from dataclasses import replace

from ....errors import CheckpointKeysError, HeadConfigError, UnknownFormatError
from ..dflash import keys as dflash_keys
from ..dflash import read as dflash
from ..eagle import read as eagle
from ..eagle3 import read as eagle3
from ..fields import Conversion, RawConfig, Source, Tensors, boolean, renamed, with_our_prefix
from ..peagle import read as peagle
from . import keys
from . import read_mtp as mtp


def recognises(shapes: dict[str, tuple[int, ...]], config: RawConfig) -> bool:
    """Whether the config or the keys are those of `speculators`."""
    return keys.KIND in config or keys.FUSION + "weight" in shapes


def convert(source: Source) -> Conversion:
    """Builds config and weights of heads in a layout of `speculators`.

    Raises:
        CheckpointKeysError: If keys are missing or unknown, or the config contradicts the norms or biases in the file.
        CheckpointShapeError: If sizes contradict one another or the config.
        CheckpointValueError: If `d2t` and `t2d` do not describe a draft vocabulary.
        HeadConfigError: If a field is missing or impossible.
        UnknownFormatError: If these are another kind of model of the library.
    """
    raw_config = source.raw_config
    kind = raw_config.get(keys.KIND, keys.EAGLE_KIND)
    if kind not in keys.KINDS:
        raise UnknownFormatError(
            f"this is a `speculators` model of type {kind!r}; supported types: {list(keys.KINDS)}."
        )
    layer = raw_config.get(keys.LAYER_CONFIG)
    if not isinstance(layer, dict):
        raise HeadConfigError(f"config.json has {keys.LAYER_CONFIG}={layer!r}, expected an object.")
    if kind != keys.MTP_KIND and layer.get("model_type", keys.LLAMA) not in keys.LAYER_TYPES:
        raise HeadConfigError(
            f"config.json describes a layer of {layer['model_type']!r}, expected one of {keys.LAYER_TYPES}."
        )
    flat = {**layer, **_rope_of(raw_config, layer)}
    if kind == keys.MTP_KIND:
        conversion = mtp.convert(replace(source, raw_config=flat))
    elif kind == keys.EAGLE_KIND:
        tensors = _eagle_tensors(raw_config, source.tensors)
        conversion = eagle.convert(Source(flat, tensors, source.name))
    elif kind == keys.PEAGLE_KIND:
        flat |= {field: raw_config[field] for field in keys.PEAGLE_FIELDS if field in raw_config}
        conversion = peagle.convert(Source(_with_residual(flat), source.tensors, source.name))
    elif kind in keys.BLOCK_KINDS:
        conversion = dflash.convert(replace(source, raw_config=flat | _block_config(raw_config, kind)))
    else:
        flat |= {field: raw_config[field] for field in keys.EAGLE3_FIELDS if field in raw_config}
        conversion = eagle3.convert(Source(_with_residual(flat), source.tensors, source.name))
    if verifier := _verifier(raw_config):
        conversion.config.target = {**(conversion.config.target or {}), "name": verifier}
    return conversion


def _block_config(raw_config: RawConfig, kind: str) -> RawConfig:
    """Fields of a block drafter, renamed to those of its authors."""
    fields = {name: raw_config[name] for name in keys.BLOCK_FIELDS if raw_config.get(name) is not None}
    levels = raw_config.get(keys.AUX_LAYERS)
    if not isinstance(levels, list) or not all(type(level) is int and level >= 0 for level in levels):
        raise HeadConfigError(
            f"config.json has {keys.AUX_LAYERS}={levels!r}, expected a list of indices of hidden states."
        )
    fields.setdefault("sliding_window_non_causal", kind == keys.DFLASH2_KIND)
    fields.setdefault("sample_from_anchor", bool(fields.get("shift_label", kind == keys.DSPARK_KIND)))
    return fields | {dflash_keys.TAPS: [level - 1 for level in levels], "window_from": "anchor"}


def _rope_of(raw_config: RawConfig, layer: RawConfig) -> RawConfig:
    """Rope fields outside `transformer_layer_config`, where some writers repeat them; both must agree."""
    outside = {name: raw_config[name] for name in keys.ROPE if raw_config.get(name) is not None}
    for name, value in outside.items():
        if layer.get(name, value) != value:
            raise HeadConfigError(
                f"config.json says {name}={value!r}, but in {keys.LAYER_CONFIG} it says {layer[name]!r}; correct one "
                "of the two."
            )
    return outside


def _with_residual(config: RawConfig) -> RawConfig:
    """Requires `norm_before_residual`, because the library itself and vLLM assume opposite defaults."""
    if boolean(config, "norm_before_residual") is None:
        raise HeadConfigError(
            "config.json lacks `norm_before_residual`, for which readers of this layout assume different defaults; "
            "add it, as false for heads trained with EAGLE's, SpecForge's or ModelOpt's code."
        )
    return config


def _verifier(raw_config: RawConfig) -> str | None:
    """Name of the target; `None` if the config does not have it."""
    inner = raw_config.get(keys.OWN_CONFIG)
    verifier = inner.get(keys.VERIFIER) if isinstance(inner, dict) else None
    name = verifier.get(keys.VERIFIER_NAME) if isinstance(verifier, dict) else None
    return name if isinstance(name, str) and name else None


def _eagle_tensors(raw_config: RawConfig, tensors: Tensors) -> Tensors:
    """Renames the tensors to EAGLE's own layout."""
    for field, key in (("fusion_bias", keys.FUSION_BIAS), ("layernorms", keys.LAST_NORM)):
        stated = boolean(raw_config, field)
        if stated is not None and stated != (key in tensors):
            raise CheckpointKeysError(
                f"config.json says {field}={str(stated).lower()}, but the file has {'a' if key in tensors else 'no'} "
                f"tensor {key}; one of the two is damaged."
            )
    return renamed(tensors, _eagle_name)


def _eagle_name(key: str) -> str:
    return keys.NORMS.get(key) or with_our_prefix(keys.PREFIXES, key)
