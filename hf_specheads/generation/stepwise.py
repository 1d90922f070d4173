"""Stopping criteria of a batch that have to be asked about all of its sequences at once."""

from __future__ import annotations

from transformers import StoppingCriteriaList

from .outputs import EmittedOutputs
from .sequences import Sequences


class StepwiseCriteria:
    """Criteria of a batch, asked step by step as plain `generate` does: every one once per step, about all sequences.

    Args:
        criteria: All criteria of the call.
        sequences, outputs: Of the call; what a sequence emitted past its end is taken out of both.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: Sequences, outputs: EmittedOutputs):
        self.criteria, self.sequences, self.outputs = criteria, sequences, outputs
        self.steps = 0
        self._open = set(range(len(sequences.lengths)))  # not ended at any step so far

    def ended(self, complete: list[int]) -> list[int]:
        """Sequences that get no more tokens after a round.

        Args:
            complete: Those that came to their budget or an end-of-sequence token.
        """
        sequences = self.sequences
        going_on = [sequence for sequence in sequences.active if sequence not in complete]
        ended = list(complete)
        while self._open and self.steps < self._complete_steps(going_on):
            self.steps += 1
            done = self.criteria(sequences.at_step(self.steps), self.outputs.scores_by_step(self.steps)).tolist()
            for sequence in [sequence for sequence in self._open if done[sequence]]:
                self._open.discard(sequence)
                sequences.cut(sequence, self.steps)
                self.outputs.cut(sequence, self.steps)
                ended.append(sequence)
                going_on = [other for other in going_on if other != sequence]
        return ended

    def _complete_steps(self, going_on: list[int]) -> int:
        """Steps that every sequence which goes on has come to; all steps there are if none does."""
        new_tokens = self.sequences.new_tokens
        return min(map(new_tokens, going_on)) if going_on else max(map(new_tokens, self._open))
