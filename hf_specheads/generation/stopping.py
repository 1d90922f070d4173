"""When a generation ends: by length or end-of-sequence inside a block of tokens, by other criteria token by token.

In a batch, plain `generate` asks criteria about all sequences at once, step by step. Our sequences have different
lengths. Criteria without state that look at a single sequence are asked about each sequence whenever it has a new
token. Others are asked about a step once every sequence has reached it ([`stepwise.StepwiseCriteria`]). That also
holds for all criteria but the length in a call without an end-of-sequence token: plain `generate` pads nothing there,
and sequences that a criterion has ended go on until all have ended.
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
OF_ONE_SEQUENCE = (*OF_A_BLOCK, MaxTimeCriteria, StopStringCriteria)  # exact classes: a subclass may differ


def pads_ended(criteria: StoppingCriteriaList) -> bool:
    """Whether plain `generate` pads sequences that end before others."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


class StopRule:
    """Stopping criteria, split into those that can cut a block of tokens and those that must see every token.

    Attributes:
        per_token: Whether some criterion (stop strings, time, a user's own) must be called for every token.
        in_step: Whether some criterion must be asked about all sequences of a batch at once instead.
        max_length: Most tokens of a sequence, prompt included; `None` without a limit.
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
        """Number of tokens that may follow `length` tokens, in a call that needs a limit (compiled rounds).

        Raises:
            RuntimeError: if the call has no length limit.
        """
        if self.max_length is None:
            raise RuntimeError("compiled rounds need a length limit.")
        return self.max_length - length

    def left(self, length: int) -> int | None:
        """Number of tokens that may follow `length` tokens; `None` without a limit."""
        return None if self.max_length is None else self.max_length - length

    def for_sequence(self, sequence: int) -> StopRule:
        """The stop rule of one sequence. All sequences of a batch share this one."""
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
        """Calls every criterion once, as plain `generate` does after each token. The host waits for the device."""
        return bool(self.criteria(input_ids, scores).all())
