"""What the next round drafts: the tree, of a small menu, that has given most tokens per second, or nothing.

A round that drafts costs a draft and a forward over a tree, and pays in accepted tokens; a plain step is a forward
over one token. Both are known from the rounds themselves: what rounds of every tree cost ([`Costs`]), and what they
give by how often drafts at each position were accepted ([`Gains`]). From these every tree of the menu has an expected
rate in tokens per plain step, the less certain the fewer rounds there were of it. Each round takes the best; now and
then another one that may be better, or worth it again, is tried. Trials cost no more than [`TRIAL_SHARE`] of the time,
and [`PLAIN_TRIAL_SHARE`] where drafts do not pay.

Only what a round always costs counts: rounds that compile a step or take in a whole prompt are not counted.
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

TRIAL_SHARE = 0.02  # of the wall time of rounds, for others that turn out not to be the best
PLAIN_TRIAL_SHARE = 0.008  # the same of plain steps
INTAKE_SHARE = 0.02  # of the time of a prompt's forward, for heads that take in the prompt to see whether they pay
FIRST_ROUNDS = 4  # of the chains that tell what all others may cost and give: fewer may all be bad luck
LOOKS_AGAIN_AFTER = 96  # rounds without a trial, at what was tried longest ago: it may have had bad luck
OVERDUE_AFTER = 1024  # rounds, at anything, whatever promises more in the meantime
PLAIN_STEPS_AFTER = (2, 16)  # of the first rounds plain steps are timed again,
ROUNDS_BETWEEN_PLAIN_STEPS = 64  # and from then on, as the machine may have become faster or slower
CLOSE = 1.5  # times as fast: as long as drafts are no more than that, plain steps are timed as often; else a quarter
ROUNDS_BEFORE_A_VERDICT = 2  # of a tree,
ROUNDS_BEFORE_TEXTS_DIFFER = 8  # and before texts are told apart
GROWN = 2.0  # plain steps are timed again when the context has grown by this factor
STAYS = 1.04  # times as fast a tree must be as the best until now, to be the best instead: of near ties luck decides
CLEARLY = 1.02  # better than the best, for a tree that is tried
PAYS = 1.05  # times as fast as plain steps: what drafts must promise, as going to and fro costs something too,
STILL_PAYS = 1.02  # and what they must keep
BETTER_BY_LUCK = 0.25  # as a share of its rate, what a tree that was never tried may be better than expected,
BETTER_BY_LESS_LUCK = 0.06  # the same where it is told which children are right, but for what its cost may be,
ENDING_BETTER_BY_LUCK = 0.6  # the same of chains that end where they like: they are still learning where that is
CHAINS_TELL = 3.0  # a chain as one of which there were so many rounds, where others of its kind were tried
LEVELS_AHEAD = 2  # that chains may have more than usual, where as many are drafted at once as are asked for
# What follows from the rounds is worked out again after each of the first ones and each trial, then now and then: a
# pause grows by a round whenever there were so many more, up to so many,
ROUNDS_BETWEEN_LOOKS, MOST_BETWEEN_LOOKS = 16, 15
PAUSE_IN_PLAIN_STEPS = 8  # and is so long between plain steps
FORGOTTEN = 128.0  # rounds after which those of a tree tell half as much of it


class Pace:
    """Costs and gains of one pair under one setting; kept from call to call.

    Args:
        menu: Trees to choose from, the one in force first.
        before: Of another number of sequences: drafts are worth as much here, trials may lose as much, and chains
            that are known there are here.
        ending: Chains of the menu end where another link would not pay.

    Attributes:
        costs: Of rounds and plain steps.
        gains: Of rounds.
        rounds: Rounds that drafted.
        budget: What trials may lose.
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
        """After every round or step: works out again what follows from them, if there were more than so many since."""
        self._unseen += 1
        if self._unseen > pause:
            self._work_out_again()

    def _work_out_again(self) -> None:
        """Forgets what followed from the rounds until now."""
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
        """The best of the menu that is known well enough, or [`PLAIN`]."""
        if self._best is None:
            best = max(filter(self.is_known, range(len(self.menu))), key=self.rate, default=PLAIN)
            if self._best_before != PLAIN and self.rate(best) < STAYS * self.rate(self._best_before):
                best = self._best_before
            self._best_before = best
            self._pays = self.rate(best) > (STILL_PAYS if self._pays else PAYS)
            self._best = best if self._pays else PLAIN
        return self._best

    def is_known(self, choice: int) -> bool:
        """Whether a tree was tried, or is a chain among others that were: their costs and gains tell its own."""
        if self.gains.tried[choice].rounds >= ROUNDS_BEFORE_A_VERDICT or choice in self._known_before:
            return True
        if self._chains_known is None:
            self._chains_known = self._known_ways()
        return self.gains.is_plain_chain(choice) and way_of(self.menu[choice]) in self._chains_known

    def _known_ways(self) -> set[Way]:
        """Ways of which a chain was tried, where two chains of any tell what chains cost."""
        timed = [way_of(self.menu[choice]) for choice, tried in enumerate(self.gains.tried)
                 if tried.rounds > 1 and self.gains.is_plain_chain(choice)]  # fmt: skip
        return set(timed) if len(timed) > 1 else set()

    def rate(self, choice: int) -> float:
        """Tokens per plain step's time: what rounds over a tree have given, and others let expect of it."""
        if choice == PLAIN:
            return 1.0
        if choice not in self._rates:
            self._rates[choice] = self.tokens(choice) / max(self.costs.cost(choice), 1e-9)
        return self._rates[choice]

    def promise(self, choice: int) -> float:
        """The rate that a tree may turn out to have: the fewer rounds there were, and the longer ago, the higher."""
        tried = self.gains.tried[choice]
        seen = tried.sequences * 0.5 ** ((self.rounds - tried.last) / FORGOTTEN)
        if self.is_known(choice) and self.gains.is_plain_chain(choice):
            seen += CHAINS_TELL
        return self.rate(choice) * (1 + self._luck(choice) / (1 + seen) ** 0.5)

    def _luck(self, choice: int) -> float:
        """As a share of its rate, what a tree that was not tried of late may be better than expected."""
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
        """Another text may be drafted better.

        Args:
            text: Of the call.
            prefill: Seconds of the prompts' forward.
        """
        if text is not None:
            text.prefill = prefill
        self.gains.begin_text()
        self.budget.begin_call()

    def choose(self, context: int, text: TextTally | None = None) -> int:
        """What the next round drafts: a place in the menu, or [`PLAIN`].

        Args:
            context: Tokens in the context.
            text: What rounds of the texts at hand have given; `None` where nothing is known of them.
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
        """What drafts best, where drafts pay in this text though not in others; plain steps the other way round."""
        drafted = self._best_before if choice == PLAIN else choice
        if drafted == PLAIN or self.rounds < ROUNDS_BEFORE_TEXTS_DIFFER:
            return choice
        here = self.rate(drafted) * text.times_usual(self.tokens(drafted))
        return drafted if here > (PAYS if choice == PLAIN else 1.0) else PLAIN

    def _whatever_the_text(self, context: int) -> int:
        if context > GROWN * self.context:
            self._plain_due, self.context = 1, context
            self.costs.begin_context()
        if self._plain_due > 0:
            return PLAIN
        return self.best if self.budget.debt > 0 else self._trial(self.best)

    def _trial(self, best: int) -> int:
        """A tree that may be better than the best; the best itself where there is nothing to learn."""
        if self._planned is None:
            self._planned = self._plan(best)
        trial, loss, promising = self._planned
        # Where nothing promises to pay, the text may have changed: all that may be lost is saved up for another look.
        saved_up = self.budget.is_full
        if not promising and saved_up and best != PLAIN:
            trial, loss = self._neglected(best)
        return trial if self.budget.affords(loss) and (promising or saved_up) else best

    def _neglected(self, best: int) -> tuple[int, float]:
        """What was not tried for longest, as it may have had bad luck, and what that may lose; the best itself while
        the latest trial is not long ago."""
        last = {choice: tried.last for choice, tried in enumerate(self.gains.tried) if choice != best}
        if not last or self.rounds - max(last.values()) < LOOKS_AGAIN_AFTER:
            return best, 0.0
        neglected = min(filter(partial(self._may_be_tried, best=best), last), key=last.__getitem__, default=best)
        return neglected, self._loss(neglected, best)

    def _plan(self, best: int) -> tuple[int, float, bool]:
        """The tree to try next, what that may lose, and whether it promises to be better than the best."""
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
        """Where a tree that promises more than the best may be too dear for a trial, as it is not known what nodes
        cost: a smaller one, which tells that."""
        unknown = [choice for choice in others if self.gains.tried[choice].rounds < ROUNDS_BEFORE_A_VERDICT]
        promises = (self.promise(c) > better for c in range(len(self.menu)) if c != best and c not in others)
        return max(unknown, key=lambda c: self.menu[c].most_nodes) if unknown and any(promises) else None

    def _may_be_tried(self, choice: int, best: int) -> bool:
        """Whether a tree beside the best may ever lose no more than can be saved up for it."""
        return choice != best and self._loss(choice, best) <= FIRST_TRIALS

    def _loss(self, choice: int, best: int) -> float:
        """What a round over a tree may lose to the best, in plain steps. The only tree is looked at again now and
        then, however dear it was: devices load kernels in the first rounds that need them."""
        unsure = self.gains.tried[choice].rounds < ROUNDS_BEFORE_A_VERDICT
        lost = max(self.costs.cost(choice, unsure) * self.rate(best) - self.gains.given(choice, self.costs), 0.0)
        return min(lost, FIRST_TRIALS) if len(self.menu) == 1 else lost

    def _first(self) -> int | None:
        """What tells most about all others, and costs little where drafts are worth nothing: a chain of some depth, of
        every way in which nodes are chosen. Or the only tree there is, of which nothing else tells."""
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
        """What decides where the chains of the next round end; `None` for trees of which that is settled.

        Args:
            choice: Place of the tree.
            moods: How well drafts of every sequence have fared of late; `None` of new ones. Followed in place.
            one_forward: All draft positions come of one forward of the heads, so that nodes alone cost something.
            open_ended: As many as are asked for, before it is known where the chain ends: few more than usual.
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
        """Tokens that a plain step's time would give instead of links of chains: where these are the best, what they
        have given until now, not what they may give yet (Dinkelbach's method for ratios)."""
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
    ) -> None:
        """Adds a round that drafted a tree of the menu.

        Args:
            choice: Place of the tree.
            seconds: Wall seconds.
            num_accepted: Accepted tokens per sequence.
            reach: What decided where its chains ended.
            text: What is known of the texts at hand.
            told: What became of the favourites, per sequence; `None` where that is not known.
        """
        if not self.costs.unit:
            return  # another thread, in a longer context, has just asked for new times: there is no measure
        best, best_rate = self.best, self.rate(self.best)
        tree, tokens = self.menu[choice], 1 + sum(num_accepted) / len(num_accepted)
        depth = tree.depth if reach is None else reach.levels
        self.rounds += 1
        self.gains.record(choice, self.rounds, num_accepted, self.costs, reach, told)
        self.costs.record(choice, seconds, None if reach is None else depth)
        if text is not None and self.is_known(choice):
            cost = self.costs.cost(choice) if reach is None else self.costs.of_levels(choice, depth)
            text.record(tokens, cost * self.rate(choice))
        self._look(0 if choice != best else min(self.rounds // ROUNDS_BETWEEN_LOOKS, MOST_BETWEEN_LOOKS))
        if choice != best:
            # What a trial loses is told by what such rounds usually cost and give: luck levels out. Next to plain
            # steps by what it gave: what is usual may be of easier texts, and trials seem to cost nothing for ever.
            given = tokens if best == PLAIN else self.gains.given(choice, self.costs)
            lost = self.costs.own(choice) * best_rate - given
            self.budget.lose(lost if best == PLAIN else max(lost, 0.0))
        self.budget.earn(TRIAL_SHARE * self.costs.cost(choice))
        pause = ROUNDS_BETWEEN_PLAIN_STEPS * (4 if best_rate > CLOSE else 1)
        if self.rounds in PLAIN_STEPS_AFTER or self.rounds % pause == 0:
            self._plain_due = 1

    def record_intake(
        self, choice: int, seconds: float, num_accepted: Sequence[int], text: TextTally | None = None
    ) -> None:
        """Adds a round that took in a whole prompt: no measure of others; where plain steps are best a loss, but for
        what is little next to the prompt's own forward. Arguments as in [`record_round`]."""
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
        """What plain steps were taken for, in one sentence."""
        enough = 1 if self.budget.debt > 0 else ROUNDS_BEFORE_A_VERDICT  # in debt, the few there were were dear enough
        known = [choice for choice, tried in enumerate(self.gains.tried) if tried.rounds >= enough]
        if not known or self.best != PLAIN:
            return "to time them, for the choice of what to draft, or because drafts did not pay in this text"
        gain = max(self.rate(choice) for choice in known)
        return f"because a drafted round gave {gain:.2f} of the tokens per second of plain steps"
