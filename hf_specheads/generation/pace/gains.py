"""What rounds give, in tokens: by what was seen of them, and by what others tell of trees that were never tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from ...tree.config import DraftTreeConfig
from ..drafting.foresight import Foresight, Reach
from .costs import Costs
from .favourites import Favourites
from .tallies import Acceptance, Siblings, Tried, tokens_by_depth, tokens_of

ENOUGH_MISSES = 64  # favourites that were wrong, before it is asked less often what was right,
ROUNDS_BETWEEN_MISSES = 4  # in every so many rounds


class Gains:
    """Tokens of rounds over a menu's trees.

    Texts differ more than trees do: a tree that was tried where a text is easy would seem to be better than it is. So
    what its rounds have given is kept next to what was expected of them just then, by how often chains were accepted
    of late and by what siblings add to them, and only the ratio of the two is the tree's own.

    Args:
        menu: The trees.
        ending: Chains of the menu, by place, that end where they like.
        before: Of another number of sequences: drafts are worth as much here.

    Attributes:
        tried: Per tree of the menu, see [`Tried`].
        foresight: How likely the links of such chains are to be accepted, by how children are chosen.
        acceptance: Of chains, by how children are chosen; what is copied comes after all that was drafted.
        siblings: What they add to chains.
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
        """Forgets what followed from the rounds until now."""
        self._rates.clear()
        self._of_trees.clear()

    def record_plain(self) -> None:
        """Adds a plain step."""
        for acceptance in self.acceptance.values():
            acceptance.record_plain()

    def begin_text(self) -> None:
        """Another text may be drafted better or worse."""
        for acceptance in self.acceptance.values():
            acceptance.begin_text()

    def is_plain_chain(self, choice: int) -> bool:
        """Whether chains of other depths tell all of this one."""
        return choice not in self.ending and self.menu[choice].kind == "chain" and not self.menu[choice].stop_below

    def tokens(self, choice: int, costs: Costs) -> float:
        """Expected tokens of a round over a tree.

        Args:
            choice: Place of the tree.
            costs: Of the menu.
        """
        given = self.given(choice, costs)
        if choice not in self.ending:
            return given
        # No fewer per second than if they ended always at the best depth.
        by_depth = tokens_by_depth(self._rates_of(choice))
        fixed = max(tokens / costs.of_levels(choice, depth) for depth, tokens in enumerate(by_depth, 1))
        return max(given, fixed * costs.cost(choice))

    def given(self, choice: int, costs: Costs) -> float:
        """The same of rounds as they were until now, however well chains might yet learn where to end."""
        expected = self._expected(choice, costs)
        if self.is_plain_chain(choice):
            return expected + self._copied(choice)
        return self.tried[choice].tokens_given(expected)

    def _expected(self, choice: int, costs: Costs) -> float:
        """The same by what chains and siblings tell alone; of chains that end where they like, of one as deep as they
        usually are."""
        rates = self._rates_of(choice)
        if choice in self.ending:
            return tokens_of(rates[: round(costs.levels[choice])])
        if self.is_plain_chain(choice):
            return tokens_of(rates)
        if choice not in self._of_trees:
            self._of_trees[choice] = self.siblings.tokens(self.menu[choice], rates)
        return self._of_trees[choice]

    def _rates_of(self, choice: int) -> list[float]:
        """How often chains are accepted, by position of a tree."""
        children = self.menu[choice].children
        if children not in self._rates:
            self._rates[children] = self.acceptance[children].rates(self._deepest)
        return self._rates[children][: self.menu[choice].depth]

    def _copied(self, choice: int) -> float:
        """Tokens of a round of a chain that are copied from the text after all that was drafted: its own, else those
        of the chain with copies that is most like it."""
        if not self.menu[choice].lookup or self.tried[choice].rounds:
            return self.tried[choice].copied
        depth = self.menu[choice].depth
        alike = [other for other, tried in enumerate(self.tried)
                 if tried.rounds and self.menu[other].lookup and self.is_plain_chain(other)]  # fmt: skip
        nearest = min(alike, key=lambda other: abs(self.menu[other].depth - depth), default=choice)
        return self.tried[nearest].copied

    def asks_for_favourites(self, choice: int) -> bool:
        """Whether it is worth knowing, of the next round, which child would have been right where a chain was not:
        where there are trees that may have it, and in some rounds only once it is known well."""
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
    ) -> None:
        """Adds a round.

        Args:
            choice: Place of its tree.
            number: Of the round, over all that drafted.
            num_accepted: Accepted tokens per sequence.
            costs: Of the menu.
            reach: What decided where its chains ended.
            told: What became of the favourites, per sequence; `None` where that is not known.
        """
        tree, chains = self.menu[choice], self.acceptance[self.menu[choice].children]
        depth = tree.depth if reach is None else reach.levels
        tokens = 1 + sum(num_accepted) / len(num_accepted)
        copied = sum(max(accepted - depth, 0) for accepted in num_accepted) / len(num_accepted)
        self.tried[choice].record(number, tokens, self._expected(choice, costs), copied, len(num_accepted))
        for one in told or ():
            if one.rank > one.at_least:  # that the favourite was wrong and had no siblings tells nothing of those
                self.siblings.record_miss(self._rates_of(choice)[one.accepted], one.rank, one.at_least)
        depths = [depth] * len(num_accepted)
        if reach is not None:
            chains.record(depths, num_accepted, reach.next_chance)
        elif self.is_plain_chain(choice):
            chains.record(depths, num_accepted)
        elif told is not None:
            chains.record([one.depth for one in told], [one.accepted for one in told])
        else:
            self.siblings.record(tree, chains, num_accepted)
