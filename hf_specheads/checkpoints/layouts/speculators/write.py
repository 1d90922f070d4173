"""Writes EAGLE-3 and P-EAGLE heads in the layout of the `speculators` library, which vLLM serves without options.

The fields are those that version 0.9.0 writes. They are checked with the library's own `from_pretrained` and converter
(`benchmarks/oracles/compare_speculators.py`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....errors import ExportError
from ....heads import Eagle3Head, PEagleHead
from ....heads.base import DraftHead
from ..commands import drafted_positions
from ..eagle.write import lost_specialists
from ..eagle3.keys import FLAGS, LEVELS
from ..eagle3.write import MLP_BIASES, NOT_IN_QWEN3, levels_of, paired_biases, size_fields, tensors_of
from ..keys import FIRST_LAYER
from ..peagle.read import DEEPER
from ..written import Layout, adapter_note, dtype_name, llama_fields, scales_embeddings, target_name
from . import keys

VERSION = "0.9.0"


def heads_config(heads: DraftHead, kind: str, target: PreTrainedModel | str | None) -> dict[str, Any]:
    """Builds `speculators_config`, which names the algorithm and the target."""
    name, architectures = _verifier(heads, target)
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": drafted_positions(heads), "verifier_accept_k": 1,
             "accept_tolerance": 0.0}
        ],
        keys.VERIFIER: {keys.VERIFIER_NAME: name, "architectures": architectures},
    }  # fmt: skip


def layout(heads: Eagle3Head, target: PreTrainedModel | str | None) -> Layout:
    """Builds the files in the layout of `speculators`.

    Args:
        heads: EAGLE-3 or P-EAGLE heads.
        target: The target or its name, which the layout records; default the name stored with the heads.

    Raises:
        ExportError: If the layout cannot represent the heads, or the target is unknown.
    """
    config = heads.config
    if config.feature_size != config.hidden_size:
        raise ExportError(
            f"these heads are {config.hidden_size} wide and their target is {config.feature_size} wide, but "
            "`speculators` supports only heads as wide as their target; export them `--to vllm`."
        )
    if scales_embeddings(heads) and not config.own_embedding:
        raise ExportError(
            "the target scales its embeddings, but `speculators` reads them unscaled from the target; train heads "
            "with own_embedding=True, or export them `--to vllm`."
        )
    layer_fields = {**llama_fields(heads, "speculators"), **_kept_for_vllm(heads)}
    layer_fields["attention_bias"] = config.attention_bias or config.attention_out_bias
    if config.qk_norm:
        layer_fields["model_type"] = keys.QWEN3
        if config.mlp_bias:
            raise ExportError(f"these heads have {MLP_BIASES} and norms of queries and keys, {NOT_IN_QWEN3}.")
    parallel = isinstance(heads, PEagleHead)
    kind, name = (keys.PEAGLE_KIND, "PEagle") if parallel else (keys.EAGLE3_KIND, "Eagle3")
    fields: dict[str, Any] = {
        "architectures": [f"{name}Speculator"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        keys.KIND: kind,
        "speculators_version": VERSION,
        keys.OWN_CONFIG: heads_config(heads, kind, target),
        keys.LAYER_CONFIG: layer_fields,
        keys.DRAFT_VOCAB_SIZE: size_fields(heads)[keys.DRAFT_VOCAB_SIZE],
        keys.TARGET_HIDDEN_SIZE: None,
        LEVELS: levels_of(heads, "`speculators`"),
        **{flag: getattr(config, flag) for flag in FLAGS},
        "embed_requires_grad": parallel,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(heads),
        "dtype": dtype_name(heads),
        "transformers_version": layer_fields["transformers_version"],
    }  # fmt: skip
    tensors = tensors_of(heads, FIRST_LAYER, whole_vocabulary=False) | paired_biases(heads, FIRST_LAYER)
    if isinstance(heads, PEagleHead):
        fields[keys.MASK_TOKEN] = heads.config.mask_token_id
        layer_fields["num_hidden_layers"] = heads.config.num_hidden_layers
        tensors |= {name: value for name, value in heads.state_dict().items() if DEEPER.match(name)}
    return Layout(fields, tensors, lost_specialists(heads) + adapter_note(heads), "vllm serve {folder}")


def _kept_for_vllm(heads: Eagle3Head) -> dict[str, Any]:
    """`num_aux_hidden_states`, if unusual: vLLM reads this field only from `transformer_layer_config`."""
    return {name: value for name, value in size_fields(heads).items() if name == "num_aux_hidden_states"}


def _verifier(heads: DraftHead, target: PreTrainedModel | str | None) -> tuple[str, list[str]]:
    """Name and architectures of the target."""
    name = target if isinstance(target, str) else None
    known = None
    if isinstance(target, PreTrainedModel):
        name, known = target.config.name_or_path or None, [type(target).__name__]
    name = name or target_name(heads)
    if not name:
        raise ExportError(
            "the layout of `speculators` must name the target, but these heads do not store the name of theirs; pass "
            "its name or folder (`target=`, `--target`)."
        )
    model_type = str((heads.config.target or {}).get("model_type"))
    guessed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name, known or ([guessed] if isinstance(guessed, str) else ["LlamaForCausalLM"])
