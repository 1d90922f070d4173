"""Computes losses and their gradients in chunks of rows, so that the logits of all rows never exist together.

Logits over a vocabulary V take more memory than anything else a draft head computes. The losses of a pass depend only
on rows [R, h] of its output. Detached from the graph of the draft heads, these rows pass through `lm_head` and loss,
forward and backward, one chunk at a time. Only their gradient [R, h] is kept, and it is propagated through the draft
heads once, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specheads.unroll.rows import DraftedPass

CHUNK_ROWS = 256  # default number of rows whose full logits exist at the same time


class ChunkedPass:
    """One pass whose losses and gradients are accumulated chunk by chunk.

    Args:
        drafted: Output of the draft heads for the pass, with its graph.

    Attributes:
        values: Losses by name, summed over the chunks so far, detached.
    """

    def __init__(self, drafted: DraftedPass):
        self.drafted = drafted
        self.values: dict[str, torch.Tensor] = {}
        sources = [drafted.hidden]
        if drafted.features is not None and drafted.features is not drafted.hidden:
            sources.append(drafted.features)
        self.sources = sources  # [B, T, *] each
        self.grads = [torch.zeros_like(source) if source.requires_grad else None for source in sources]

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """Returns rows [R', *] of `hidden` and of `features` as detached leaves, and the leaves for [`gather`].

        Args:
            rows: Flat row indices, int64 [R']; no row may be taken twice.
        """
        leaves = [source.detach().flatten(0, 1)[rows].requires_grad_(source.requires_grad) for source in self.sources]
        return leaves[0], None if self.drafted.features is None else leaves[-1], leaves

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Adds the losses of a chunk to `values`."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.detach()

    def gather(self, rows: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Stores the gradients that the backward of a chunk has left at its rows."""
        for grads, leaf in zip(self.grads, leaves, strict=True):
            if grads is not None and leaf.grad is not None:
                grads.flatten(0, 1)[rows] = leaf.grad


def send_on(passes: Sequence[ChunkedPass], others: Sequence[torch.Tensor] = ()) -> None:
    """Runs one backward from the gathered gradients of all passes through the draft heads, together with the backward
    of the scalars `others`."""
    pairs = [pair for chunked in passes for pair in zip(chunked.sources, chunked.grads, strict=True)]
    pairs = [(loss, None) for loss in others] + [(source, grads) for source, grads in pairs if grads is not None]
    torch.autograd.backward([source for source, _ in pairs], [grads for _, grads in pairs])
