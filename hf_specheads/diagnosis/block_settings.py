"""Settings that files of block drafters do not determine: the first drafting slot, attention masks, the mask token."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..heads.base import DraftHead
from ..heads.block_config import ANCHOR_SLOTS, WINDOW_STARTS, BlockHeadConfig, embedding_scale_of
from .alternative import Alternative


def block_settings(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives for block drafters, and for other heads that draft with mask tokens; empty for all others."""
    found = mask_tokens(heads, target)
    config = heads.config
    if not isinstance(config, BlockHeadConfig):
        return found
    found += _others("anchor_slot", ANCHOR_SLOTS, config.anchor_slot, "anchor slot")
    found += _others("causal", (True, False), config.causal, "block mask")
    scales = sorted({1.0, embedding_scale_of(target.get_input_embeddings())})
    found += _others("embedding_scale", scales, config.embedding_scale, "embedding scale")
    return found + windows(config, target)


def windows(config: BlockHeadConfig, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives for sliding windows: none at all, the target's window in all layers, or counted differently."""
    if config.sliding_layers:
        found = _others("sliding_layers", [()], config.sliding_layers, "window")
        found += _others("sliding_causal", (True, False), config.sliding_causal, "window")
        return found + _others("window_from", WINDOW_STARTS, config.window_from, "window")
    theirs = config.sliding_window or getattr(target.config.get_text_config(decoder=True), "sliding_window", None)
    if not theirs:
        return []
    every = tuple(range(config.num_hidden_layers))
    changes = {"sliding_layers": every, "sliding_window": int(theirs)}
    return [Alternative("sliding_layers", f"all, window {theirs}", "none", "window", changes)]


def mask_tokens(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives for the mask token: the target's special tokens, and the first and last of the vocabulary."""
    now = getattr(heads.config, "mask_token_id", None)
    if now is None:
        return []
    config, defaults = target.config.get_text_config(decoder=True), target.generation_config
    special: list[Any] = [0, config.vocab_size - 1]
    for one in (config, defaults):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id", "unk_token_id"):
            value = getattr(one, name, None)
            special += value if isinstance(value, list) else [value]
    known = sorted({int(token) for token in special if token is not None and 0 <= token < config.vocab_size})
    return _others("mask_token_id", known, now, "mask token")


def _others(name: str, values: Any, now: Any, cause: str) -> list[Alternative]:
    return [Alternative(name, str(value), str(now), cause, {name: value}) for value in values if value != now]
