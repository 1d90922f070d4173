"""What calls have taught about draft trees and is worth keeping beyond the process."""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Memory
from ...tree.config import DraftTreeConfig
from .pace import PLAIN, Pace

ROUNDS_OF_A_LESSON = 64  # drafting rounds before what they taught is worth keeping


@dataclass(frozen=True)
class Lesson:
    """What calls have taught about the tree that pays most.

    Attributes:
        tree: The tree.
        tokens_per_second: Token rate of rounds that draft the tree, one sequence at a time.
        plain_tokens_per_second: Token rate of plain steps.
        rounds: Number of rounds that the lesson was learnt from.
    """

    tree: DraftTreeConfig
    tokens_per_second: float
    plain_tokens_per_second: float
    rounds: int


def lesson_of(memory: Memory) -> Lesson | None:
    """What calls with one sequence have taught, under the settings that had most rounds. `None` if these were fewer
    than [`ROUNDS_OF_A_LESSON`] rounds, if every menu had a single tree, or if drafts did not pay."""
    paces = [pace for known in memory.values() for key, pace in known.items()
             if isinstance(pace, Pace) and key[1] == 0 and len(pace.menu) > 1]  # fmt: skip
    pace = max(paces, key=lambda pace: pace.rounds, default=None)
    if pace is None or pace.rounds < ROUNDS_OF_A_LESSON or (best := pace.best) == PLAIN:
        return None
    plain = 1 / pace.costs.plain_seconds
    return Lesson(_usual_tree(pace, best), pace.rate(best) * plain, plain, pace.rounds)


def _usual_tree(pace: Pace, choice: int) -> DraftTreeConfig:
    """A tree of the menu. For a variable-length chain it is a chain of the usual depth."""
    tree = pace.menu[choice]
    if choice not in pace.costs.levels:
        return tree
    depth = max(round(pace.costs.levels[choice]), 1)
    return tree.replace(depth=depth, total_tokens=depth + 1)
