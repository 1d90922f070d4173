"""What trials may lose: a share of the time, saved up from round to round and from call to call."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TRIALS = 3.0  # plain steps' worth of time that may be lost before anything was earned, and saved up at the most
MOST_DEBT = 2.0  # in plain steps: what was lost, to stalls perhaps, is no reason to wait long before another look
FORGIVEN = 0.5  # plain steps' worth of debt, with every new call


@dataclass
class Budget:
    """Of time, in plain steps' worth.

    Attributes:
        debt: Lost to trials, less what has been earned for further ones.
    """

    debt: float = -FIRST_TRIALS

    @property
    def is_full(self) -> bool:
        """Whether no more can be saved up."""
        return self.debt <= -FIRST_TRIALS

    def affords(self, loss: float) -> bool:
        """Whether so much may be lost now."""
        return loss <= -self.debt

    def lose(self, lost: float) -> None:
        """A trial has cost something; or given it, where it is less than nothing."""
        self.debt = min(self.debt + lost, MOST_DEBT)

    def earn(self, earned: float) -> None:
        """Time that was no trial has passed."""
        self.debt = max(self.debt - earned, -FIRST_TRIALS)

    def begin_call(self) -> None:
        """Another text may be drafted better: some of what was lost is forgotten."""
        self.debt = min(self.debt, max(self.debt - FORGIVEN, 0.0))
