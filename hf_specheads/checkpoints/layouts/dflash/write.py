"""Writes block drafters in the layout of z-lab's, SpecForge's and JetSpec's code, which vLLM and SGLang also read."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ....errors import ExportError
from ....heads.block import BlockHead
from ....heads.dflash2 import DFlash2Head
from ....heads.domino import DominoHead
from ..written import Layout, common_notes, dtype_name, rope_fields, token_fields
from . import keys


def layout(heads: BlockHead, target: PreTrainedModel | None) -> Layout:
    """Builds the files in the authors' layout.

    Args:
        heads: DFlash, DFlash 2, Domino or JetSpec heads.
        target: The loaded target. Only its depth is used, which is the index of its last hidden state; by default the
            depth stored with the heads is used.

    Raises:
        ExportError: If the layout cannot represent the heads.
    """
    config, notes = heads.config, common_notes(heads)
    if config.window_from != "query" and config.sliding_layers:
        notes.append(
            "the layout counts windows from each row, not from the root: later rows of a block see a little less"
        )
    if config.anchor_slot == "drafts" and not isinstance(heads, DominoHead):
        notes.append(
            "the layout has no field for a root slot that drafts: set it where the heads are loaded (`draft_shift`)"
        )
    depth = target_depth(heads, target)
    nested: dict[str, Any] = {keys.MASK_TOKEN: config.mask_token_id, keys.TAPS: taps(heads, depth)}
    nested |= {"causal_head": True, "causal": True} if config.causal else {}
    # In z-lab's code, blocks of sliding layers are causal unless `is_causal` says otherwise.
    nested |= {keys.NON_CAUSAL: not config.sliding_causal} if config.sliding_layers else {}
    nested |= {keys.EMBEDDING_SCALE: config.embedding_scale} if config.embedding_scale != 1 else {}
    nested |= {keys.MULTIPLIER: config.logit_multiplier} if config.logit_multiplier != 1 else {}
    nested |= {keys.SOFTCAP: config.logit_softcap} if config.logit_softcap is not None else {}
    architecture, of_method = _of_method(heads)
    nested |= of_method
    fields = {
        "architectures": [architecture],
        **qwen3_fields(heads, "dflash"),
        keys.BLOCK_SIZE: config.block_size,
        keys.NESTED: nested,
        **({"is_causal": config.causal} if config.causal or not config.sliding_causal else {}),
        **({keys.TARGET_DEPTH: depth} if depth is not None else {}),
        "dtype": dtype_name(heads),
    }
    return Layout(fields, own_tensors(heads), notes)


def _of_method(heads: BlockHead) -> tuple[str, dict[str, Any]]:
    """Architecture, and the fields that only this method has."""
    if isinstance(heads, DFlash2Head):
        return keys.ZLAB2, {name: getattr(heads.config, name) for name in keys.SELECTOR_FIELDS}
    if isinstance(heads, DominoHead):
        fields = {theirs: getattr(heads.config, name) for name, theirs in keys.DOMINO_FIELDS.items()}
        shifted = heads.config.anchor_slot == "drafts"
        return keys.SPECFORGE_DOMINO, {**fields, keys.PROJECTOR: keys.DOMINO, keys.SHIFT_LABEL: shifted}
    return keys.ZLAB, {}


def qwen3_fields(heads: BlockHead, destination: str) -> dict[str, Any]:
    """Fields of the layers, as in the config of an ordinary Qwen 3.

    Raises:
        ExportError: If the layers are not of Qwen 3's form.
    """
    config = heads.config
    if not config.qk_norm or config.mlp_bias or config.attention_bias != config.attention_out_bias:
        raise ExportError(
            "the layouts of block drafters consist of Qwen 3 layers, but these heads lack norms of queries and keys, "
            "or have biases that Qwen 3 layers do not have. Keep them in this package's own layout."
        )
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "vocab_size", "rms_norm_eps", "hidden_act", "max_position_embeddings", "initializer_range",
             "num_hidden_layers", "attention_bias", "attention_dropout")  # fmt: skip
    kinds = [keys.SLIDING if i in config.sliding_layers else keys.FULL for i in range(config.num_hidden_layers)]
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in names},
        **rope_fields(config, destination),
        **token_fields(config),
        keys.LAYER_TYPES: kinds,
        keys.WINDOW: config.sliding_window if config.sliding_layers else None,
        "use_sliding_window": bool(config.sliding_layers),
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
    }


def target_depth(heads: BlockHead, target: PreTrainedModel | None) -> int | None:
    """Number of layers of the target; `None` if unknown."""
    if target is not None:
        return int(target.config.get_text_config(decoder=True).num_hidden_layers)
    return (heads.config.target or {}).get("num_hidden_layers")


def taps(heads: BlockHead, depth: int | None) -> list[int]:
    """Indices of the hidden states that the heads read, counted as outputs of layers.

    Raises:
        ExportError: If the heads read the last hidden state and the target's depth is unknown.
    """
    levels = heads.feature_layers
    if -1 in levels and depth is None:
        raise ExportError(
            "these heads read the target's last hidden state, but the target's number of layers is unknown; pass "
            "`target=`."
        )
    return [(depth if level == -1 and depth is not None else level) - 1 for level in levels]


def own_tensors(heads: BlockHead) -> dict[str, Any]:
    """Weights of the heads, whose names are already those of the layout."""
    return {name: parameter.detach() for name, parameter in heads.named_parameters()}
