"""Cache buffers that calls with the same target and heads reuse, at the same memory addresses.

A CUDA graph writes into the tensors it was captured with. If the caches of a later call lay elsewhere, the graph would
be captured again, with another copy of its memory, until the compiler gives up on graphs. A static cache therefore
takes its buffers from a [`Room`], where the next call finds them again. A buffer of any shape begins at the start of
the room's memory for its name, so shrinking batches and calls of other lengths need no more memory than the largest.
"""

from __future__ import annotations

import math

import torch

MOST_IDLE = 2  # unused rooms kept per kind of cache; those of further concurrent calls are freed


class Room:
    """The buffers of one cache, by name."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Returns zeros of the given shape, with dtype and device of `like`, in the memory kept under this name.

        Old contents are overwritten because a mask hides finite numbers, but not NaN.
        """
        size, known = math.prod(shape), self._memory.get(name)
        if known is None or (known.dtype, known.device) != (like.dtype, like.device) or len(known) < size:
            known = self._memory[name] = like.new_empty(size)
        return stays(known[:size].zero_().view(shape))


def stays(buffer: torch.Tensor) -> torch.Tensor:
    """Tells the compiler that a tensor keeps its address, so that CUDA graphs may write into it directly.

    No guard is added: if the tensor does move, its graph is captured again but nothing is recompiled.
    """
    torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer


class Rooms:
    """The rooms of one pair of target and heads, by kind of cache. Concurrent calls get separate rooms."""

    def __init__(self) -> None:
        self._idle: dict[type, list[Room]] = {}

    def take(self, kind: type) -> Room:
        """Returns the room that was left last, or a new one if there is none."""
        try:
            return self._idle.setdefault(kind, []).pop()
        except IndexError:
            return Room()

    def leave(self, kind: type, room: Room) -> None:
        """Hands a room back for reuse by a later call."""
        idle = self._idle.setdefault(kind, [])
        if len(idle) < MOST_IDLE:
            idle.append(room)
