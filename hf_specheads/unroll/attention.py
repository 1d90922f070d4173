"""Attention of training rows over several feature streams, in memory linear in the number of rows.

A row sees a triangle of stream 0 and at most one row of every later stream (see [`streams`]). The triangle is plain
causal attention per document, for which torch has kernels. The later streams are a band of S - 1 scores per row. The
two parts are partial softmaxes, merged by their log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1):

    out = exp(lse_0 - lse) out_0 + sum_s exp(score_s - lse) value_s,    lse = log(exp(lse_0) + sum_s exp(score_s))

The kernel's backward recomputes its weights as exp(score - lse) and uses the output only for rowsum(grad * out). Given
the merged `out` and `lse` instead of its own, it therefore returns the triangle's share of the whole gradient.

This merge is used on CPUs. On accelerators the attention is one fused kernel ([`flex`]). Where neither applies
(dropout of attention weights; on accelerators also phantom columns and sizes that flex attention does not serve), rows
attend in blocks that are recomputed in the backward. (torch's public attention function does not return the
log-sum-exp; flex attention does, but has no backward on the CPU.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import repeat_kv

from . import flex
from .rows import row_positions

BLOCK_ROWS = 256  # rows per block in `StreamAttention.in_blocks`
Streams = tuple[torch.Tensor, ...]


class Documents:
    """The documents in B sequences of T rows.

    Args:
        ids: int64 [B, T], equal within a document, whose rows are contiguous; -1 on padding.

    Attributes:
        offsets: int64 [B, T], number of rows before each row in its document.
    """

    def __init__(self, ids: torch.Tensor):
        self.ids = ids
        self.offsets = row_positions(ids)

    @cached_property
    def spans(self) -> list[tuple[slice, int, int]]:
        """(Sequences, first row, end) of every document, or a single span if all documents start at row 0.

        The single span covers all sequences, padding after their documents included. That is harmless, because the
        rows before do not see padding and the output of padding is not used.
        """
        rows = self.ids.shape[1]
        if not bool(((self.offsets == 0) & (self.ids >= 0))[:, 1:].any()) and not bool((self.ids[:, 0] < 0).any()):
            return [(slice(None), 0, rows)]
        spans = []
        for sequence, (ids, offsets) in enumerate(zip(self.ids.tolist(), self.offsets.tolist(), strict=True)):
            starts = [row for row in range(rows) if offsets[row] == 0]
            for first, end in zip(starts, [*starts[1:], rows], strict=True):
                if ids[first] != -1:
                    spans.append((slice(sequence, sequence + 1), first, end))
        return spans


class StreamAttention:
    """Attention of T queries over S streams of T rows, with transformers' attention signature.

    It computes exactly the softmax under [`streams.stream_mask`], without a tensor of T x T elements.

    Args:
        documents: The documents; no row sees another document.
        num_streams: Number of streams S.
        phantom_columns: Reproduce the attention of HASS's and PosS's training code, which multiplies scores by a 0/1
            mask, so that each of the T - 1 - t future rows adds exp(0) to the softmax's denominator.
        own_rows: A row sees the row with its own index in every stream, and all earlier rows of stream 0. This is for
            streams whose row t belongs to the round with root t (EAGLE-3's training-time test).
    """

    def __init__(self, documents: Documents, num_streams: int, phantom_columns: bool = False, own_rows: bool = False):
        rows, last = documents.ids.shape[1], num_streams - 1
        self.documents, self.num_streams = documents, num_streams
        self.lag = 0 if own_rows else last  # distance to the nearest visible row of stream 0
        # (Stream, lag) of the later streams with a visible row. The newest stream comes first; its lag is always 0.
        self.band = [(stream, 0 if own_rows else last - stream) for stream in range(last, 0, -1)]
        self.band = [(stream, lag) for stream, lag in self.band if lag < rows]
        self._mask: Any = None  # block mask of flex attention, created on first use
        self.phantoms = None
        if phantom_columns:
            index = torch.arange(rows, device=documents.ids.device)
            self.phantoms = (rows - 1 - index).float().log()  # [T], -inf in the last row

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [B, heads, T, head_dim]
        key: torch.Tensor | Streams,  # one tensor per stream, or all in one: [B, key-value heads, S * T, head_dim]
        value: torch.Tensor | Streams,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        rows = query.shape[2]
        keys, values = (x.split(rows, dim=2) if isinstance(x, torch.Tensor) else x for x in (key, value))
        dtype = values[0].dtype  # under autocast, rotary embeddings may return queries and keys of a wider dtype
        band = [streams[number].to(dtype) for streams in (keys, values) for number, _ in self.band]
        inputs = (query.to(dtype), keys[0].to(dtype), values[0], *band)
        if query.device.type == "cpu" and not dropout:
            return _MergedAttention.apply(self, scaling, *inputs).transpose(1, 2), None
        sizes = (query.shape[1], values[0].shape[1], query.shape[3])
        if not dropout and self.phantoms is None and flex_serves(query.device, dtype, *sizes):
            return self.fused(*inputs, scaling=scaling).transpose(1, 2), None
        return self.in_blocks(*inputs, scaling=scaling, dropout=dropout).transpose(1, 2), None

    def fused(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *band: torch.Tensor,
              scaling: float) -> torch.Tensor:  # fmt: skip
        """Computes the same as [`in_blocks`] by flex attention, without dropout and phantom columns."""
        if self._mask is None:
            self._mask = flex.block_mask(self.documents.ids, self.lag, [lag for _, lag in self.band])
        keys, values = (key, *band[: len(self.band)]), (value, *band[len(self.band) :])
        return flex.attend(self._mask, scaling, query, keys, values)

    def band_scores(self, query: torch.Tensor, keys: Streams, scaling: float) -> torch.Tensor:
        """Returns the scores of the visible rows of the later streams, -inf where there is none.

        The shape is [B, heads, T, streams in `self.band`], at most S - 1 streams; the dtype is at least fp32.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.new_full((*query.shape[:3], len(keys)), float("-inf"), dtype=wide)
        for column, ((_, lag), key) in enumerate(zip(self.band, keys, strict=True)):
            products = _by_group(query, key)[..., lag:, :] * _seen(key, lag)
            score = products.sum(dim=-1, dtype=wide).flatten(1, 2) * scaling
            outside = self.documents.offsets[:, None, lag:] < lag
            scores[..., lag:, column] = score.masked_fill(outside, float("-inf"))
        return scores

    def in_blocks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *band: torch.Tensor,
                  scaling: float, dropout: float = 0.0) -> torch.Tensor:  # fmt: skip
        """Computes the attention with plain operations, [`BLOCK_ROWS`] rows at a time, recomputed in the backward.

        Args:
            query: [B, heads, T, head_dim].
            key, value: [B, key-value heads, T, head_dim], of stream 0.
            *band: Keys, then values, of the later streams in the order of `self.band`.
            scaling: Factor applied to the scores.
            dropout: Probability of dropping an attention weight.

        Returns:
            [B, heads, T, head_dim].
        """
        keys, values = band[: len(self.band)], band[len(self.band) :]
        columns = []
        if self.band:
            columns.append(self.band_scores(query, keys, scaling))
        if self.phantoms is not None:
            columns.append(self.phantoms[:, None].expand(*query.shape[:3], 1))
        extra = torch.cat(columns, dim=-1) if columns else None
        outputs = []
        for first in range(0, query.shape[2], BLOCK_ROWS):
            at = slice(first, first + BLOCK_ROWS)
            block = (at, scaling, dropout, query, key, value, extra, *values)
            outputs.append(checkpoint(self._block, *block, use_reentrant=False))
        return torch.cat(outputs, dim=2)

    def _block(self, at: slice, scaling: float, dropout: float, query: torch.Tensor, key: torch.Tensor,
               value: torch.Tensor, extra: torch.Tensor | None, *band: torch.Tensor) -> torch.Tensor:  # fmt: skip
        groups, ids = query.shape[1] // key.shape[1], self.documents.ids
        query, index = query[:, :, at], torch.arange(ids.shape[1], device=query.device)
        end = max(at.start + query.shape[2] - self.lag, 1)  # no row of this block sees a later column of stream 0
        seen = (ids[:, at, None] == ids[:, None, :end]) & (index[at, None] - index[:end] >= self.lag)
        scores = query @ repeat_kv(key[:, :, :end], groups).transpose(2, 3) * scaling
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if extra is not None:
            scores = torch.cat([scores, extra[:, :, at]], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
        weights = nn.functional.dropout(weights, dropout)
        output = weights[..., :end] @ repeat_kv(value[:, :, :end], groups)
        for column, ((_, lag), states) in enumerate(zip(self.band, band, strict=True), start=end):
            shifted = nn.functional.pad(states[:, :, : ids.shape[1] - lag], (0, 0, lag, 0))
            output = output + weights[..., column, None] * repeat_kv(shifted[:, :, at], groups)
        return output


@cache
def flex_serves(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether flex attention can be used for states of this device, dtype and size. Warns if it cannot.

    It is tried once for each combination of arguments, on two documents and three streams.
    """
    rows = flex.MULTIPLE + 12
    generator = torch.Generator().manual_seed(0)
    sizes = [heads, *[kv_heads] * 6]
    states = [
        torch.randn(1, size, rows, head_dim, dtype=torch.float32, generator=generator).to(device, dtype)
        for size in sizes
    ]
    plan = StreamAttention(Documents((torch.arange(rows, device=device) // 100)[None]), 3)
    fused, in_blocks = partial(plan.fused, scaling=head_dim**-0.5), partial(plan.in_blocks, scaling=head_dim**-0.5)
    if (problem := flex.problem(fused, in_blocks, states)) is not None:
        warnings.warn(f"flex attention is not used on {device}, in {dtype} with heads of {head_dim}: {problem}",
                      stacklevel=2)  # fmt: skip
    return problem is None


class _MergedAttention(torch.autograd.Function):
    """Merges causal attention of every document with the band; one kernel call per span in each direction."""

    @staticmethod
    def forward(ctx: Any, plan: StreamAttention, scaling: float, query: torch.Tensor, key: torch.Tensor,
                value: torch.Tensor, *band: torch.Tensor) -> torch.Tensor:  # fmt: skip
        keys, values = band[: len(plan.band)], band[len(plan.band) :]
        out, lse = _triangles(plan, scaling, query, key, value)
        weights = None
        if plan.band or plan.phantoms is not None:
            scores = [lse[..., None], plan.band_scores(query, keys, scaling)]
            if plan.phantoms is not None:
                scores.append(plan.phantoms.to(lse.dtype)[:, None].expand(*lse.shape, 1))
            merged = torch.cat(scores, dim=-1).logsumexp(dim=-1)
            # Padding may see no row and no phantom column, and -inf - (-inf) is NaN.
            out = out.mul_((lse - merged).exp_().nan_to_num_(nan=0.0)[..., None])
            lse, weights = merged, scores[1].sub_(merged[..., None]).exp_()
            for column, ((_, lag), states) in enumerate(zip(plan.band, values, strict=True)):
                weight = _by_group(weights[..., lag:, column, None].to(out.dtype), states)
                _by_group(out, states)[..., lag:, :].addcmul_(weight, _seen(states, lag))
        ctx.plan, ctx.scaling = plan, scaling
        ctx.save_for_backward(query, key, value, out, lse, weights, *band)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, weights, *band = ctx.saved_tensors
        plan, scaling, count = ctx.plan, ctx.scaling, len(ctx.plan.band)
        grads = _triangle_gradients(plan, scaling, grad, (query, key, value), out, lse)
        if count == 0:
            return None, None, *grads
        delta = (grad * out).sum(dim=-1, dtype=lse.dtype)  # [B, heads, T]
        key_grads, value_grads = ([torch.zeros_like(x) for x in part] for part in (band[:count], band[count:]))
        for column, (_, lag) in enumerate(plan.band):
            keys, values = band[column], band[count + column]
            grad_here, query_here, query_grad = (_by_group(x, keys)[..., lag:, :] for x in (grad, query, grads[0]))
            weight = _by_group(weights[..., lag:, column], keys)
            change = (grad_here * _seen(values, lag)).sum(dim=-1, dtype=lse.dtype)
            change = (weight * (change - _by_group(delta[..., lag:], keys)) * scaling).to(query.dtype)[..., None]
            query_grad.addcmul_(change, _seen(keys, lag))
            _seen(key_grads[column], lag)[:, :, 0] = (change * query_here).sum(dim=2)
            _seen(value_grads[column], lag)[:, :, 0] = (weight.to(grad.dtype)[..., None] * grad_here).sum(dim=2)
        return None, None, *grads, *key_grads, *value_grads


def _triangles(
    plan: StreamAttention, scaling: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp of stream 0 alone; they are 0 and -inf in rows that see none of its rows.

    The shapes are [B, heads, T, head_dim] and [B, heads, T]; the log-sum-exp is at least fp32.
    """
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    spans, rows = plan.documents.spans, query.shape[2]
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if plan.lag == 0 and spans == [(slice(None), 0, rows)]:
        return run(query, key, value, 0.0, True, scale=scaling)
    out = torch.zeros_like(query)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full(query.shape[:3], float("-inf"), dtype=wide)
    for late, early in _causal_parts(plan):
        out[late], lse[late] = run(query[late], key[early], value[early], 0.0, True, scale=scaling)
    return out, lse


def _triangle_gradients(
    plan: StreamAttention, scaling: float, grad: torch.Tensor, inputs: Streams, out: torch.Tensor, lse: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the gradients of query, key and value (`inputs`) through stream 0, given merged `out` and `lse`."""
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for late, early in _causal_parts(plan):
        states = (query[late], key[early], value[early], out[late], lse[late])
        parts = run(grad[late], *states, 0.0, True, scale=scaling)
        for whole, at, part in zip(grads, (late, early, early), parts, strict=True):
            whole[at] = part
    return [grads[0], *(x.unflatten(1, (-1, groups)).sum(dim=2) if groups > 1 else x for x in grads[1:])]


def _causal_parts(plan: StreamAttention) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yields, per span, the indices into [B, heads, T] of the queries and the keys of a square causal attention."""
    for sequences, first, end in plan.documents.spans:
        if end - first > plan.lag:
            late, early = slice(first + plan.lag, end), slice(first, end - plan.lag)
            yield (sequences, slice(None), late), (sequences, slice(None), early)


def _by_group(states: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a view that groups heads by key-value head: [B, heads, ...] -> [B, key-value heads, group, ...]."""
    return states.unflatten(1, (key.shape[1], -1))


def _seen(states: torch.Tensor, lag: int) -> torch.Tensor:
    """Returns a view of a later stream's rows seen `lag` rows later, [B, key-value heads, 1, T - lag, head_dim]."""
    return states[:, :, None, : states.shape[2] - lag]


class StreamCache:
    """Takes the place of transformers' cache: keys and values of every stream, projected once per specialist.

    Args:
        rows: Number of rows T.
        apart: Let passes read detached copies; [`finish_backward`] propagates the gradients accumulated in them.
    """

    def __init__(self, rows: int, apart: bool = False):
        self.rows, self.apart = rows, apart
        self._streams: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._leaves: list[tuple[torch.Tensor, torch.Tensor]] = []  # (states with graph, detached leaf read instead)

    def num_streams(self, specialist: int) -> int:
        """Returns the number of streams that a specialist has."""
        return len(self._streams[specialist][0]) if specialist in self._streams else 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[Streams, Streams]:
        """Appends streams to those of a specialist.

        Args:
            key, value: [B, key-value heads, n * T, head_dim], states of n more streams.
            layer_idx: Index of the specialist.

        Returns:
            Keys and values of every stream of the specialist, [B, key-value heads, T, head_dim] each.
        """
        known = self._streams.setdefault(layer_idx, ([], []))
        for states, streams in zip((key, value), known, strict=True):
            read = states
            if self.apart and states.requires_grad:
                read = states.detach().requires_grad_()
                self._leaves.append((states, read))
            streams += read.split(self.rows, dim=2)
        return tuple(known[0]), tuple(known[1])

    def finish_backward(self) -> None:
        """Runs the backward of the projections. Call it after the last pass's backward if `apart` is set."""
        used = [(states, leaf) for states, leaf in self._leaves if leaf.grad is not None]
        torch.autograd.backward([states for states, _ in used], [leaf.grad for _, leaf in used])
