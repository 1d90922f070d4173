"""Stopping criteria of a batch that have to be asked about all of its sequences at once."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList

from .outputs import EmittedOutputs
from .sequences import Sequences
from .stopping import pads_ended


class StepwiseCriteria:
    """Criteria of a batch, asked step by step as plain `generate` does: every one once per step, about all sequences.

    Args:
        criteria: All criteria of the call.
        sequences, outputs: Of the call; what a sequence emitted past its end is taken out of both.

    Attributes:
        steps: Steps the criteria have been asked about.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences, outputs: EmittedOutputs):
        self.criteria, self.sequences, self.outputs = criteria, sequences, outputs
        self.steps = 0
        self._scores: tuple[torch.Tensor, ...] = ()
        self._open = set(range(len(sequences.lengths)))  # no criterion has been met for them so far
        self._ended_one_by_one = pads_ended(criteria)

    def ended(self, complete: list[int]) -> list[int]:
        """Sequences that get no more tokens after a round.

        Args:
            complete: Those that came to their budget or an end-of-sequence token.
        """
        going_on = [sequence for sequence in self.sequences.active if sequence not in complete]
        ended = list(complete)
        while self._open and self.steps < self._complete_steps(going_on):
            met = self._ask_about_next_step()
            self._open -= met
            if not self._ended_one_by_one:
                met = set() if self._open else set(range(len(self.sequences.lengths)))
            for sequence in met:
                self.sequences.cut(sequence, self.steps)
                self.outputs.cut(sequence, self.steps)
            ended += met
            going_on = [sequence for sequence in going_on if sequence not in met]
        return ended

    def _ask_about_next_step(self) -> set[int]:
        """Sequences for which a criterion is met now and was not before."""
        self.steps += 1
        scores = self.outputs.scores_at(self.steps)
        self._scores += () if scores is None else (scores,)
        done = self.criteria(self.sequences.at_step(self.steps), None if scores is None else self._scores).tolist()
        return {sequence for sequence in self._open if done[sequence]}

    def _complete_steps(self, going_on: list[int]) -> int:
        """Steps that every sequence which goes on has come to; all steps there are if none does."""
        new_tokens = self.sequences.new_tokens
        return min(map(new_tokens, going_on)) if going_on else max(map(new_tokens, self._open))
