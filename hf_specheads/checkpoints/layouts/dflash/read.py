"""Reads the layout of block drafters, which z-lab's, DeepSpec's, SpecForge's, JetSpec's and NeMo's code write.

    fc.weight [h, n H]   hidden_norm.weight [h]   layers.{i}.*, a Qwen 3 layer each   norm.weight [h]

The config looks like an ordinary Qwen 3's; the layout is recognised by `fc` and `hidden_norm`. `target_layer_ids`
count *outputs* of layers: id i is transformers' `hidden_states[i + 1]`. Some files contain copies of the target's
embedding and `lm_head`, which are ignored, and `d2t`, which says which tokens the rows of such an `lm_head` belong to.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ....errors import (
    CheckpointKeysError,
    CheckpointShapeError,
    HeadConfigError,
    UnknownFormatError,
    refuse_wrong_keys,
)
from ....heads.block_config import ANCHOR_SLOTS, BlockHeadConfig, spread_layers
from ....heads.dflash import DFlashHeadConfig
from ....heads.dflash2 import DFlash2HeadConfig
from ....heads.domino import DominoHeadConfig
from ....heads.dspark import DSparkHeadConfig
from ....heads.pruning import PRUNED_TOKEN_IDS
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
    number,
    refuse_contradiction,
    special_tokens,
    target_of,
)
from ..keys import (
    D2T,
    EMBEDDING,
    FC,
    FIRST_LAYER,
    GATE_PROJ,
    K_PROJ,
    LM_HEAD,
    Q_PROJ,
    T2D,
    TARGET_NAME,
    attention_bias,
)
from ..vocabulary import draft_vocabulary_of
from . import keys

# Rope fields that the authors' trainers ignore, although configs that were copied from a target contain them.
IGNORED_ROPE_FIELDS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def recognises(shapes: dict[str, tuple[int, ...]], config: RawConfig) -> bool:
    """Whether the keys are those of a block drafter."""
    return FC in shapes and keys.CONTEXT_NORM in shapes and FIRST_LAYER + keys.Q_NORM in shapes


def convert(source: Source) -> Conversion:
    """Builds config and weights of block drafters.

    Raises:
        CheckpointKeysError: If keys are missing or unknown.
        CheckpointShapeError: If sizes contradict one another or the config.
        CheckpointValueError: If `d2t` does not describe a draft vocabulary.
        HeadConfigError: If a field is missing or impossible, or an argument contradicts the file.
        UnknownFormatError: If these are block drafters of another method.
    """
    raw_config, notes = with_nested(source.raw_config), list[str]()
    tensors, borrowed = _apart(source.tensors)
    sizes = _sizes(raw_config, tensors, notes)
    config_class, extra, parts = _method(raw_config, tensors, sizes, notes)
    _check_keys(tensors, sizes["num_hidden_layers"], parts)
    vocabulary = _draft_vocabulary(borrowed, raw_config, notes)
    tensors = _with_all_rows(tensors, vocabulary, sizes["vocab_size"])
    causal = any(boolean(raw_config, name) for name in ("causal_head", "causal", "is_causal"))
    fields: dict[str, Any] = {
        **sizes,
        "method": "jetspec" if causal and config_class is DFlashHeadConfig else config_class.method,
        "causal": causal,
        **extra,
        "attention_bias": FIRST_LAYER + attention_bias("q") in tensors,
        "attention_out_bias": FIRST_LAYER + attention_bias("o") in tensors,
        **block_fields(raw_config, source, notes),
        **layer_fields(_without_ignored_rope(raw_config, notes), notes, EAGLE3_ROPES),
        **special_tokens(raw_config),
        "target": target_of(raw_config.get(TARGET_NAME), borrowed.get(EMBEDDING)),
        "pruned_vocab_size": None if vocabulary is None else len(vocabulary),
    }
    config = config_of(config_class, fields, source.name)
    return Conversion(config, tensors if vocabulary is None else tensors | {PRUNED_TOKEN_IDS: vocabulary}, notes)


# ------------------------------------------------------------------ config.json
def with_nested(raw_config: RawConfig) -> RawConfig:
    """Merges the nested fields of the method into the top level.

    Raises:
        HeadConfigError: If a field has two different values.
        UnknownFormatError: If the config names another method.
    """
    nested = raw_config.get(keys.NESTED) or {}
    if not isinstance(nested, dict):
        raise HeadConfigError(f"config.json has {keys.NESTED}={nested!r}, expected an object.")
    for name, value in nested.items():
        if raw_config.get(name, value) not in (value, None):
            raise HeadConfigError(
                f"config.json says {name}={raw_config[name]!r}, but in {keys.NESTED} it says {value!r}; correct one "
                "of the two."
            )
    flat = raw_config | nested
    if (kind := flat.get(keys.PROJECTOR, "dflash")) not in ("dflash", keys.DOMINO):
        raise UnknownFormatError(
            f"config.json says {keys.PROJECTOR}={kind!r}, a kind of block drafter that is not supported."
        )
    return flat


def block_fields(raw_config: RawConfig, source: Source, notes: list[str]) -> dict[str, Any]:
    """Config fields of the block: its size, what it reads, its scales, and attention within the block."""
    cap, multiplier = raw_config.get(keys.SOFTCAP), raw_config.get(keys.MULTIPLIER)
    scale = raw_config.get(keys.EMBEDDING_SCALE)
    return {
        "block_size": integer(raw_config, keys.BLOCK_SIZE, notes, default=16),
        "mask_token_id": _mask_token(raw_config),
        "feature_layers": _levels(raw_config, source.tensors, notes),
        "anchor_slot": _anchor_slot(raw_config, source.anchor_slot, notes),
        "logit_softcap": float(number(raw_config, keys.SOFTCAP, notes)) if cap else None,
        "logit_multiplier": 1.0 if multiplier is None else float(number(raw_config, keys.MULTIPLIER, notes)),
        "embedding_scale": 1.0 if scale is None else float(number(raw_config, keys.EMBEDDING_SCALE, notes)),
        **_sliding_fields(raw_config, notes),
    }


def _mask_token(raw_config: RawConfig) -> int:
    token = raw_config.get(keys.MASK_TOKEN)
    if type(token) is not int or token < 0:
        raise HeadConfigError(
            f"config.json has {keys.MASK_TOKEN}={token!r}, expected the id of the token that marks unknown tokens in "
            "a block."
        )
    return token


def _levels(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> list[int]:
    """Indices of the hidden states that the heads read, from ids that count outputs of layers (-1: the embedding)."""
    width, inputs = matrix_shape(tensors, FC)
    count, outputs = inputs // width, raw_config.get(keys.TAPS)
    depth = None
    if raw_config.get(keys.TARGET_DEPTH) is not None:
        depth = integer(raw_config, keys.TARGET_DEPTH, notes)
    if outputs is None:
        if depth is None:
            raise HeadConfigError(
                f"config.json lacks both `{keys.TAPS}` and `{keys.TARGET_DEPTH}`, from which the authors' code "
                "computes the former; add one of the two."
            )
        levels = list(spread_layers(depth, count))
        notes.append(f"hidden states {levels} of a target of {depth} layers (`{keys.TAPS}` not in config.json)")
    elif not isinstance(outputs, list) or not all(type(output) is int and output >= -1 for output in outputs):
        raise HeadConfigError(f"config.json has {keys.TAPS}={outputs!r}, expected a list of integers.")
    else:
        levels = [output + 1 for output in outputs]
    if len(levels) != count:
        raise CheckpointShapeError(
            f"config.json names {len(levels)} hidden states, but fc.weight reads {count}; one of the two is wrong."
        )
    if depth is not None and depth in levels:
        notes.append("the target's last hidden state is read after its final norm, as in z-lab's code")
    return levels


def _anchor_slot(raw_config: RawConfig, asked: str | None, notes: list[str]) -> str:
    """Decides whether the root's slot drafts, which no weight reveals."""
    if asked not in (None, *ANCHOR_SLOTS):
        raise HeadConfigError(f"`anchor_slot` must be one of {list(ANCHOR_SLOTS)}, got {asked!r}.")
    architectures = raw_config.get("architectures")
    architectures = architectures if isinstance(architectures, list) else []
    stated = boolean(raw_config, "sample_from_anchor")
    if stated is None:
        stated = boolean(raw_config, keys.SHIFT_LABEL)
    if any(keys.DEEPSPEC in str(name) for name in architectures):
        stated = True
    if stated is None:
        if asked is None:
            notes.append(
                "the slot of the root is idle (the files do not say; for heads trained otherwise, e.g. with JetSpec's "
                "`draft_shift`, pass anchor_slot='drafts')"
            )
        return asked or "idle"
    known = ANCHOR_SLOTS[stated]
    if asked not in (None, known):
        raise HeadConfigError(f"config.json says that the slot of the root is {known!r}; leave `anchor_slot` out.")
    return known


