"""What the next round drafts: the tree, of a small menu, that has given most tokens per second, or nothing.

A round that drafts costs a draft and a forward over a tree, and pays in accepted tokens; a plain step is a forward
over one token. Both are known from the rounds themselves: what rounds of every tree cost, and how often drafts at each
position of a chain were accepted. From these every tree of the menu has an expected rate in tokens per plain step, its
own where it was tried, else an optimistic one. Each round takes the best; now and then another one that may be better,
or worth it again, is tried. Trials cost no more than [`TRIAL_SHARE`] of the time, and
[`PLAIN_TRIAL_SHARE`] where drafts do not pay.

Only what a round always costs counts. Rounds that compile a step or take in a whole prompt are not counted, and of the
others the median: a page fault or a busy scheduler decides nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import GenerationConfig, PreTrainedModel

from ..contract import DraftingContract, Memory
from ..tree.config import CHILDREN, DraftTreeConfig
from .menu import trees_to_choose
from .options import DraftingOptions

PLAIN = -1  # in the place of a tree of the menu
TRIAL_SHARE = 0.02  # of the wall time of rounds, for others that turn out not to be the best
PLAIN_TRIAL_SHARE = 0.01  # the same of plain steps
FIRST_TRIALS = 3.0  # plain steps' worth of time that may be lost before anything was earned
PLAIN_STEPS_BEFORE_A_VERDICT = 2
ROUNDS_BEFORE_A_VERDICT = 3  # of a tree; the first of them may be slow for reasons of its own
FIRST_ROUNDS = 2  # of the chains that tell what all others may cost and give
ROUNDS_BETWEEN_PLAIN_STEPS = 64  # plain steps are timed again, as the machine may have become faster or slower
REMEMBERED = 9  # rounds of a tree, and plain steps, whose median counts
TALLY_KEEPS = 1 - 1 / 64  # of the acceptance of drafts so far, with every round
ROUNDS_OF_A_MEAN = 24  # tokens of a tree's rounds are a running mean over about so many
HOPED_ROUNDS = 2  # as many as that an unknown tree is taken to have done well: its real ones may be bad luck
MOST_DEBT = 8.0  # in plain steps: what was lost before is no reason never to try again
GROWN = 2.0  # plain steps are timed again when the context has grown by this factor
HOPE = 0.4  # of a chain's rejections that siblings may leave at best
UNKNOWN = 0.8  # acceptance of drafts before any was seen: high, so that they are seen
CLEARLY = 1.02  # better: than plain steps, for drafts; than the best, for a tree that was never tried
WORTH_ANOTHER_LOOK = 0.85  # of the best rate, for one that was
ROUNDS_OF_A_LESSON = 64  # that drafted, before what they taught is worth keeping beyond the process


def _recent() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass
class Acceptance:
    """How often drafts of a chain are accepted, by position, given that all before were; newer rounds count more."""

    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def record(self, depth: int, num_accepted: Sequence[int]) -> None:
        """Adds a round of chains of a depth, one entry per sequence."""
        for counts in (self.tried, self.accepted):
            counts[:] = [count * TALLY_KEEPS for count in counts] + [0.0] * (depth - len(counts))
        for number in num_accepted:
            for position in range(min(number + 1, depth)):
                self.tried[position] += 1 / len(num_accepted)
                self.accepted[position] += (position < number) / len(num_accepted)

    def rates(self, depth: int) -> list[float]:
        """Per position; of one that was hardly tried, close to that of the position before."""
        rates, before = [], UNKNOWN
        for position in range(depth):
            tried = self.tried[position] if position < len(self.tried) else 0.0
            accepted = self.accepted[position] if position < len(self.accepted) else 0.0
            before = (accepted + before) / (tried + 1)
            rates.append(before)
        return rates

    def tokens(self, depth: int, hope: float = 1.0) -> float:
        """Expected tokens of a round over a chain, the bonus token included; `hope` scales the rejections."""
        tokens = reached = 1.0
        for rate in self.rates(depth):
            reached *= 1 - hope * (1 - rate)
            tokens += reached
        return tokens


@dataclass
class Tried:
    """What rounds of one tree have cost and given.

    Attributes:
        costs: Wall time of the latest rounds, in plain steps.
        tokens: Tokens per round and sequence, bonus token included, running mean.
        rounds: How many there were.
        last: Number of the newest, counted over all rounds.
    """

    costs: deque[float] = field(default_factory=_recent)
    tokens: float = 0.0
    rounds: int = 0
    last: int = 0

    @property
    def cost(self) -> float:
        """Of a round, in plain steps. While there are two at most the faster counts."""
        costs = list(self.costs)  # another thread may add to it
        return min(costs) if len(costs) < ROUNDS_BEFORE_A_VERDICT else statistics.median(costs)


class Pace:
    """Costs and gains of one pair under one setting; kept from call to call.

    Args:
        menu: Trees to choose from, the one in force first.

    Attributes:
        plain: Wall seconds of the latest plain steps.
        tried: Per tree of the menu, see [`Tried`].
        acceptance: Of chains, by how their children are chosen.
        rounds: Rounds that drafted.
        debt: Plain steps' worth of time lost to trials, less what has been earned for further ones.
        context: Tokens in the context when plain steps were timed last; 0 asks for them to be timed anew.
    """

    def __init__(self, menu: Sequence[DraftTreeConfig]):
        self.menu = tuple(menu)
        self.plain = _recent()
        self.tried = [Tried() for _ in self.menu]
        self.acceptance = {children: Acceptance() for children in CHILDREN}
        self.rounds = 0
        self.debt = -FIRST_TRIALS
        self.context = 0
        self._plain_due = 0
        self._rates: dict[int, float] = {}  # what follows from the rounds so far, until the next one
        self._slopes: tuple[float, float] | None = None
        self._chains_known: set[str] | None = None

    # ------------------------------------------------------------------ what is known
    @property
    def plain_seconds(self) -> float:
        """Of a plain step. While there are two at most the faster counts: the first warms up what the second finds
        warm."""
        plain = list(self.plain)
        if not plain:
            return float("inf")
        return min(plain) if len(plain) <= PLAIN_STEPS_BEFORE_A_VERDICT else statistics.median(plain)

    @property
    def best(self) -> int:
        """The best of the menu that is known well enough, or [`PLAIN`]."""
        best = max(filter(self.is_known, range(len(self.menu))), key=self.rate, default=PLAIN)
        return best if self.rate(best) > CLEARLY else PLAIN

    def is_known(self, choice: int) -> bool:
        """Whether a tree was tried, or is a chain among others that were: their costs and gains tell its own."""
        if self.tried[choice].rounds >= ROUNDS_BEFORE_A_VERDICT:
            return True
        if self._chains_known is None:
            self._chains_known = self._known_kinds()
        return self._is_plain_chain(choice) and self.menu[choice].children in self._chains_known

    def _known_kinds(self) -> set[str]:
        """Ways to choose children of which a chain was tried, where two chains of any tell what chains cost."""
        timed = [self.menu[choice].children for choice, tried in enumerate(self.tried)
                 if tried.rounds > 1 and self._is_plain_chain(choice)]  # fmt: skip
        return set(timed) if len(timed) > 1 else set()

    def rate(self, choice: int) -> float:
        """Tokens per plain step's time: what a tree that was tried has given, else what it may give."""
        if choice == PLAIN:
            return 1.0
        if choice not in self._rates:
            self._rates[choice] = self.tokens(choice) / max(self.cost(choice), 1e-9)
        return self._rates[choice]

    def promise(self, choice: int) -> float:
        """The rate that a tree may turn out to have: its rounds so far may have been bad luck, the less likely the
        more they were."""
        return self._hoped_tokens(choice) / max(self.cost(choice), 1e-9)

    def tokens(self, choice: int) -> float:
        """Tokens of a round over a tree: on average so far, or expected where it was never tried."""
        if self._is_plain_chain(choice):
            return self._of_chain(choice).tokens(self.menu[choice].depth)
        tried = self.tried[choice]
        return tried.tokens if tried.rounds else self._hoped_tokens(choice)

    def _hoped_tokens(self, choice: int) -> float:
        """As if [`HOPED_ROUNDS`] more had gone as well as they can."""
        tried, depth = self.tried[choice], self.menu[choice].depth
        if self._is_plain_chain(choice):
            return self._of_chain(choice).tokens(depth)
        hoped = max(self._of_chain(choice).tokens(depth, HOPE), tried.tokens)
        return (tried.rounds * tried.tokens + HOPED_ROUNDS * hoped) / (tried.rounds + HOPED_ROUNDS)

    def cost(self, choice: int) -> float:
        """Expected time of a round over a tree, in plain steps: by its own rounds, else by those of others."""
        if self.tried[choice].rounds:
            return self.tried[choice].cost
        tree = self.menu[choice]
        if self._slopes is None:
            self._slopes = self._fit_slopes()
        level, node = self._slopes
        return 1.0 + level * tree.depth + node * (tree.num_nodes - 1)

    def _of_chain(self, choice: int) -> Acceptance:
        """Of chains whose children are chosen like those of a tree."""
        return self.acceptance[self.menu[choice].children]

    def _is_plain_chain(self, choice: int) -> bool:
        tree = self.menu[choice]
        return tree.kind == "chain" and not tree.stop_below

    def _fit_slopes(self) -> tuple[float, float]:
        """What a draft level and a node add to a plain step, by least squares over what was tried. Chains alone do not
        tell them apart: then a chain has all of it in its levels, and so have trees, which may cost more."""
        rows = [(tree.depth, tree.num_nodes - 1, tried.cost - 1.0)
                for tree, tried in zip(self.menu, self.tried, strict=True) if tried.rounds]  # fmt: skip
        dd = sum(d * d for d, _, _ in rows)
        dn = sum(d * n for d, n, _ in rows)
        nn = sum(n * n for _, n, _ in rows)
        dc = sum(d * c for d, _, c in rows)
        nc = sum(n * c for _, n, c in rows)
        determinant = dd * nn - dn * dn
        if determinant <= 1e-6 * dd * nn:
            return max(dc / dd, 0.0) if dd else 0.0, 0.0
        level, node = (dc * nn - nc * dn) / determinant, (nc * dd - dc * dn) / determinant
        if level < 0:
            return 0.0, max(nc / nn, 0.0)
        return (level, node) if node >= 0 else (max(dc / dd, 0.0), 0.0)

    # ------------------------------------------------------------------ the choice
    def begin_call(self) -> None:
        """Another text may be drafted better: half of what was lost is forgotten."""
        self.debt = min(self.debt, self.debt / 2)

    def choose(self, context: int) -> int:
        """What the next round drafts: a place in the menu, or [`PLAIN`].

        Args:
            context: Tokens in the context.
        """
        if context > GROWN * self.context:
            self._plain_due, self.context = PLAIN_STEPS_BEFORE_A_VERDICT, context
            self.plain.clear()  # timed for another context: what was known before tells little
        if self._plain_due > 0:
            return PLAIN
        best = self.best
        return best if self.debt > 0 else self._trial(best)

    def _trial(self, best: int) -> int:
        """A tree that may be better than the best; else one that was not looked at for long; the best itself where
        there is nothing to learn."""
        if (first := self._first_chain()) is not None:
            return first
        rate = self.rate(best)
        new = [choice for choice in range(len(self.menu))
               if not self.is_known(choice) and self.promise(choice) > CLEARLY * rate]  # fmt: skip
        if new:  # the smallest tells what more nodes cost
            return min(new, key=lambda choice: (not self.tried[choice].rounds, self.menu[choice].num_nodes))
        near = [
            choice
            for choice, tried in enumerate(self.tried)
            if choice != best and tried.rounds and self.promise(choice) > WORTH_ANOTHER_LOOK * rate
        ]
        if best == PLAIN and not near:
            near = [max(range(len(self.menu)), key=self.promise)]
        return min(near, key=lambda choice: self.tried[choice].last) if near else best

    def _first_chain(self) -> int | None:
        """What tells most about all others: a chain of some depth and the shortest, of which there may be one; and of
        chains whose children are chosen in another way, which cost as much, one of some depth."""
        wanted: list[int] = []
        for children in CHILDREN:
            chains = sorted(
                (c for c, tree in enumerate(self.menu) if self._is_plain_chain(c) and tree.children == children),
                key=lambda choice: self.menu[choice].depth,
            )
            wanted += [*chains[len(chains) // 2 :][:1], *(chains[:1] if not wanted else [])]
        return next((choice for choice in wanted if self.tried[choice].rounds < FIRST_ROUNDS), None)

    # ------------------------------------------------------------------ what rounds tell
    def record_plain(self, seconds: float) -> None:
        """Adds a plain step."""
        self.plain.append(seconds)
        self._plain_due = max(self._plain_due - 1, 0)
        self.debt = max(self.debt - PLAIN_TRIAL_SHARE, -FIRST_TRIALS)

    def record_round(self, choice: int, seconds: float, num_accepted: Sequence[int]) -> None:
        """Adds a round that drafted a tree of the menu.

        Args:
            choice: Place of the tree.
            seconds: Wall seconds.
            num_accepted: Accepted tokens per sequence.
        """
        if not self.plain:
            return  # another thread, in a longer context, has just asked for new times: there is no measure
        best, best_rate = self.best, self.rate(self.best)
        tried, tree = self.tried[choice], self.menu[choice]
        cost, tokens = seconds / self.plain_seconds, 1 + sum(num_accepted) / len(num_accepted)
        self.rounds += 1
        tried.rounds, tried.last = tried.rounds + 1, self.rounds
        tried.costs.append(cost)
        tried.tokens += (tokens - tried.tokens) * max(1 / ROUNDS_OF_A_MEAN, 1 / tried.rounds)
        if self._is_plain_chain(choice):
            self._of_chain(choice).record(tree.depth, num_accepted)
        self._rates, self._slopes, self._chains_known = {}, None, None
        # What a trial loses is told by what such rounds usually give: luck levels out.
        lost = 0.0 if choice == best else max(min(cost, 2 * tried.cost) * best_rate - self.tokens(choice), 0.0)
        self.debt = max(min(self.debt + lost, MOST_DEBT) - TRIAL_SHARE * tried.cost, -FIRST_TRIALS)
        if self.rounds % ROUNDS_BETWEEN_PLAIN_STEPS == 0:
            self._plain_due = 1

    def conditions_changed(self) -> None:
        """Sequences have left the batch, or the like: plain steps are timed again."""
        self.context = 0

    def why_plain(self) -> str:
        """What plain steps were taken for, in one sentence."""
        enough = 1 if self.debt > 0 else ROUNDS_BEFORE_A_VERDICT  # in debt, the few there were were dear enough
        known = [choice for choice, tried in enumerate(self.tried) if tried.rounds >= enough]
        if not known or self.best != PLAIN:
            return "to time them, for the choice between drafting and plain steps"
        gain = max(self.rate(choice) for choice in known)
        return f"because a drafted round gave {gain:.2f} of the tokens per second of plain steps"


def pace_of(
    heads: DraftingContract,
    target: PreTrainedModel,
    options: DraftingOptions,
    batch_size: int,
    config: GenerationConfig,
) -> Pace:
    """Costs and gains of a pair under the settings of a call; kept with the heads for the next such call."""
    menu: tuple[DraftTreeConfig, ...] = (options.tree,)
    if options.free_tree and not options.compiled:
        seeded = batch_size == 1 and options.exact_seed  # tokens are then drawn as plain `generate` draws them
        drawn = bool(config.do_sample) and not seeded
        menu = trees_to_choose(options.tree, heads.max_draft_positions, heads.tree_problem, drawn)
    settings = (Pace, batch_size, repr(menu), options.compiled, config.do_sample, config.temperature)
    return heads.memory.setdefault(target, {}).setdefault(settings, Pace(menu))


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
             if isinstance(pace, Pace) and key[1] == 1 and len(pace.menu) > 1]  # fmt: skip
    pace = max(paces, key=lambda pace: pace.rounds, default=None)
    if pace is None or pace.rounds < ROUNDS_OF_A_LESSON or (best := pace.best) == PLAIN:
        return None
    plain = 1 / pace.plain_seconds
    return Lesson(pace.menu[best], pace.rate(best) * plain, plain, pace.rounds)
