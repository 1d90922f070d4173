"""The draft cache of MTP layers."""

from __future__ import annotations

import torch

from ..cache.draft import DraftCache
from ..cache.indexed import IndexedSlotLayer
from ..cache.slots import SlotCache


class MtpCache(DraftCache):
    """Draft cache with one cache layer per MTP layer.

    Attributes:
        earlier: State [B, 1, h] of the first layer's last committed row, which the second layer reads in the next
            round; `None` before the first round.
    """

    def __init__(self, num_layers: int):
        super().__init__(num_layers)
        self.layers = [IndexedSlotLayer(self) for _ in range(num_layers)]
        self.earlier: torch.Tensor | None = None

    def put_buffers(self, place: int, other: SlotCache, batch: int) -> None:
        assert isinstance(other, MtpCache)
        super().put_buffers(place, other, batch)
        theirs = other.earlier
        if theirs is None:
            theirs = None if self.earlier is None else torch.zeros_like(self.earlier[:1])
        if theirs is None:
            return
        mine = theirs.new_zeros(batch, *theirs.shape[1:]) if self.earlier is None else self.earlier
        self.earlier = torch.cat([mine[:place], theirs, mine[place + 1 :]])

    def select_buffers(self, kept: list[int]) -> None:
        super().select_buffers(kept)
        if self.earlier is not None:
            self.earlier = self.earlier[kept]

    def outlive_step(self) -> None:
        super().outlive_step()
        self.earlier = None if self.earlier is None else self.earlier.clone()

    def one_later(self, states: torch.Tensor) -> torch.Tensor:
        """Moves states [B, M, h] of the rows to commit to the row after each; to be called before `commit`."""
        earlier = torch.zeros_like(states[:, :1]) if self.earlier is None else self.earlier.to(states.dtype)
        moved = torch.cat([earlier, states[:, :-1]], dim=1)
        self.earlier = states[:, -1:]
        if self.taken_in is None:
            return moved
        # In sequences with fewer rows than others, the first real row comes after meaningless columns.
        first = torch.nn.functional.pad(~self.taken_in.valid[:, :-1], (1, 0), value=True)
        return torch.where(first[..., None], earlier, moved)
