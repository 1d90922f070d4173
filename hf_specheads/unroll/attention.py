"""Attention of training rows over several feature streams, in memory linear in the number of rows.

A row sees a triangle of stream 0 and at most one row of every later stream (see [`streams`]). The triangle is plain
causal attention per document, which torch has kernels for; the later streams are a band of S - 1 scores per row. Both
are partial softmaxes, merged by their log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1):

    out = exp(lse_0 - lse) out_0 + sum_s exp(score_s - lse) value_s,    lse = log(exp(lse_0) + sum_s exp(score_s))

The kernel's backward recomputes its weights as exp(score - lse) and needs of the output only rowsum(grad * out). Given
the merged `out` and `lse` instead of its own it therefore returns the triangle's share of the gradient of the whole.

On accelerators it is one fused kernel ([`flex`]). Where there is none (dropout of attention weights, phantom columns,
sizes that it does not serve), rows attend in blocks that are recomputed in the backward. (torch's public attention
function does not return the log-sum-exp; flex attention does, but has no backward on the CPU.)
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

BLOCK_ROWS = 256  # rows per block where there is no kernel
Streams = tuple[torch.Tensor, ...]


class Documents:
    """Where the documents of B sequences of T rows lie.

    Args:
        ids: int64 [B, T], equal within a document, which is one run of rows; -1 on padding.

    Attributes:
        offsets: int64 [B, T], rows before a row in its document.
    """

    def __init__(self, ids: torch.Tensor):
        self.ids = ids
        self.offsets = row_positions(ids)

    @cached_property
    def spans(self) -> list[tuple[slice, int, int]]:
        """(Sequences, first row, end) of every document; one for all sequences where no document starts late.

        Padding after a document may be part of its span: the rows before do not see it, and nobody reads it.
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

    Exactly the softmax under [`streams.stream_mask`], without a tensor of T x T elements.

    Args:
        documents: No row sees another document.
        num_streams: S.
        phantom_columns: Reproduce the attention of HASS's and PosS's training code, which multiplies scores by a 0/1
            mask: each of the T - 1 - t future rows then adds exp(0) to the softmax's denominator.
        own_rows: A row sees its own row of every later stream, and of stream 0 all that is visible: streams whose row
            t belongs to the round with root t (EAGLE-3's training-time test).
    """

    def __init__(self, documents: Documents, num_streams: int, phantom_columns: bool = False, own_rows: bool = False):
        rows, last = documents.ids.shape[1], num_streams - 1
        self.documents, self.num_streams = documents, num_streams
        self.lag = 0 if own_rows else last  # of the nearest visible row of stream 0
        # The later streams that have a visible row, each with its lag, the row's own first: that one always exists.
        self.band = [(stream, 0 if own_rows else last - stream) for stream in range(last, 0, -1)]
        self.band = [(stream, lag) for stream, lag in self.band if lag < rows]
        self._mask: Any = None  # flex attention's, made when it is first needed
        self.phantoms = None
        if phantom_columns:
            index = torch.arange(rows, device=documents.ids.device)
            self.phantoms = (rows - 1 - index).float().log()  # [T], -inf in the last row

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [B, heads, T, head_dim]
        key: torch.Tensor | Streams,  # of every stream, or of all in one: [B, key-value heads, S * T, head_dim]
        value: torch.Tensor | Streams,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        rows = query.shape[2]
        keys, values = (x.split(rows, dim=2) if isinstance(x, torch.Tensor) else x for x in (key, value))
        dtype = values[0].dtype  # under autocast, rotated queries and keys may be wider
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
        """The same as [`in_blocks`] without dropout and phantoms, by flex attention."""
        if self._mask is None:
            self._mask = flex.block_mask(self.documents.ids, self.lag, [lag for _, lag in self.band])
        keys, values = (key, *band[: len(self.band)]), (value, *band[len(self.band) :])
        return flex.attend(self._mask, scaling, query, keys, values)

    def band_scores(self, query: torch.Tensor, keys: Streams, scaling: float) -> torch.Tensor:
        """Scores of the visible rows of the later streams, -inf where there is none: fp32 [B, heads, T, S - 1]."""
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
        """The same with plain operations, [`BLOCK_ROWS`] rows at a time, recomputed in the backward.

        Args:
            query: [B, heads, T, head_dim].
            key, value: Of stream 0, [B, key-value heads, T, head_dim].
            *band: Keys, then values, of the later streams in the order of `self.band`.
            scaling: Factor of the scores.
            dropout: Share of attention weights to drop.

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
        end = max(at.start + query.shape[2] - self.lag, 1)  # columns that any of these rows sees
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
    """Whether flex attention can be used for such states: it is tried once, on two documents and three streams. Warns
    if not."""
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
    """Causal attention of every document and the band, merged; one kernel call per span in each direction."""

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
            # Padding may see nothing, not even a phantom: -inf less -inf.
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
    """Output and log-sum-exp of stream 0 alone, 0 and -inf in rows that see nothing of it.

    Shapes: [B, heads, T, head_dim] and fp32 [B, heads, T].
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
    """Gradients of query, key and value (`inputs`) through stream 0, given the merged output and log-sum-exp."""
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
    """Per span, where the queries and where the keys of a square causal attention lie, in [B, heads, T]."""
    for sequences, first, end in plan.documents.spans:
        if end - first > plan.lag:
            late, early = slice(first + plan.lag, end), slice(first, end - plan.lag)
            yield (sequences, slice(None), late), (sequences, slice(None), early)


def _by_group(states: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, heads, ...] -> [B, key-value heads, heads of each, ...], a view."""
    return states.unflatten(1, (key.shape[1], -1))


def _seen(states: torch.Tensor, lag: int) -> torch.Tensor:
    """Rows of a later stream that are seen `lag` rows later, a view: [B, key-value heads, 1, T - lag, head_dim]."""
    return states[:, :, None, : states.shape[2] - lag]


class StreamCache:
    """Keys and values of every stream, projected once per specialist, in the place of transformers' cache.

    Args:
        apart: Passes read leaves of their own; [`finish_backward`] sends on the gradients gathered there.
        rows: T.
    """

    def __init__(self, rows: int, apart: bool = False):
        self.rows, self.apart = rows, apart
        self._streams: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._leaves: list[tuple[torch.Tensor, torch.Tensor]] = []  # with graph, and what is read instead

    def num_streams(self, specialist: int) -> int:
        """Streams that a specialist has."""
        return len(self._streams[specialist][0]) if specialist in self._streams else 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[Streams, Streams]:
        """Appends streams to a specialist's.

        Args:
            key, value: [B, key-value heads, n * T, head_dim], of n more streams.
            layer_idx: The specialist.

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
        """After the last pass's backward, if passes read leaves: the backward of the projections."""
        used = [(states, leaf) for states, leaf in self._leaves if leaf.grad is not None]
        torch.autograd.backward([states for states, _ in used], [leaf.grad for _, leaf in used])
