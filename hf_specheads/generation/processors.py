"""transformers' processors of logits, by what they look at: a row of logits, the tokens before it, or a state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from ..cache.slots import to_device
from ..tree.draft_tree import DraftTree
from .sequences import NO_TOKEN

# Processors whose output for a row depends only on the logits of that row, so that all nodes can be processed at once.
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

# Row-wise processors whose output for a token depends only on its own score and on the scores that are not -inf, in
# any order. Given only the tokens with a finite score, they return what they return for these tokens among all.
ORDERLESS_PROCESSORS = ROW_WISE_PROCESSORS - {"InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor"}

# Processors without state, whose output for a row depends only on the tokens and logits of that row. They may be asked
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


# Processors that may be asked about the sequences of a batch one after the other, out of step.
BATCH_PROCESSORS = PATH_WISE_PROCESSORS | {"PrefixConstrainedLogitsProcessor", "WatermarkLogitsProcessor"}


# Processors that forbid the end of a text as long as it is shorter than a number of tokens, with that number.
LENGTH_WISE_PROCESSORS: dict[str, Callable[[Any], int]] = {
    "MinLengthLogitsProcessor": lambda processor: processor.min_length,
    "MinNewTokensLengthLogitsProcessor": lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens,
}
LENGTH_WISE = frozenset(LENGTH_WISE_PROCESSORS)


def out_of_step(processors: LogitsProcessorList) -> list[str]:
    """Names of the processors that may keep a state between calls, and so need the sequences of a batch in step."""
    ours = "transformers.generation.logits_process"
    return [type(p).__name__ for p in processors
            if type(p).__module__ != ours or type(p).__name__ not in BATCH_PROCESSORS]  # fmt: skip


def is_among(processor: Any, names: frozenset[str]) -> bool:
    """Whether a processor is one of these classes of transformers. A user's class of the same name is not."""
    if type(processor).__module__ != "transformers.generation.logits_process" or type(processor).__name__ not in names:
        return False
    # Processors with one length per sequence would apply these lengths to nodes.
    return not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)


def is_set_wise(processor: Any) -> bool:
    """Whether the output of a processor for a row depends only on its logits and on which tokens come before, in any
    order. Tokens beyond the vocabulary do not count."""
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return False
    return not isinstance(getattr(processor, "prompt_ignore_length", None), int)  # may ignore drafted tokens too


def rules_out(processor: Any) -> bool:
    """Whether a processor filters tokens out with -inf, as those of `generate` do, so that they are never drawn."""
    return getattr(processor, "filter_value", -torch.inf) == -torch.inf


def for_lengths(processor: Any, shortest: int, longest: int) -> LogitsProcessor | None:
    """Replaces a length-wise processor by one with the same effect on all texts of these lengths, from logits alone.

    Returns the processor itself if it is not length-wise or its effect differs between the lengths, and `None` if it
    has no effect at any of them.
    """
    if not is_among(processor, LENGTH_WISE):
        return processor
    least = LENGTH_WISE_PROCESSORS[type(processor).__name__](processor)
    if longest < least:
        ends = processor.eos_token_id
        return SuppressTokensLogitsProcessor(ends.tolist(), device=ends.device)
    return None if shortest >= least else processor


class AtNodes(LogitsProcessor):
    """A set-wise processor for rows of logits that are all nodes of draft trees, whose texts it holds.

    Args:
        processor: The processor, prepared for one or more sequences.
        tree: Draft tree of B sequences and N nodes.
        texts: int64 [1, T'], the committed tokens of each sequence. The root is the last of them.
        sequences: The place of each sequence among those that the processor was prepared for.

    Attributes:
        token_ids: int64 [B * N, T + N - 1], the text up to each node, with `NO_TOKEN` in gaps.
    """

    def __init__(
        self, processor: LogitsProcessor, tree: DraftTree, texts: Sequence[torch.Tensor], sequences: list[int]
    ):
        committed = pad_sequence([text[0] for text in texts], batch_first=True, padding_value=NO_TOKEN)
        if (ignored := getattr(processor, "prompt_ignore_length", None)) is not None:
            begins = ignored.to(committed.device)[to_device(sequences, committed.device), None]
            before = torch.arange(committed.shape[1], device=committed.device) < begins
            committed = committed.masked_fill(before, NO_TOKEN)
        drafted = torch.where(tree.ancestor_mask[:, :, 1:], tree.token_ids[:, None, 1:], NO_TOKEN)
        self.token_ids = torch.cat([committed[:, None].expand(-1, tree.num_nodes, -1), drafted], dim=2).flatten(0, 1)
        self.processor = copy.copy(processor)
        self.processor.prompt_ignore_length = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(self.token_ids, scores)


def processors_of(processors: LogitsProcessorList, sequence: int) -> LogitsProcessorList:
    """The processors of a batch for one of its sequences: what they hold per sequence is reduced to this sequence."""
    return LogitsProcessorList(_processor_of(processor, sequence) for processor in processors)


def _processor_of(processor: LogitsProcessor, sequence: int) -> LogitsProcessor:
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed, prompt = processor._prefix_allowed_tokens_fn, sequence // processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = ignored[sequence : sequence + 1]
    return own
