"""The authors' layout of EAGLE-3 heads (arXiv 2503.01840), written by SafeAILab's, SpecForge's and ModelOpt's code.

    fc.weight [h, 3 H]   norm.weight [h]   lm_head.weight [Vd, h]   d2t int64 [Vd], offsets   t2d bool [V]
    midlayer.* or layers.0.*   attention over [embedding ; feature], hidden_norm, input_layernorm, ...

`d2t` and `t2d` may be absent where Vd = V. An `embed_tokens.weight` in the file is the heads' own.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ....draft_vocabulary import mapping_of, mapping_problem
from ....errors import (
    CheckpointKeysError,
    CheckpointShapeError,
    CheckpointValueError,
    HeadConfigError,
    UnknownFormatError,
    refuse_wrong_keys,
)
from ....heads import Eagle3HeadConfig
from ....heads.auto import build_config
from ..fields import Converted, activation, boolean, integer, number, renamed, rope, special_tokens

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
Q_NORM, K_NORM = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"
ROPES = ("linear", "dynamic", "llama3")
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
OLD_NAMES = {f"aux_norm_{level}": f"fc_norm.{index}" for index, level in enumerate(("low", "mid", "high"))}
LEVELS = "eagle_aux_hidden_state_layer_ids"


def recognises(shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> bool:
    """Whether the keys are those of EAGLE-3 heads, in any of the spellings."""
    if "mask_hidden" in shapes or "fusion_fc.weight" in shapes:
        return False
    if any(key.startswith("midlayer.") or key.endswith(".hidden_norm.weight") for key in shapes):
        return True
    return "d2t" in shapes or ("draft_vocab_size" in config and "fc.weight" in shapes)


def convert(
    raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str, positions_per_specialist: int | None
) -> Converted:
    """Builds config and weights of EAGLE-3 heads.

    Args:
        raw_config: The checkpoint's `config.json`.
        tensors: Its tensors.
        name: Repository or folder name, for messages.
        positions_per_specialist: Has no meaning here.

    Raises:
        CheckpointKeysError: for missing or unknown keys, and a missing `d2t`.
        CheckpointShapeError: if shapes contradict one another or the config.
        CheckpointValueError: if `d2t` and `t2d` are no draft vocabulary.
        HeadConfigError: if a field is missing or impossible.
    """
    notes: list[str] = []
    eagle_config = _modelopt_config(raw_config)
    tensors = renamed(tensors, _our_name)
    flags = {flag: bool(boolean(raw_config, flag)) for flag in FLAGS}
    _check_keys(tensors, flags)
    sizes = _sizes(raw_config, tensors, notes)
    tensors |= _draft_vocabulary(tensors, sizes)
    fields: dict[str, Any] = {
        **sizes,
        **flags,
        "own_embedding": EMBEDDING in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "attention_out_bias": "layers.0.self_attn.o_proj.bias" in tensors,
        "qk_norm": Q_NORM in tensors,
        "feature_layers": _levels(raw_config, eagle_config, sizes, tensors, notes),
        "rms_norm_eps": number(raw_config, "rms_norm_eps", notes, default=1e-6),
        "hidden_act": activation(raw_config, notes),
        "rope_parameters": rope(raw_config, notes, ROPES),
        "max_position_embeddings": integer(raw_config, "max_position_embeddings", notes, default=2048),
    }
    fields |= special_tokens(raw_config)
    try:
        config = build_config(Eagle3HeadConfig, fields)
    except ValueError as error:
        raise HeadConfigError(f"config.json of {name!r} does not fit its weights: {error}") from error
    if config.own_embedding and config.hidden_size == config.feature_size:
        notes.append("the embedding in the file is the heads' own, which need not be a copy of the target's")
    _check_shapes(tensors, config)
    return Converted(config, tensors, notes)


# ------------------------------------------------------------------ config.json
def _modelopt_config(raw_config: dict[str, Any]) -> dict[str, Any]:
    """ModelOpt's nested `eagle_config`, empty in other files."""
    nested = raw_config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise HeadConfigError(f"config.json has eagle_config={nested!r}, expected an object.")
    steps = nested.get("parallel_draft_step")
    if steps not in (None, 0, 1) or nested.get("use_mtp_layernorm"):
        what = "parallel_draft_step" if steps not in (None, 0, 1) else "use_mtp_layernorm"
        raise UnknownFormatError(
            f"config.json says {what}={nested[what]!r}: these are not EAGLE-3 heads as published but a variant of "
            "ModelOpt's, which is not read. Export heads without it."
        )
    if nested.get("use_aux_hidden_state", True) is not True:
        raise HeadConfigError(
            "config.json says use_aux_hidden_state=false: these heads read one final feature as EAGLE-1 does, in "
            "EAGLE-3's layout, which is not read. Export them with use_aux_hidden_state=true, or train EAGLE-3 heads."
        )
    return nested


