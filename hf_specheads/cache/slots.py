"""Keys and values in pre-allocated slots, written in place: what draft cache and target cache have in common.

A sequence b that has committed n_b tokens owns slots 0 .. n_b - 1 of the buffers, whatever the others have, and
the rows of a round (tree nodes, drafted rows) lie in the slots right after. Slots beyond are not shown to attention,
or masked; what they hold does not matter. So the sequences of a batch may accept different numbers of tokens without
any row being moved or padded.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .rooms import Room, Rooms

SMALLEST_CAPACITY = 64
SPARE = 64  # slots beyond what a call was said to need, once that has turned out to be too few


def to_device(numbers: list, device: torch.device) -> torch.Tensor:
    """Integers of the host on a device, int64: one copy, which the host does not wait for where it need not."""
    tensor = torch.tensor(numbers)
    if device.type in ("cpu", "meta", "mps"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def write_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [B, heads, R, width] into slots int64 [B, R] of a buffer [B, heads, C, width], in place.

    By indexed assignment, which compilers leave in place; they make a copy of the whole buffer for `scatter_`.
    """
    slots = slots.to(buffer.device)
    if slots.shape[0] == 1:
        buffer.index_copy_(2, slots[0], rows)
        return
    buffer[_sequences(len(slots), buffer.device), :, slots] = rows.transpose(1, 2)


def _sequences(batch: int, device: torch.device) -> torch.Tensor:
    """The numbers of sequences, int64 [B, 1]."""
    return torch.arange(batch, device=device)[:, None] if torch.compiler.is_compiling() else _kept(batch, device)


@lru_cache(maxsize=64)
def _kept(batch: int, device: torch.device) -> torch.Tensor:
    """The same, made once: every layer of every round asks for them twice."""
    with torch.inference_mode(False):
        return torch.arange(batch, device=device)[:, None]


class OwnSlots:
    """What a layer alone sees of a [`SlotCache`] that shows all its slots: its keys and values, and where to write.

    Args:
        keys, values: [B, heads, capacity, head_dim].
        slots: int64 [B, R].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor):
        self.keys, self.values, self.slots = keys, values, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`SlotCacheLayer.update`]."""
        write_rows(self.keys, self.slots, key_states)
        write_rows(self.values, self.slots, value_states)
        return self.keys, self.values


class SlotCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, capacity, head_dim] each; where to write, the cache says.

    Args:
        cache: The cache this layer belongs to.
        window: Sliding window of the layer's attention; it is shown no older slots than the window needs.
    """

    is_sliding = False
    is_croppable = False
    names: tuple[str, ...] = ("keys", "values")  # of the buffers

    def __init__(self, cache: SlotCache, window: int | None = None):
        super().__init__()
        self._cache = weakref.ref(cache)  # the cache holds the layer: a cycle would keep both until the collector runs
        self.window = window

    @property
    def cache(self) -> SlotCache:
        """The cache the layer belongs to.

        Raises:
            RuntimeError: if that is gone.
        """
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the cache of this layer is gone; hold on to the cache, not to its layers.")
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer("keys", key_states, self.cache.capacity)
        self.values = self._buffer("values", value_states, self.cache.capacity)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _buffer(self, name: str, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        """Zeros for rows [B, heads, *, width]."""
        shape = (*rows.shape[:2], capacity, rows.shape[3])
        if (room := self.cache.room) is None:
            return rows.new_zeros(shape)
        index = next(index for index, layer in enumerate(self.cache.layers) if layer is self)
        return room.buffer(f"{index}.{name}", rows, *shape)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes R rows [B, heads, R, head_dim] and returns the slots shown, [B, heads, shown, head_dim] each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        cache.write(self.keys, key_states)
        cache.write(self.values, value_states)
        first, end = cache.shown(self.window)
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def grow(self, capacity: int) -> None:
        """Moves the rows into larger buffers."""
        for name in self.names:
            old = getattr(self, name)
            buffer = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            buffer[:, :, : old.shape[2]] = old
            setattr(self, name, buffer)

    def select_sequences(self, kept: list[int]) -> None:
        """Keeps only some sequences of the batch."""
        index = to_device(kept, self.keys.device)
        for name in self.names:
            rows = getattr(self, name)[index]
            if self.cache.room is not None:
                rows = self._buffer(name, rows, rows.shape[2]).copy_(rows)
            setattr(self, name, rows)

    def put_sequence(self, place: int, other: SlotCacheLayer, batch: int) -> None:
        """The only sequence of another layer goes into the place of one of `batch` sequences, or after the last."""
        if not (self.is_initialized or other.is_initialized):
            return
        if not self.is_initialized:
            like = other.keys.expand(batch, -1, -1, -1)
            self.lazy_initialization(like, other.values.expand(batch, -1, -1, -1))
        for name in self.names:
            buffer = getattr(self, name)
            if place == len(buffer):
                buffer = torch.nn.functional.pad(buffer, (0, 0, 0, 0, 0, 0, 0, 1))
                setattr(self, name, buffer)
            if other.is_initialized:
                rows = other.cache.longest
                buffer[place, :, :rows] = getattr(other, name)[0, :, :rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first, end = self.cache.shown(self.window)
        return end - first, first

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.is_initialized = False


class SlotCache(Cache):
    """A cache of [`SlotCacheLayer`]s with one place to write for all of them.

    Attributes:
        capacity: Slots of the buffers; doubled when they are full, unless `static`.
        most: Slots needed at most, by what is known of the call; `None` where nothing is.
        static: Whether all slots are always shown, so that shapes never change. Nothing that a compiled step reads is
            a number of the host then: it would be compiled into it.
        counts: Committed rows of every sequence, on the host; one entry for all while they are the same.
        lengths: The same on the device, int64 [B]; `None` while all have the same number.
        room: Where the buffers of a fixed size come from, `None` for new ones.
        start: First slot of the rows written next, where that is the same for all sequences.
        slots: int64 [B, R], slots of the rows written next, otherwise.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.static = False
        self.capacity = 0
        self.most: int | None = None
        self.counts: list[int] = [0]
        self.lengths: torch.Tensor | None = None
        self.start = 0
        self.slots: torch.Tensor | None = None
        self._end = 0
        self.room: Room | None = None
        self._rooms: Rooms | None = None

    @property
    def longest(self) -> int:
        """Committed rows of the longest sequence."""
        return max(self.counts)

    def known_lengths(self) -> int | torch.Tensor:
        """Committed rows: a number for all sequences, or int64 [B]."""
        return self.counts[0] if self.lengths is None else self.lengths

    def shown(self, window: int | None = None) -> tuple[int, int]:
        """First and last + 1 of the slots a forward may see, in a layer with a sliding window if given."""
        if self.static:
            return 0, self.capacity
        return 0 if window is None else max(min(self.counts) - window + 1, 0), self._end

    def place(self, first: int, rows: int) -> None:
        """The next forward writes `rows` rows, from the slot `first` after the committed ones."""
        if not self.static:
            end = self.longest + first + rows
            self.reserve(end)
            self._end = end
        if self.lengths is None:
            self.start, self.slots = self.counts[0] + first, None
            return
        index = torch.arange(first, first + rows, device=self.lengths.device)
        self.slots = self.lengths[:, None] + index

    def write(self, buffer: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows [B, heads, R, width] where they are to go, into a buffer [B, heads, capacity, width]."""
        if self.slots is None:
            buffer[:, :, self.start : self.start + rows.shape[2]] = rows
        else:
            write_rows(buffer, self.slots, rows)

    def reserve(self, capacity: int) -> None:
        """Makes room for so many slots.

        Raises:
            RuntimeError: if the capacity is fixed and too small.
        """
        if capacity <= self.capacity:
            return
        if self.static:
            raise RuntimeError(f"this cache has {self.capacity} slots, fixed, and {capacity} are needed.")
        self.capacity = self._grown(capacity)
        self.grow()

    def _grown(self, needed: int) -> int:
        """Twice as many slots, so that growing costs little in the long run; no more than the call needs at most."""
        doubled = max(needed, 2 * self.capacity, SMALLEST_CAPACITY)
        if self.most is None:
            return doubled
        return needed + SPARE if needed > self.most else min(doubled, self.most)

    def fix_capacity(self, capacity: int, rooms: Rooms | None = None) -> None:
        """Makes an empty cache one of so many slots, all of which are always shown.

        Args:
            capacity: Slots.
            rooms: Where earlier calls have left buffers, and this one leaves its own ([`leave_room`]).
        """
        self.capacity, self.static, self._rooms = capacity, True, rooms
        self.room = None if rooms is None else rooms.take(type(self))

    def leave_room(self) -> None:
        """Nothing is read from the buffers any more: the next call may have them."""
        room, self.room = self.room, None
        if self._rooms is not None and room is not None:
            self._rooms.leave(type(self), room)

    def grow(self) -> None:
        """Gives every layer buffers of the new capacity."""
        for layer in self.layers:
            if isinstance(layer, SlotCacheLayer) and layer.is_initialized:  # others hold nothing of their own
                layer.grow(self.capacity)

    def become_ragged(self, batch: int, device: torch.device) -> torch.Tensor:
        """From now on every sequence has a number of committed rows of its own: `lengths`, which are returned."""
        if self.lengths is None:
            self.counts = self.counts * batch if len(self.counts) == 1 else self.counts
            self.lengths = to_device(self.counts, device)
        return self.lengths

    def put_sequence(self, place: int, other: SlotCache, batch: int, device: torch.device) -> None:
        """Takes over the only sequence of another cache of the same layers.

        Args:
            place: Of the sequence it comes in for, or `batch`: after the last.
            other: The cache, of growing buffers as this one; its rows are copied.
            batch: Sequences there are.
            device: Of `lengths`.
        """
        self.become_ragged(batch, device)
        self.most = None  # known of one call, not of those that join it
        self.reserve(max(self.longest, other.longest))
        self.put_buffers(place, other, batch)
        self.counts[place : place + 1] = [other.longest]
        self.lengths = to_device(self.counts, device)

    def put_buffers(self, place: int, other: SlotCache, batch: int) -> None:
        """Copies keys and values; arguments as in [`put_sequence`]."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, SlotCacheLayer) and isinstance(theirs, SlotCacheLayer):
                mine.put_sequence(place, theirs, batch)

    def select_sequences(self, kept: list[int]) -> None:
        """Keeps only some sequences of the batch."""
        self.select_buffers(kept)
        if self.lengths is not None:
            self.lengths = self.lengths[to_device(kept, self.lengths.device)]
            self.counts = [self.counts[sequence] for sequence in kept]

    def select_buffers(self, kept: list[int]) -> None:
        """Keeps keys and values of these sequences only."""
        for layer in self.layers:
            if isinstance(layer, SlotCacheLayer) and layer.is_initialized:  # others hold nothing of their own
                layer.select_sequences(kept)
