"""Chooses what the next round drafts: the tree of a small menu with the highest token rate, or nothing.

A round that drafts costs a draft and a target forward over the tree, and gains the accepted tokens. A plain step is a
target forward over one token. Costs and gains are learnt from the rounds themselves: [`Costs`] measures what rounds
cost, and [`Gains`] estimates what they give from how often drafts were accepted at each position. Together they give
every tree of the menu an expected rate, in tokens per time of a plain step, which is the more certain the more rounds
drafted that tree. Each round drafts the best tree. Now and then a round tries another tree that may turn out better.
Trials lose at most [`TRIAL_SHARE`] of the time, or [`PLAIN_TRIAL_SHARE`] where drafts do not pay.

Rounds that compile a step or take in a whole prompt are not counted, because other rounds do not have that cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...tree.config import DraftTreeConfig
from ..drafting.foresight import Reach
from .budget import FIRST_TRIALS, Budget
from .costs import PLAIN, Costs
from .favourites import Favourites
from .gains import Gains
from .menu import Way, way_of
from .tallies import TextTally

TRIAL_SHARE = 0.02  # share of the wall time of drafting rounds that trials of other trees may lose
PLAIN_TRIAL_SHARE = 0.008  # share of the wall time of plain steps that trials may lose
# Share of a prompt's prefill time that draft heads may spend on taking in the prompt before it counts as a loss.
INTAKE_SHARE = 0.02
FIRST_ROUNDS = 4  # rounds of each chain that is tried first: with fewer, all of them may be bad luck
LOOKS_AGAIN_AFTER = 96  # rounds without a trial, after which the tree tried longest ago gets another chance
OVERDUE_AFTER = 1024  # rounds after which a tree is tried again, even if others promise more
PLAIN_STEPS_AFTER = (2, 16)  # numbers of the early rounds after which a plain step is timed
ROUNDS_BETWEEN_PLAIN_STEPS = 64  # later interval between timed plain steps: the machine's speed may have changed
CLOSE = 1.5  # where drafts are more than this many times as fast as plain steps, those are timed less often
ROUNDS_BEFORE_A_VERDICT = 2  # rounds of a tree before its own measurements are enough to judge it
ROUNDS_BEFORE_TEXTS_DIFFER = 8  # drafting rounds before the choice depends on the text at hand
GROWN = 2.0  # plain steps are timed again when the context has grown by this factor, or by its square
STAYS = 1.04  # a tree replaces the best one if it is this many times as fast: luck decides near ties
CLEARLY = 1.02  # a trial must promise this many times the rate of the best tree
PAYS = 1.05  # drafts start when they promise this many times the rate of plain steps: switching has a cost as well
STILL_PAYS = 1.02  # drafts continue while they have this many times the rate of plain steps
BETTER_BY_LUCK = 0.25  # share by which a tree may beat its expected rate while nothing tells how siblings fare
BETTER_BY_LESS_LUCK = 0.06  # least share by which a tree may beat its expected rate once siblings are known
ENDING_BETTER_BY_LUCK = 0.6  # the share for variable-length chains: these still learn where to end, so it is larger
CHAINS_TELL = 3.0  # rounds that a chain is credited with where other chains of its kind were tried
LEVELS_AHEAD = 2  # levels beyond the usual number that a chain may have where the number is fixed before the draft
# Estimates are updated after every early round and after every trial, later less often: the pause between updates
# grows by one round for every ROUNDS_BETWEEN_LOOKS rounds, up to MOST_BETWEEN_LOOKS.
ROUNDS_BETWEEN_LOOKS, MOST_BETWEEN_LOOKS = 16, 15
PAUSE_IN_PLAIN_STEPS = 8  # plain steps between two updates of the estimates
FORGOTTEN = 128.0  # rounds after which what is known of a tree counts half as much


class Pace:
    """Costs and gains of one pair of target and draft head under one setting; kept from call to call.

    Args:
        menu: Trees to choose from, the one in force first.
        before: The pace of another number of sequences. This one shares what is known of the gains and starts with the
            same costs, trial budget and known chains.
        ending: Whether chains of the menu have a variable length: they end where another link would not pay.

    Attributes:
        costs: Measured cost of rounds and of plain steps.
        gains: Expected tokens of rounds.
        rounds: Number of rounds that drafted.
        budget: Time that trials may lose.
        context: Tokens in the context when plain steps were timed last; 0 asks for them to be timed anew.
    """

    def __init__(self, menu: Sequence[DraftTreeConfig], before: Pace | None = None, ending: bool = False):
        self.menu = tuple(menu)
        self._ending = {choice for choice, tree in enumerate(self.menu) if ending and tree.kind == "chain"}
        self.costs: Costs = Costs(self.menu, None if before is None else before.costs, self._ending)
        self.gains: Gains = Gains(self.menu, self._ending, None if before is None else before.gains)
        self.rounds = 0
        self.budget: Budget = Budget() if before is None else replace(before.budget)
        self.context = 0
        self._plain_due = 0
        self._best_before, self._pays = PLAIN, False
        self._known_before: set[int] = set()
        if before is not None:
            chains = (c for c in range(len(self.menu)) if c in self._ending or self.gains.is_plain_chain(c))
            self._known_before = set(filter(before.is_known, chains))
        self._work_out_again()

    def _look(self, pause: int) -> None:
        """Called after every round or step: updates the estimates if more than `pause` of them passed since then."""
        self._unseen += 1
        if self._unseen > pause:
            self._work_out_again()

    def _work_out_again(self) -> None:
        """Drops all cached estimates, so that the next query computes them from the rounds so far."""
        self._rates: dict[int, float] = {}
        self._tokens: dict[int, float] = {}
        self._steps: dict[int, list[float]] = {}
        self.gains.work_out_again()
        self._chains_known: set[Way] | None = None
        self._best: int | None = None
        self._planned: tuple[int, float, bool] | None = None
        self._unseen = 0

    # ------------------------------------------------------------------ what is known
    @property
    def best(self) -> int:
        """The fastest tree of the menu among those known well enough, or [`PLAIN`] if none pays."""
        if self._best is None:
            best = max(filter(self.is_known, range(len(self.menu))), key=self.rate, default=PLAIN)
            if self._best_before != PLAIN and self.rate(best) < STAYS * self.rate(self._best_before):
                best = self._best_before
            self._best_before = best
            self._pays = self.rate(best) > (STILL_PAYS if self._pays else PAYS)
            self._best = best if self._pays else PLAIN
        return self._best

    def is_known(self, choice: int) -> bool:
        """Whether a tree was tried, or is a chain whose costs and gains follow from other chains that were tried."""
        if self.gains.tried[choice].rounds >= ROUNDS_BEFORE_A_VERDICT or choice in self._known_before:
            return True
        if self._chains_known is None:
            self._chains_known = self._known_ways()
        return self.gains.is_plain_chain(choice) and way_of(self.menu[choice]) in self._chains_known

    def _known_ways(self) -> set[Way]:
        """Ways of choosing nodes of which a chain was tried; none until two chains have told what chains cost."""
        timed = [way_of(self.menu[choice]) for choice, tried in enumerate(self.gains.tried)
                 if tried.rounds > 1 and self.gains.is_plain_chain(choice)]  # fmt: skip
        return set(timed) if len(timed) > 1 else set()

    def rate(self, choice: int) -> float:
        """Expected tokens of a tree's rounds in the time of a plain step, from its own rounds and from other trees."""
        if choice == PLAIN:
            return 1.0
        if choice not in self._rates:
            self._rates[choice] = self.tokens(choice) / max(self.costs.cost(choice), 1e-9)
        return self._rates[choice]

    def promise(self, choice: int) -> float:
        """Optimistic rate of a tree: the fewer rounds it had, and the longer ago, the further above [`rate`]."""
        tried = self.gains.tried[choice]
        seen = tried.sequences * 0.5 ** ((self.rounds - tried.last) / FORGOTTEN)
        if self.is_known(choice) and self.gains.is_plain_chain(choice):
            seen += CHAINS_TELL
        return self.rate(choice) * (1 + self._luck(choice) / (1 + seen) ** 0.5)

    def _luck(self, choice: int) -> float:
        """Share of its expected rate by which a tree that was not tried lately may be better than expected."""
        if choice in self._ending:
            return ENDING_BETTER_BY_LUCK
        if not self.gains.siblings.misses:
            return BETTER_BY_LUCK
        if self.gains.tried[choice].rounds >= ROUNDS_BEFORE_A_VERDICT:
            return BETTER_BY_LESS_LUCK
        cost, spread = self.costs.expected(choice)
        return min(max(spread / cost, BETTER_BY_LESS_LUCK), BETTER_BY_LUCK)

    def tokens(self, choice: int) -> float:
        """Expected tokens of a round over a tree."""
        if choice not in self._tokens:
            self._tokens[choice] = self.gains.tokens(choice, self.costs)
        return self._tokens[choice]

    # ------------------------------------------------------------------ the choice
    def begin_call(self, text: TextTally | None = None, prefill: float = 0.0) -> None:
        """Begins a call: its text may be drafted better, so older evidence and debts count for less.

        Args:
            text: Tally of the call's texts; its prefill time is set here.
            prefill: Seconds of the prompts' forward.
        """
        if text is not None:
            text.prefill = prefill
        self.gains.begin_text()
        self.budget.begin_call()

    def choose(self, context: int, text: TextTally | None = None) -> int:
        """Chooses what the next round drafts: an index into the menu, or [`PLAIN`].

        Args:
            context: Tokens in the context.
            text: What rounds of the current texts have given; `None` where nothing is known of them.
        """
        choice = self._whatever_the_text(context)
        if text is None:
            return choice
        if self._plain_due <= 0 and choice in (PLAIN, self.best):
            choice = self._in_text(choice, text)
        if choice == PLAIN:
            text.record_plain()
        return choice

    def _in_text(self, choice: int, text: TextTally) -> int:
        """Corrects the choice for the current text: the best tree where drafts pay here though not elsewhere, and
        plain steps where they do not pay here."""
        drafted = self._best_before if choice == PLAIN else choice
        if drafted == PLAIN or self.rounds < ROUNDS_BEFORE_TEXTS_DIFFER:
            return choice
        here = self.rate(drafted) * text.times_usual(self.tokens(drafted))
        return drafted if here > (PAYS if choice == PLAIN else 1.0) else PLAIN

    def _whatever_the_text(self, context: int) -> int:
        if context > (GROWN**2 if self.rate(self.best) > CLOSE else GROWN) * self.context:
            self._plain_due, self.context = 1, context
            self.costs.begin_context()
        if self._plain_due > 0:
            return PLAIN
        return self.best if self.budget.debt > 0 else self._trial(self.best)

    def _trial(self, best: int) -> int:
        """A tree that may be better than the best one; the best one itself where there is nothing to learn."""
        if self._planned is None:
            self._planned = self._plan(best)
        trial, loss, promising = self._planned
        # Where no tree promises to pay, the text may still have changed: a full budget buys another trial.
        saved_up = self.budget.is_full
        if not promising and saved_up and best != PLAIN:
            trial, loss = self._neglected(best)
        return trial if self.budget.affords(loss) and (promising or saved_up) else best

    def _neglected(self, best: int) -> tuple[int, float]:
        """The tree that was tried longest ago, as it may have had bad luck, and what a trial of it may lose. Returns
        the best tree itself while the latest trial was recent."""
        last = {choice: tried.last for choice, tried in enumerate(self.gains.tried) if choice != best}
        if not last or self.rounds - max(last.values()) < LOOKS_AGAIN_AFTER:
            return best, 0.0
        neglected = min(filter(partial(self._may_be_tried, best=best), last), key=last.__getitem__, default=best)
        return neglected, self._loss(neglected, best)

    def _plan(self, best: int) -> tuple[int, float, bool]:
        """The tree to try next, what that trial may lose, and whether the tree promises to beat the best one."""
        if (first := self._first()) is not None:
            return first, 0.0, True
        others = [choice for choice in range(len(self.menu)) if self._may_be_tried(choice, best)]
        trial = max(others, key=self.promise, default=best)
        longest = min(others, key=lambda choice: self.gains.tried[choice].last, default=best)
        if best != PLAIN and self.rounds - self.gains.tried[longest].last >= OVERDUE_AFTER:
            return longest, self._loss(longest, best), True
        better = PAYS if best == PLAIN else CLEARLY * self.rate(best)
        if self.promise(trial) <= better and (telling := self._telling(others, best, better)) is not None:
            return telling, self._loss(telling, best), True
        return trial, self._loss(trial, best), self.promise(trial) > better

    def _telling(self, others: Sequence[int], best: int, better: float) -> int | None:
        """A tree to try where a more promising one is too expensive for a trial: the largest untried tree that is
        affordable, as it tells what nodes cost."""
        unknown = [choice for choice in others if self.gains.tried[choice].rounds < ROUNDS_BEFORE_A_VERDICT]
        promises = (self.promise(c) > better for c in range(len(self.menu)) if c != best and c not in others)
        return max(unknown, key=lambda c: self.menu[c].most_nodes) if unknown and any(promises) else None

    def _may_be_tried(self, choice: int, best: int) -> bool:
        """Whether a tree is not the best one and a full budget would cover the loss of trying it."""
        return choice != best and self._loss(choice, best) <= FIRST_TRIALS

    def _loss(self, choice: int, best: int) -> float:
        """What a round over a tree may lose against the best choice, in plain steps. The loss of a menu's only tree is
        capped, so that it is tried again now and then: devices load kernels in the first rounds that need them."""
        unsure = self.gains.tried[choice].rounds < ROUNDS_BEFORE_A_VERDICT
        lost = max(self.costs.cost(choice, unsure) * self.rate(best) - self.gains.given(choice, self.costs), 0.0)
        return min(lost, FIRST_TRIALS) if len(self.menu) == 1 else lost

    def _first(self) -> int | None:
        """The tree to try before all others, `None` when these are known: for every way of choosing nodes, a chain of
        medium depth, which tells most about other trees at little cost. A menu of one tree returns that tree."""
        if len(self.menu) == 1 and self.gains.tried[0].rounds < ROUNDS_BEFORE_A_VERDICT:
            return 0
        chains_of = defaultdict(list)
        for choice in sorted(range(len(self.menu)), key=lambda c: self.menu[c].depth):
            if choice in self._ending or self.gains.is_plain_chain(choice):
                chains_of[way_of(self.menu[choice])].append(choice)
        wanted = [chains[(len(chains) - 1) // 2] for chains in chains_of.values()]
        return next(filter(self._is_unknown, wanted), None)

    def _is_unknown(self, choice: int) -> bool:
        """Whether a chain was tried too seldom to be judged."""
        unknown = self.gains.tried[choice].rounds < FIRST_ROUNDS
        return unknown and (choice in self._ending or self.promise(choice) > PAYS)

    def reach(
        self, choice: int, moods: list[float | None], one_forward: bool = False, open_ended: bool = False
    ) -> Reach | None:
        """Makes what decides where the chains of the next round end; `None` for trees without variable length.

        Args:
            choice: Index of the tree in the menu.
            moods: How well drafts of each sequence have fared lately; `None` for new sequences. Updated in place.
            one_forward: The draft head drafts all positions in one forward, so only verifying nodes costs time.
            open_ended: The number of positions is fixed before it is known where the chain ends, and has no limit of
                its own; it then stays within [`LEVELS_AHEAD`] of the usual number.
        """
        if choice not in self._ending:
            return None
        level, node = self.costs.marginal(choice, one_forward)
        rate, drawn = max(self._given_otherwise(choice), 1.0), self.menu[choice].children == "sampled"
        foresight = self.gains.foresight[self.menu[choice].children]
        reach = Reach(foresight, foresight.follow(moods), rate * (level + node), rate * node, drawn)
        reach.known, reach.least, reach.farthest = self.costs.levels_to_draft(choice, self.gains.tried[choice].rounds)
        if open_ended:
            reach.farthest = min(reach.farthest, round(self.costs.levels[choice]) + LEVELS_AHEAD)
        steps = self._steps.get(choice) or self._steps.setdefault(choice, self.costs.steps(choice))
        reach.steps = [rate * more for more in steps]
        reach.offered = [] if self.gains.asks_for_favourites(choice) else None
        return reach

    def _given_otherwise(self, choice: int) -> float:
        """Tokens that the time of a plain step gives if it is not spent on another link. Where the chain itself is the
        best tree, this is the rate it has had so far, not the one it may reach (Dinkelbach's method for ratios)."""
        tried, usual = self.gains.tried[choice], self.rate(self.best)
        achieves = self.best == choice and tried.rounds >= FIRST_ROUNDS
        return min(usual, tried.tokens / self.costs.own(choice)) if achieves else usual

    # ------------------------------------------------------------------ what rounds tell
    def record_plain(self, seconds: float) -> None:
        """Adds a plain step."""
        self.costs.record(PLAIN, seconds)
        self.gains.record_plain()
        self._look(PAUSE_IN_PLAIN_STEPS if self.costs.rounds(PLAIN) > len(PLAIN_STEPS_AFTER) else 0)
        self._plain_due = max(self._plain_due - 1, 0)
        self.budget.earn(PLAIN_TRIAL_SHARE)

    def record_round(
        self,
        choice: int,
        seconds: float,
        num_accepted: Sequence[int],
        reach: Reach | None = None,
        text: TextTally | None = None,
        told: Sequence[Favourites] | None = None,
        num_drafted: Sequence[int] | None = None,
    ) -> None:
        """Adds a round that drafted a tree of the menu.

        Args:
            choice: Index of the tree in the menu.
            seconds: Wall time of the round in seconds.
            num_accepted: Accepted draft tokens per sequence.
            reach: What decided where its chains ended; `None` for trees without variable length.
            text: What is known of the current texts; updated.
            told: What the round tells about the most probable children, per sequence; `None` where that is unknown.
            num_drafted: As in [`Gains.record`].
        """
        if not self.costs.unit:
            return  # another thread has just begun a longer context: no plain step is timed yet to compare with
        best, best_rate = self.best, self.rate(self.best)
        tree, tokens = self.menu[choice], 1 + sum(num_accepted) / len(num_accepted)
        depth = tree.depth if reach is None else reach.levels
        self.rounds += 1
        self.gains.record(choice, self.rounds, num_accepted, self.costs, reach, told, num_drafted)
        self.costs.record(choice, seconds, *(() if reach is None else (depth, reach.copied)))
        if text is not None and self.is_known(choice):
            cost = self.costs.cost(choice) if reach is None else self.costs.of_levels(choice, depth)
            text.record(tokens, cost * self.rate(choice))
        self._look(0 if choice != best else min(self.rounds // ROUNDS_BETWEEN_LOOKS, MOST_BETWEEN_LOOKS))
        if choice != best:
            # The loss of a trial is taken from what such rounds usually cost and give, so that luck levels out. Where
            # plain steps are best it is what this round gave: the usual gain may come from easier texts, and trials
            # would seem free forever.
            given = tokens if best == PLAIN else self.gains.given(choice, self.costs)
            lost = self.costs.own(choice) * best_rate - given
            self.budget.lose(lost if best == PLAIN else max(lost, 0.0))
        self.budget.earn(TRIAL_SHARE * self.costs.cost(choice))
        clear = best_rate > CLOSE
        pause = ROUNDS_BETWEEN_PLAIN_STEPS * (4 if clear else 1)
        if self.rounds in PLAIN_STEPS_AFTER[: 1 if clear else None] or self.rounds % pause == 0:
            self._plain_due = 1

    def record_intake(
        self, choice: int, seconds: float, num_accepted: Sequence[int], text: TextTally | None = None
    ) -> None:
        """Adds a round that took in a whole prompt. Its time says nothing of other rounds, so it is not recorded.
        Where plain steps are best it counts as a loss, except for a small share ([`INTAKE_SHARE`]) of the prompt's
        prefill time. Arguments as in [`record_round`]."""
        if not self.costs.unit:
            return
        tokens, allowed = 1 + sum(num_accepted) / len(num_accepted), 0.0
        if text is not None:
            text.record(tokens, self.tokens(choice))
            allowed = INTAKE_SHARE * text.prefill
        if self.best == PLAIN:
            lost = min((seconds - allowed) / self.costs.plain_seconds - tokens, FIRST_TRIALS)
            self.budget.lose(max(lost, 0.0))

    def why_plain(self) -> str:
        """Says in one clause why plain steps were taken."""
        enough = 1 if self.budget.debt > 0 else ROUNDS_BEFORE_A_VERDICT  # in debt, even one round was expensive enough
        known = [choice for choice, tried in enumerate(self.gains.tried) if tried.rounds >= enough]
        if not known or self.best != PLAIN:
            return "because they were being timed, or because drafts did not pay in this text"
        gain = max(self.rate(choice) for choice in known)
        return f"because a drafted round gave {gain:.2f} of the tokens per second of plain steps"
