"""Clocks of the tests' own, where what is chosen by seconds must not depend on the machine."""

from __future__ import annotations


class Clock:
    """Time passes with every look at it, in steps of the test's choosing."""

    def __init__(self, *steps: float):
        self.now, self.steps, self.looks = 0.0, steps, 0

    def perf_counter(self) -> float:
        """Seconds, one step after the last look."""
        self.now += self.steps[self.looks % len(self.steps)]
        self.looks += 1
        return self.now
