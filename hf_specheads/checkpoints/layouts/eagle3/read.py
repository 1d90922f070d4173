"""Reads the authors' layout of EAGLE-3 heads (arXiv 2503.01840), which SafeAILab's, SpecForge's, ModelOpt's and
DeepSpec's code write.

    fc.weight [h, 3 H]   norm.weight [h]   lm_head.weight [Vd, h]   d2t int64 [Vd], offsets   t2d bool [V]
    midlayer.* or layers.0.*   attention over [embedding ; feature], hidden_norm, input_layernorm, ...

`d2t` and `t2d` may be absent if Vd = V. An `embed_tokens.weight` in the file is the heads' own embedding.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from ....errors import (
    CheckpointKeysError,
    CheckpointShapeError,
    HeadConfigError,
    UnknownFormatError,
    refuse_wrong_keys,
)
from ....heads import Eagle3HeadConfig
from ..fields import (
    EAGLE3_ROPES,
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
    renamed,
    special_tokens,
    with_our_prefix,
)
from ..keys import (
    D2T,
    EMBEDDING,
    FC,
    FIRST_LAYER,
    GATE_PROJ,
    INPUT_NORM,
    K_PROJ,
    LAYER_WEIGHTS,
    LM_HEAD,
    POST_NORM,
    Q_PROJ,
    T2D,
    attention_bias,
)
from ..vocabulary import draft_vocabulary_of
from .keys import (
    FLAGS,
    HIDDEN_NORM,
    K_NORM,
    LEVEL_NORMS,
    LEVELS,
    LEVELS_NORM,
    MIDLAYER,
    NORM,
    OUTPUT_LEVELS,
    PREFIXES,
    Q_NORM,
)


def recognises(shapes: dict[str, tuple[int, ...]], config: RawConfig) -> bool:
    """Whether the keys are those of EAGLE-3 heads, in any spelling."""
    if "mask_hidden" in shapes or "fusion_fc.weight" in shapes:
        return False
    if any(key.startswith(MIDLAYER) or key.endswith(f".{HIDDEN_NORM}") for key in shapes):
        return True
    return D2T in shapes or ("draft_vocab_size" in config and FC in shapes)


def convert(source: Source) -> Conversion:
    """Builds config and weights of EAGLE-3 heads.

    Raises:
        CheckpointKeysError: If keys are missing or unknown, or `d2t` is missing.
        CheckpointShapeError: If sizes contradict one another or the config.
        CheckpointValueError: If `d2t` and `t2d` do not describe a draft vocabulary.
        HeadConfigError: If a field is missing or impossible.
    """
    raw_config, notes = source.raw_config, list[str]()
    eagle_config = _modelopt_config(raw_config)
    tensors = renamed(source.tensors, partial(with_our_prefix, PREFIXES))
    flags = {flag: bool(boolean(raw_config, flag)) for flag in FLAGS}
    _check_keys(tensors, flags)
    sizes = _sizes(raw_config, tensors, notes)
    d2t, t2d = tensors.pop(D2T, None), tensors.pop(T2D, None)
    tensors |= draft_vocabulary_of(d2t, t2d, sizes["draft_vocab_size"], sizes["vocab_size"])
    fields: dict[str, Any] = {
        **sizes,
        **flags,
        "own_embedding": EMBEDDING in tensors,
        "attention_bias": FIRST_LAYER + attention_bias("q") in tensors,
        "attention_out_bias": FIRST_LAYER + attention_bias("o") in tensors,
        "qk_norm": Q_NORM in tensors,
        "feature_layers": _levels(raw_config, eagle_config, sizes, tensors, notes),
        **layer_fields(raw_config, notes, EAGLE3_ROPES),
        **special_tokens(raw_config),
    }
    config = config_of(Eagle3HeadConfig, fields, source.name)
    if EMBEDDING in tensors and sizes["hidden_size"] == sizes["feature_size"]:
        notes.append("the embedding in the file is the heads' own, which need not be a copy of the target's")
    return Conversion(config, tensors, notes)


# ------------------------------------------------------------------ config.json
def _modelopt_config(raw_config: RawConfig) -> RawConfig:
    """Returns ModelOpt's nested `eagle_config`, which is empty in other files; refuses variants that are not read."""
    nested = raw_config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise HeadConfigError(f"config.json has eagle_config={nested!r}, expected an object.")
    steps = nested.get("parallel_draft_step")
    if steps not in (None, 0, 1) or nested.get("use_mtp_layernorm"):
        what = "parallel_draft_step" if steps not in (None, 0, 1) else "use_mtp_layernorm"
        raise UnknownFormatError(
            f"config.json says {what}={nested[what]!r}: these are not EAGLE-3 heads as published but a variant of "
            "ModelOpt's that is not supported. Export heads without it."
        )
    if nested.get("use_aux_hidden_state", True) is not True:
        raise HeadConfigError(
            "config.json says use_aux_hidden_state=false: these heads read one final feature, as EAGLE-1 does, which "
            "is not supported in EAGLE-3's layout. Export them with use_aux_hidden_state=true, or train EAGLE-3 heads."
        )
    return nested