def _levels(
    raw_config: dict[str, Any],
    eagle_config: dict[str, Any],
    sizes: dict[str, int],
    tensors: dict[str, torch.Tensor],
    notes: list[str],
) -> list[int] | None:
    """Hidden states the heads read, `None` for the usual three. ModelOpt counts outputs of layers, one less."""
    width, levels = sizes["feature_size"], raw_config.get(LEVELS)
    shift = 0
    if not levels and eagle_config.get(LEVELS):
        levels, shift = eagle_config[LEVELS], 1
        notes.append(f"ModelOpt's {LEVELS}={levels} are outputs of layers, as its own code counts")
    count = tensors["fc.weight"].shape[1] // width
    if not levels:
        if count != 3:
            raise HeadConfigError(
                f"fc.weight reads {count} hidden states of width {width}, and config.json does not say which; add "
                f"`{LEVELS}`."
            )
        notes.append("levels 2, N // 2 and N - 3 of a target of N layers (not in config.json)")
        return None
    if not isinstance(levels, list) or not all(type(level) is int for level in levels):
        raise HeadConfigError(f"config.json has {LEVELS}={levels!r}, expected a list of integers.")
    if len(levels) != count:
        raise CheckpointShapeError(
            f"config.json names {len(levels)} hidden states in {LEVELS}, fc.weight reads {count}; one is damaged."
        )
    return [level + shift for level in levels]


