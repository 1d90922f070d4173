"""When a generation ends: length and end-of-sequence inside a block, and any other criterion token by token.

In a batch plain `generate` asks criteria about all sequences at once, one step after the other, while ours are of
different lengths. Criteria that look at one sequence alone and have no state are asked about it as it goes; others
([`stepwise.StepwiseCriteria`]) about a step as soon as every sequence has come to it. So is every criterion of a call
without an end-of-sequence token, in which plain `generate` pads nothing: sequences that a criterion has ended go on
until all have.
"""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

OF_A_BLOCK = (MaxLengthCriteria, EosTokenCriteria)
OF_ONE_SEQUENCE = (*OF_A_BLOCK, MaxTimeCriteria, StopStringCriteria)  # by class: a subclass may do anything


def pads_ended(criteria: StoppingCriteriaList) -> bool:
    """Whether plain `generate` pads sequences that have ended before others."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


class StopRule:
    """Stopping criteria split into those a block of tokens can be cut by, and those that must see every token.

    Attributes:
        per_token: Whether some criterion (stop strings, time, a user's own) has to be called for every token.
        in_step: Whether some criterion has to be asked about all sequences of a batch at once instead.
        max_length: Total tokens allowed, prompt included; `None` without limit.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int = 1):
        self.criteria = criteria
        out_of_step = OF_ONE_SEQUENCE if pads_ended(criteria) else OF_A_BLOCK
        self.in_step = batch > 1 and any(type(c) not in out_of_step for c in criteria)
        self.per_token = not self.in_step and any(type(c) not in OF_A_BLOCK for c in criteria)
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self.max_length: int | None = min(lengths, default=None)
        self._eos_ids = {t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.tolist()}

    def budget(self, length: int) -> int:
        """Tokens that a call which must have a limit (a compiled one) may emit after so many.

        Raises:
            RuntimeError: without a limit.
        """
        if self.max_length is None:
            raise RuntimeError("compiled rounds need a length limit.")
        return self.max_length - length

    def left(self, length: int) -> int | None:
        """The same for any call: `None` without a limit."""
        return None if self.max_length is None else self.max_length - length

    def for_sequence(self, sequence: int) -> StopRule:
        """The rule of one sequence: of a batch it is the same for all."""
        return self

    def cut(self, token_ids: list[int], length: int) -> tuple[int, bool]:
        """How many tokens of a block may be emitted after `length` tokens, and whether generation ends there."""
        allowed = len(token_ids)
        stopped = False
        if self.max_length is not None and length + allowed >= self.max_length:
            allowed, stopped = max(self.max_length - length, 1), True
        for index, token in enumerate(token_ids[:allowed]):
            if token in self._eos_ids:
                return index + 1, True
        return allowed, stopped

    def met(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Calls every criterion once, as plain `generate` does after each token. Waits for the device."""
        return bool(self.criteria(input_ids, scores).all())
