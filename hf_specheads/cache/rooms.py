"""Buffers that calls of one pair leave for later ones, at the same addresses.

A CUDA graph writes into the tensors it was captured with. Caches of a later call that lie elsewhere would have it
captured anew, with another copy of its memory, until the compiler gives graphs up. So a cache of a fixed size takes
its buffers from a room, where the next call finds them again; whatever their shape, they begin where the room's memory
for them does, so that batches whose sequences end and calls of other lengths take no more than the largest of them.
"""

from __future__ import annotations

import math

import torch

MOST_IDLE = 2  # rooms of a kind: more calls than that at the same time get new ones


class Room:
    """Buffers of one cache, by name."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Zeros of a shape, of the type and on the device of `like`, where a buffer of the name was before.

        What was there is wiped: a mask hides numbers, but not `nan`.
        """
        size, known = math.prod(shape), self._memory.get(name)
        if known is None or (known.dtype, known.device) != (like.dtype, like.device) or len(known) < size:
            known = self._memory[name] = like.new_empty(size)
        return stays(known[:size].zero_().view(shape))


def stays(buffer: torch.Tensor) -> torch.Tensor:
    """Tells the compiler that a tensor stays where it is: CUDA graphs write into no other. Without a guard: what lies
    elsewhere one day has its graph captured anew, not compiled anew."""
    torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer


class Rooms:
    """The rooms of one pair, by kind of cache. Calls that run at the same time have rooms of their own."""

    def __init__(self) -> None:
        self._idle: dict[type, list[Room]] = {}

    def take(self, kind: type) -> Room:
        """The room that was left last, or a new one."""
        try:
            return self._idle.setdefault(kind, []).pop()
        except IndexError:
            return Room()

    def leave(self, kind: type, room: Room) -> None:
        """Nobody uses the room any more."""
        idle = self._idle.setdefault(kind, [])
        if len(idle) < MOST_IDLE:
            idle.append(room)