def _sliding_fields(raw_config: RawConfig, notes: list[str]) -> dict[str, Any]:
    """Config fields of sliding attention: its layers, its window, and whether their blocks attend both ways."""
    kinds = raw_config.get(keys.LAYER_TYPES) or []
    if not isinstance(kinds, list) or not set(kinds) <= {keys.SLIDING, keys.FULL}:
        raise HeadConfigError(
            f"config.json has {keys.LAYER_TYPES}={kinds!r}, expected a list of values from "
            f"{[keys.FULL, keys.SLIDING]}."
        )
    layers = [index for index, kind in enumerate(kinds) if kind == keys.SLIDING]
    if not layers:
        return {}
    if boolean(raw_config, "use_sliding_window") is False or raw_config.get(keys.WINDOW) is None:
        raise HeadConfigError(
            f"config.json has layers with sliding attention, but does not enable a {keys.WINDOW}; correct one of the "
            "two."
        )
    both_ways = boolean(raw_config, keys.NON_CAUSAL)
    if both_ways is None and boolean(raw_config, "is_causal") is None:
        notes.append(
            "blocks of sliding layers attend in both directions, as in NeMo's code (in newer code of z-lab's they are "
            "causal: heads.config.sliding_causal=True)"
        )
    return {
        "sliding_layers": layers,
        "sliding_window": integer(raw_config, keys.WINDOW, notes),
        "sliding_causal": both_ways is False,
        "window_from": raw_config.get("window_from", "query"),
    }


