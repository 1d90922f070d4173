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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedModel

from ..contract import DraftingContract, Memory
from ..tree.config import DraftTreeConfig
from .menu import trees_to_choose
from .options import DraftingOptions
from .tallies import ROUNDS_BEFORE_A_VERDICT, Acceptance, Tried, recent

PLAIN = -1  # in the place of a tree of the menu
TRIAL_SHARE = 0.02  # of the wall time of rounds, for others that turn out not to be the best
PLAIN_TRIAL_SHARE = 0.01  # the same of plain steps
FIRST_TRIALS = 3.0  # plain steps' worth of time that may be lost before anything was earned
PLAIN_STEPS_BEFORE_A_VERDICT = 2
FIRST_ROUNDS = 2  # of the chains that tell what all others may cost and give
ROUNDS_BETWEEN_PLAIN_STEPS = 64  # plain steps are timed again, as the machine may have become faster or slower
HOPED_ROUNDS = 2  # as many as that an unknown tree is taken to have done well: its real ones may be bad luck
MOST_DEBT = 8.0  # in plain steps: what was lost before is no reason never to try again
GROWN = 2.0  # plain steps are timed again when the context has grown by this factor
HOPE = 0.4  # of a chain's rejections that siblings may leave at best
CLEARLY = 1.02  # better: than plain steps, for drafts; than the best, for a tree that was never tried
WORTH_ANOTHER_LOOK = 0.85  # of the best rate, for one that was
ROUNDS_OF_A_LESSON = 64  # that drafted, before what they taught is worth keeping beyond the process

Group = tuple[str, bool]  # how children are chosen, and whether nodes are copied from the text


