"""Losses and their gradients chunk by chunk of the rows, so that the logits of all rows never exist together.

Logits over a vocabulary V take more memory than everything else a head computes. What a loss needs of a pass are rows
[R, h]; cut loose from the heads' graph they can go through `lm_head` and loss, forward and backward, a few at a time.
Only their gradient [R, h] is kept, and is sent on through the heads once. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specheads.unroll.rows import DraftedPass

CHUNK_ROWS = 256  # of which all logits exist at a time


class ChunkedPass:
    """One pass on its way through the losses.

    Args:
        drafted: What the heads draft, with their graph.

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
        """Rows of `hidden` and of `features` [R', *], and the leaves they are.

        Args:
            rows: int64 [R'], flat; no row is taken twice.
        """
        leaves = [source.detach().flatten(0, 1)[rows].requires_grad_(source.requires_grad) for source in self.sources]
        return leaves[0], None if self.drafted.features is None else leaves[-1], leaves

    def add(self, values: dict[str, torch.Tensor]) -> None:
        """Adds the losses of a chunk."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.detach()

    def gather(self, rows: torch.Tensor, leaves: list[torch.Tensor]) -> None:
        """Keeps the gradients that a chunk's backward has left at its rows."""
        for grads, leaf in zip(self.grads, leaves, strict=True):
            if grads is not None and leaf.grad is not None:
                grads.flatten(0, 1)[rows] = leaf.grad


def send_on(passes: Sequence[ChunkedPass], others: Sequence[torch.Tensor] = ()) -> None:
    """The backward from the drafted rows through the heads, of all passes and of `others`, scalars, together."""
    pairs = [pair for chunked in passes for pair in zip(chunked.sources, chunked.grads, strict=True)]
    pairs = [(loss, None) for loss in others] + [(source, grads) for source, grads in pairs if grads is not None]
    torch.autograd.backward([source for source, _ in pairs], [grads for _, grads in pairs])
