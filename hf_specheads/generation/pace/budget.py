"""What trials may lose: a share of the time, saved up over rounds and calls."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TRIALS = 3.0  # initial and largest savings, in plain steps
MOST_DEBT = 2.0  # largest debt, in plain steps: a loss, perhaps to a stall, should not delay the next trial for long
FORGIVEN = 0.5  # debt that every new call forgives, in plain steps


@dataclass
class Budget:
    """Time that trials may lose, measured in plain steps.

    Attributes:
        debt: What trials have lost, less what has been earned for further trials; negative while there are savings.
    """

    debt: float = -FIRST_TRIALS

    @property
    def is_full(self) -> bool:
        """Whether no more can be saved up."""
        return self.debt <= -FIRST_TRIALS

    def affords(self, loss: float) -> bool:
        """Whether a trial may lose this much now."""
        return loss <= -self.debt

    def lose(self, lost: float) -> None:
        """Adds what a trial has lost, or gained if negative."""
        self.debt = min(self.debt + lost, MOST_DEBT)

    def earn(self, earned: float) -> None:
        """Adds what has been earned for further trials."""
        self.debt = max(self.debt - earned, -FIRST_TRIALS)

    def begin_call(self) -> None:
        """Forgives some of the debt, as the new call's text may be drafted better."""
        self.debt = min(self.debt, max(self.debt - FORGIVEN, 0.0))
