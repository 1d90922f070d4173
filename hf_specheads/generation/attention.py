"""How the target's attention runs while trees are verified on a CPU.

transformers copies grouped keys and values for every query head whenever a mask is given, because kernels of other
devices need that. On a CPU that copies the whole cache in every tree forward, for the same result bit for bit; plain
decoding has no mask and copies nothing. So `sdpa` attention of transformers' registry is wrapped, once, by a function
that reads them as they are under the *additive* masks that tree forwards have (transformers' own masks for sdpa are
boolean), and hands every other call on. Nothing is switched while texts are generated, so other threads see nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What only transformers' own function knows.
HANDED_ON = frozenset({"softcap", "output_attentions", "position_bias", "cache"})


def install_grouped_attention() -> None:
    """Wraps transformers' `sdpa`; calling it again changes nothing."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(original, "_specheads_original"):
        AttentionInterface.register("sdpa", _wrapped(original))


def uninstall_grouped_attention() -> None:
    """Takes the wrapper off again."""
    original = getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "_specheads_original", None)
    if original is not None:
        AttentionInterface.register("sdpa", original)


def _wrapped(original: Callable) -> Callable:
    @functools.wraps(original)
    def grouped_sdpa(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        is_additive = attention_mask is not None and attention_mask.is_floating_point()
        grouped = getattr(module, "num_key_value_groups", 1) > 1 and key.device.type == "cpu"
        special = not HANDED_ON.isdisjoint(kwargs) and any(
            kwargs.get(name) is not None and kwargs[name] is not False for name in HANDED_ON
        )
        if special or not (is_additive and grouped):
            return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    wrapper: Any = grouped_sdpa
    wrapper._specheads_original = original
    return wrapper
