"""Collects what `generate` returns besides tokens: scores, raw logits and hidden states of every emitted token."""

from __future__ import annotations

import torch
from transformers import Cache, GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from ..cache.names import CACHE_NAME
from .verification.accepted import Accepted


class EmittedOutputs:
    """Scores, raw logits and hidden states of the emitted tokens, one tuple entry per token as in plain `generate`.

    Entries are copies, so that no entry keeps the logits of a whole tree alive. In a batch, the entries of sequences
    that have ended are zeros, whereas plain `generate` goes on computing them.

    Attributes:
        scores, logits: Per sequence, one entry [1, V] per emitted token; `None` if not asked for.
        hidden_states: Per emitted token, one entry per layer; `None` if not asked for. Batch size 1 only.
    """

    def __init__(self, config: GenerationConfig, batch: int):
        as_dict = bool(config.return_dict_in_generate)
        self.as_dict = as_dict
        self.scores: list[list[torch.Tensor]] | None = (
            [[] for _ in range(batch)] if as_dict and config.output_scores else None
        )
        self.logits: list[list[torch.Tensor]] | None = (
            [[] for _ in range(batch)] if as_dict and config.output_logits else None
        )
        self.hidden_states: tuple | None = () if as_dict and config.output_hidden_states else None

    def earlier_scores(self, sequence: int) -> tuple[torch.Tensor, ...] | None:
        """Scores of a sequence's tokens so far, for stopping criteria that read them."""
        return None if self.scores is None else tuple(self.scores[sequence])

    def collect(self, outputs: ModelOutput, accepted: dict[int, Accepted], prefill: bool = False) -> None:
        """Adds the entries of the tokens of one round.

        Args:
            outputs: Outputs of the target's forward, with one row per item of `accepted`, in that order.
            accepted: What was accepted, by sequence.
            prefill: Whether the forward was the prefill, whose hidden states are those of the whole prompt.
        """
        for index, (sequence, result) in enumerate(accepted.items()):
            if self.scores is not None:
                self.scores[sequence] += result.scores
            if self.logits is not None:
                nodes = [-1] if prefill else result.nodes
                self.logits[sequence] += [
                    outputs.logits[index : index + 1, node].to(torch.float32, copy=True) for node in nodes
                ]
            if self.hidden_states is None:
                continue
            if prefill:
                self.hidden_states += (tuple(outputs.hidden_states),)
            else:
                self.hidden_states += tuple(
                    tuple(layer[:, node : node + 1].clone() for layer in outputs.hidden_states)
                    for node in result.nodes
                )

    def cut(self, sequence: int, tokens: int) -> None:
        """Drops the entries of a sequence after its first `tokens` new tokens."""
        for entries in (self.scores, self.logits):
            if entries is not None:
                del entries[sequence][tokens:]

    def scores_at(self, step: int) -> torch.Tensor | None:
        """Scores [B, V] of a step, counted from 1; `None` if not asked for."""
        return None if self.scores is None else _at_step(self.scores, step - 1)

    def result(self, input_ids: torch.Tensor, cache: Cache | None) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if not self.as_dict:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=_by_step(self.scores),
            logits=_by_step(self.logits),
            hidden_states=self.hidden_states,
            **{CACHE_NAME: cache},
        )


def _by_step(sequences: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
    """Joins entries [1, V] per sequence and step into entries [B, V] per step."""
    if sequences is None:
        return None
    return tuple(_at_step(sequences, step) for step in range(max(map(len, sequences))))


def _at_step(sequences: list[list[torch.Tensor]], step: int) -> torch.Tensor:
    ended = torch.zeros_like(next(entry for entries in sequences for entry in entries))
    return torch.cat([entries[step] if step < len(entries) else ended for entries in sequences])
