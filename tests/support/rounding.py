"""Texts that differ: by rounding alone, or by a mistake."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

FACTOR = 4  # how far a gap may lie above the difference that was measured on this text


def forwards_over(target: PreTrainedModel, token_ids: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Logits [1, T, V] of a text, from cached forwards over so many tokens each; the last width goes on."""
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
    """`None` for equal texts, "tie" where the two tokens lie closer than rounding can move them, else "bug".

    The difference of rounding is measured: logits of plain decoding (prompt, then token by token) against logits of
    forwards over `width` tokens, on the plain text up to where the texts part.

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
        return "bug"  # one of them ends earlier
    at = int(parted[0])
    decoded = forwards_over(target, plain[:, :at], [prompt_length, 1])[:, prompt_length - 1 :]
    verified = forwards_over(target, plain[:, :at], [prompt_length, width])[:, prompt_length - 1 :]
    rounding = float((decoded - verified).abs().max())
    last = decoded[0, -1]
    gap = float(last[plain[0, at]] - last[ours[0, at]])
    return "tie" if gap <= FACTOR * rounding else "bug"