class Pace:
    """Costs and gains of one pair under one setting; kept from call to call.

    Args:
        menu: Trees to choose from, the one in force first.
        before: Of another number of sequences: drafts are worth as much here, and trials may lose as much.

    Attributes:
        plain: Wall seconds of the latest plain steps.
        tried: Per tree of the menu, see [`Tried`].
        acceptance: Of chains, by [`group_of`].
        rounds: Rounds that drafted.
        debt: Plain steps' worth of time lost to trials, less what has been earned for further ones.
        context: Tokens in the context when plain steps were timed last; 0 asks for them to be timed anew.
    """

    def __init__(self, menu: Sequence[DraftTreeConfig], before: Pace | None = None):
        self.menu = tuple(menu)
        self.plain = recent()
        self.tried = [Tried() for _ in self.menu]
        self.acceptance: defaultdict[Group, Acceptance] = (
            defaultdict(Acceptance) if before is None else before.acceptance
        )
        self.rounds = 0
        self.debt: float = -FIRST_TRIALS if before is None else before.debt
        self.context = 0
        self._plain_due = 0
        self._rates: dict[int, float] = {}  # what follows from the rounds so far, until the next one
        self._slopes: tuple[float, float] | None = None
        self._chains_known: set[Group] | None = None

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
        return self._is_plain_chain(choice) and group_of(self.menu[choice]) in self._chains_known

    def _known_kinds(self) -> set[Group]:
        """Groups of which a chain was tried, where two chains of any tell what chains cost."""
        timed = [group_of(self.menu[choice]) for choice, tried in enumerate(self.tried)
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
            return self._of_chain(choice).tokens(self.menu[choice].depth) + self._copied(choice)
        tried = self.tried[choice]
        return tried.tokens if tried.rounds else self._hoped_tokens(choice)

    def _hoped_tokens(self, choice: int) -> float:
        """As if [`HOPED_ROUNDS`] more had gone as well as they can."""
        tried, depth = self.tried[choice], self.menu[choice].depth
        if self._is_plain_chain(choice):
            return self._of_chain(choice).tokens(depth) + self._copied(choice)
        hoped = max(self._of_chain(choice).tokens(depth, HOPE), tried.tokens)
        return (tried.rounds * tried.tokens + HOPED_ROUNDS * hoped) / (tried.rounds + HOPED_ROUNDS)

    def _copied(self, choice: int) -> float:
        """Tokens of a round of a chain that are copied from the text after all that was drafted: its own, else those
        of the chain with copies that is most like it."""
        if not self.menu[choice].lookup or self.tried[choice].rounds:
            return self.tried[choice].copied
        depth = self.menu[choice].depth
        alike = [other for other, tried in enumerate(self.tried)
                 if tried.rounds and self.menu[other].lookup and self._is_plain_chain(other)]  # fmt: skip
        nearest = min(alike, key=lambda other: abs(self.menu[other].depth - depth), default=choice)
        return self.tried[nearest].copied

    def cost(self, choice: int) -> float:
        """Expected time of a round over a tree, in plain steps: by its own rounds, else by those of others."""
        if self.tried[choice].rounds:
            return self.tried[choice].cost
        tree = self.menu[choice]
        if self._slopes is None:
            self._slopes = self._fit_slopes()
        level, node = self._slopes
        return 1.0 + level * tree.depth + node * (tree.most_nodes - 1)

    def _of_chain(self, choice: int) -> Acceptance:
        """Of chains whose nodes are chosen like those of a tree."""
        return self.acceptance[group_of(self.menu[choice])]

    def _is_plain_chain(self, choice: int) -> bool:
        tree = self.menu[choice]
        return tree.kind == "chain" and not tree.stop_below

    def _fit_slopes(self) -> tuple[float, float]:
        """What a draft level and a node add to a plain step, by least squares over what was tried. Chains alone do not
        tell them apart: then a chain has all of it in its levels, and so have trees, which may cost more."""
        rows = [(tree.depth, tree.most_nodes - 1, tried.cost - 1.0)
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
        chains whose nodes are chosen in another way one of some depth."""
        wanted: list[int] = []
        chains_of = defaultdict(list)
        for choice in sorted(filter(self._is_plain_chain, range(len(self.menu))), key=lambda c: self.menu[c].depth):
            chains_of[group_of(self.menu[choice])].append(choice)
        for chains in chains_of.values():
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
        copied = sum(max(number - tree.depth, 0) for number in num_accepted) / len(num_accepted)
        self.rounds += 1
        tried.record(self.rounds, cost, tokens, copied)
        if self._is_plain_chain(choice):
            self._of_chain(choice).record(tree.depth, num_accepted)
        self._rates, self._slopes, self._chains_known = {}, None, None
        # What a trial loses is told by what such rounds usually give: luck levels out.
        lost = 0.0 if choice == best else max(min(cost, 2 * tried.cost) * best_rate - self.tokens(choice), 0.0)
        self.debt = max(min(self.debt + lost, MOST_DEBT) - TRIAL_SHARE * tried.cost, -FIRST_TRIALS)
        if self.rounds % ROUNDS_BETWEEN_PLAIN_STEPS == 0:
            self._plain_due = 1

    def why_plain(self) -> str:
        """What plain steps were taken for, in one sentence."""
        enough = 1 if self.debt > 0 else ROUNDS_BEFORE_A_VERDICT  # in debt, the few there were were dear enough
        known = [choice for choice, tried in enumerate(self.tried) if tried.rounds >= enough]
        if not known or self.best != PLAIN:
            return "to time them, for the choice between drafting and plain steps"
        gain = max(self.rate(choice) for choice in known)
        return f"because a drafted round gave {gain:.2f} of the tokens per second of plain steps"


def group_of(tree: DraftTreeConfig) -> Group:
    """How the nodes of a tree are chosen: chains of one group tell of each other how often they are accepted."""
    return tree.children, tree.lookup > 0


def pace_of(
    heads: DraftingContract,
    target: PreTrainedModel,
    options: DraftingOptions,
    batch_size: int,
    config: GenerationConfig,
    active: int | None = None,
) -> Pace:
    """Costs and gains of a pair under the settings of a call; kept with the heads for the next such call.

    Args:
        heads: The heads.
        target: Their target.
        options: Of the call.
        batch_size: Sequences of the call.
        config: How tokens are chosen.
        active: Sequences that have not ended. Costs are kept by the octave of their number, acceptance for all.
    """
    menu: tuple[DraftTreeConfig, ...] = (options.tree,)
    if options.free_tree and not options.compiled:
        seeded = batch_size == 1 and options.exact_seed  # tokens are then drawn as plain `generate` draws them
        drawn = bool(config.do_sample) and not seeded
        menu = trees_to_choose(options.tree, heads.max_draft_positions, heads.tree_problem, drawn)
    # One that is left of a batch pays for the batch's masks, as two do.
    octave = 0 if batch_size == 1 else max(((active or batch_size) - 1).bit_length(), 1)
    settings = (repr(menu), options.compiled, config.do_sample, config.temperature)
    known = heads.memory.setdefault(target, {})
    if (key := (Pace, octave, *settings)) in known:
        return known[key]
    alike = (pace for other, pace in list(known.items()) if other[0] is Pace and other[2:] == settings)
    return known.setdefault(key, Pace(menu, next(alike, None)))


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
    plain = 1 / pace.plain_seconds
    return Lesson(pace.menu[best], pace.rate(best) * plain, plain, pace.rounds)
