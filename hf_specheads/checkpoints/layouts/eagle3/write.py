"""Writes EAGLE-3 heads as their authors do, and as vLLM, SGLang and `speculators` read them (arXiv 2503.01840).

Of POSS heads with this backbone, only specialist 0 is written, because no layout has several specialists. Specialist 0
is a complete EAGLE-3 head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ....draft_vocabulary import mapping_of
from ....errors import ExportError
from ....heads import Eagle3Head
from ....heads.eagle3 import default_feature_layers
from ....heads.pruning import PRUNED_TOKEN_IDS
from ..commands import sglang_command, vllm_command
from ..eagle.absorb import embedding_of, needed_target
from ..eagle.write import lost_specialists
from ..fields import Tensors
from ..keys import D2T, EMBEDDING, LM_HEAD, T2D
from ..written import Layout, adapter_note, llama_fields, scales_embeddings, zero_biases
from .keys import FLAGS, LEVELS, MIDLAYER

MLP_BIASES = "biases in their MLP"
NOT_IN_QWEN3 = "which Qwen 3's layers do not have together; use them with this package"


def layout(heads: Eagle3Head, to: str, target: PreTrainedModel | None) -> Layout:
    """Builds the files for `"vllm"`, `"sglang"` or `"eagle"` (the authors' own layout).

    Raises:
        ExportError: If the destination cannot represent the heads.
    """
    _check_rows(heads)
    files = {"vllm": _vllm, "sglang": _sglang, "eagle": _authors}[to](heads)
    if scales_embeddings(heads) and not heads.config.own_embedding and to == "vllm":
        files.tensors[EMBEDDING] = embedding_of(
            heads, needed_target(target, "the target scales its embeddings, but vLLM does not")
        )
        files.notes.append("the target's embedding is written, already scaled")
    files.notes += lost_specialists(heads) + adapter_note(heads)
    return files


def _check_rows(heads: Eagle3Head) -> None:
    config = heads.config
    if config.row_embedding_size != config.hidden_size:
        raise ExportError(
            f"these heads are {config.hidden_size} wide and read embeddings of width {config.row_embedding_size}, "
            "which no layout of EAGLE-3 supports; train heads with own_embedding=True."
        )


# ------------------------------------------------------------------ tensors and levels
def tensors_of(heads: Eagle3Head, layer: str, *, whole_vocabulary: bool) -> Tensors:
    """Tensors of specialist 0.

    Args:
        heads: EAGLE-3 heads.
        layer: Prefix of the decoder layer's keys.
        whole_vocabulary: Write `d2t` (zeros) and `t2d` (ones) even if the whole vocabulary is drafted.
    """
    state = {key: value.detach() for key, value in heads.state_dict().items() if not key.startswith("layers.")}
    state |= {f"{layer}{name}": value for name, value in heads.specialist_state(0).items()}
    if (kept := state.pop(PRUNED_TOKEN_IDS, None)) is not None:
        state |= _pruned(heads, kept)
    if whole_vocabulary and heads.draft_vocabulary is None:
        state[D2T] = torch.zeros(heads.config.vocab_size, dtype=torch.long)
        state[T2D] = torch.ones(heads.config.vocab_size, dtype=torch.bool)
    return state


def _pruned(heads: Eagle3Head, kept: torch.Tensor) -> Tensors:
    """`lm_head` rows and draft vocabulary of pruned heads, as if they had been trained with only these tokens."""
    trained = heads.trained_vocabulary
    rows = kept if trained is None else torch.searchsorted(trained, kept)
    d2t, t2d = mapping_of(kept.cpu(), heads.config.vocab_size)
    tensors = {LM_HEAD: heads.lm_head.weight.detach()[rows]}
    return tensors | ({D2T: d2t, T2D: t2d} if len(kept) < heads.config.vocab_size else {})


def levels_of(heads: Eagle3Head, to: str) -> list[int] | None:
    """Indices of the hidden states that the heads read, where index i enters layer i; `None` for the usual three.

    Raises:
        ExportError: If a hidden state enters no layer.
    """
    levels, depth = heads.config.feature_layers, target_depth(heads)
    if levels is None:
        return None
    if min(levels) < 0 or (depth is not None and max(levels) >= depth):
        raise ExportError(
            f"these heads read the hidden states {list(levels)} of their target, but {to} reads only those that enter "
            f"a layer (0 to {'N' if depth is None else depth} - 1), not the one after the final norm; train heads "
            "with other `feature_layers`."
        )
    return list(levels)


def target_depth(heads: Eagle3Head) -> int | None:
    """Number of layers of the target; `None` if unknown."""
    return (heads.config.target or {}).get("num_hidden_layers")


def size_fields(heads: Eagle3Head) -> dict[str, Any]:
    """Size of the draft vocabulary, and the target's width and the number of levels if they are not the usual ones."""
    config, vocabulary = heads.config, heads.draft_vocabulary
    fields: dict[str, Any] = {"draft_vocab_size": config.vocab_size if vocabulary is None else len(vocabulary)}
    if config.feature_size != config.hidden_size:
        fields["target_hidden_size"] = config.feature_size
    if config.num_levels != 3:
        fields["num_aux_hidden_states"] = config.num_levels
    return fields


# ------------------------------------------------------------------ vLLM
def _vllm(heads: Eagle3Head) -> Layout:
    config = heads.config
    fields = {"architectures": ["LlamaForCausalLMEagle3"], **llama_fields(heads, "vllm"), **size_fields(heads)}
    fields |= {flag: getattr(config, flag) for flag in FLAGS}
    if (levels := levels_of(heads, "vLLM")) is not None:
        fields[LEVELS] = levels
    tensors = tensors_of(heads, MIDLAYER, whole_vocabulary=False)
    if config.qk_norm:
        _check_qwen3(heads)
        fields |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
        fields["attention_bias"] = config.attention_bias
    else:
        tensors |= paired_biases(heads, MIDLAYER)
        fields["attention_bias"] = config.attention_bias or config.attention_out_bias
    return Layout(fields, tensors, [], vllm_command(heads, "eagle3"))


def _check_qwen3(heads: Eagle3Head) -> None:
    """Refuses biases that vLLM's Qwen 3 layers lack; heads with norms of queries and keys are served as Qwen 3."""
    for what, there in (("a bias of `o_proj`", heads.config.attention_out_bias), (MLP_BIASES, heads.config.mlp_bias)):
        if there:
            raise ExportError(f"these heads have {what} and norms of queries and keys, {NOT_IN_QWEN3}.")


def paired_biases(heads: Eagle3Head, layer: str) -> Tensors:
    """Zeros for missing biases, if only some projections have one: engines have one field for all four biases."""
    config = heads.config
    if config.attention_bias == config.attention_out_bias:
        return {}
    return zero_biases(heads, layer, "o" if config.attention_bias else "qkv")


# ------------------------------------------------------------------ SGLang
def _sglang(heads: Eagle3Head) -> Layout:
    """SGLang reads the levels in `eagle_config`, as outputs of layers (one less); other readers use the outer copy."""
    config = heads.config
    for what, there in (
        ("norm_before_residual=True", config.norm_before_residual),
        ("biases of attention", config.attention_bias or config.attention_out_bias),
        (MLP_BIASES, config.mlp_bias),
        ("norms of queries and keys", config.qk_norm),
    ):
        if there:
            raise ExportError(
                f"these heads have {what}, which SGLang's EAGLE-3 layer does not support; export them `--to vllm`."
            )
    if config.own_embedding and config.hidden_size == config.feature_size:
        raise ExportError(
            "these heads have an embedding of their own, but SGLang replaces it with the target's if both have the "
            "same width; export them `--to vllm`, or train heads with own_embedding=False."
        )
    if scales_embeddings(heads) and not config.own_embedding:
        raise ExportError(
            "the target scales its embeddings, but SGLang's EAGLE-3 layer reads them unscaled; export them "
            "`--to vllm`."
        )
    fields = {"architectures": ["LlamaForCausalLMEagle3"], **llama_fields(heads, "sglang"), **size_fields(heads)}
    fields |= {flag: getattr(config, flag) for flag in FLAGS}
    if (levels := levels_of(heads, "SGLang")) is not None:
        outputs = [level - 1 for level in levels]
        fields |= {LEVELS: levels, "eagle_config": {LEVELS: outputs, "use_aux_hidden_state": True}}
    tensors = tensors_of(heads, MIDLAYER, whole_vocabulary=True)
    return Layout(fields, tensors, [], sglang_command(heads, "EAGLE3"))


# ------------------------------------------------------------------ the authors' own
def _authors(heads: Eagle3Head) -> Layout:
    """The authors' code supports none of the variants and always reads the usual three levels."""
    config = heads.config
    if variants := [flag for flag in (*FLAGS, "qk_norm") if getattr(config, flag)]:
        raise ExportError(
            f"these heads have {variants}, which EAGLE-3's own code does not support; export them `--to vllm`."
        )
    if config.attention_out_bias or config.mlp_bias:
        raise ExportError(
            "these heads have biases of `o_proj` or of the MLP, which EAGLE-3's own layout does not have; "
            "export them `--to vllm`."
        )
    levels, depth, notes = levels_of(heads, "EAGLE-3's own code"), target_depth(heads), []
    if levels is not None and (depth is None or tuple(levels) != default_feature_layers(depth)):
        if depth is not None:
            raise ExportError(
                f"these heads read the hidden states {levels}, but EAGLE-3's own code always reads 2, N // 2 and "
                f"N - 3 of N={depth} layers; export them `--to vllm` or `--to sglang`."
            )
        notes.append(
            f"EAGLE-3's own code reads the levels 2, N // 2 and N - 3, and these heads read {levels}: check that "
            "they agree"
        )
    fields = {"architectures": ["LlamaForCausalLM"], **llama_fields(heads, "eagle3"), **size_fields(heads)}
    del fields["attention_bias"]
    fields |= {"qkv_bias": True} if config.attention_bias else {}
    fields |= {LEVELS: levels} if levels is not None else {}
    return Layout(fields, tensors_of(heads, MIDLAYER, whole_vocabulary=False), notes)
