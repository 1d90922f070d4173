"""From target logits to tokens, through transformers' processors. The only place that draws random numbers."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

# Processors whose output for a row depends on that row's logits alone, so that all nodes can be processed at once.
ROW_WISE_PROCESSORS = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    }
)

# Processors without state whose output for a row depends on that row's tokens and logits alone: they may be asked
# about text that is never written.
PATH_WISE_PROCESSORS = ROW_WISE_PROCESSORS | {
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "TopHLogitsWarper",
}


# What may be asked about the sequences of a batch one after the other, out of step.
BATCH_PROCESSORS = PATH_WISE_PROCESSORS | {"PrefixConstrainedLogitsProcessor", "WatermarkLogitsProcessor"}


def out_of_step(processors: LogitsProcessorList) -> list[str]:
    """Processors that may keep something from call to call, so that the sequences of a batch must be asked in step."""
    ours = "transformers.generation.logits_process"
    return [type(p).__name__ for p in processors
            if type(p).__module__ != ours or type(p).__name__ not in BATCH_PROCESSORS]  # fmt: skip


def _is_among(processor: Any, names: frozenset[str]) -> bool:
    """Whether a processor is one of transformers' own, by name: a user's class of the same name is not."""
    if type(processor).__module__ != "transformers.generation.logits_process" or type(processor).__name__ not in names:
        return False
    # One length per sequence would be paired with nodes instead.
    return not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)


def processors_of(processors: LogitsProcessorList, sequence: int) -> LogitsProcessorList:
    """The processors of a batch as one of its sequences has them: what they hold per sequence is that one's."""
    return LogitsProcessorList(_processor_of(processor, sequence) for processor in processors)


def _processor_of(processor: LogitsProcessor, sequence: int) -> LogitsProcessor:
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(sequence, ids), processor._num_beams)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = ignored[sequence : sequence + 1]
    return own


# `torch.multinomial` looks at its probabilities twice before it draws.
WAITS_OF_A_DRAW = 2
NO_DISTRIBUTION = -1  # in the place of a token


def refuse_no_distribution(token_id: int) -> None:
    """A token that was drawn without looking at the probabilities.

    Raises:
        RuntimeError: if these were none, as `torch.multinomial` does.
    """
    if token_id == NO_DISTRIBUTION:
        raise RuntimeError(
            "the target's probabilities at a token hold NaN or inf; its logits have overflowed, or a logits processor "
            "has left no token."
        )


def favourite(scores: torch.Tensor) -> torch.Tensor:
    """Number [...] of the highest of the scores [..., V], the first of several: `argmax`, by a kernel that CPUs run
    with vector instructions."""
    return scores.max(dim=-1).indices


