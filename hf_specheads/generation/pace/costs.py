"""What rounds cost, in plain steps: measured next to each other, and expected of trees that were never tried."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from ...tree.config import DraftTreeConfig

PLAIN = -1  # in the place of a tree of the menu
RECENT = 5  # rounds and steps whose median tells how fast the machine is just now
REMEMBERED = 128  # rounds of a kind that its cost is a mean of: many more than the machine's changes of speed take
STALL = 2.0  # what takes longer than this many times its usual cost is a stall, and counts as that
USUAL_LEVELS = 3  # of chains that end where they like, before any was drafted
FIRST_LEVELS, GROWS = 3, 2  # that they may have at first, and times as many as are known
CURIOUS_AFTER = 32  # rounds of them, to see again what lies deeper, or what other numbers of levels cost
A_FEW_TIMES = 3  # chains of a number of levels or more, before it is known what those cost and give
UNEVEN = 0.06  # of a round's cost, as a share: what kernels for some numbers of rows make of it, at the least
SHORT = 8  # levels of the longest chain of which that is asked: for longer ones a row more or less is little
NEARBY = (1, -1, 2)  # levels more than chains usually have, of which it is worth knowing what they cost
WARMING_UP = 8  # of a kind, of which all until now may have been slow: devices load kernels when they need them first
FEW = 2  # of a kind: the first warms up what the second finds warm, so the faster counts
# What a round that drafts adds to a plain step, before any was seen: once, per draft level, per node, and per level of
# which children are drawn; with how far off that may be.
EXPECTED = np.array([0.05, 0.12, 0.02, 0.02])
SPREAD = np.array([0.4, 0.3, 0.15, 0.2])
SCATTER = 0.15  # of the cost of one round, as a share
MISFIT = 0.08  # of a tree's mean cost around what levels and nodes tell, as a share
BELIEVED = 2.0  # rounds' worth: what levels and nodes tell, next to a tree's own rounds
OF_BEFORE = 3  # rounds of a kind that count on where the context is of another length
MEDIAN_OF = 31  # rounds of a kind, where a stall must not count
STEADY = 8.0  # rounds' worth: that a chain is as far off from what levels and nodes tell as one of a level less


class _Kind:
    """Cost of plain steps, or of rounds over one tree, in a unit of time of its own; a mean that forgets."""

    def __init__(self, mean: float = 0.0):
        self.mean, self.count, self.weight = mean, 0, 0
        self.recent: deque[float] = deque(maxlen=MEDIAN_OF)

    def record(self, cost: float) -> None:
        """Adds one."""
        self.count, self.weight = self.count + 1, self.weight + 1
        self.recent.append(cost)
        if self.weight <= FEW:
            self.mean = cost if self.weight == 1 else min(self.mean, cost)
            return
        latest = max(list(self.recent)[-FEW:])
        if self.weight <= WARMING_UP and latest < self.mean / STALL:  # all before were stalls
            self.mean = latest
            return
        cost = min(max(cost, self.mean / STALL), self.mean * STALL)
        self.mean += (cost - self.mean) / min(self.weight - 1, REMEMBERED)

    def begin_context(self) -> None:
        """What was seen is of another context: the next rounds count for more."""
        self.weight = min(self.weight, OF_BEFORE)
        self.recent = deque(list(self.recent)[-OF_BEFORE:], maxlen=MEDIAN_OF)

    def add(self) -> None:
        """Adds one of several sorts, whose costs are their own."""
        self.count, self.weight = self.count + 1, self.weight + 1


class Costs:
    """Costs of a menu's trees in plain steps.

    The machine may be faster now and slower then, by more than two trees differ. So times are compared with those
    right before and after: in a unit that follows the machine, the median of what the latest rounds took over what
    such rounds usually take.

    Args:
        menu: The trees.
        before: Of another number of sequences: expected to be as high, until rounds tell.
        ending: Chains of the menu, by place, that end where they like. Those of as many levels cost the same.

    Attributes:
        unit: Seconds; 0 where nothing was timed yet.
        levels: Of the chains that end where they like: how many they had, on average. By place.
    """

    def __init__(self, menu: Sequence[DraftTreeConfig], before: Costs | None = None, ending: Collection[int] = ()):
        rows = [_row(tree, tree.depth, tree.most_nodes - 1) for tree in menu]
        self._places: dict[tuple[int, int], int] = {}  # of the chains of every number of levels, after the menu
        for choice in ending:
            for levels in range(1, menu[choice].depth + 1):
                self._places[choice, levels] = len(rows)
                rows.append(_row(menu[choice], levels, levels + menu[choice].lookup))
        self._farthest = {choice: menu[choice].depth for choice in ending}
        self._known = dict.fromkeys(ending, 0)
        self.levels = {choice: float(min(USUAL_LEVELS, menu[choice].depth)) for choice in ending}
        self._shares: dict[int, dict[int, float]] = {choice: {} for choice in ending}  # of its rounds, by levels
        self._menu, self._rows = menu, rows
        self._kinds = {PLAIN: _Kind(1.0)} | {choice: _Kind() for choice in range(len(rows))}
        self._units: deque[float] = deque(maxlen=RECENT)
        self.unit = 0.0
        self._anew = False  # the unit is being timed in another context
        self._prior = EXPECTED if before is None else _without_negative(*before._equations())
        self._expectation: list[tuple[float, float]] | None = None
        self._marginal = (0.0, 0.0, 0.0)
        self._drawn = {choice for choice, tree in enumerate(menu) if tree.children == "sampled"}

    @property
    def plain_seconds(self) -> float:
        """Of a plain step, now; infinite where none was timed."""
        return self.unit * self._kinds[PLAIN].mean or float("inf")

    def begin_context(self) -> None:
        """In a context of another length all is different: plain steps are timed anew, and costs learnt quickly."""
        self._units.clear()
        self.unit = 0.0
        self._anew = bool(self._kinds[PLAIN].count)
        for kind in self._kinds.values():
            kind.begin_context()
        self._expectation = None

    def rounds(self, choice: int) -> int:
        """That were timed of a tree."""
        return self._kinds[choice].count

    def record(self, choice: int, seconds: float, levels: int | None = None) -> None:
        """Adds a round, or a plain step, which alone counts where another thread has just begun a context.

        Args:
            choice: The tree, or [`PLAIN`].
            seconds: Wall seconds.
            levels: Of a chain that ends where it likes.
        """
        kind, unit = self._kinds[choice if levels is None else self._places[choice, levels]], self.unit
        if not unit and choice != PLAIN:
            return
        if unit and not (self._anew and kind.count):
            kind.record(seconds / unit)
            if levels is not None:
                self._kinds[choice].add()
                self._follow(choice, levels)
        elif kind.weight:
            kind.count += 1
        else:
            kind.record(kind.mean)  # that of which the unit is made is one itself
        self._units.append(seconds / kind.mean)
        units = list(self._units)  # another thread may add to them, or clear them
        self.unit = (min if len(units) <= FEW else statistics.median)(units or [0.0])
        self._anew = self._anew and len(self._units) < FEW
        count = self._kinds[choice].count
        if count & (count - 1) == 0 or count % REMEMBERED == 0:  # others tell nothing new
            self._expectation = None

    def _follow(self, choice: int, levels: int) -> None:
        """A chain that ends where it likes is expected to cost what one of as many levels would."""
        kind, shares = self._kinds[choice], self._shares[choice]
        share = 1 / min(kind.weight, REMEMBERED)
        self.levels[choice] += (levels - self.levels[choice]) * share
        for known in shares:
            shares[known] *= 1 - share
        shares[levels] = shares.get(levels, 0.0) + share
        kind.mean = sum(share * self._kinds[self._places[choice, known]].mean for known, share in shares.items())

    def cost(self, choice: int, unsure: bool = False) -> float:
        """Of a round over a tree, in plain steps: by its own rounds, and by what others tell of levels and nodes.

        Args:
            choice: The tree, or [`PLAIN`].
            unsure: What it may well be instead, where that is not known yet: the standard deviation more.
        """
        if choice == PLAIN:
            return 1.0
        expected, spread = self.expected(choice)
        count, own = min(self._kinds[choice].weight, REMEMBERED), self.own(choice)
        if self._kinds[choice].count == 1:
            own = min(own, expected)  # the first warms up: it tells what the next ones take at the most
        expected += spread if unsure else 0.0
        return (count * own + BELIEVED * expected) / (count + BELIEVED)

    def expected(self, choice: int) -> tuple[float, float]:
        """By what trees that were tried tell of levels and nodes: the cost, and its standard deviation."""
        if self._expectation is None:
            self._expectation = self._expected()
        return self._expectation[choice]

    def levels_to_draft(self, choice: int, rounds: int) -> tuple[int, int, int]:
        """Of a chain that ends where it likes, for the next round after so many: up to how many levels are known well
        enough to judge them, and how many it has at the least and at the most."""
        known = self._known_levels(choice)
        farthest = max(FIRST_LEVELS, GROWS * known)
        if rounds % CURIOUS_AFTER != CURIOUS_AFTER - 1:
            return known, 0, farthest
        levels = self._unknown_levels(choice)
        return 0, levels, levels or farthest

    def _known_levels(self, choice: int) -> int:
        """Up to how many levels a chain that ends where it likes was timed a few times: never fewer than before."""
        rounds = 0
        for levels in range(self._farthest[choice], self._known[choice], -1):
            rounds += self._kinds[self._places[choice, levels]].count
            if rounds >= A_FEW_TIMES:
                self._known[choice] = levels
                break
        return self._known[choice]

    def _unknown_levels(self, choice: int) -> int:
        """Levels, close to those that such chains usually have, that were not timed often enough in contexts like
        this; 0 if all were."""
        usual, farthest = round(self.levels[choice]), self._farthest[choice]
        near = [levels for levels in (usual + off for off in NEARBY) if 0 < levels <= min(farthest, SHORT)]
        return next((levels for levels in near if self._kinds[self._places[choice, levels]].weight < STEADY), 0)

    def of_levels(self, choice: int, levels: int) -> float:
        """Of a chain that ends where it likes, where it has so many levels; in plain steps."""
        return self.cost(self._places[choice, levels])

    def steps(self, choice: int) -> list[float]:
        """By how much chains that end where they like cost more than levels and nodes tell, by levels from 0 on; in
        plain steps. Kernels are made for some numbers of rows: a forward over one more may cost nothing, or a lot."""
        more = [0.0]
        for levels in range(1, min(self._farthest[choice], SHORT) + 1):
            place, off = self._places[choice, levels], more[-1]
            if (count := self._kinds[place].weight) >= A_FEW_TIMES:
                expected = self.expected(place)[0]
                own = statistics.median(self._kinds[place].recent) / self._kinds[PLAIN].mean - expected
                # By luck, or by as much as no choice depends on, none is off, from levels and nodes or a level less.
                far = max(abs(own), abs(own - off)) > expected * max(UNEVEN, 2 * SCATTER / count**0.5)
                own = own if far else 0.0
                off += (own - off) * count / (count + STEADY)
            more.append(off)
        return more

    def marginal(self, choice: int, one_forward: bool = False) -> tuple[float, float]:
        """What another draft level and another node cost, in plain steps; of `one_forward` heads, which draft all
        levels in any case, nodes alone cost something."""
        self.expected(choice)
        level, node, drawn = self._marginal
        level += drawn if choice in self._drawn else 0.0
        return (0.0, level + node) if one_forward else (level, node)

    def own(self, choice: int) -> float:
        """By its own rounds alone; 0 where there were none. Of chains that end where they like, by those of every
        number of levels, as often as they had so many."""
        return self._kinds[choice].mean / self._kinds[PLAIN].mean

    def _expected(self) -> list[tuple[float, float]]:
        """By what the trees that were tried tell of a round that drafts, of levels and of nodes: costs and their
        standard deviations, per tree of the menu."""
        matrix, right = self._equations()
        for choice, levels in self.levels.items():
            self._rows[choice] = _row(self._menu[choice], levels, levels + self._menu[choice].lookup)
        rows = np.array(self._rows)
        spread = np.sqrt(np.einsum("ni,ij,nj->n", rows, np.linalg.inv(matrix), rows))
        found = _without_negative(matrix, right)
        self._marginal = float(found[1]), float(found[2]), float(found[3])
        return list(zip((1.0 + rows @ found).tolist(), spread.tolist(), strict=True))

    def _equations(self) -> tuple[np.ndarray, np.ndarray]:
        """Of weighted least squares over the trees that were tried more than once, drawn to what was expected: [4, 4]
        and [4]."""
        kinds = [self._kinds[choice] for choice in range(len(self._rows))]
        tried = np.array([kind.count > 1 and choice not in self.levels for choice, kind in enumerate(kinds)])
        rows = np.array(self._rows)[tried]
        own = np.array([kind.mean for kind in kinds])[tried] / self._kinds[PLAIN].mean
        count = np.array([min(max(kind.weight, 1), REMEMBERED) for kind in kinds])[tried]
        weighted = rows.T * (own**-2 / (SCATTER**2 / count + MISFIT**2))
        return np.diag(SPREAD**-2) + weighted @ rows, self._prior / SPREAD**2 + weighted @ (own - 1.0)


def _row(tree: DraftTreeConfig, levels: float, nodes: float) -> list[float]:
    """How often a round pays what [`EXPECTED`] is the price of."""
    return [1.0, levels, nodes, levels if tree.children == "sampled" else 0.0]


def _without_negative(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solves for some numbers; one that would be negative is 0, and the others are solved for again."""
    kept, found = list(range(len(right))), np.zeros(len(right))
    while kept:
        solved = np.linalg.solve(matrix[np.ix_(kept, kept)], right[kept])
        if (solved >= 0).all():
            found[kept] = solved
            break
        kept.remove(kept[int(solved.argmin())])
    return found
