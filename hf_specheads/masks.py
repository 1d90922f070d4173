"""What the target's stock forward needs to verify a tree: 4D attention masks and position ids.

Masks are built by *position*: siblings share a position although they sit in different cache slots, so transformers'
own mask functions, which compare slots, are too strict under a sliding window.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer

from .layers import additive_mask
from .tree import DraftTree

GROUPED_ATTENTION = "TRANSFORMERS_SDPA_FORCE_GQA"


def tree_attention_masks(
    target: PreTrainedModel,
    cache: Cache,
    tree: DraftTree,
    length: int,
    padding_mask: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive masks of one tree forward, [B, 1, N, visible slots + N] per layer type.

    A dict keyed by layer type exactly when the target's config has `layer_types`, as transformers' own
    `create_masks_for_generate` does. Additive, because eager attention silently mishandles boolean masks.

    Args:
        target: The target model.
        cache: Its cache, holding `length` committed tokens.
        tree: The tree to verify.
        length: Committed tokens in the cache, T.
        padding_mask: int or bool [B, at least T], 0 on padding; `None` without padding.
        dtype: The target's compute dtype.
    """
    config = target.config.get_text_config(decoder=True)
    ancestors = tree.ancestor_mask
    window = getattr(config, "sliding_window", None)

    def mask(sliding: bool) -> torch.Tensor:
        slots = _visible_slots(cache, sliding, length)
        allowed = _allowed(tree, ancestors, length, slots, window if sliding else None, padding_mask)
        return additive_mask(allowed, dtype)[:, None]

    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return {kind: mask(kind == "sliding_attention") for kind in set(layer_types)}
    return mask(any(cache.is_sliding))


def _visible_slots(cache: Cache, sliding: bool, length: int) -> int:
    """Cache slots that layers of a kind show to a forward: all, or the last window - 1."""
    for layer in cache.layers:
        if isinstance(layer, DummyLayer) or bool(getattr(layer, "is_sliding", False)) != sliding:
            continue
        return min(length, layer.sliding_window - 1) if sliding else length
    return length


def _allowed(
    tree: DraftTree,
    ancestors: torch.Tensor,
    length: int,
    slots: int,
    window: int | None,
    padding_mask: torch.Tensor | None,
) -> torch.Tensor:
    """bool [B, N, slots + N]: committed tokens inside the window and not padding, and the node's own ancestors."""
    batch, nodes = tree.token_ids.shape
    context_positions = torch.arange(length - slots, length, device=ancestors.device)
    node_positions = length + tree.depths
    context = torch.ones(batch, nodes, slots, dtype=torch.bool, device=ancestors.device)
    if window is not None:
        oldest = node_positions[:, :, None] - window
        context = context_positions[None, None] > oldest
        ancestors = ancestors & (node_positions[:, None, :] > oldest)
    if padding_mask is not None:
        context = context & padding_mask[:, None, length - slots : length].bool()
    return torch.cat([context, ancestors], dim=-1)


def tree_position_ids(position_ids: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Position of every node: the root's plus the depth.

    Args:
        position_ids: The model kwarg after the last update, whose last entry belongs to the root: [B, T + 1], or
            [3, B, T + 1] for targets with several position axes.
        tree: The tree.
    """
    return position_ids[..., -1:] + tree.depths


@contextmanager
def grouped_attention_under_masks(target: PreTrainedModel) -> Iterator[None]:
    """On a CPU, lets sdpa attention read grouped keys and values as they are although there is a mask.

    transformers copies them for every query head whenever a mask is given, because kernels of other devices need that.
    On a CPU that copies the whole cache in every tree forward, for the same result bit for bit; plain decoding
    has no mask and copies nothing. The switch is transformers' own environment variable; a user's setting stays.
    """
    devices = getattr(target, "hf_device_map", None) or {"": target.device}
    if GROUPED_ATTENTION in os.environ or any(str(device) != "cpu" for device in devices.values()):
        yield
        return
    os.environ[GROUPED_ATTENTION] = "1"
    try:
        yield
    finally:
        os.environ.pop(GROUPED_ATTENTION, None)
