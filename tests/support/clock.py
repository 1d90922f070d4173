"""A simulated clock, for tests of choices that depend on measured seconds."""

from __future__ import annotations


class Clock:
    """A clock that advances by the given steps, in turn, each time it is read."""

    def __init__(self, *steps: float):
        self.now, self.steps, self.looks = 0.0, steps, 0

    def perf_counter(self) -> float:
        """Advances by one step and returns the time in seconds."""
        self.now += self.steps[self.looks % len(self.steps)]
        self.looks += 1
        return self.now
