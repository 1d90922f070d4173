"""The draft cache: keys and values of every specialist, for one generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from .masks import additive_mask, chain_mask, slot_mask
from .slots import SlotCache, SlotCacheLayer

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of positions, [1 or B, rows, head_dim] each
MOST_OWED = 32  # most committed rows owed to a specialist; delaying more saves nothing and keeps them in memory


class RealRows(NamedTuple):
    """Which of the M rows of a round are real.

    Attributes:
        valid: bool [B, M], true for real rows.
        counts: Number of real rows, per sequence.
        lengths: int64 [B], number of committed rows before these rows.
    """

    valid: torch.Tensor
    counts: list[int]
    lengths: torch.Tensor


class CommittedRows(NamedTuple):
    """Rows of one round that are committed in some specialists' layers and still owed to others.

    Attributes:
        fused: [B, M, *], the input of the specialists' layers.
        rotary: Rotary embeddings of the rows' positions.
        valid: bool [B, M], which rows are real; `None` if all are.
    """

    fused: torch.Tensor
    rotary: Rotary
    valid: torch.Tensor | None


class Links(NamedTuple):
    """How a compiled step drafts the links of a chain, so that all links of one kind share one compiled graph.

    Attributes:
        offsets: int64 [1] each, the numbers 0, 1, 2, ...: distance of a row from the committed rows. They are tensors
            because a number of the host would be compiled in as a constant.
        kinds: One number per specialist; specialists with the same number do the same computation.
        run: Calls `run(kind, link, layer, *tensors)`, so that links of one kind are compiled once; `None` if the
            installed torch does not support this.
        best: Function that picks the best children of a link while drafting.
        dtype: Dtype in which links are computed.
        catch_up: Whether `run` accepts, as its last tensor, the rows that a specialist lacks when it starts to draft.
    """

    offsets: tuple[torch.Tensor, ...]
    kinds: tuple[int, ...]
    run: Callable[..., Any] | None
    best: Callable[..., Any]
    dtype: torch.dtype
    catch_up: bool = False


class DraftCache(SlotCache):
    """Draft cache of one generation, with one layer per specialist.

    Committed rows come from target features, and every specialist has the same number of them. Drafted rows are
    appended during a round and dropped at its end (invariant: a committed row never comes from a drafted feature). The
    slot of a row is its position.

    A specialist that drafts in few rounds need not take in the rows of every round. They are owed to it ([`owe`]) and
    written together with the next row it drafts ([`take_owed`]), or earlier ([`settle`]). When they are written makes
    no difference to what the specialist sees.

    Args:
        num_specialists: Number of layers.
        take_in: Writes rows into a specialist's layer, called as `take_in(cache, fused, rotary, specialist)`. Required
            if rows are owed.

    Attributes:
        taken_in: Which of the rows that a round takes in are real; `None` if all are. The sequences of a batch accept
            different numbers of tokens, and those that accepted fewer than others begin with filler columns. Set
            before every round ([`begin_round`]).
        deepest: Draft positions of the deepest tree that may be drafted with this cache; 0 to use those of the heads'
            current tree.
        levels: Upper bound of the draft positions of this round's tree; 0 if unknown.
        links: How a compiled step drafts chains; `None` for other trees and heads, and if nothing is compiled.
        drafted_inputs: The fused rows drafted in this round, [B, rows, *] each, for specialists that start later.
        rotary: Rotary embeddings of the positions of this round's levels; `None` until they are computed.
        rotary_table: Rotary embeddings of the positions from 0 on, [1, slots, head_dim] each, used while all sequences
            have the same length.
    """

    def __init__(self, num_specialists: int, take_in: Callable[..., Any] | None = None):
        super().__init__()
        self._take_in = take_in
        self._owed: list[tuple[CommittedRows, ...]] = [()] * num_specialists
        self.layers = [SlotCacheLayer(self) for _ in range(num_specialists)]
        self.taken_in: RealRows | None = None
        self.deepest = self.levels = 0
        self.links: Links | None = None
        self.drafted_inputs: list[torch.Tensor] = []
        self.rotary: Rotary | None = None
        self.rotary_table: Rotary | None = None
        self._levels_in = [0] * num_specialists

    @property
    def committed(self) -> int:
        """Committed rows of the longest sequence, i.e. its committed tokens minus one."""
        return self.longest

    def begin_round(self, valid: torch.Tensor | None = None, counts: list[int] | None = None) -> None:
        """Sets which of the rows taken in next are real.

        Args:
            valid: bool [B, M], true for real rows; `None` if all are.
            counts: Number of real rows, per sequence.
        """
        self.taken_in = None
        if valid is None or counts is None:
            return
        lengths = self.become_ragged(valid.shape[0], valid.device)
        self.taken_in = RealRows(valid, counts, lengths)
        if self.static:
            self.reserve(self.longest + valid.shape[1] + 1)
            self.counts = [count + new for count, new in zip(self.counts, counts, strict=True)]

    def open_rows(self, rows: int, device: torch.device, and_root: int = 0) -> torch.Tensor:
        """Starts a round: drops all drafted rows and makes the next forward write `rows` new rows to commit.

        Args:
            rows: Number of rows M to commit.
            device: Device of the draft head.
            and_root: Number of further rows that the forward writes but that will not be committed: the root's row and
                mask rows.

        Returns:
            Positions int64 [1 or B, M + and_root]. Rows that are not real get positions after those that are.
        """
        if (first := self.open_in_a_row(rows + and_root)) is not None:
            return torch.arange(first, first + rows + and_root, device=device)[None]
        self.drop_drafted()
        if self.taken_in is None:
            self.place(0, rows + and_root)
            return cast(torch.Tensor, self.slots)
        valid, counts, lengths = self.taken_in
        if not self.static:
            self.reserve(self.longest + rows + and_root)
            self._end = max(count + new for count, new in zip(self.counts, counts, strict=True)) + and_root
        real = torch.nn.functional.pad(valid, (0, int(and_root)), value=True) if and_root else valid
        rank = real.cumsum(1) - 1
        after = real.sum(1, keepdim=True) + (~real).cumsum(1) - 1
        self.slots = lengths[:, None] + torch.where(real, rank, after)
        return self.slots

    def open_in_a_row(self, rows: int) -> int | None:
        """Starts a round as [`open_rows`] does, if all rows are real and all sequences have the same length.

        Returns:
            The first position, which the others follow one by one. Otherwise `None`, and nothing has been done.
        """
        if self.taken_in is not None or self.lengths is not None:
            return None
        self.drop_drafted()
        self.place(0, rows)
        return self.start

    def commit(self, rows: int) -> None:
        """Marks the rows just written as committed."""
        if self.taken_in is None:
            self.counts = [count + rows for count in self.counts]
            self.lengths = None if self.lengths is None else self.lengths + rows
            return
        valid, counts, lengths = self.taken_in
        if not self.static:
            self.counts = [count + new for count, new in zip(self.counts, counts, strict=True)]
        self.lengths = lengths + valid.sum(1)
        self.taken_in = None

    def owe(self, specialist: int, rows: CommittedRows) -> None:
        """Records that a specialist lacks the rows just committed, to be written before it drafts next."""
        owed = (*self._owed[specialist], rows)
        self._owed[specialist] = owed
        if sum(some.fused.shape[1] for some in owed) > MOST_OWED:
            self.settle(specialist)

    def take_owed(self, specialist: int) -> tuple[CommittedRows, ...]:
        """Returns the rows owed to a specialist that starts to draft; the caller's forward must write them.

        They belong right before the specialist's first drafted row. If sequences differ in length, the rows are
        written immediately instead and none are returned.
        """
        if self.lengths is not None:
            self.settle(specialist)
        owed, self._owed[specialist] = self._owed[specialist], ()
        return owed

    def settle(self, specialist: int) -> None:
        """Writes the rows owed to a specialist. Call it between rounds, or before a level is placed.

        Raises:
            RuntimeError: if the cache was made without `take_in`.
        """
        owed, self._owed[specialist] = self._owed[specialist], ()
        if not owed:
            return
        if self._take_in is None:
            raise RuntimeError("the draft cache has rows to write, but was made without `take_in`, which writes them.")
        fused, rotary = joined([rows.fused for rows in owed]), joined_rotary([rows.rotary for rows in owed])
        self._place_owed(owed, fused.shape[:2])
        self._take_in(self, fused, rotary, specialist)

    def settle_all(self) -> None:
        """Writes the rows owed to all specialists."""
        for specialist in range(len(self._owed)):
            self.settle(specialist)

    def _place_owed(self, owed: tuple[CommittedRows, ...], shape: torch.Size) -> None:
        """Makes the next forward write owed rows [B, R].

        Rows that are not real come after the others, as in [`open_rows`], because no two rows may share a slot.
        """
        batch, rows = shape
        if self.lengths is None:
            self.place(-rows, rows)
            return
        device = self.lengths.device
        real = torch.cat([torch.ones(batch, some.fused.shape[1], dtype=torch.bool, device=device)
                          if some.valid is None else some.valid for some in owed], dim=1)  # fmt: skip
        taken = real.sum(1, keepdim=True)
        index = torch.where(real, real.cumsum(1) - 1, taken + (~real).cumsum(1) - 1)
        self.slots = self.lengths[:, None] - taken + index
        self._end = self.longest + rows
        self.reserve(self._end)

    def select_sequences(self, kept: list[int]) -> None:
        self.settle_all()
        super().select_sequences(kept)

    def put_sequence(self, place: int, other: SlotCache, batch: int, device: torch.device) -> None:
        self.settle_all()
        if isinstance(other, DraftCache):
            other.settle_all()
        super().put_sequence(place, other, batch, device)

    @contextmanager
    def drafting(self, links: Links) -> Iterator[None]:
        """Drafts chains by these links inside the context."""
        self.links = links
        try:
            yield
        finally:
            self.links = None

    def state(self) -> dict[str, Any]:
        """Returns the state that a round changes, for [`go_back`].

        The buffers are not part of it, because repeating the round overwrites the same slots.
        """
        return {name: list(value) if type(value) is list else value for name, value in vars(self).items()}

    def go_back(self, state: dict[str, Any]) -> None:
        """Undoes a round, given the result of [`state`] from before it."""
        self.__dict__.update({name: list(value) if type(value) is list else value for name, value in state.items()})

    def outlive_step(self) -> None:
        """Copies the outputs of a compiled step that the next round needs.

        Without a copy the next replay of the CUDA graph would overwrite them.
        """
        if self.lengths is not None:
            self.lengths = self.lengths.clone()

    def last_row_mask(self, rows: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, 1, shown] of the last of the rows to commit; `None` if it sees all slots shown."""
        if self.lengths is None:
            return None
        length = self.lengths + (rows if self.taken_in is None else self.taken_in.valid.sum(1))
        seen = torch.arange(self.shown()[1], device=length.device) < length[:, None]
        return additive_mask(seen[:, None, None], dtype)

    def tree_mask(self, visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [B, 1, K, shown] of K nodes that see all committed rows and some rows of the round.

        Args:
            visible: bool [B, K, R], which rows of the round each node sees; `None` if it sees all of them.
            dtype: Dtype of the mask.

        Returns:
            The mask. With `visible=None` it is `None` unless slots without rows are shown.
        """
        if visible is None:
            return None if self.slots is None else chain_mask(self.slots[:, -1:], self.shown()[1], dtype)
        return additive_mask(slot_mask(visible, self.known_lengths(), *self.shown())[:, None], dtype)

    def lacked(self, specialist: int) -> list[torch.Tensor]:
        """Returns this round's drafted rows that a specialist's layer does not have yet, [B, rows, *] each."""
        return self.drafted_inputs[self._levels_in[specialist] :]

    def take_level(self, specialist: int) -> int:
        """Returns the first level of this round's drafted rows that a specialist's layer lacks, and marks all levels
        as written."""
        first, self._levels_in[specialist] = self._levels_in[specialist], len(self.drafted_inputs)
        return first

    def drop_drafted(self) -> None:
        """Ends a round: drops the drafted rows of every specialist."""
        self.drafted_inputs, self.rotary = [], None
        self._levels_in = [0] * len(self._levels_in)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates rows [B, *, *] to [B, R, *]. A single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def joined_rotary(parts: list[Rotary]) -> Rotary:
    """Concatenates the rotary embeddings of several parts. A single part is returned without a copy."""
    if len(parts) == 1:
        return parts[0]
    batch = max(len(cos) for cos, _ in parts)
    cos, sin = ([part[i].expand(batch, -1, -1) for part in parts] for i in (0, 1))
    return joined(cos), joined(sin)
