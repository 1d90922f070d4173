"""Writes block drafters in the layout of the `speculators` library, which vLLM serves without further options.

The layout includes copies of the target's embedding and of the drafted rows of its `lm_head`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ....errors import ExportError
from ....heads.block import BlockHead
from ....heads.dflash2 import DFlash2Head
from ....heads.dspark import DSparkHead
from ..dflash.copies import copied_target, copies_of
from ..dflash.keys import MARKOV_OUT, SELECTOR_FIELDS
from ..dflash.write import own_tensors, qwen3_fields, taps, target_depth
from ..dflash.write_deepspec import markov_fields
from ..written import Layout, adapter_note, dtype_name
from . import keys
from .write import VERSION, heads_config

CONFIG_CLASSES = {
    keys.DFLASH_KIND: "DFlashSpeculatorConfig",
    keys.DSPARK_KIND: "DSparkSpeculatorConfig",
    keys.DFLASH2_KIND: "DFlash2SpeculatorConfig",
}


def layout(heads: BlockHead, target: PreTrainedModel | None) -> Layout:
    """Builds the files in the layout of `speculators`.

    Args:
        heads: DFlash, DFlash 2 or DSpark heads.
        target: The loaded target.

    Raises:
        ExportError: If the layout cannot represent the heads, or there is no target.
    """
    config, notes = heads.config, adapter_note(heads)
    target = copied_target(heads, target, "export them `--to dflash`")
    if config.causal:
        raise ExportError("`speculators` has no causal blocks (JetSpec); export these heads `--to dflash`.")
    if config.sliding_layers and config.window_from != "anchor":
        notes.append(
            "the layout counts windows from the root, not from each row: later rows of a block see a little more"
        )
    kind, of_method = _of_method(heads)
    depth = target_depth(heads, target)
    layers = qwen3_fields(heads, "speculators")
    fields: dict[str, Any] = {
        "architectures": [keys.BLOCK_ARCHITECTURES[kind]],
        "auto_map": {"": f"config.{CONFIG_CLASSES[kind]}"},
        keys.KIND: kind,
        "speculators_version": VERSION,
        keys.OWN_CONFIG: heads_config(heads, kind, target),
        keys.LAYER_CONFIG: layers,
        keys.DRAFT_VOCAB_SIZE: config.pruned_vocab_size or config.vocab_size,
        keys.TARGET_HIDDEN_SIZE: None,
        keys.AUX_LAYERS: [output + 1 for output in taps(heads, depth)],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_slot == "drafts",
        "sliding_window_non_causal": not config.sliding_causal,
        **of_method,
        "tie_word_embeddings": False,
        "dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }
    tensors = _own_tensors(heads) | copies_of(heads, target, heads.pruned_token_ids)
    served = getattr(config, "markov_head", "vanilla") == "vanilla"
    if not served:
        notes.append(f"vLLM (0.32) has vanilla Markov heads only and cannot load this {config.markov_head} one")
    return Layout(fields, tensors, notes, "vllm serve {folder}" if served else None)


def _of_method(heads: BlockHead) -> tuple[str, dict[str, Any]]:
    """Kind of the speculator, and the fields that only its method has.

    Raises:
        ExportError: If DFlash 2 heads draft only a part of the vocabulary.
    """
    if isinstance(heads, DSparkHead):
        return keys.DSPARK_KIND, markov_fields(heads)
    if not isinstance(heads, DFlash2Head):
        return keys.DFLASH_KIND, {}
    if heads.pruned_token_ids is not None:
        raise ExportError(
            "`speculators` supports DFlash 2 heads only over the whole vocabulary, but these are pruned; call "
            "heads.prune_draft_vocabulary(None) first."
        )
    return keys.DFLASH2_KIND, {name: getattr(heads.config, name) for name in SELECTOR_FIELDS}


def _own_tensors(heads: BlockHead) -> dict[str, torch.Tensor]:
    """Weights of the heads; of DSpark's `markov_w2` only the rows of drafted tokens."""
    tensors, kept = own_tensors(heads), heads.pruned_token_ids
    if isinstance(heads, DSparkHead) and kept is not None:
        tensors[MARKOV_OUT] = tensors[MARKOV_OUT][kept]
    return tensors
