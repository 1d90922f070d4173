"""Writes DSpark heads in the layout of DeepSpec, its authors' code.

All fields are at the top level of the config, and copies of the target's embedding and `lm_head` are included.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ....errors import ExportError
from ....heads.dspark import DSparkHead
from ..written import Layout, common_notes, dtype_name
from . import keys
from .copies import copied_target, copies_of
from .write import own_tensors, qwen3_fields, taps, target_depth


def layout(heads: DSparkHead, target: PreTrainedModel | None) -> Layout:
    """Builds the files in DeepSpec's layout.

    Args:
        heads: DSpark heads.
        target: The loaded target.

    Raises:
        ExportError: If the layout cannot represent the heads, or there is no target.
    """
    config = heads.config
    target = copied_target(heads, target, "keep them in this package's own layout")
    if config.anchor_slot != "drafts" or config.causal or config.sliding_layers:
        raise ExportError(
            "these heads have a root slot that does not draft, causal blocks or sliding layers, which DeepSpec's code "
            "does not know; export them `--to speculators`."
        )
    depth = target_depth(heads, target)
    fields = {
        "architectures": ["Qwen3" + keys.DEEPSPEC],
        **qwen3_fields(heads, "dflash"),
        keys.BLOCK_SIZE: config.block_size,
        keys.MASK_TOKEN: config.mask_token_id,
        keys.TAPS: taps(heads, depth),
        keys.TARGET_DEPTH: depth,
        **markov_fields(heads),
        "dtype": dtype_name(heads),
    }
    return Layout(fields, own_tensors(heads) | copies_of(heads, target, None), common_notes(heads))


def markov_fields(heads: DSparkHead) -> dict[str, Any]:
    """Config fields of DSpark's Markov head and confidence head."""
    config = heads.config
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
