"""Limits of a target's positions: its context, and the length past which its rotary embedding changes."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

RESCALING_ROPES = ("dynamic", "longrope")
# `model_type` of targets that take no positions and find the first token of each text from the attention mask.
POSITIONS_BY_MASK = frozenset({"bloom"})


def context_limit(target: PreTrainedModel) -> int | None:
    """Returns the number of positions a target was made for; `None` if its config does not say."""
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)


def drops_positions(target: PreTrainedModel) -> bool:
    """Whether a target discards the position ids that `generate` passes and counts its tokens by itself."""
    ids = torch.ones(1, 2, dtype=torch.long, device=target.device)
    counted = {"attention_mask": torch.ones_like(ids), "position_ids": ids.cumsum(1) - 1}
    try:
        inputs = target.prepare_inputs_for_generation(ids, is_first_iteration=True, use_cache=True, **counted)
    except (AttributeError, KeyError, TypeError, ValueError):  # the target needs more inputs than this text probe has
        return False
    return inputs.get("position_ids") is None


def finds_begins(target: PreTrainedModel) -> bool:
    """Whether a target that takes no positions finds the begin of a left-padded text from the attention mask."""
    return target.config.get_text_config(decoder=True).model_type in POSITIONS_BY_MASK


def sparse_limit(target: PreTrainedModel) -> tuple[int, str] | None:
    """Returns the number of tokens up to which a sparse attention sees its whole context, and the name of the config
    field that says so; `None` for targets without sparse attention."""
    config = target.config.get_text_config(decoder=True)
    blocks = getattr(config, "index_topk_blocks", None) or 0
    stated = {
        "index_topk": getattr(config, "index_topk", None),
        "indexer_budget": getattr(config, "indexer_budget", None),
        "index_topk_blocks * index_block_size": blocks * (getattr(config, "index_block_size", None) or 0),
    }
    return min(((limit, name) for name, limit in stated.items() if limit), default=None)


def rope_limit(target: PreTrainedModel) -> tuple[int, str] | None:
    """Returns the number of tokens past which the angles of *all* rows of a forward change, and the rope type.

    The result is `None` for rope types without such a limit. transformers looks at the largest position of a forward,
    so a tree that crosses the limit would change the angles of its root as well.
    """
    config = target.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = [rope for rope in parameters.values() if isinstance(rope, dict)] or [parameters]
    limits = []
    for rope in ropes:
        limit = rope.get("original_max_position_embeddings") or context_limit(target)
        if rope.get("rope_type") in RESCALING_ROPES and limit is not None:
            limits.append((limit, rope["rope_type"]))
    return min(limits, default=None)
