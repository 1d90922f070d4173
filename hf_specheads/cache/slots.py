"""Keys and values in pre-allocated slots, written in place: the common base of draft cache and target cache.

A sequence b that has committed n_b tokens owns slots 0 .. n_b - 1 of the buffers, independently of the other
sequences. The rows of a round (tree nodes, drafted rows) lie in the slots right after them. Later slots are either not
shown to attention or masked, so their contents do not matter. The sequences of a batch may therefore accept different
numbers of tokens without any row being moved or padded.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .rooms import Room, Rooms

SMALLEST_CAPACITY = 64
SPARE = 64  # slots to add beyond the need when a cache must grow past the number of slots its call was said to need


def to_device(numbers: list, device: torch.device) -> torch.Tensor:
    """Copies integers of the host to a device as int64, without the host waiting for the copy on accelerators."""
    tensor = torch.tensor(numbers)
    if device.type in ("cpu", "meta", "mps"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def write_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows [B, heads, R, width] into slots int64 [B, R] of a buffer [B, heads, C, width], in place.

    Indexed assignment is used because compilers keep it in place; for `scatter_` they copy the whole buffer.
    """
    slots = slots.to(buffer.device)
    if slots.shape[0] == 1:
        buffer.index_copy_(2, slots[0], rows)
        return
    buffer[_sequences(len(slots), buffer.device), :, slots] = rows.transpose(1, 2)


def _sequences(batch: int, device: torch.device) -> torch.Tensor:
    """Indices of the sequences of a batch, int64 [B, 1]."""
    return torch.arange(batch, device=device)[:, None] if torch.compiler.is_compiling() else _kept(batch, device)


@lru_cache(maxsize=64)
def _kept(batch: int, device: torch.device) -> torch.Tensor:
    """Cached indices of the sequences, int64 [B, 1], because every layer asks for them twice in every round."""
    with torch.inference_mode(False):
        return torch.arange(batch, device=device)[:, None]


class OwnSlots:
    """A single layer's view of a [`SlotCache`] that shows all its slots: its keys and values, and where to write.

    Args:
        keys, values: [B, heads, capacity, head_dim], the layer's buffers.
        slots: int64 [B, R], the slots that the next rows are written to.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor):
        self.keys, self.values, self.slots = keys, values, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes R rows and returns the whole buffers, see [`SlotCacheLayer.update`]."""
        write_rows(self.keys, self.slots, key_states)
        write_rows(self.values, self.slots, value_states)
        return self.keys, self.values


class SlotCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, capacity, head_dim] each. The cache decides where rows are written.

    Args:
        cache: The cache this layer belongs to.
        window: Sliding window of the layer's attention. The layer is shown no slots older than the window needs.
    """

    is_sliding = False
    is_croppable = False
    names: tuple[str, ...] = ("keys", "values")  # attributes that hold the buffers

    def __init__(self, cache: SlotCache, window: int | None = None):
        super().__init__()
        self._cache = weakref.ref(cache)  # a reference cycle would keep both alive until the garbage collector runs
        self.window = window

    @property
    def cache(self) -> SlotCache:
        """The cache the layer belongs to.

        Raises:
            RuntimeError: if the cache has been freed.
        """
        cache = self._cache()
        if cache is None:
            raise RuntimeError(
                "the cache of this layer has been freed; keep a reference to the cache, not only to its layers."
            )
        return cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer("keys", key_states, self.cache.capacity)
        self.values = self._buffer("values", value_states, self.cache.capacity)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _buffer(self, name: str, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        """Returns a buffer of zeros with room for `capacity` rows like `rows` [B, heads, *, width]."""
        shape = (*rows.shape[:2], capacity, rows.shape[3])
        if (room := self.cache.room) is None:
            return rows.new_zeros(shape)
        index = next(index for index, layer in enumerate(self.cache.layers) if layer is self)
        return room.buffer(f"{index}.{name}", rows, *shape)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes R rows [B, heads, R, head_dim] and returns the visible slots, [B, heads, shown, head_dim] each."""
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
        """Keeps only the sequences `kept` of the batch."""
        index = to_device(kept, self.keys.device)
        for name in self.names:
            rows = getattr(self, name)[index]
            if self.cache.room is not None:
                rows = self._buffer(name, rows, rows.shape[2]).copy_(rows)
            setattr(self, name, rows)

    def put_sequence(self, place: int, other: SlotCacheLayer, batch: int) -> None:
        """Copies the only sequence of another layer over sequence `place` of `batch`, or appends it after the last."""
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
    """A cache of [`SlotCacheLayer`]s that all write to the same slots.

    Attributes:
        capacity: Number of slots of the buffers. It doubles when they are full, unless the cache is `static`.
        most: Upper bound of the slots that the call needs; `None` if unknown.
        static: Whether all slots are always shown, so that shapes never change. Compiled steps then read no numbers
            of the host, because those would be compiled in as constants.
        counts: Committed rows of every sequence, on the host; a single entry while all sequences have equally many.
        lengths: Committed rows on the device, int64 [B]; `None` while all sequences have equally many.
        room: Source of the buffers of a static cache; `None` to allocate new ones.
        start: First slot of the rows written next, if it is the same for all sequences.
        slots: int64 [B, R], slots of the rows written next, if they differ between sequences; `None` otherwise.
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
        """Committed rows: one number if it holds for all sequences, otherwise int64 [B]."""
        return self.counts[0] if self.lengths is None else self.lengths

    def shown(self, window: int | None = None) -> tuple[int, int]:
        """Returns the range (first, end) of slots that a forward may see; `window` is the layer's, if it has one."""
        if self.static:
            return 0, self.capacity
        return 0 if window is None else max(min(self.counts) - window + 1, 0), self._end

    def place(self, first: int, rows: int) -> None:
        """Makes the next forward write `rows` rows, beginning `first` slots after the committed rows."""
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
        """Writes rows [B, heads, R, width] to the current slots of a buffer [B, heads, capacity, width]."""
        if self.slots is None:
            buffer[:, :, self.start : self.start + rows.shape[2]] = rows
        else:
            write_rows(buffer, self.slots, rows)

    def reserve(self, capacity: int) -> None:
        """Ensures a capacity of at least `capacity` slots.

        Raises:
            RuntimeError: if the cache is static and too small.
        """
        if capacity <= self.capacity:
            return
        if self.static:
            raise RuntimeError(f"this cache has a fixed size of {self.capacity} slots, but {capacity} are needed.")
        self.capacity = self._grown(capacity)
        self.grow()

    def _grown(self, needed: int) -> int:
        """Returns the next capacity: doubled, so that growing is cheap on average, but at most what the call needs."""
        doubled = max(needed, 2 * self.capacity, SMALLEST_CAPACITY)
        if self.most is None:
            return doubled
        return needed + SPARE if needed > self.most else min(doubled, self.most)

    def fix_capacity(self, capacity: int, rooms: Rooms | None = None) -> None:
        """Makes an empty cache static, with `capacity` slots that are all shown always.

        Args:
            capacity: Number of slots.
            rooms: Holds buffers of earlier calls; the buffers of this cache go back there with [`leave_room`].
        """
        self.capacity, self.static, self._rooms = capacity, True, rooms
        self.room = None if rooms is None else rooms.take(type(self))

    def leave_room(self) -> None:
        """Returns the buffers for reuse by a later call; nothing may be read from them afterwards."""
        room, self.room = self.room, None
        if self._rooms is not None and room is not None:
            self._rooms.leave(type(self), room)

    def grow(self) -> None:
        """Gives every layer buffers of the new capacity."""
        for layer in self.layers:
            if isinstance(layer, SlotCacheLayer) and layer.is_initialized:  # other layers hold no rows
                layer.grow(self.capacity)

    def become_ragged(self, batch: int, device: torch.device) -> torch.Tensor:
        """Switches to a separate number of committed rows per sequence, and returns them: `lengths`, int64 [B]."""
        if self.lengths is None:
            self.counts = self.counts * batch if len(self.counts) == 1 else self.counts
            self.lengths = to_device(self.counts, device)
        return self.lengths

    def put_sequence(self, place: int, other: SlotCache, batch: int, device: torch.device) -> None:
        """Takes over the only sequence of another cache with the same layers.

        Args:
            place: Index of the sequence to replace, or `batch` to append after the last one.
            other: The other cache, with growing buffers as this one has. Its rows are copied.
            batch: Number of sequences in this cache.
            device: Device of `lengths`.
        """
        self.become_ragged(batch, device)
        self.most = None  # the bound was computed for one call and does not cover sequences that join it
        self.reserve(max(self.longest, other.longest))
        self.put_buffers(place, other, batch)
        self.counts[place : place + 1] = [other.longest]
        self.lengths = to_device(self.counts, device)

    def put_buffers(self, place: int, other: SlotCache, batch: int) -> None:
        """Copies the keys and values of a joining sequence; arguments as in [`put_sequence`]."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, SlotCacheLayer) and isinstance(theirs, SlotCacheLayer):
                mine.put_sequence(place, theirs, batch)

    def select_sequences(self, kept: list[int]) -> None:
        """Keeps only the sequences `kept` of the batch."""
        self.select_buffers(kept)
        if self.lengths is not None:
            self.lengths = self.lengths[to_device(kept, self.lengths.device)]
            self.counts = [self.counts[sequence] for sequence in kept]

    def select_buffers(self, kept: list[int]) -> None:
        """Keeps the keys and values of the sequences `kept` only."""
        for layer in self.layers:
            if isinstance(layer, SlotCacheLayer) and layer.is_initialized:  # other layers hold no rows
                layer.select_sequences(kept)
