"""Whether the next round is worth drafting: measured seconds and accepted tokens against plain steps.

A round that drafts costs a draft and a forward over a tree, and pays in accepted tokens; a plain step is a forward
over one token. Where drafting has paid less than plain steps would have, generation goes on plainly, and drafts a
round now and then to see whether that has changed: so seldom that these trials cost no more than [`TRIAL_SHARE`] of
the time.

Only what a round always costs counts. Rounds that compile a step or take in a whole prompt are not counted, and of the
others the median: a page fault or a busy scheduler decides nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from transformers import GenerationConfig, PreTrainedModel

from ..contract import DraftingContract
from .options import DraftingOptions

TRIAL_SHARE = 0.02  # of the wall time of plain steps, for rounds that turn out not to pay
ROUNDS_BEFORE_A_VERDICT = 4
PLAIN_STEPS_BEFORE_A_VERDICT = 2
ROUND_WEIGHT = 1 / 8  # of the newest round in the running mean of tokens, once there are as many
REMEMBERED = 9  # rounds, and plain steps, whose median counts
MOST_DEBT = ROUNDS_BEFORE_A_VERDICT  # in rounds: what was lost before is no reason never to try again
GROWN = 2.0  # plain steps are timed again when the context has grown by this factor


def _recent() -> deque[float]:
    return deque(maxlen=REMEMBERED)


@dataclass
class Pace:
    """Costs and gains of one pair under one setting; kept from call to call.

    Attributes:
        plain: Wall seconds of the latest plain steps.
        drafted: Wall seconds of the latest rounds that drafted.
        round_tokens: Tokens a round emits per sequence, bonus token included, running mean.
        rounds: Rounds that drafted.
        debt: Seconds lost to rounds that did not pay, less what plain steps since have earned for further trials.
        context: Tokens in the context when plain steps were timed last; 0 asks for them to be timed anew.
    """

    plain: deque[float] = field(default_factory=_recent)
    drafted: deque[float] = field(default_factory=_recent)
    round_tokens: float = 0.0
    rounds: int = 0
    debt: float = 0.0
    context: int = 0

    @property
    def plain_seconds(self) -> float:
        """Of a plain step. While there are two at most the faster counts: the first warms up what the second finds
        warm."""
        plain = list(self.plain)  # another thread may add to it
        if not plain:
            return float("inf")
        return min(plain) if len(plain) <= PLAIN_STEPS_BEFORE_A_VERDICT else statistics.median(plain)

    @property
    def round_seconds(self) -> float:
        """Of a round that drafts."""
        return statistics.median(self.drafted) if self.drafted else 0.0

    @property
    def gain(self) -> float:
        """Tokens per second of drafting rounds over those of plain steps."""
        return self.round_tokens * self.plain_seconds / max(self.round_seconds, 1e-12)

    def begin_call(self) -> None:
        """Another text may be drafted better: half of what was lost is forgotten."""
        self.debt /= 2

    def drafts(self, context: int) -> bool:
        """Whether the next round should draft.

        Args:
            context: Tokens in the context.
        """
        if context > GROWN * self.context:
            self.plain.clear()  # timed for another context: what was known before tells little
            self.context = context
        if len(self.plain) < PLAIN_STEPS_BEFORE_A_VERDICT:
            return False
        if self.rounds < ROUNDS_BEFORE_A_VERDICT:
            return True
        return self.gain >= 1.0 or self.debt <= 0.0

    def record_plain(self, seconds: float) -> None:
        """Adds a plain step."""
        self.plain.append(seconds)
        self.debt = max(self.debt - TRIAL_SHARE * seconds, 0.0)

    def record_round(self, seconds: float, tokens: float) -> None:
        """Adds a round that drafted and emitted so many tokens per sequence."""
        self.rounds += 1
        self.drafted.append(seconds)
        self.round_tokens += (tokens - self.round_tokens) * max(ROUND_WEIGHT, 1 / self.rounds)
        usual = self.round_seconds
        lost = min(seconds, 2 * usual) - tokens * self.plain_seconds
        self.debt = min(max(self.debt + lost, 0.0), MOST_DEBT * usual)

    def conditions_changed(self) -> None:
        """Sequences have left the batch, or the like: plain steps are timed again."""
        self.context = 0

    def why_plain(self) -> str:
        """What plain steps were taken for, in one sentence."""
        if self.rounds < ROUNDS_BEFORE_A_VERDICT or self.gain >= 1.0:
            return "to time them, for the choice between drafting and plain steps"
        return f"because a drafted round gave {self.gain:.2f} of the tokens per second of plain steps"


def pace_of(
    heads: DraftingContract,
    target: PreTrainedModel,
    options: DraftingOptions,
    batch_size: int,
    config: GenerationConfig,
) -> Pace:
    """Costs and gains of a pair under the settings of a call; kept with the heads for the next such call."""
    settings = (Pace, batch_size, repr(options.tree), options.compiled, config.do_sample, config.temperature)
    return heads.memory.setdefault(target, {}).setdefault(settings, Pace())
