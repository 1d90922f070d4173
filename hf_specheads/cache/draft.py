"""The draft cache: keys and values of every specialist, one generation long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from .masks import additive_mask, chain_mask, slot_mask
from .slots import SlotCache, SlotCacheLayer

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of positions, [1 or B, rows, head_dim] each
MOST_OWED = 32  # committed rows that a specialist may lack: more of them cost as much later as now, and stay in memory


class RealRows(NamedTuple):
    """Which of M rows are real.

    Attributes:
        valid: bool [B, M].
        counts: How many that are, per sequence.
        lengths: int64 [B], committed rows before them.
    """

    valid: torch.Tensor
    counts: list[int]
    lengths: torch.Tensor


class CommittedRows(NamedTuple):
    """Rows of one round that are committed in some specialists' layers and owed to others.

    Attributes:
        fused: [B, M, *], as the layers take them in.
        rotary: Of their positions.
        valid: bool [B, M], which of them are real; `None` if all are.
    """

    fused: torch.Tensor
    rotary: Rotary
    valid: torch.Tensor | None


class Links(NamedTuple):
    """How a compiled step drafts the links of a chain, so that all of a kind are the same work to the compiler.

    Attributes:
        offsets: int64 [1] each, the numbers from 0 on: how far after the committed rows a row lies. Tensors, because
            a number of the host would be compiled into the link.
        kinds: Of every specialist, a number that those with the same work have in common.
        run: Calls `run(kind, link, layer, *tensors)`, so that links of one kind are compiled once; `None` where the
            installed torch cannot.
        best: The best children of a link, as drafting finds them.
        dtype: That links are computed in.
        catch_up: Whether `run` takes, as the last tensor, rows that a specialist lacks as well, where it starts.
    """

    offsets: tuple[torch.Tensor, ...]
    kinds: tuple[int, ...]
    run: Callable[..., Any] | None
    best: Callable[..., Any]
    dtype: torch.dtype
    catch_up: bool = False


class DraftCache(SlotCache):
    """Draft cache of one generation: one layer per specialist.

    Committed rows come from target features and are the same number in every specialist; drafted rows are appended
    during a round and dropped at its end (invariant: a committed row never comes from a drafted feature). The slot of
    a row is its position.

    A specialist that drafts in few rounds need not take in the rows of every round: they are owed to it ([`owe`]) and
    written with the next row it drafts ([`take_owed`]), or before ([`settle`]). It sees the same rows then, whenever
    they were written.

    Args:
        num_specialists: Layers.
        take_in: Writes rows into a specialist's layer, called as `take_in(cache, fused, rotary, specialist)`; needed
            where rows are owed.

    Attributes:
        taken_in: Which of the rows a round takes in are real, `None` if all are. In a batch, sequences have accepted
            different numbers of tokens; those that accepted fewer than others come after columns of no meaning. Set
            before every round ([`begin_round`]).
        deepest: Draft positions of the deepest tree that may be drafted with this cache; 0 where that is the tree in
            force of the heads.
        levels: Draft positions of this round's tree at the most; 0 where that is not known.
        links: How a compiled step drafts chains, `None` for other trees and heads, and where nothing is compiled.
        drafted_inputs: This round's drafted rows, fused, [B, rows, *] each, for specialists that start later.
        rotary: Of the positions of this round's levels; `None` before anybody has made it.
        rotary_table: Of the positions from 0 on, [1, slots, head_dim] each, for sequences that are alike in length.
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
        """Committed rows, of the longest sequence: its committed tokens minus one."""
        return self.longest

    def begin_round(self, valid: torch.Tensor | None = None, counts: list[int] | None = None) -> None:
        """Says which of the rows taken in next are real.

        Args:
            valid: bool [B, M]; `None` if all are.
            counts: How many that are, per sequence.
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
        """Starts a round: drafted rows are forgotten, and the next forward writes `rows` new rows to commit.

        Args:
            rows: M.
            device: Where the head computes.
            and_root: Rows that the forward writes besides and that are not to be committed: the root's, mask rows.

        Returns:
            Positions int64 [1 or B, M + and_root]. Rows that are not real have positions after those.
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
        """The same where no row lacks meaning and sequences are alike in length: the first position, which others
        follow one by one. `None` elsewhere, and nothing has been done."""
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
        """A specialist is to have the rows just committed, whenever it drafts next."""
        owed = (*self._owed[specialist], rows)
        self._owed[specialist] = owed
        if sum(some.fused.shape[1] for some in owed) > MOST_OWED:
            self.settle(specialist)

    def take_owed(self, specialist: int) -> tuple[CommittedRows, ...]:
        """The rows owed to a specialist that starts to draft, for the same forward to write them right before its
        first drafted row. Where sequences differ in length they are written at once, and none are returned."""
        if self.lengths is not None:
            self.settle(specialist)
        owed, self._owed[specialist] = self._owed[specialist], ()
        return owed

    def settle(self, specialist: int) -> None:
        """Writes the rows that are owed to a specialist; to be called between rounds, or before a level is placed."""
        owed, self._owed[specialist] = self._owed[specialist], ()
        if not owed:
            return
        if self._take_in is None:
            raise RuntimeError("rows are owed in a draft cache that was made without `take_in`, which writes them.")
        fused, rotary = joined([rows.fused for rows in owed]), joined_rotary([rows.rotary for rows in owed])
        self._place_owed(owed, fused.shape[:2])
        self._take_in(self, fused, rotary, specialist)

    def settle_all(self) -> None:
        """Writes all rows that are owed."""
        for specialist in range(len(self._owed)):
            self.settle(specialist)

    def _place_owed(self, owed: tuple[CommittedRows, ...], shape: torch.Size) -> None:
        """The next forward writes owed rows [B, R]. Those that are not real come after the others, as in
        [`open_rows`]: two rows must not go into one slot."""
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
        """Chains are drafted like this meanwhile."""
        self.links = links
        try:
            yield
        finally:
            self.links = None

    def state(self) -> dict[str, Any]:
        """What a round changes besides the buffers, which a round like it writes over ([`go_back`])."""
        return {name: list(value) if type(value) is list else value for name, value in vars(self).items()}

    def go_back(self, state: dict[str, Any]) -> None:
        """Undoes a round."""
        self.__dict__.update({name: list(value) if type(value) is list else value for name, value in state.items()})

    def outlive_step(self) -> None:
        """What a compiled step has left for the next round becomes the cache's own: the next replay of a CUDA graph
        writes over what the last one has left."""
        if self.lengths is not None:
            self.lengths = self.lengths.clone()

    def last_row_mask(self, rows: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive [B, 1, 1, shown]: what the last of the rows to commit sees; `None` if that is all that is shown."""
        if self.lengths is None:
            return None
        length = self.lengths + (rows if self.taken_in is None else self.taken_in.valid.sum(1))
        seen = torch.arange(self.shown()[1], device=length.device) < length[:, None]
        return additive_mask(seen[:, None, None], dtype)

    def tree_mask(self, visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive [B, 1, K, shown]: all committed rows, and those of the round that are `visible` [B, K, R]. For
        `None` all are; the mask is `None` as well then, unless slots are shown that hold no row."""
        if visible is None:
            return None if self.slots is None else chain_mask(self.slots[:, -1:], self.shown()[1], dtype)
        return additive_mask(slot_mask(visible, self.known_lengths(), *self.shown())[:, None], dtype)

    def lacked(self, specialist: int) -> list[torch.Tensor]:
        """This round's drafted rows that a specialist's layer does not have, [B, rows, *] each."""
        return self.drafted_inputs[self._levels_in[specialist] :]

    def take_level(self, specialist: int) -> int:
        """Which levels of this round's drafted rows a specialist's layer lacks: all from the one returned on. They
        count as written from now on."""
        first, self._levels_in[specialist] = self._levels_in[specialist], len(self.drafted_inputs)
        return first

    def drop_drafted(self) -> None:
        """Ends a round: every specialist forgets its drafted rows."""
        self.drafted_inputs, self.rotary = [], None
        self._levels_in = [0] * len(self._levels_in)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows [B, *, *] one after another: [B, R, *]. One part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def joined_rotary(parts: list[Rotary]) -> Rotary:
    """Of rows one after another. One part is not copied."""
    if len(parts) == 1:
        return parts[0]
    batch = max(len(cos) for cos, _ in parts)
    cos, sin = ([part[i].expand(batch, -1, -1) for part in parts] for i in (0, 1))
    return joined(cos), joined(sin)
