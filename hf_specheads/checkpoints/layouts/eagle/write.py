"""Writes EAGLE-1/2, HASS and POSS heads as their authors do, and as vLLM and SGLang read them.

Engines have a single EAGLE layer, so only specialist 0 of POSS heads is written for them; it is a complete EAGLE head.
The authors' own layout keeps all specialists. (arXiv 2401.15077, 2408.15766, 2506.03566)
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ....errors import ExportError
from ....heads import EagleHead
from ....heads.eagle import INPUTS
from ....heads.specialists import SpecialistHead
from ..commands import sglang_command, vllm_command
from ..fields import Tensors
from ..keys import EMBEDDING, FC_BIAS, FIRST_LAYER, Q_PROJ
from ..written import Layout, common_notes, llama_fields, scales_embeddings, zero_biases
from .absorb import absorb_bias, embedding_of, needed_target
from .keys import EXTRA_NORMS

MEND = "export them `--to eagle`, or use them with this package"


def layout(heads: EagleHead, to: str, target: PreTrainedModel | None) -> Layout:
    """Builds the files for `"vllm"`, `"sglang"` or `"eagle"` (the authors' own layout).

    Raises:
        ExportError: If the destination cannot represent the heads.
    """
    if to == "speculators":
        raise ExportError(
            "`speculators` has had no layout for EAGLE, HASS or POSS heads since its version 0.7, and vLLM reads only "
            "its EAGLE-3 heads; export them `--to vllm`."
        )
    if heads.config.inputs != INPUTS[0]:
        raise ExportError(
            f"these heads have inputs={heads.config.inputs!r}, but {to} supports only EAGLE's own {INPUTS[0]!r}; "
            "train heads without `inputs`, or use these with this package."
        )
    if heads.config.extra_norms and to != "eagle":
        raise ExportError(f"these heads have three norms that neither EAGLE's own layer nor {to}'s has; {MEND}.")
    return {"vllm": _vllm, "sglang": _sglang, "eagle": _authors}[to](heads, target)


# ------------------------------------------------------------------ tensors
def _tensors(heads: EagleHead, specialists: int) -> Tensors:
    """`fc` and the layers of the first specialists, with adapters merged; the authors' names equal ours."""
    tensors = {f"fc.{name}": value.detach() for name, value in heads.fc.state_dict().items()}
    for index in range(specialists):
        tensors |= {f"layers.{index}.{name}": value for name, value in heads.specialist_state(index).items()}
    return tensors


def lost_specialists(heads: SpecialistHead) -> list[str]:
    """Note on what is lost if only specialist 0 is served; empty for heads with one specialist."""
    config = heads.config
    if config.num_specialists == 1:
        return []
    count, span = config.num_specialists, config.positions_per_specialist
    return [
        f"only specialist 0 of {count} is written: it was trained for draft positions 1 to {span}, and beyond {span} "
        f"it replaces the other {count - 1}, so acceptance is lower there; the text is the same"
    ]


# ------------------------------------------------------------------ vLLM
def _vllm(heads: EagleHead, target: PreTrainedModel | None) -> Layout:
    """vLLM's `fc` has no bias. The config field `bias` is not written, because it would enable attention biases."""
    config = heads.config
    fields = {"architectures": ["LlamaForCausalLM"], **llama_fields(heads, "vllm")}
    fields["attention_bias"] = config.attention_out_bias
    if config.attention_bias != config.attention_out_bias:
        fields["qkv_bias"] = config.attention_bias
    tensors, notes = _tensors(heads, 1), lost_specialists(heads) + common_notes(heads)
    if config.fc_bias:
        absorbed, measured = absorb_bias(heads, target)
        del tensors[FC_BIAS]
        tensors |= absorbed
        notes += measured
    elif scales_embeddings(heads):
        tensors[EMBEDDING] = embedding_of(
            heads, needed_target(target, "the target scales its embeddings, but vLLM's EAGLE does not")
        )
        notes.append("the target's embedding is written, already scaled")
    command = vllm_command(heads, "eagle")
    return Layout(fields, tensors, notes, command)


# ------------------------------------------------------------------ SGLang
def _sglang(heads: EagleHead, target: PreTrainedModel | None) -> Layout:
    """SGLang's `fc` always has a bias, and leaves it uninitialised if the file has none, so a bias of 0 is written."""
    config = heads.config
    if config.mlp_bias:
        raise ExportError(f"these heads have biases in their MLP, but SGLang's Llama layers have none; {MEND}.")
    if scales_embeddings(heads):
        raise ExportError(
            "the target scales its embeddings, but SGLang's EAGLE layer reads them unscaled and ignores an embedding "
            f"in the file. Export the heads `--to vllm`, or {MEND}."
        )
    only_qkv = config.attention_bias and not config.attention_out_bias
    fields = {
        "architectures": ["Qwen2ForCausalLMEagle" if only_qkv else "LlamaForCausalLMEagle"],
        **llama_fields(heads, "sglang"),
        "attention_bias": config.attention_bias or config.attention_out_bias,
    }
    if only_qkv:  # SGLang's Qwen 2 layers have biases of q, k and v only
        fields |= {"model_type": "qwen2", "use_sliding_window": False}
    tensors, notes = _tensors(heads, 1), lost_specialists(heads) + common_notes(heads)
    if config.attention_out_bias and not config.attention_bias:
        tensors |= zero_biases(heads, FIRST_LAYER, "qkv")
    if not config.fc_bias:
        tensors[FC_BIAS] = torch.zeros(config.hidden_size, dtype=heads.dtype)
        notes.append("`fc.bias` is written as 0, because SGLang's `fc` has one")
    return Layout(fields, tensors, notes, sglang_command(heads, "EAGLE"))


# ------------------------------------------------------------------ the authors' own
def _authors(heads: EagleHead, target: PreTrainedModel | None) -> Layout:
    """The authors' code reads `bias` (default true) for `fc` and `qkv_bias` for attention."""
    config = heads.config
    if config.attention_out_bias or config.mlp_bias:
        raise ExportError(
            "these heads have biases of `o_proj` or of the MLP, which the authors' layout does not have; "
            "export them `--to vllm`."
        )
    if len(heads.specialist_state(0)[Q_PROJ]) != config.hidden_size:
        raise ExportError(
            "the authors' code requires attention heads of width hidden_size / num_attention_heads, but these draft "
            f"heads have {config.num_attention_heads} of width {config.head_dim} at hidden_size={config.hidden_size}; "
            "export them `--to vllm` or `--to sglang`."
        )
    fields = {"architectures": ["LlamaForCausalLM"], **llama_fields(heads, "eagle"), "bias": config.fc_bias}
    if config.attention_bias:
        fields["qkv_bias"] = True
    del fields["attention_bias"]
    count = config.num_specialists
    tensors, notes = _tensors(heads, count), common_notes(heads)
    if count > 1:
        span = config.positions_per_specialist
        fields["num_hidden_layers"] = count
        notes.append(
            f"the layout does not say that a specialist has {span} position(s): keep `PosS{span}` in the folder's "
            f"name, and pass the authors' code --position_per_layer {span} --forward_num_total {count * span}"
        )
    if config.extra_norms:
        state = heads.state_dict()
        tensors = {key: value for key, value in tensors.items() if key not in EXTRA_NORMS.values()}
        tensors |= {theirs: state[ours] for theirs, ours in EXTRA_NORMS.items()}
        notes.append("these heads have three norms that EAGLE's own code silently ignores")
    if target is not None:
        tensors[EMBEDDING] = embedding_of(heads, target)
    elif config.method != "eagle":
        notes.append(
            "`embed_tokens.weight` is missing, which HASS's and PosS's own code needs: pass the target to have it "
            "written"
        )
    return Layout(fields, tensors, notes)
