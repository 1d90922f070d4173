"""When a generation ends: by length, end-of-sequence or stop strings within a block, by other criteria token by token.

In a batch, plain `generate` asks criteria about all sequences at once, step by step. Our sequences have different
lengths. Criteria without state that look at a single sequence are asked about each sequence whenever it has a new
token. Others are asked about a step once every sequence has reached it ([`stepwise.StepwiseCriteria`]). That also
holds for all criteria but the length in a call without an end-of-sequence token: plain `generate` pads nothing there,
and sequences that a criterion has ended go on until all have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from ..cache.slots import to_device
from .sequences import NO_TOKEN

# Exact classes: a subclass may differ.
OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria)
OF_A_BLOCK = (*OF_TOKENS, StopStringCriteria)
OF_ONE_SEQUENCE = (*OF_A_BLOCK, MaxTimeCriteria)


def pads_ended(criteria: StoppingCriteriaList) -> bool:
    """Whether plain `generate` pads sequences that end before others."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


class StopRule:
    """Stopping criteria, split into those that can cut a block of tokens and those that must see every token.

    Attributes:
        per_token: Whether some criterion (time, a user's own) must be called for every token.
        strings: Criteria of stop strings, which find the first token of a block that completes one. None where
            `per_token` or `in_step` asks them.
        in_step: Whether some criterion must be asked about all sequences of a batch at once instead.
        max_length: Most tokens of a sequence, prompt included; `None` without a limit.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int = 1):
        self.criteria = criteria
        out_of_step = OF_ONE_SEQUENCE if pads_ended(criteria) else OF_TOKENS
        self.in_step = batch > 1 and any(type(c) not in out_of_step for c in criteria)
        self.per_token = not self.in_step and any(type(c) not in OF_A_BLOCK for c in criteria)
        asked = self.in_step or self.per_token  # with all other criteria
        self.strings = [] if asked else [c for c in criteria if type(c) is StopStringCriteria]
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

    @property
    def looks_at_text(self) -> bool:
        """Whether some criterion must be asked about a text, unlike lengths and end-of-sequence tokens."""
        return self.per_token or bool(self.strings)

    def cut(self, token_ids: list[int], length: int) -> tuple[int, bool]:
        """How many tokens of a block may be emitted after `length` tokens, and whether generation ends there, by the
        length and the end-of-sequence tokens alone."""
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


def cut_blocks(
    blocks: Sequence[list[int]], texts: Sequence[torch.Tensor], rules: Sequence[StopRule]
) -> list[tuple[int, bool]]:
    """How many tokens of each sequence's block may be emitted, and whether its generation ends there.

    Args:
        blocks: New tokens of each sequence, at least one.
        texts: int64 [1, T], the tokens before them.
        rules: Stop rule of each sequence. Criteria that need every token are not asked. The host waits for the device
            once if some have stop strings.
    """
    cuts = [rule.cut(block, text.shape[1]) for block, text, rule in zip(blocks, texts, rules, strict=True)]
    for row, kept in _first_complete(blocks, texts, rules).items():
        if kept <= cuts[row][0]:
            cuts[row] = kept, True
    return cuts


def _first_complete(
    blocks: Sequence[list[int]], texts: Sequence[torch.Tensor], rules: Sequence[StopRule]
) -> dict[int, int]:
    """The number of tokens with which a block first completes a stop string, for the rows in which one does.

    Each criterion is asked about all tokens of all its blocks in one call, as it only looks at the end of a text.
    """
    rows_of: dict[StopStringCriteria, list[int]] = defaultdict(list)
    for row, rule in enumerate(rules):
        for criterion in rule.strings:
            rows_of[criterion].append(row)
    met, asked = [], []
    for criterion, rows in rows_of.items():
        ends = [_ends_of(texts[row], blocks[row], criterion.maximum_token_len) for row in rows]
        met.append(criterion(torch.cat(ends), None))
        asked += [(row, kept) for row in rows for kept in range(1, len(blocks[row]) + 1)]
    first: dict[int, int] = {}
    for (row, kept), is_met in zip(asked, torch.cat(met).tolist() if met else [], strict=True):
        if is_met:
            first[row] = min(kept, first.get(row, kept))
    return first


def _ends_of(text: torch.Tensor, block: list[int], width: int) -> torch.Tensor:
    """The last `width` tokens after each token of a block that follows a text [1, T], int64 [len(block), width]."""
    before = torch.nn.functional.pad(text[0, max(text.shape[1] - width, 0) :], (width, 0), value=NO_TOKEN)
    tokens = torch.cat([before, to_device(block, text.device)])
    return tokens.unfold(0, width, 1)[-len(block) :]
