"""What calls have taught about trees that is worth keeping beyond the process."""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Memory
from ...tree.config import DraftTreeConfig
from .pace import PLAIN, Pace

ROUNDS_OF_A_LESSON = 64  # that drafted, before what they taught is worth keeping


@dataclass(frozen=True)
class Lesson:
    """What calls have taught about the tree that pays most.

    Attributes:
        tree: The tree.
        tokens_per_second: Of rounds that draft it, one sequence at a time.
        plain_tokens_per_second: Of plain steps.
        rounds: That it was learnt from.
    """

    tree: DraftTreeConfig
    tokens_per_second: float
    plain_tokens_per_second: float
    rounds: int


def lesson_of(memory: Memory) -> Lesson | None:
    """What calls of one sequence each have taught, those under the settings of which there were most; `None` where
    there were fewer than [`ROUNDS_OF_A_LESSON`] rounds, nobody left the engine a choice, or drafts did not pay."""
    paces = [pace for known in memory.values() for key, pace in known.items()
             if isinstance(pace, Pace) and key[1] == 0 and len(pace.menu) > 1]  # fmt: skip
    pace = max(paces, key=lambda pace: pace.rounds, default=None)
    if pace is None or pace.rounds < ROUNDS_OF_A_LESSON or (best := pace.best) == PLAIN:
        return None
    plain = 1 / pace.costs.plain_seconds
    return Lesson(_usual_tree(pace, best), pace.rate(best) * plain, plain, pace.rounds)


def _usual_tree(pace: Pace, choice: int) -> DraftTreeConfig:
    """A tree of the menu; of chains that end where they like, one as deep as they usually were."""
    tree = pace.menu[choice]
    if choice not in pace.costs.levels:
        return tree
    depth = max(round(pace.costs.levels[choice]), 1)
    return tree.replace(depth=depth, total_tokens=depth + 1)
