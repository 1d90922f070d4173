"""What rounds cost, in plain steps: measured relative to each other, and estimated for trees that were never tried."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from ...tree.config import DraftTreeConfig

PLAIN = -1  # stands for a plain step where a menu index stands for a tree
RECENT = 5  # latest rounds and steps whose median measures the machine's current speed
REMEMBERED = 128  # rounds that a kind's cost is averaged over: many more than a change of the machine's speed lasts
STALL = 2.0  # a round slower than this many times its usual cost is a stall, and counts as just that many times
USUAL_LEVELS = 3  # assumed usual levels of a variable-length chain before any was drafted
# A variable-length chain may have FIRST_LEVELS levels from the start, later GROWS times as many as are known well.
FIRST_LEVELS, GROWS = 3, 2
CURIOUS_AFTER = 32  # rounds of variable-length chains between those that explore other numbers of levels
A_FEW_TIMES = 3  # chains of some number of levels or more, before that number's cost and gain count as known
UNEVEN = 0.06  # least relative deviation of a cost that is ascribed to kernels made for some numbers of rows
SHORT = 8  # most levels for which deviations from the fit are estimated: one more row matters little in longer chains
NEARBY = (1, -1, 2)  # differences from the usual number of levels whose costs are worth exploring
WARMING_UP = 8  # first rounds of a kind, which may all have been slow: devices load kernels at first use
FEW = 2  # first rounds of a kind, of which the faster counts: the first one warms up
# What a drafting round is expected to cost on top of a plain step, in plain steps, and the standard deviation of that:
# once per round, per draft level, per node, and additionally per level whose children are drawn. The first may turn
# out negative, because kernels for a few rows can be faster than those for the single row of a plain step.
EXPECTED = np.array([0.05, 0.12, 0.02, 0.02])
SPREAD = np.array([0.4, 0.3, 0.15, 0.2])
CHEAPEST = 0.2  # least that a round is expected to cost, in plain steps
SCATTER = 0.15  # relative scatter of the cost of a single round
MISFIT = 0.08  # relative deviation of a tree's mean cost from what the fit of levels and nodes predicts
BELIEVED = 2.0  # weight of the fit of levels and nodes, in rounds, against a tree's own rounds
OF_BEFORE = 3  # weight, in rounds, that a kind keeps when a context of another length begins
MEDIAN_OF = 31  # latest rounds of a kind that a median is taken over where a stall must not count
# Weight, in rounds, of the assumption that a chain deviates from the fit as much as a chain with one level less.
STEADY = 8.0


class _Kind:
    """Running mean of the cost of one kind: of plain steps, or of rounds over one tree; in units of [`Costs.unit`]."""

    def __init__(self, mean: float = 0.0):
        self.mean, self.count, self.weight = mean, 0, 0
        self.recent: deque[float] = deque(maxlen=MEDIAN_OF)

    def record(self, cost: float) -> None:
        """Adds the cost of a round or step."""
        self.count, self.weight = self.count + 1, self.weight + 1
        self.recent.append(cost)
        if self.weight <= FEW:
            self.mean = cost if self.weight == 1 else min(self.mean, cost)
            return
        latest = max(list(self.recent)[-FEW:])
        if self.weight <= WARMING_UP and latest < self.mean / STALL:  # all earlier rounds were stalls
            self.mean = latest
            return
        cost = min(max(cost, self.mean / STALL), self.mean * STALL)
        self.mean += (cost - self.mean) / min(self.weight - 1, REMEMBERED)

    def begin_context(self) -> None:
        """Begins a context of another length: earlier rounds count for less."""
        self.weight = min(self.weight, OF_BEFORE)
        self.recent = deque(list(self.recent)[-OF_BEFORE:], maxlen=MEDIAN_OF)

    def add(self) -> None:
        """Counts a round whose cost is recorded elsewhere, by its number of levels."""
        self.count, self.weight = self.count + 1, self.weight + 1


class Costs:
    """Costs of a menu's trees, in plain steps.

    The machine's speed may change by more than two trees differ. So times are compared with those of the rounds right
    before, in a unit that follows the machine: the median, over the latest rounds, of the time a round took divided by
    the cost such rounds usually have.

    Args:
        menu: The trees.
        before: The costs of another number of sequences, expected to be the same until rounds tell.
        ending: Indices of the menu's variable-length chains. Chains with the same number of levels cost the same.

    Attributes:
        unit: Unit of time in seconds; 0 where nothing was timed yet.
        levels: Average number of levels of the variable-length chains, by menu index.
    """

    def __init__(self, menu: Sequence[DraftTreeConfig], before: Costs | None = None, ending: Collection[int] = ()):
        rows = [_row(tree, tree.depth, tree.most_nodes - 1) for tree in menu]
        # Rows after those of the menu: one for each number of levels of each variable-length chain.
        self._places: dict[tuple[int, int], int] = {}
        for choice in ending:
            for levels in range(1, menu[choice].depth + 1):
                self._places[choice, levels] = len(rows)
                rows.append(_row(menu[choice], levels, levels + menu[choice].lookup))
        self._copied = {choice: float(menu[choice].lookup) for choice in ending}  # average nodes copied from the text
        self._farthest = {choice: menu[choice].depth for choice in ending}
        self._known = dict.fromkeys(ending, 0)
        self.levels = {choice: float(min(USUAL_LEVELS, menu[choice].depth)) for choice in ending}
        self._shares: dict[int, dict[int, float]] = {choice: {} for choice in ending}  # share of rounds, by levels
        self._menu, self._rows = menu, rows
        self._kinds = {PLAIN: _Kind(1.0)} | {choice: _Kind() for choice in range(len(rows))}
        self._units: deque[float] = deque(maxlen=RECENT)
        self.unit = 0.0
        self._anew = False  # the unit is being timed in another context
        self._prior = EXPECTED if before is None else _with_prices(*before._equations())
        self._expectation: list[tuple[float, float]] | None = None
        self._marginal = (0.0, 0.0, 0.0)
        self._drawn = {choice for choice, tree in enumerate(menu) if tree.children == "sampled"}

    @property
    def plain_seconds(self) -> float:
        """Seconds that a plain step takes now; infinite if none was timed."""
        return self.unit * self._kinds[PLAIN].mean or float("inf")

    def begin_context(self) -> None:
        """Begins a context of another length, where every cost is different: plain steps have to be timed anew, and
        costs are learnt quickly."""
        self._units.clear()
        self.unit = 0.0
        self._anew = bool(self._kinds[PLAIN].count)
        for kind in self._kinds.values():
            kind.begin_context()
        self._expectation = None

    def rounds(self, choice: int) -> int:
        """Number of timed rounds over a tree, or of plain steps."""
        return self._kinds[choice].count

    def record(self, choice: int, seconds: float, levels: int | None = None, copied: int = 0) -> None:
        """Adds a round or a plain step. Rounds are dropped until a plain step has been timed in a new context.

        Args:
            choice: Menu index of the tree, or [`PLAIN`].
            seconds: Wall time in seconds.
            levels: Number of levels of a variable-length chain; `None` for other trees.
            copied: Nodes that such a chain copied from the text.
        """
        kind, unit = self._kinds[choice if levels is None else self._places[choice, levels]], self.unit
        if not unit and choice != PLAIN:
            return
        if unit and not (self._anew and kind.count):
            kind.record(seconds / unit)
            if levels is not None:
                self._kinds[choice].add()
                self._follow(choice, levels, copied)
        elif kind.weight:
            kind.count += 1
        else:
            kind.record(kind.mean)  # the unit is made from this plain step, so its cost is the mean by definition
        self._units.append(seconds / kind.mean)
        units = list(self._units)  # another thread may add to them, or clear them
        self.unit = (min if len(units) <= FEW else statistics.median)(units or [0.0])
        self._anew = self._anew and len(self._units) < FEW
        count = self._kinds[choice].count
        if count & (count - 1) == 0 or count % REMEMBERED == 0:  # rounds in between change little
            self._expectation = None

    def _follow(self, choice: int, levels: int, copied: int) -> None:
        """Sets the cost of a variable-length chain to the mean over its numbers of levels, weighted by frequency."""
        kind, shares = self._kinds[choice], self._shares[choice]
        share = 1 / min(kind.weight, REMEMBERED)
        self.levels[choice] += (levels - self.levels[choice]) * share
        self._copied[choice] += (copied - self._copied[choice]) * share
        for known in shares:
            shares[known] *= 1 - share
        shares[levels] = shares.get(levels, 0.0) + share
        kind.mean = sum(share * self._kinds[self._places[choice, known]].mean for known, share in shares.items())

    def cost(self, choice: int, unsure: bool = False) -> float:
        """Cost of a round over a tree, in plain steps, from its own rounds and from the fit of levels and nodes.

        Args:
            choice: Menu index of the tree, or [`PLAIN`].
            unsure: Adds the standard deviation of the fit, for trees whose cost is not known yet.
        """
        if choice == PLAIN:
            return 1.0
        expected, spread = self.expected(choice)
        count, own = min(self._kinds[choice].weight, REMEMBERED), self.own(choice)
        if self._kinds[choice].count == 1:
            own = min(own, expected)  # the first round warms up: later ones take at most as long
        expected += spread if unsure else 0.0
        return (count * own + BELIEVED * expected) / (count + BELIEVED)

    def expected(self, choice: int) -> tuple[float, float]:
        """Cost of a tree and its standard deviation, by the fit of levels and nodes to the trees that were tried."""
        if self._expectation is None:
            self._expectation = self._expected()
        return self._expectation[choice]

    def levels_to_draft(self, choice: int, rounds: int) -> tuple[int, int, int]:
        """Limits of a variable-length chain in the next round: the levels known well enough to judge them, the fewest
        levels and the most levels. Every [`CURIOUS_AFTER`] of its `rounds`, one explores other numbers of levels."""
        known = self._known_levels(choice)
        farthest = max(FIRST_LEVELS, GROWS * known)
        if rounds % CURIOUS_AFTER != CURIOUS_AFTER - 1:
            return known, 0, farthest
        levels = self._unknown_levels(choice)
        return 0, levels, levels or farthest

    def _known_levels(self, choice: int) -> int:
        """The highest number of levels that variable-length chains with such children had a few times at least; it
        never decreases. How well drafts fare so deep does not depend on what is copied after them."""
        rounds, children = 0, self._menu[choice].children
        alike = [other for other in self._farthest if self._menu[other].children == children]
        for levels in range(self._farthest[choice], self._known[choice], -1):
            rounds += sum(self._kinds[self._places[other, levels]].count for other in alike)
            if rounds >= A_FEW_TIMES:
                self._known[choice] = levels
                break
        return self._known[choice]

    def _unknown_levels(self, choice: int) -> int:
        """A number of levels, near the usual one, that was not timed often enough in contexts of this length; 0 if all
        were."""
        usual, farthest = round(self.levels[choice]), self._farthest[choice]
        near = [levels for levels in (usual + off for off in NEARBY) if 0 < levels <= min(farthest, SHORT)]
        return next((levels for levels in near if self._kinds[self._places[choice, levels]].weight < STEADY), 0)

    def of_levels(self, choice: int, levels: int) -> float:
        """Cost of a variable-length chain that has this many levels, in plain steps."""
        return self.cost(self._places[choice, levels])

    def steps(self, choice: int) -> list[float]:
        """By how much a variable-length chain costs more than the fit of levels and nodes tells, for each number of
        levels from 0 on, in plain steps. Kernels are made for some numbers of rows, so that a forward over one more
        row may cost nothing, or a lot."""
        more = [0.0]
        for levels in range(1, min(self._farthest[choice], SHORT) + 1):
            place, off = self._places[choice, levels], more[-1]
            if (count := self._kinds[place].weight) >= A_FEW_TIMES:
                expected = self.expected(place)[0]
                own = statistics.median(self._kinds[place].recent) / self._kinds[PLAIN].mean - expected
                # A deviation, from the fit or from one level less, counts only beyond luck and if it may matter.
                far = max(abs(own), abs(own - off)) > expected * max(UNEVEN, 2 * SCATTER / count**0.5)
                own = own if far else 0.0
                off += (own - off) * count / (count + STEADY)
            more.append(off)
        return more

    def marginal(self, choice: int, one_forward: bool = False) -> tuple[float, float]:
        """Cost of another draft level and of another node, in plain steps. If the draft head drafts all levels in
        `one_forward`, both are charged to the node."""
        self.expected(choice)
        level, node, drawn = self._marginal
        level += drawn if choice in self._drawn else 0.0
        return (0.0, level + node) if one_forward else (level, node)

    def own(self, choice: int) -> float:
        """Cost from a tree's own rounds alone, in plain steps; 0 where there were none. For a variable-length chain,
        the mean over its numbers of levels, weighted by frequency."""
        return self._kinds[choice].mean / self._kinds[PLAIN].mean

    def _expected(self) -> list[tuple[float, float]]:
        """Fits the prices of a round, a level and a node to the trees that were tried; returns the cost and its
        standard deviation for every tree of the menu."""
        for (choice, levels), place in self._places.items():
            self._rows[place] = _row(self._menu[choice], levels, levels + self._copied[choice])
        for choice, usual in self.levels.items():
            self._rows[choice] = _row(self._menu[choice], usual, usual + self._copied[choice])
        matrix, right = self._equations()
        rows = np.array(self._rows)
        spread = np.sqrt(np.einsum("ni,ij,nj->n", rows, np.linalg.inv(matrix), rows))
        found = _with_prices(matrix, right)
        self._marginal = float(found[1]), float(found[2]), float(found[3])
        cost = np.maximum(1.0 + rows @ found, CHEAPEST)
        return list(zip(cost.tolist(), spread.tolist(), strict=True))

    def _equations(self) -> tuple[np.ndarray, np.ndarray]:
        """Normal equations, [4, 4] and [4], of weighted least squares over the trees that were tried more than once,
        regularised towards the prior expectation."""
        kinds = [self._kinds[choice] for choice in range(len(self._rows))]
        tried = np.array([kind.count > 1 and choice not in self.levels for choice, kind in enumerate(kinds)])
        rows = np.array(self._rows)[tried]
        own = np.array([kind.mean for kind in kinds])[tried] / self._kinds[PLAIN].mean
        count = np.array([min(max(kind.weight, 1), REMEMBERED) for kind in kinds])[tried]
        weighted = rows.T * (own**-2 / (SCATTER**2 / count + MISFIT**2))
        return np.diag(SPREAD**-2) + weighted @ rows, self._prior / SPREAD**2 + weighted @ (own - 1.0)


def _row(tree: DraftTreeConfig, levels: float, nodes: float) -> list[float]:
    """How often a round pays each of the prices of [`EXPECTED`]."""
    return [1.0, levels, nodes, levels if tree.children == "sampled" else 0.0]


def _with_prices(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solves the equations of [`Costs._equations`]. The price of a level, a node or a draw that would be negative is
    set to 0 and the others are solved for again."""
    kept, found = list(range(len(right))), np.zeros(len(right))
    while True:
        solved = np.linalg.solve(matrix[np.ix_(kept, kept)], right[kept])
        if (solved[1:] >= 0).all():
            found[kept] = solved
            return found
        del kept[1 + int(solved[1:].argmin())]
