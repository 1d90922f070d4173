"""What rounds give, in tokens: from a tree's own rounds, and from what other trees tell of those never tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from ...tree.config import DraftTreeConfig
from ..drafting.foresight import Foresight, Reach
from .costs import Costs
from .favourites import Favourites
from .tallies import Acceptance, Siblings, Tried, tokens_by_depth, tokens_of

ENOUGH_MISSES = 64  # wrong favourites seen before rounds look less often for the child that was right
ROUNDS_BETWEEN_MISSES = 4  # interval, in rounds, of looking for the right child once ENOUGH_MISSES were seen


class Gains:
    """Expected tokens of rounds over a menu's trees.

    Texts differ more than trees do: a tree that was tried in an easy text would seem better than it is. So the tokens
    of its rounds are kept next to the tokens that were expected of them at that time, from how often chains were
    accepted lately and from what siblings add to chains. Only the ratio of the two belongs to the tree itself.

    Args:
        menu: The trees.
        ending: Indices of the menu's variable-length chains.
        before: The gains of another number of sequences; what they know of acceptance is shared.

    Attributes:
        tried: What the rounds of each tree of the menu have given, see [`Tried`].
        foresight: How likely links of variable-length chains are to be accepted, by how children are chosen.
        acceptance: How often drafts of chains are accepted, by how children are chosen; without copied tokens, which
            come after all drafted ones.
        siblings: What siblings add to chains.
    """

    def __init__(self, menu: Sequence[DraftTreeConfig], ending: set[int], before: Gains | None = None):
        self.menu, self.ending = menu, ending
        self.tried = [Tried() for _ in menu]
        self._deepest = max(tree.depth for tree in menu)
        self.foresight: defaultdict[str, Foresight] = defaultdict(Foresight) if before is None else before.foresight
        self.acceptance: defaultdict[str, Acceptance] = (
            defaultdict(partial(Acceptance, self._deepest)) if before is None else before.acceptance
        )
        self.siblings: Siblings = Siblings() if before is None else before.siblings
        self._branches = any(tree.kind != "chain" for tree in menu)
        self._rates: dict[str, list[float]] = {}
        self._of_trees: dict[int, float] = {}

    def work_out_again(self) -> None:
        """Drops all cached estimates, so that the next query computes them from the rounds so far."""
        self._rates.clear()
        self._of_trees.clear()

    def record_plain(self) -> None:
        """Adds a plain step."""
        for acceptance in self.acceptance.values():
            acceptance.record_plain()

    def begin_text(self) -> None:
        """Begins another text, which may be drafted better or worse."""
        for acceptance in self.acceptance.values():
            acceptance.begin_text()

    def is_plain_chain(self, choice: int) -> bool:
        """Whether a tree is a chain of fixed depth, whose tokens follow from those of chains of other depths."""
        return choice not in self.ending and self.menu[choice].kind == "chain" and not self.menu[choice].stop_below

    def tokens(self, choice: int, costs: Costs) -> float:
        """Expected tokens of a round over a tree.

        Args:
            choice: Index of the tree in the menu.
            costs: Costs of the menu.
        """
        given = self.given(choice, costs)
        if choice not in self.ending:
            return given
        # Once it has learnt where to end, such a chain gives no fewer tokens per second than the best fixed depth.
        by_depth = tokens_by_depth(self._rates_of(choice))
        fixed = max(tokens / costs.of_levels(choice, depth) for depth, tokens in enumerate(by_depth, 1))
        return max(given, fixed * costs.cost(choice))

    def given(self, choice: int, costs: Costs) -> float:
        """Expected tokens of a round like those so far; a variable-length chain may yet learn to end better."""
        expected = self._expected(choice, costs)
        drafted = expected if self.is_plain_chain(choice) else self.tried[choice].tokens_drafted(expected)
        return drafted + self._copied(choice)

    def _expected(self, choice: int, costs: Costs) -> float:
        """Expected tokens of a round from what chains and siblings tell alone. A variable-length chain is expected to
        give what a chain of its usual depth does."""
        rates = self._rates_of(choice)
        if choice in self.ending:
            return tokens_of(rates[: round(costs.levels[choice])])
        if self.is_plain_chain(choice):
            return tokens_of(rates)
        if choice not in self._of_trees:
            self._of_trees[choice] = self.siblings.tokens(self.menu[choice], rates)
        return self._of_trees[choice]

    def _rates_of(self, choice: int) -> list[float]:
        """How often drafts of chains are accepted, for each position of a tree."""
        children = self.menu[choice].children
        if children not in self._rates:
            self._rates[children] = self.acceptance[children].rates(self._deepest)
        return self._rates[children][: self.menu[choice].depth]

    def _copied(self, choice: int) -> float:
        """Accepted tokens per round that a chain copied from the text after all drafted ones. For an untried chain,
        those of the tried chain with copies that is nearest in depth."""
        if not self.menu[choice].lookup or self.tried[choice].rounds:
            return self.tried[choice].copied
        depth = self.menu[choice].depth
        alike = [other for other, tried in enumerate(self.tried)
                 if tried.rounds and self.menu[other].lookup and self.is_plain_chain(other)]  # fmt: skip
        nearest = min(alike, key=lambda other: abs(self.menu[other].depth - depth), default=choice)
        return self.tried[nearest].copied

    def asks_for_favourites(self, choice: int) -> bool:
        """Whether the next round should tell which child would have been right where its chain was wrong. That matters
        if the menu has branching trees; once enough is known, only some rounds tell it."""
        now = self.siblings.misses < ENOUGH_MISSES or self.tried[choice].rounds % ROUNDS_BETWEEN_MISSES == 0
        return now and self._branches and self.menu[choice].children == "top_k"

    def record(
        self,
        choice: int,
        number: int,
        num_accepted: Sequence[int],
        costs: Costs,
        reach: Reach | None = None,
        told: Sequence[Favourites] | None = None,
        num_drafted: Sequence[int] | None = None,
    ) -> None:
        """Adds a round that drafted a tree.

        Args:
            choice: Index of its tree in the menu.
            number: Number of the round, counted over all drafting rounds.
            num_accepted: Accepted draft tokens per sequence.
            costs: Costs of the menu.
            reach: What decided where its chains ended; `None` for trees without variable length.
            told: What became of the favourites, per sequence; `None` where that is unknown.
            num_drafted: Accepted tokens per sequence without those copied from the text; `None` if only tokens deeper
                than the tree were copied.
        """
        tree, chains = self.menu[choice], self.acceptance[self.menu[choice].children]
        depth = tree.depth if reach is None else reach.levels
        tokens = 1 + sum(num_accepted) / len(num_accepted)
        drafted = [min(number, depth) for number in num_accepted] if num_drafted is None else num_drafted
        copied = (sum(num_accepted) - sum(drafted)) / len(num_accepted)
        self.tried[choice].record(number, tokens, self._expected(choice, costs), copied, len(num_accepted))
        for one in told or ():
            if one.rank > one.at_least:  # a wrong favourite without siblings in the tree tells nothing of siblings
                self.siblings.record_miss(self._rates_of(choice)[one.accepted], one.rank, one.at_least)
        depths = [depth] * len(num_accepted)
        if reach is not None:
            chains.record(depths, drafted, reach.next_chance)
        elif self.is_plain_chain(choice):
            chains.record(depths, drafted)
        elif told is not None:
            chains.record([one.depth for one in told], [one.accepted for one in told])
        else:
            self.siblings.record(tree, chains, drafted)
