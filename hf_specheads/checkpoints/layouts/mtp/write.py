"""Writes fine-tuned MTP layers under the names of Qwen's targets (`mtp.*`), or in the layout of `speculators`.

Engines and `load_heads(..., method="mtp")` read MTP layers from a target's own checkpoint.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....errors import ExportError
from ....heads import MtpHead
from ....target.mtp import QWEN_NAMES, separate_experts
from ..fields import Tensors
from ..speculators import keys as speculators
from ..speculators.write import VERSION, heads_config
from ..written import Layout, common_notes, dtype_name

QWEN_LAYERS = "mtp_num_hidden_layers"
OURS = "layers.0."


def layout(heads: MtpHead) -> Layout:
    """Builds the files of a checkpoint that holds only the MTP layer, with the target's fields in `config.json`.

    Raises:
        ExportError: If the layers are the target's own, or if there is more than one.
    """
    _check(heads)
    names = {ours: f"mtp.{theirs}" for theirs, ours in QWEN_NAMES.items()}
    layer_config = dict(heads.config.layer_config or {})
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(layer_config.get("model_type")))
    fields = {
        **({"architectures": [architecture]} if isinstance(architecture, str) else {}),
        **layer_config,
        QWEN_LAYERS: 1,
        "dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }
    notes = [
        "engines read MTP layers from the target's checkpoint: put the weight file next to the target's own, and list "
        "it in `model.safetensors.index.json` for all `mtp.*` tensors"
    ]
    return Layout(fields, _named(heads, names, "mtp.layers.0."), notes + common_notes(heads))


def speculators_layout(heads: MtpHead, target: PreTrainedModel | str | None) -> Layout:
    """Builds the files in the layout of `speculators`.

    Args:
        heads: MTP heads.
        target: The target or its name, which the layout records; default the name stored with the heads.

    Raises:
        ExportError: If the layers are the target's own, if there is more than one, if the library does not know their
            type, or if the target is unknown.
    """
    _check(heads)
    model_type = (heads.config.layer_config or {}).get("model_type")
    if model_type not in speculators.MTP_LAYER_TYPES:
        raise ExportError(
            f"these are layers of {model_type!r}, but `speculators` supports only MTP layers of "
            f"{list(speculators.MTP_LAYER_TYPES)}; export them `--to mtp`."
        )
    names = {ours: speculators.MTP_LAYER + theirs for theirs, ours in speculators.MTP_NAMES.items()}
    fields: dict[str, Any] = {
        "architectures": ["MTPDraftModel"],
        "auto_map": {"": "config.MTPSpeculatorConfig"},
        speculators.KIND: speculators.MTP_KIND,
        "speculators_version": VERSION,
        speculators.OWN_CONFIG: heads_config(heads, speculators.MTP_KIND, target),
        speculators.LAYER_CONFIG: {**(heads.config.layer_config or {}), QWEN_LAYERS: 1},
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }
    notes = ["vLLM (0.32) does not serve MTP layers of this layout; for engines, export them `--to mtp`"]
    return Layout(fields, _named(heads, names, speculators.MTP_LAYER), notes + common_notes(heads))


def _check(heads: MtpHead) -> None:
    config = heads.config
    if config.native:
        raise ExportError(
            "these MTP layers are the target's own and already in its checkpoint; only fine-tuned layers can be "
            "exported."
        )
    if config.num_mtp_layers != 1:
        raise ExportError(
            f"these heads have {config.num_mtp_layers} MTP layers, but the layouts have only one; keep them in this "
            "package's own layout."
        )


def _named(heads: MtpHead, modules: dict[str, str], layer: str) -> Tensors:
    """Renames the weights: modules as `modules` says, and those of the decoder layer with the prefix `layer`."""
    tensors: Tensors = {}
    for key, value in heads.state_dict().items():
        module, _, kind = key.removeprefix(OURS).partition(".")
        tensors[layer + kind if module == "block" else f"{modules[module]}.{kind}"] = value.detach()
    return separate_experts(tensors)
