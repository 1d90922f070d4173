"""The tokens of a batch during a generation: sequences of different lengths, some of which have ended."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer

NO_TOKEN = torch.iinfo(torch.int32).max  # stands where a text has no token, and is in no vocabulary


class Sequences:
    """Token ids per sequence, and which sequences have not ended.

    Args:
        input_ids: int64 [B, T], the prompts.
        pad_token_id: Token that pads sequences which end before others.
        streamer: Receives every token as in plain `generate`: one `put` of int64 [B] per step, as soon as every
            sequence that has not ended before the step has its token.

    Attributes:
        active: Sequences that have not ended, in the order of the rows of a round's tensors.
        lengths: Number of tokens per sequence, prompt included.
        prompt_length: Length T of the prompts, padding included.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int, streamer: BaseStreamer | None = None):
        self.ids, self.pad_token_id, self.streamer = input_ids, pad_token_id, streamer
        batch, self.prompt_length = input_ids.shape
        self.active = list(range(batch))
        self.lengths = [self.prompt_length] * batch
        self._new: list[list[int]] = [[] for _ in range(batch)]
        self._streamed = 0

    def tokens_of(self, sequence: int) -> torch.Tensor:
        """Tokens of a sequence so far, int64 [1, T']."""
        return self.ids[sequence : sequence + 1, : self.lengths[sequence]]

    def last_tokens(self) -> list[int]:
        """The newest token of every active sequence, which is the root of its next tree."""
        return [self._new[sequence][-1] for sequence in self.active]

    def append(self, sequence: int, token_ids: list[int], on_device: torch.Tensor) -> None:
        """Appends emitted tokens.

        Args:
            sequence: Index of the sequence in the batch.
            token_ids: The tokens.
            on_device: int64 [*] on the device of the prompts, which ends with the same tokens.
        """
        begin, end = self.lengths[sequence], self.lengths[sequence] + len(token_ids)
        if end > self.ids.shape[1]:
            room = max(end, 2 * self.ids.shape[1]) - self.ids.shape[1]
            self.ids = torch.nn.functional.pad(self.ids, (0, room), value=self.pad_token_id)
        self.ids[sequence, begin:end] = on_device[-len(token_ids) :]
        self._new[sequence] += token_ids
        self.lengths[sequence] = end

    def end(self, sequences: list[int]) -> None:
        """Marks sequences as ended, so that they get no more tokens."""
        self.active = [sequence for sequence in self.active if sequence not in sequences]

    def cut(self, sequence: int, tokens: int) -> None:
        """Removes all new tokens of a sequence after the first `tokens`."""
        self.ids[sequence, self.prompt_length + tokens :] = self.pad_token_id
        del self._new[sequence][tokens:]
        self.lengths[sequence] = self.prompt_length + len(self._new[sequence])

    def new_tokens(self, sequence: int) -> int:
        """Number of new tokens of a sequence so far."""
        return len(self._new[sequence])

    def new_ids(self, sequence: int) -> list[int]:
        """The new tokens of a sequence so far."""
        return list(self._new[sequence])

    @property
    def mean_new_tokens(self) -> float:
        """Mean number of new tokens per sequence so far."""
        return sum(map(len, self._new)) / len(self._new)

    def emitted_tokens(self, sequence: int) -> int:
        """Number of new tokens of a sequence that the caller has got: with a streamer, those that were streamed."""
        appended = len(self._new[sequence])
        return appended if self.streamer is None else min(appended, self._streamed)

    def at_step(self, step: int) -> torch.Tensor:
        """All sequences as plain `generate` has them after `step` new tokens, int64 [B, T + step].

        Sequences that ended before are padded on the right.
        """
        return self.ids[:, : self.prompt_length + step].clone()

    def stream(self, steps: int | None = None) -> None:
        """Passes the complete steps to the streamer, at most up to step `steps` if that is given."""
        if self.streamer is None:
            return
        complete = min((len(self._new[sequence]) for sequence in self.active), default=max(map(len, self._new)))
        complete = complete if steps is None else min(steps, complete)
        for step in range(self._streamed, complete):
            tokens = [new[step] if step < len(new) else self.pad_token_id for new in self._new]
            self._streamed = step + 1
            self.streamer.put(torch.tensor(tokens))
        if not self.active:
            self.streamer.end()

    def padded(self) -> torch.Tensor:
        """All sequences, int64 [B, longest], with shorter ones padded on the right."""
        return self.ids[:, : max(self.lengths)].clone()


def pad_token_of(pad_token: torch.Tensor | None, eos_token: torch.Tensor | None) -> int | None:
    """The token that ended sequences are padded with, from what `generate` prepared; `None` if there is none."""
    for token in (pad_token, eos_token):
        if token is not None:
            return int(token.flatten()[0])
    return None
