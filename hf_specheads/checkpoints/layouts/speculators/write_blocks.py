"""Block drafters in the layout of the `speculators` library, which vLLM serves without further options.

Copies of the target's embedding and of the drafted rows of its `lm_head` belong to the layout.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ....errors import ExportError
from ....heads.dflash import DFlashHead
from ....target.projection import output_weight
from ..dflash.keys import D2T, T2D
from ..dflash.write import own_tensors, qwen3_fields, taps, target_depth
from ..keys import EMBEDDING, LM_HEAD
from ..written import Layout, adapter_note, dtype_name
from . import keys
from .write import VERSION, heads_config


def layout(heads: DFlashHead, target: PreTrainedModel | None) -> Layout:
    """Files in the layout of `speculators`.

    Args:
        heads: DFlash heads.
        target: The loaded target.

    Raises:
        ExportError: for heads the layout cannot represent, or without a target.
    """
    config, notes = heads.config, adapter_note(heads)
    if target is None:
        raise ExportError("the layout has copies of the target's embedding and `lm_head`; pass the loaded `target=`.")
    heads.check_target(target)
    if config.causal:
        raise ExportError("`speculators` has no causal blocks (JetSpec); export these heads `--to dflash`.")
    if (config.embedding_scale, config.logit_multiplier, config.logit_softcap) != (1, 1, None):
        raise ExportError(
            "these heads scale embeddings or logits, or cap them, which `speculators` has no field for; export them "
            "`--to dflash`."
        )
    if config.sliding_layers and config.window_from != "anchor":
        notes.append("windows count from the root there, from each row here: later rows of a block see a little more")
    depth = target_depth(heads, target)
    layers = qwen3_fields(heads, "speculators")
    fields: dict[str, Any] = {
        "architectures": ["DFlashSpeculator"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        keys.KIND: keys.DFLASH_KIND,
        "speculators_version": VERSION,
        keys.OWN_CONFIG: heads_config(heads, keys.DFLASH_KIND, target),
        keys.LAYER_CONFIG: layers,
        keys.DRAFT_VOCAB_SIZE: config.pruned_vocab_size or config.vocab_size,
        keys.TARGET_HIDDEN_SIZE: None,
        keys.AUX_LAYERS: [output + 1 for output in taps(heads, depth)],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_slot == "drafts",
        "sliding_window_non_causal": not config.sliding_causal,
        "tie_word_embeddings": False,
        "dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }
    return Layout(fields, own_tensors(heads) | _of_target(heads, target), notes, "vllm serve {folder}")


@torch.no_grad()
def _of_target(heads: DFlashHead, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Copies of the target's weights, and which tokens are drafted."""
    weight, ids = output_weight(target), torch.arange(heads.config.vocab_size, device=target.device)
    copies = {EMBEDDING: target.get_input_embeddings()(ids).to(heads.dtype)}
    if (kept := heads.pruned_token_ids) is None:
        return {**copies, LM_HEAD: weight.to(heads.dtype)}
    t2d = torch.zeros(heads.config.vocab_size, dtype=torch.bool)
    t2d[kept.cpu()] = True
    rows = weight[kept.to(weight.device)].to(heads.dtype)
    return {**copies, LM_HEAD: rows, D2T: kept.cpu() - torch.arange(len(kept)), T2D: t2d}