def _without_ignored_rope(raw_config: RawConfig, notes: list[str]) -> RawConfig:
    """Drops rope fields that come from the target's config and were not in force when the drafter was trained."""
    ignored = set()
    config = dict(raw_config)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), dict):
            ignored |= set(config[name]) & set(IGNORED_ROPE_FIELDS)
            config[name] = {key: value for key, value in config[name].items() if key not in IGNORED_ROPE_FIELDS}
    ignored |= {name for name in IGNORED_ROPE_FIELDS if config.pop(name, None) is not None}
    if ignored:
        notes.append(
            f"the rope fields {sorted(ignored)} are those of the target and are ignored: whole heads are rotated"
        )
    return config


# ------------------------------------------------------------------ tensors
def _apart(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Splits the tensors into the heads' own, and copies of the target's with `d2t` and `t2d`."""
    names = (EMBEDDING, LM_HEAD, D2T, T2D)
    return (
        {key: tensor for key, tensor in tensors.items() if key not in names},
        {key: tensor for key, tensor in tensors.items() if key in names},
    )


def _method(
    raw_config: RawConfig, tensors: Tensors, sizes: dict[str, int], notes: list[str]
) -> tuple[type[BlockHeadConfig], dict[str, Any], set[str]]:
    """Config class of the method, its own fields, and the tensors it has in addition to DFlash's."""
    if any(key.startswith((keys.MARKOV, keys.CONFIDENCE)) for key in tensors):
        return (DSparkHeadConfig, *_markov(raw_config, tensors, sizes))
    if any(key.startswith(keys.SELECTOR) for key in tensors):
        return (DFlash2HeadConfig, *_selector(raw_config, tensors, sizes, notes))
    if (
        any(key.startswith((keys.GRU, keys.PROJECTION)) for key in tensors)
        or raw_config.get(keys.PROJECTOR) == keys.DOMINO
    ):
        return (DominoHeadConfig, *_recurrent(raw_config, tensors, sizes, notes))
    return DFlashHeadConfig, {}, set()


def _selector(
    raw_config: RawConfig, tensors: Tensors, sizes: dict[str, int], notes: list[str]
) -> tuple[dict[str, Any], set[str]]:
    """Config fields of DFlash 2's selector and convolutions, and the names of their tensors."""
    parts = {f"layers.{i}.{part}" for i in range(sizes["num_hidden_layers"]) for part in keys.CONVOLUTION_PARTS}
    parts |= set(keys.SELECTOR_PARTS)
    refuse_wrong_keys(missing=parts - set(tensors), unknown=set())
    kernel = tensors[FIRST_LAYER + keys.CONVOLUTION_PARTS[0]]
    fields = {
        "selector_rank": matrix_shape(tensors, keys.SELECTOR_PARTS[0])[1],
        "conv_kernel_size": kernel.shape[1] if kernel.dim() == 3 else 0,
        "conv_group_size": integer(raw_config, "conv_group_size", notes, default=16),
    }
    refuse_contradiction(raw_config, fields)
    return {**fields, "selector_top_k": integer(raw_config, "selector_top_k", notes, default=16)}, parts


def _recurrent(
    raw_config: RawConfig, tensors: Tensors, sizes: dict[str, int], notes: list[str]
) -> tuple[dict[str, Any], set[str]]:
    """Config fields of Domino's recurrent correction, and the names of its tensors."""
    parts = {*keys.GRU_PARTS, *keys.PROJECTION_PARTS}
    refuse_wrong_keys(missing=parts - set(tensors), unknown=set())
    rank, inputs = matrix_shape(tensors, keys.PROJECTION_PARTS[0])
    fields = {"gru_hidden_size": inputs - sizes["hidden_size"], "correction_rank": rank}
    refuse_contradiction(raw_config, {keys.DOMINO_FIELDS[name]: value for name, value in fields.items()})
    plain = keys.DOMINO_FIELDS["plain_positions"]
    if raw_config.get(plain) not in (0, None) or isinstance(raw_config.get(plain), bool):
        return {**fields, "plain_positions": integer(raw_config, plain, notes)}, parts
    return {**fields, "plain_positions": 0}, parts


def _markov(raw_config: RawConfig, tensors: Tensors, sizes: dict[str, int]) -> tuple[dict[str, Any], set[str]]:
    """Config fields of DSpark's Markov head and confidence head, and the names of their tensors."""
    refuse_wrong_keys(missing={keys.MARKOV_IN, keys.MARKOV_OUT} - set(tensors), unknown=set())
    kind = raw_config.get("markov_head_type") or "vanilla"
    if kind not in keys.MARKOV_PARTS:
        raise HeadConfigError(f"config.json has markov_head_type={kind!r}, expected one of {list(keys.MARKOV_PARTS)}.")
    rank, width = matrix_shape(tensors, keys.MARKOV_IN)[1], sizes["hidden_size"]
    refuse_contradiction(raw_config, {"markov_rank": rank})
    parts = {keys.MARKOV_IN, keys.MARKOV_OUT, *(keys.MARKOV + part for part in keys.MARKOV_PARTS[kind])}
    confident = keys.CONFIDENCE_PARTS[0] in tensors
    inputs = matrix_shape(tensors, keys.CONFIDENCE_PARTS[0])[1] if confident else width + rank
    fields = {"markov_head": kind, "markov_rank": rank, "confidence_head": confident}
    fields["confidence_with_markov"] = inputs != width
    return fields, parts | (set(keys.CONFIDENCE_PARTS) if confident else set())


def _check_keys(tensors: Tensors, num_layers: int, others: set[str]) -> None:
    biases = [attention_bias(x) for x in "qkv"] if FIRST_LAYER + attention_bias("q") in tensors else []
    biases += [attention_bias("o")] if FIRST_LAYER + attention_bias("o") in tensors else []
    parts = (*keys.LAYER_PARTS, *biases)
    expected = {FC, keys.CONTEXT_NORM, keys.NORM, *others}
    expected |= {f"layers.{index}.{part}" for index in range(num_layers) for part in parts}
    refuse_wrong_keys(missing=expected - set(tensors), unknown=set(tensors) - expected)


def _sizes(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> dict[str, int]:
    needed = [FC, *(FIRST_LAYER + part for part in (Q_PROJ, K_PROJ, GATE_PROJ))]
    refuse_wrong_keys(missing=set(needed) - set(tensors), unknown=set())
    hidden, inputs = matrix_shape(tensors, FC)
    if inputs % hidden:
        raise CheckpointShapeError(f"{FC} has {inputs} inputs, which is not a multiple of the width {hidden}.")
    width = raw_config.get("target_hidden_size") or hidden
    if width != hidden:
        raise CheckpointKeysError(
            f"the heads are {hidden} wide and the target is {width} wide, so they cannot draft with its `lm_head`; "
            "heads of another width than their target's are not supported."
        )
    numbers = [int(found[1]) for key in tensors if (found := re.match(r"layers\.(\d{1,4})\.", key))]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": matrix_shape(tensors, FIRST_LAYER + GATE_PROJ)[0],
        **attention_sizes(
            raw_config,
            matrix_shape(tensors, FIRST_LAYER + Q_PROJ)[0],
            matrix_shape(tensors, FIRST_LAYER + K_PROJ)[0],
            notes,
        ),
        "num_hidden_layers": 1 + max(numbers),
        "vocab_size": integer(raw_config, "vocab_size", notes),
    }
    refuse_contradiction(raw_config, sizes)
    return {**sizes, "feature_size": hidden, "embedding_size": hidden}


def _with_all_rows(tensors: Tensors, vocabulary: torch.Tensor | None, size: int) -> Tensors:
    """Extends DSpark's W2 to the whole vocabulary, with rows of 0 for tokens that are not drafted."""
    rows = tensors.get(keys.MARKOV_OUT)
    if rows is None or len(rows) == size:
        return tensors
    if vocabulary is None or len(vocabulary) != len(rows):
        drafted = size if vocabulary is None else len(vocabulary)
        raise CheckpointShapeError(
            f"{keys.MARKOV_OUT} has {len(rows)} rows, but the heads draft {drafted} tokens; one of the two is damaged."
        )
    whole = rows.new_zeros(size, *rows.shape[1:])
    return tensors | {keys.MARKOV_OUT: whole if rows.is_meta else whole.index_copy_(0, vocabulary, rows)}


def _draft_vocabulary(borrowed: Tensors, raw_config: RawConfig, notes: list[str]) -> torch.Tensor | None:
    """Token ids of the rows of a copied `lm_head`; `None` if it covers the whole vocabulary."""
    size = integer(raw_config, "vocab_size", notes)
    if EMBEDDING in borrowed and matrix_shape(borrowed, EMBEDDING)[0] != size:
        raise CheckpointShapeError(
            f"{EMBEDDING} has {len(borrowed[EMBEDDING])} rows, but config.json says {size} tokens; one of the two is "
            "wrong."
        )
    if LM_HEAD in borrowed or EMBEDDING in borrowed:
        notes.append("embedding and `lm_head` in the file are copies of the target's; the target's own are used")
    drafted = matrix_shape(borrowed, LM_HEAD)[0] if LM_HEAD in borrowed else size
    found = draft_vocabulary_of(borrowed.get(D2T), borrowed.get(T2D), drafted, size)
    if not found:
        return None
    return found[D2T] if found[D2T].is_meta else torch.arange(drafted) + found[D2T]
