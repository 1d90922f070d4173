"""Stopping criteria of a batch that must be asked about all sequences at once."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList

from .outputs import EmittedOutputs
from .sequences import Sequences
from .stopping import pads_ended


class StepwiseCriteria:
    """Asks the criteria of a batch as plain `generate` does: each criterion once per step, about all sequences.

    Args:
        criteria: All criteria of the call.
        sequences, outputs: Those of the call. Tokens past the end of a sequence are removed from both.

    Attributes:
        steps: Number of steps that the criteria have been asked about.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences, outputs: EmittedOutputs):
        self.criteria, self.sequences, self.outputs = criteria, sequences, outputs
        self.steps = 0
        self._scores: tuple[torch.Tensor, ...] = ()
        self._open = set(range(len(sequences.lengths)))  # sequences for which no criterion was met yet
        self._ended_one_by_one = pads_ended(criteria)

    def ended(self, complete: list[int]) -> list[int]:
        """Returns the sequences that get no more tokens after a round.

        Args:
            complete: Sequences that reached their length limit or an end-of-sequence token.
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
        """Asks about the next step. Returns the sequences for which a criterion is met for the first time."""
        self.steps += 1
        scores = self.outputs.scores_at(self.steps)
        self._scores += () if scores is None else (scores,)
        done = self.criteria(self.sequences.at_step(self.steps), None if scores is None else self._scores).tolist()
        return {sequence for sequence in self._open if done[sequence]}

    def _complete_steps(self, going_on: list[int]) -> int:
        """Number of steps that all sequences in `going_on` have reached; of all open sequences if none goes on."""
        new_tokens = self.sequences.new_tokens
        return min(map(new_tokens, going_on)) if going_on else max(map(new_tokens, self._open))
