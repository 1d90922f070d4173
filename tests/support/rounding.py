"""Finds out whether texts differ only by rounding or by a mistake."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

FACTOR = 4  # allowed ratio of a gap to the rounding difference measured on the same text


def forwards_over(target: PreTrainedModel, token_ids: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Returns logits [1, T, V] of a text, from cached forwards over `widths` tokens. The last width repeats."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    name = "cache_params" if "mamba" in type(target).__name__.lower() else "past_key_values"
    logits, at = [], 0
    while at < token_ids.shape[1]:
        width = min(widths.pop(0) if len(widths) > 1 else widths[0], token_ids.shape[1] - at)
        inputs: dict[str, Any] = {name: cache, "use_cache": True}
        if name == "past_key_values":
            inputs["position_ids"] = torch.arange(at, at + width)[None]
        with torch.no_grad():
            logits.append(target(token_ids[:, at : at + width], **inputs).logits)
        at += width
    return torch.cat(logits, dim=1)


def why_texts_differ(
    target: PreTrainedModel, plain: torch.Tensor, ours: torch.Tensor, prompt_length: int, width: int = 5
) -> str | None:
    """Returns `None` for equal texts, "tie" if rounding can exchange the two tokens that differ, and otherwise "bug".

    The effect of rounding is measured on the plain text up to the first difference: logits of plain decoding (prompt,
    then token by token) against logits of forwards over `width` tokens.

    Args:
        target: The target, in fp32.
        plain, ours: int64 [1, T], greedy texts of plain decoding and with heads.
        prompt_length: Tokens of the prompt.
        width: Tokens per forward, as in verification.
    """
    if torch.equal(plain, ours):
        return None
    length = min(plain.shape[1], ours.shape[1])
    parted = (plain[0, :length] != ours[0, :length]).nonzero()
    if len(parted) == 0:
        return "bug"  # one of the texts ends earlier
    at = int(parted[0])
    decoded = forwards_over(target, plain[:, :at], [prompt_length, 1])[:, prompt_length - 1 :]
    verified = forwards_over(target, plain[:, :at], [prompt_length, width])[:, prompt_length - 1 :]
    rounding = float((decoded - verified).abs().max())
    last = decoded[0, -1]
    gap = float(last[plain[0, at]] - last[ours[0, at]])
    return "tie" if gap <= FACTOR * rounding else "bug"