def _levels(
    raw_config: RawConfig,
    eagle_config: RawConfig,
    sizes: dict[str, int],
    tensors: Tensors,
    notes: list[str],
) -> list[int] | None:
    """Indices of the hidden states that the heads read; `None` for the usual three.

    ModelOpt and DeepSpec count outputs of layers, so their indices are smaller by one.
    """
    width, levels = sizes["feature_size"], raw_config.get(LEVELS)
    shift = 0
    if not levels and eagle_config.get(LEVELS):
        levels, shift = eagle_config[LEVELS], 1
        notes.append(f"ModelOpt's {LEVELS}={levels} are read as outputs of layers, as in its own code")
    elif not levels and raw_config.get(OUTPUT_LEVELS):
        levels, shift = raw_config[OUTPUT_LEVELS], 1
        notes.append(f"DeepSpec's {OUTPUT_LEVELS}={levels} are read as outputs of layers, as in its own code")
    count = tensors[FC].shape[1] // width
    if not levels:
        if count != 3:
            raise HeadConfigError(
                f"fc.weight reads {count} hidden states of width {width}, but config.json does not say which; add "
                f"`{LEVELS}`."
            )
        notes.append("levels 2, N // 2 and N - 3 of a target of N layers (not in config.json)")
        return None
    if not isinstance(levels, list) or not all(type(level) is int for level in levels):
        raise HeadConfigError(f"config.json has {LEVELS}={levels!r}, expected a list of integers.")
    if len(levels) != count:
        raise CheckpointShapeError(
            f"config.json names {len(levels)} hidden states in {LEVELS}, but fc.weight reads {count}; one of the two "
            "is wrong."
        )
    return [level + shift for level in levels]


# ------------------------------------------------------------------ keys
def _check_keys(tensors: Tensors, flags: dict[str, bool]) -> None:
    if several := sorted({key.split(".")[1] for key in tensors if re.match(r"layers\.[1-9]", key)}):
        raise CheckpointKeysError(
            f"these EAGLE-3 heads have several consecutive layers (0 and {several}), which serving engines read "
            "differently; only heads with one layer are supported."
        )
    for flag, prefix in (("fc_norm", LEVEL_NORMS), ("norm_before_fc", LEVELS_NORM)):
        if not flags[flag] and any(key.startswith(prefix) for key in tensors):
            raise HeadConfigError(
                f"the file has `{prefix}*` tensors, but config.json does not say {flag}=true, so it is unclear "
                "whether the levels are normed; correct one of the two."
            )
    if LM_HEAD not in tensors and FC in tensors:
        raise CheckpointKeysError(
            f"{LM_HEAD} is missing: these heads draft with the target's own `lm_head`, as a few serving engines allow "
            "for EAGLE-3. Save them with a copy of it."
        )
    parts = [*LAYER_WEIGHTS, HIDDEN_NORM, INPUT_NORM, POST_NORM]
    if FIRST_LAYER + attention_bias("q") in tensors:
        parts += [attention_bias(x) for x in "qkv"]
    expected = {FC, NORM, LM_HEAD} | {FIRST_LAYER + part for part in parts}
    if flags["norm_before_fc"]:
        expected.add(f"{LEVELS_NORM}weight")
    if Q_NORM in tensors:
        expected |= {Q_NORM, K_NORM}
    optional = {D2T, T2D, EMBEDDING, FIRST_LAYER + attention_bias("o")}
    if flags["fc_norm"]:
        optional |= {key for key in tensors if re.fullmatch(rf"{re.escape(LEVEL_NORMS)}\d{{1,2}}\.weight", key)}
    found = set(tensors)
    refuse_wrong_keys(missing=expected - found, unknown=found - expected - optional)


# ------------------------------------------------------------------ sizes
def _sizes(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> dict[str, int]:
    hidden, inputs = matrix_shape(tensors, FC)
    queries, _ = matrix_shape(tensors, FIRST_LAYER + Q_PROJ)
    keys, _ = matrix_shape(tensors, FIRST_LAYER + K_PROJ)
    middle, _ = matrix_shape(tensors, FIRST_LAYER + GATE_PROJ)
    drafted, _ = matrix_shape(tensors, LM_HEAD)
    width = integer(raw_config, "target_hidden_size", [], default=hidden)
    if inputs % width:
        raise CheckpointShapeError(f"{FC} has {inputs} inputs, which is not a multiple of the target's width {width}.")
    if EMBEDDING not in tensors and width != hidden:
        raise CheckpointKeysError(
            f"the heads are {hidden} wide and the target is {width} wide, so they need an embedding of their own, but "
            f"{EMBEDDING} is missing; use a file that was saved with it."
        )
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": middle,
        **attention_sizes(raw_config, queries, keys, notes),
        "draft_vocab_size": drafted,
        "vocab_size": _vocab_size(raw_config, tensors, notes),
    }
    refuse_contradiction(raw_config, sizes)
    return {**sizes, "feature_size": width, "embedding_size": width}


def _vocab_size(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> int:
    """V of the target: the length of `t2d` and of the embedding, or else the number in the config."""
    found = {key: tensors[key].shape[0] for key in (T2D, EMBEDDING) if key in tensors and tensors[key].dim()}
    if len(set(found.values())) > 1:
        raise CheckpointShapeError(
            f"tensors of the file disagree about the number of tokens ({found}); one of the two is damaged."
        )
    return next(iter(found.values())) if found else integer(raw_config, "vocab_size", notes)
