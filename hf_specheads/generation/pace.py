"""Whether the next round is worth drafting: measured seconds and accepted tokens against plain steps.

A round that drafts costs a draft and a forward over a tree, and pays in accepted tokens; a plain step is a forward
over one token. Where drafting has paid less than plain steps would have, generation goes on plainly, and drafts a
round now and then to see whether that has changed: so seldom that these trials cost no more than [`TRIAL_SHARE`] of
the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig

from ..contract import DraftingContract

TRIAL_SHARE = 0.02  # of the wall time of plain steps, for rounds that turn out not to pay
ROUNDS_BEFORE_A_VERDICT = 4
PLAIN_STEPS_BEFORE_A_VERDICT = 2
ROUND_WEIGHT = 1 / 8  # of the newest round in the running means, once there are as many
GROWN = 2.0  # a plain step is timed again when the context has grown by this factor


@dataclass
class Pace:
    """Running costs and gains of one pair under one setting; kept from call to call.

    Attributes:
        plain_seconds: Wall seconds of a plain step.
        round_seconds: Wall seconds of a round that drafts, running mean.
        round_tokens: Tokens a round emits per batch row, bonus token included, running mean.
        rounds: Rounds that drafted.
        plain_steps: Plain steps.
        debt: Seconds lost to rounds that did not pay, less what plain steps since have earned for further trials.
        context: Tokens in the context when a plain step was timed last; 0 asks for it to be timed anew.
    """

    plain_seconds: float = float("inf")
    round_seconds: float = 0.0
    round_tokens: float = 0.0
    rounds: int = 0
    plain_steps: int = 0
    debt: float = 0.0
    context: int = 0

    @property
    def gain(self) -> float:
        """Tokens per second of drafting rounds over those of plain steps."""
        return self.round_tokens * self.plain_seconds / max(self.round_seconds, 1e-12)

    def drafts(self, context: int) -> bool:
        """Whether the next round should draft.

        Args:
            context: Tokens in the context.
        """
        if self.plain_steps < PLAIN_STEPS_BEFORE_A_VERDICT or context > GROWN * self.context:
            return False
        if self.rounds < ROUNDS_BEFORE_A_VERDICT:
            return True
        return self.gain >= 1.0 or self.debt <= 0.0

    def record_plain(self, seconds: float, context: int) -> None:
        """Adds a plain step. Of the first two the faster counts: the first warms up what the second finds warm."""
        self.plain_steps += 1
        if self.plain_steps <= PLAIN_STEPS_BEFORE_A_VERDICT:
            self.plain_seconds = min(self.plain_seconds, seconds)
        else:
            self.plain_seconds += (seconds - self.plain_seconds) * ROUND_WEIGHT
        if context > GROWN * self.context:
            # Timed for another context: what was known before tells little.
            known = self.plain_steps <= PLAIN_STEPS_BEFORE_A_VERDICT
            self.plain_seconds, self.context = self.plain_seconds if known else seconds, context
        self.debt = max(self.debt - TRIAL_SHARE * seconds, 0.0)

    def record_round(self, seconds: float, tokens: float) -> None:
        """Adds a round that drafted and emitted so many tokens per batch row."""
        self.rounds += 1
        weight = max(ROUND_WEIGHT, 1 / self.rounds)
        self.round_seconds += (seconds - self.round_seconds) * weight
        self.round_tokens += (tokens - self.round_tokens) * weight
        lost = seconds - tokens * self.plain_seconds
        self.debt = max(self.debt + lost, 0.0)

    def conditions_changed(self) -> None:
        """Rows have left the batch, or the like: a plain step is timed again."""
        self.context = 0


def pace_of(heads: DraftingContract, batch_size: int, config: GenerationConfig) -> Pace:
    """Running costs and gains of heads under the settings of a call; kept with the heads for the next such call."""
    settings = (batch_size, repr(heads.tree_config), heads.compiled, config.do_sample, config.temperature)
    return heads.paces.setdefault(settings, Pace())