class TokenSampler:
    """Chooses the target's token at a node exactly as plain `generate` would.

    Args:
        logits_processor: Processors and warpers, in the order `generate` prepared them.
        do_sample: Draw from the processed distribution instead of taking its argmax.
        batch: Sequences that the processors are of; those of one alone are in [`for_sequence`].
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool, batch: int = 1):
        self.logits_processor = logits_processor
        self.do_sample = do_sample
        self.batch = batch

    def for_sequence(self, sequence: int) -> TokenSampler:
        """The sampler of one sequence of the batch, whose processors see that sequence alone."""
        if self.batch == 1:
            return self
        return TokenSampler(processors_of(self.logits_processor, sequence), self.do_sample)

    @cached_property
    def row_wise(self) -> bool:
        """Whether every processor looks at one row of logits only, never at the tokens before it."""
        return all(_is_among(p, ROW_WISE_PROCESSORS) for p in self.logits_processor)

    @property
    def path_wise(self) -> bool:
        """Whether every processor is free of state, and so may be asked about any path of a tree."""
        return all(_is_among(p, PATH_WISE_PROCESSORS) for p in self.logits_processor)

    def at_all_nodes(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens at all nodes of a tree at once, for row-wise processors.

        Args:
            logits: [B, N, V], raw target logits.

        Returns:
            Tokens int64 [B, N] and processed scores [B, N, V] (the raw logits where nothing had to be processed).
        """
        if not self.logits_processor and not self.do_sample:
            return favourite(logits), logits
        scores = self.scores_at_all_nodes(logits)
        return self.race(scores.softmax(-1)) if self.do_sample else favourite(scores), scores

    def scores_at_all_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores fp32 [B, N, V] at all nodes of a tree at once; logits as in [`at_all_nodes`]."""
        batch, nodes, vocab = logits.shape
        nothing = torch.empty(batch * nodes, 0, dtype=torch.long, device=logits.device)  # they do not look at tokens
        scores = self.logits_processor(nothing, logits.to(torch.float32, copy=True).view(-1, vocab))
        return scores.view(batch, nodes, vocab)

    def scores_at_node(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores fp32 [K, V] from logits [K, V] after the tokens [K, T']: one call of the processors."""
        return self.logits_processor(input_ids, logits.to(torch.float32, copy=True))

    def at_node(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token at one node: one call of the processors, one draw.

        Args:
            input_ids: int64 [1, T'], committed tokens and the path to the node.
            logits: [1, V], raw target logits at the node.

        Returns:
            Token int64 [1] and processed scores fp32 [1, V].
        """
        scores = self.scores_at_node(input_ids, logits)
        if not self.do_sample:
            return favourite(scores), scores
        return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0], scores

    @property
    def waits_at_node(self) -> int:
        """How often the host waits in [`at_node`]."""
        return WAITS_OF_A_DRAW if self.do_sample else 0

    @staticmethod
    def race(probs: torch.Tensor) -> torch.Tensor:
        """One token each, int64 [...], from probabilities [..., V], without a wait: [`NO_DISTRIBUTION`] where they are
        none, for [`refuse_no_distribution`] to find when the tokens are read.

        An exponential race, which is how `torch.multinomial` draws.
        """
        arrivals = torch.empty_like(probs).exponential_().clamp_min(torch.finfo(probs.dtype).tiny)
        total = probs.sum(-1)
        return torch.where((total > 0) & total.isfinite(), favourite(probs / arrivals), NO_DISTRIBUTION)


class DraftSampler:
    """Draws the children of draft nodes, without replacement, from the draft's own distribution.

    That distribution q is the softmax of the draft logits after the call's processors, as far as these may be asked
    about text that is never written: transformers' own ones without state see every node's own path; users' processors
    (`prefix_allowed_tokens_fn`, grammars) and those with a state are left out. Verification stays exact whatever q is,
    as long as it is the distribution that was really drawn from; the nearer q comes to the target's, the more is
    accepted.

    Args:
        logits_processor: Processors and warpers of the call, in the order `generate` prepared them.
        input_ids: int64 [B, T], committed tokens, the root included. Where sequences are of different lengths, no
            tokens [B, 0]: processors that look at tokens are then left out as well.
    """

    def __init__(self, logits_processor: LogitsProcessorList, input_ids: torch.Tensor):
        known = PATH_WISE_PROCESSORS if input_ids.shape[1] else ROW_WISE_PROCESSORS
        self.logits_processor = LogitsProcessorList(p for p in logits_processor if _is_among(p, known))
        self.input_ids = input_ids

    def distribution(self, logits: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """q at K nodes, fp32 [B, K, V]; every row is a distribution.

        Args:
            logits: [B, K, V], draft logits, already divided by the draft temperature.
            paths: int64 [B, K, d], tokens from below the root down to each node.
        """
        nodes, vocab = logits.shape[1:]
        committed = self.input_ids.repeat_interleave(nodes, dim=0)
        ids = torch.cat([committed, paths.flatten(0, 1).to(committed.device)], dim=1)
        scores = logits.to(committed.device, torch.float32, copy=True).view(-1, vocab)
        probs = self.logits_processor(ids, scores).softmax(-1)
        # Draft logits that overflowed, or a processor that left no token: any distribution serves.
        broken = ~probs.sum(-1, keepdim=True).isfinite()
        return torch.where(broken, 1 / vocab, probs).view(-1, nodes, vocab).to(logits.device)

    @staticmethod
    def draw(probs: torch.Tensor, width: int) -> torch.Tensor:
        """Tokens int64 [B, K, width] drawn without replacement from [B, K, V], in the order drawn.

        An exponential race: the first to arrive are `width` draws without replacement. Tokens of probability 0 come
        last; verification never accepts them.
        """
        arrivals = torch.empty_like(probs).exponential_().clamp_min(torch.finfo(probs.dtype).tiny)
        return (probs / arrivals).topk(width, dim=-1).indices