# ------------------------------------------------------------------ keys
def _our_name(key: str) -> str:
    for old, new in OLD_NAMES.items():
        key = key.replace(f"{old}.", f"{new}.") if key.startswith(f"{old}.") else key
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def _check_keys(tensors: dict[str, torch.Tensor], flags: dict[str, bool]) -> None:
    if several := sorted({key.split(".")[1] for key in tensors if re.match(r"layers\.[1-9]", key)}):
        raise CheckpointKeysError(
            f"these EAGLE-3 heads have several consecutive layers (0 and {several}), which serving engines read "
            "differently; only one layer is read."
        )
    for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        if not flags[flag] and any(key.startswith(prefix) for key in tensors):
            raise HeadConfigError(
                f"the file has `{prefix}*` tensors, but config.json does not say {flag}=true; whether the levels are "
                "normed cannot be told. Correct one of the two."
            )
    if LM_HEAD not in tensors and "fc.weight" in tensors:
        raise CheckpointKeysError(
            f"{LM_HEAD} is missing: these heads draft with the target's own `lm_head`, as a few serving engines allow "
            "for EAGLE-3. Save them with a copy of it."
        )
    expected = {"fc.weight", "norm.weight", LM_HEAD}
    expected |= {f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"}
    expected |= {f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    expected |= {f"layers.0.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    if "layers.0.self_attn.q_proj.bias" in tensors:
        expected |= {f"layers.0.self_attn.{x}_proj.bias" for x in "qkv"}
    if flags["norm_before_fc"]:
        expected.add("input_norm.weight")
    if Q_NORM in tensors:
        expected |= {Q_NORM, K_NORM}
    optional = {"d2t", "t2d", EMBEDDING, "layers.0.self_attn.o_proj.bias"}
    if flags["fc_norm"]:
        optional |= {key for key in tensors if re.fullmatch(r"fc_norm\.\d{1,2}\.weight", key)}
    found = set(tensors)
    refuse_wrong_keys(missing=expected - found, unknown=found - expected - optional)


# ------------------------------------------------------------------ sizes
def _matrix(tensors: dict[str, torch.Tensor], key: str) -> tuple[int, int]:
    shape = tuple(tensors[key].shape)
    if len(shape) != 2:
        raise CheckpointShapeError(f"{key} must be a matrix, got the shape {list(shape)}.")
    return shape


def _sizes(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], notes: list[str]) -> dict[str, int]:
    hidden, inputs = _matrix(tensors, "fc.weight")
    queries, _ = _matrix(tensors, "layers.0.self_attn.q_proj.weight")
    keys, _ = _matrix(tensors, "layers.0.self_attn.k_proj.weight")
    middle, _ = _matrix(tensors, "layers.0.mlp.gate_proj.weight")
    drafted, _ = _matrix(tensors, LM_HEAD)
    width = integer(raw_config, "target_hidden_size", [], default=hidden)
    if inputs % width:
        raise CheckpointShapeError(f"fc.weight reads {inputs} inputs, no multiple of the target's width {width}.")
    if EMBEDDING not in tensors and width != hidden:
        raise CheckpointKeysError(
            f"the heads are {hidden} wide and the target {width}, so they need an embedding of their own; "
            f"{EMBEDDING} is missing. Take a file that was saved with it."
        )
    heads = integer(raw_config, "num_attention_heads", notes)
    if queries % heads:
        raise CheckpointShapeError(f"{queries} rows of q_proj do not divide into num_attention_heads={heads}.")
    head_dim = queries // heads
    if keys % head_dim or head_dim % 2:
        raise CheckpointShapeError(f"{keys} rows of k_proj do not divide into heads of an even width {head_dim}.")
    told = {
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "draft_vocab_size": drafted,
        "vocab_size": _vocab_size(raw_config, tensors, notes),
    }
    for key, value in told.items():
        if (stated := raw_config.get(key)) is not None and stated != value:
            raise CheckpointShapeError(f"config.json says {key}={stated!r}, the weights say {value}; one is damaged.")
    return {**told, "num_attention_heads": heads, "feature_size": width, "embedding_size": width}


def _vocab_size(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], notes: list[str]) -> int:
    """V of the target: as long as `t2d` and the embedding, else as the config says."""
    found = {key: tensors[key].shape[0] for key in ("t2d", EMBEDDING) if key in tensors and tensors[key].dim()}
    if len(set(found.values())) > 1:
        raise CheckpointShapeError(f"the file has {found} tokens; one of the two is damaged.")
    return next(iter(found.values())) if found else integer(raw_config, "vocab_size", notes)


def _draft_vocabulary(tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` in our types, taken out of `tensors`; nothing where all of V is drafted."""
    drafted, vocab_size = sizes["draft_vocab_size"], sizes["vocab_size"]
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if drafted < vocab_size:
            raise CheckpointKeysError(
                f"lm_head.weight drafts {drafted} of {vocab_size} tokens, but `d2t`, which says which, is missing; "
                "take a file that was saved with it."
            )
        d2t = torch.zeros(drafted, dtype=torch.long, device=tensors[LM_HEAD].device)
    if d2t.is_meta:
        return _vocabulary_of_header(d2t, t2d, sizes)
    if d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32) or len(d2t) != drafted:
        raise CheckpointShapeError(
            f"`d2t` is {d2t.dtype} {list(d2t.shape)}, expected {drafted} integers, one per row of lm_head.weight."
        )
    d2t = d2t.long()
    if t2d is None:
        token_ids = torch.arange(drafted) + d2t
        try:
            d2t, t2d = mapping_of(token_ids, vocab_size)
        except ValueError as error:
            raise CheckpointValueError(f"`d2t` is no draft vocabulary: {error}") from error
        if bool((token_ids[1:] <= token_ids[:-1]).any()):
            raise CheckpointValueError("the token ids `d2t` leads to do not ascend; the file is damaged.")
    if t2d.dim() != 1 or t2d.dtype.is_floating_point or bool(((t2d != 0) & (t2d != 1)).any()):
        raise CheckpointShapeError(f"`t2d` is {t2d.dtype} {list(t2d.shape)}, expected one truth value per token.")
    if problem := mapping_problem(d2t, t2d.bool()):
        raise CheckpointValueError(f"{problem}; the file is damaged, download it again.")
    return {"d2t": d2t, "t2d": t2d.bool()} if drafted < vocab_size else {}


def _vocabulary_of_header(
    d2t: torch.Tensor, t2d: torch.Tensor | None, sizes: dict[str, int]
) -> dict[str, torch.Tensor]:
    """The two tensors as they will be, where only their shapes are known."""
    drafted, vocab_size = sizes["draft_vocab_size"], sizes["vocab_size"]
    if tuple(d2t.shape) != (drafted,) or (t2d is not None and tuple(t2d.shape) != (vocab_size,)):
        raise CheckpointShapeError(f"`d2t` must be [{drafted}] and `t2d` [{vocab_size}], got other shapes.")
    if drafted == vocab_size:
        return {}
    return {"d2t": d2t.long(), "t2d": torch.empty(vocab_size, dtype=torch.bool, device="meta")}


def _check_shapes(tensors: dict[str, torch.Tensor], config: Eagle3HeadConfig) -> None:
    hidden, middle, width = config.hidden_size, config.intermediate_size, config.feature_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    row = config.row_embedding_size + hidden
    expected = {
        "fc.weight": (hidden, config.num_levels * width), "norm.weight": (hidden,),
        LM_HEAD: (config.draft_vocab_size, hidden), EMBEDDING: (config.vocab_size, hidden),
        "d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,),
        "input_norm.weight": (config.num_levels * width,),
        "self_attn.q_proj.weight": (queries, row), "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, row), "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, row), "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries), "self_attn.o_proj.bias": (hidden,),
        "self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (middle, hidden), "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle), "input_layernorm.weight": (config.row_embedding_size,),
        "hidden_norm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    expected |= {f"fc_norm.{level}.weight": (width,) for level in range(config.num_levels)}
    levels = {key for key in expected if key.startswith("fc_norm.")} if config.fc_norm else set()
    found = {key for key in tensors if key.startswith("fc_norm.")}
    refuse_wrong_keys(missing=levels - found, unknown=found - levels)
    for key, tensor in tensors.items():
        wanted = expected[key.removeprefix("layers.0.")]
        if tuple(tensor.shape) != wanted:
            raise CheckpointShapeError(f"{key} has shape {list(tensor.shape)}, expected {list(wanted)}.")
