"""Fast attention of a few rows: of the target while it verifies trees, and of the draft head while it drafts.

transformers copies grouped keys and values for every query head whenever a mask is given, because kernels of some
devices need that. Plain decoding has no mask and copies nothing. On a CPU the copies are useless: the same kernel
reads grouped keys as they are, with bit-identical results. On CUDA, the kernels that take masks are made for many
rows: a few rows over a long cache occupy a few blocks of the device, one per head, and take many times as long as
reading the cache. There, few rows attend by two matrix products with a float32 softmax between them, which run in
parallel over slots. In compiled steps with Triton, they attend by a kernel that distributes the slots over the device.

So the `sdpa` attention in transformers' registry is wrapped once, by a function that does this under the *additive*
masks of tree forwards (transformers' own masks for sdpa are boolean) and passes every other call on. Nothing is
switched during generation, so other threads are not affected.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import library
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Calls with any of these arguments are passed on, as only transformers' own function handles them.
HANDED_ON = frozenset({"softcap", "output_attentions", "position_bias", "cache"})
BY_PRODUCTS = ("cuda",) if torch.version.hip is None else ()  # devices on which few rows attend by matrix products
FEW_ROWS = 128  # most rows of a forward that attend by matrix products
ROWS_OF_KERNEL, WIDTHS_OF_KERNEL = 64, (16, 32, 64, 128, 256)  # kernel's most rows over a group's heads; its head_dims
AMPERE = 8  # major compute capability of the oldest devices that the kernels support
HAS_TRITON = importlib.util.find_spec("triton") is not None


def install_grouped_attention() -> None:
    """Wraps transformers' `sdpa`; calling it again changes nothing."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(original, "_specheads_original"):
        AttentionInterface.register("sdpa", _wrapped(original))


def uninstall_grouped_attention() -> None:
    """Removes the wrapper."""
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
        special = not HANDED_ON.isdisjoint(kwargs) and any(
            kwargs.get(name) is not None and kwargs[name] is not False for name in HANDED_ON
        )
        if special or attention_mask is None or not attention_mask.is_floating_point():
            return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        if _attends_by_products(query, key, attention_mask, dropout):
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            by_kernel = torch.compiler.is_compiling() and _suits_kernel(query, key, value)
            attend = attend_by_kernel if by_kernel else attend_by_products
            return attend(query, key, value, attention_mask, scaling), None
        if key.device.type != "cpu" or getattr(module, "num_key_value_groups", 1) == 1:
            return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    wrapper: Any = grouped_sdpa
    wrapper._specheads_original = original
    return wrapper


def _attends_by_products(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, dropout: float) -> bool:
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    few = query.shape[2] <= FEW_ROWS and mask.shape[1] == 1
    return few and key.device.type in BY_PRODUCTS and not (dropout or learns)


def _suits_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    widths = {query.shape[-1], value.shape[-1]}
    fits = rows <= ROWS_OF_KERNEL and len(widths) == 1 and query.shape[-1] in WIDTHS_OF_KERNEL
    return HAS_TRITON and fits and query.dtype.itemsize == 2


def attend_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of few rows over many slots.

    Args:
        query: [B, heads, N, head_dim].
        key: [B, key heads, slots, head_dim], not repeated for the query heads of a group.
        value: [B, key heads, slots, width], likewise.
        mask: Additive mask, [B, 1, N, slots].
        scaling: Factor of the scores.

    Returns:
        [B, N, heads, width].
    """
    (batch, heads, rows, width), groups = query.shape, key.shape[:2].numel()
    rows_of_group = query.reshape(groups, -1, width)
    keys, values = key.reshape(groups, -1, width), value.reshape(groups, -1, value.shape[-1])
    scores = _product_in_float32(rows_of_group, keys.transpose(1, 2)).view(batch, key.shape[1], -1, rows, key.shape[2])
    scores = torch.add(mask[:, :, None], scores, alpha=scaling)
    weights = scores.softmax(-1).to(value.dtype)
    output = torch.bmm(weights.view(groups, -1, key.shape[2]), values)
    return output.view(batch, heads, rows, -1).transpose(1, 2).contiguous()


def _product_in_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Product of batches of matrices, in float32: scores become exponents, where rounding to 16 bits would matter."""
    if left.dtype.itemsize >= 4 or left.device.type != "cuda":
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32)


SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor mask, float scaling) -> Tensor"


@library.custom_op("specheads::attend", mutates_args=(), schema=SCHEMA)
def attend_by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """As [`attend_by_products`], by a Triton kernel for 16-bit dtypes. Other devices than CUDA, and CUDA devices
    before Ampere, use matrix products."""
    if query.device.type != "cuda" or (properties := _properties(query.device)).major < AMPERE:
        return attend_by_products(query, key, value, mask, scaling)
    from .attention_triton import launch

    output = query.new_empty(_output_shape(query, value))
    launch(query, key, value, mask, scaling, output, properties.multi_processor_count)
    return output


@attend_by_kernel.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    return query.new_empty(_output_shape(query, value))


def _output_shape(query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    return query.shape[0], query.shape[2], query.shape[1], value.shape[3]


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
