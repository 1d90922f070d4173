"""Chooses tokens from target logits through transformers' processors, and draws tokens for draft trees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from ..tree.draft_tree import DraftTree
from .kernels.few_rows_native import highest
from .processors import (
    LENGTH_WISE,
    ORDERLESS_PROCESSORS,
    PATH_WISE_PROCESSORS,
    ROW_WISE_PROCESSORS,
    AtNodes,
    for_lengths,
    is_among,
    is_set_wise,
    processors_of,
    rules_out,
)

SPARE = 2  # scores taken per token that top-k keeps, so that ties can be seen

# `torch.multinomial` checks its probabilities twice before it draws, and the host waits for each check.
WAITS_OF_A_DRAW = 2
NO_DISTRIBUTION = -1  # stands for a token that could not be drawn


def refuse_no_distribution(token_id: int) -> None:
    """Checks a token that was drawn without checking the probabilities first.

    Raises:
        RuntimeError: if the probabilities were not a distribution, as `torch.multinomial` does.
    """
    if token_id == NO_DISTRIBUTION:
        raise RuntimeError(
            "the target's probabilities for a token hold NaN or inf; its logits have overflowed, or a logits "
            "processor has excluded all tokens."
        )


def favourite(scores: torch.Tensor) -> torch.Tensor:
    """Index [...] of the highest of the scores [..., V], the first one of equal scores.

    The same as `argmax`, with a kernel that uses vector instructions on CPUs.
    """
    found = highest(scores)
    return scores.max(dim=-1).indices if found is None else found


class TokenSampler:
    """Chooses the target's token at a node exactly as plain `generate` would.

    Args:
        logits_processor: Processors and warpers, in the order `generate` prepared them.
        do_sample: Draw from the processed distribution instead of taking its argmax.
        batch: Number of sequences that the processors were prepared for. [`for_sequence`] has those of a single one.
        in_order: Whether a single sequence is drawn token by token exactly as in plain `generate`, so that seeds give
            the same text. Otherwise draws only have the same distribution, which may be faster.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool, batch: int = 1, in_order: bool = True):
        self.logits_processor = logits_processor
        self.do_sample = do_sample
        self.batch = batch
        self.in_order = in_order and batch == 1

    def for_sequence(self, sequence: int) -> TokenSampler:
        """The sampler of one sequence of the batch. Its processors see only this sequence."""
        if self.batch == 1:
            return self
        return TokenSampler(processors_of(self.logits_processor, sequence), self.do_sample, in_order=False)

    def of_sequences(self, sequences: list[int]) -> TokenSampler:
        """The sampler of some sequences of the batch, which have the same processors as the others."""
        return self

    def at_lengths(self, shortest: int, longest: int) -> TokenSampler:
        """A sampler that makes the same choices for texts of these lengths, in tokens.

        Where all these lengths are treated alike, processors that depend on the length are replaced by ones that look
        at logits alone, so that the sampler may become row-wise.
        """
        if not any(is_among(processor, LENGTH_WISE) for processor in self.logits_processor):
            return self
        at_lengths = (for_lengths(processor, shortest, longest) for processor in self.logits_processor)
        processors = LogitsProcessorList(processor for processor in at_lengths if processor is not None)
        return TokenSampler(processors, self.do_sample, self.batch, self.in_order)

    def at_nodes(self, tree: DraftTree, texts: Sequence[torch.Tensor], sequences: list[int]) -> TokenSampler:
        """A sampler that makes the same choices at the nodes of trees, given all at once.

        Where this makes the sampler row-wise, set-wise processors, such as the repetition penalty, are replaced by
        ones that hold the texts of the nodes.

        Args:
            tree: Draft tree of B sequences and N nodes.
            texts: int64 [1, T'], the committed tokens of each sequence.
            sequences: The B sequences.
        """
        if self.row_wise or not all(is_among(p, ROW_WISE_PROCESSORS) or is_set_wise(p) for p in self.logits_processor):
            return self
        places = sequences if self.batch > 1 else [0] * len(sequences)
        processors = (AtNodes(p, tree, texts, places) if is_set_wise(p) else p for p in self.logits_processor)
        return TokenSampler(LogitsProcessorList(processors), self.do_sample, self.batch, self.in_order)

    @cached_property
    def row_wise(self) -> bool:
        """Whether every processor looks only at one row of logits, never at the tokens before it."""
        return all(is_among(p, ROW_WISE_PROCESSORS) or type(p) is AtNodes for p in self.logits_processor)

    @cached_property
    def last_few(self) -> tuple[LogitsProcessorList, LogitsProcessorList, int] | None:
        """Splits the processors where the rest needs only the highest scores.

        Returns the processors before that place, those from top-k (or a temperature right before it) on, and the
        number of tokens that top-k keeps without ties. The second part gives the kept tokens the same scores whether
        or not it sees the others. `None` if the processors cannot be split so.
        """
        processors, place = list(self.logits_processor), len(self.logits_processor)
        while place and is_among(processors[place - 1], ORDERLESS_PROCESSORS) and rules_out(processors[place - 1]):
            place -= 1
        last = next((i for i in range(place, len(processors)) if type(processors[i]) is TopKLogitsWarper), None)
        if last is None:
            return None
        first = last
        while first > place and type(processors[first - 1]) is TemperatureLogitsWarper:
            first -= 1
        parts = LogitsProcessorList(processors[:first]), LogitsProcessorList(processors[first:])
        return *parts, processors[last].top_k

    @property
    def path_wise(self) -> bool:
        """Whether no processor has a state, so that they may be asked about any path of a tree."""
        return all(is_among(p, PATH_WISE_PROCESSORS) for p in self.logits_processor)

    def at_all_nodes(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses tokens at all nodes of a tree at once, for row-wise processors.

        Args:
            logits: [B, N, V], raw target logits.

        Returns:
            Tokens int64 [B, N] and processed scores [B, N, V] (the raw logits if nothing had to be processed).
        """
        if not self.logits_processor and not self.do_sample:
            return favourite(logits), logits
        scores = self.scores_at_all_nodes(logits)
        return self.race(scores.softmax(-1)) if self.do_sample else favourite(scores), scores

    def tokens_at_all_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        """Chooses tokens as [`at_all_nodes`], from the same distribution, without returning scores."""
        if not self.do_sample:
            return self.at_all_nodes(logits)[0]
        rows = logits.flatten(0, 1)
        return self._drawn(_no_tokens(rows), rows).view(logits.shape[:-1])

    def _drawn(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Draws tokens int64 [K] after `input_ids` int64 [K, T'] from logits [K, V], or `NO_DISTRIBUTION`.

        Sorting a vocabulary and drawing from it is slow on a CPU, so there only the tokens that top-k keeps are used.
        """
        few = self.last_few
        if few is None or logits.device.type != "cpu" or SPARE * few[2] >= logits.shape[-1]:
            return self.race(self.scores_at_node(input_ids, logits).softmax(-1))
        first, last, most = few
        scores = first(input_ids, logits.to(torch.float32, copy=True)) if first else logits
        values, token_ids = scores.topk(SPARE * most, dim=-1)
        probs = _probs_of_few(last, input_ids, values.float(), most)
        if probs is None:
            return self.race(last(input_ids, scores.to(torch.float32, copy=True)).softmax(-1))
        places = self.race(probs)
        drawn = token_ids.gather(-1, places.clamp_min(0)[:, None])[:, 0]
        return torch.where(places == NO_DISTRIBUTION, NO_DISTRIBUTION, drawn)

    def scores_at_all_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores fp32 [B, N, V] at all nodes of a tree at once, from logits as in [`at_all_nodes`]."""
        batch, nodes, vocab = logits.shape
        rows = logits.reshape(-1, vocab)  # not `view`: the logits of a stream may be a slice
        return self.scores_at_node(_no_tokens(rows), rows).view(batch, nodes, vocab)

    def scores_at_node(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores fp32 [K, V] from logits [K, V] after the tokens [K, T'], by one call of the processors."""
        return self.logits_processor(input_ids, logits.to(torch.float32, copy=True))

    def at_node(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the token at one node by one call of the processors and one draw.

        Args:
            input_ids: int64 [1, T'], the committed tokens and the path to the node.
            logits: [1, V], raw target logits at the node.

        Returns:
            Token int64 [1] and processed scores fp32 [1, V].
        """
        scores = self.scores_at_node(input_ids, logits)
        if not self.do_sample:
            return favourite(scores), scores
        probs = scores.softmax(-1)
        return torch.multinomial(probs, num_samples=1)[:, 0] if self.in_order else self.race(probs), scores

    def token_at_node(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Chooses a token as [`at_node`], from the same distribution (the same token if draws are in order)."""
        if self.in_order or not self.do_sample:
            return self.at_node(input_ids, logits)[0]
        return self._drawn(input_ids, logits)

    @property
    def waits_at_node(self) -> int:
        """How many times the host waits for the device in [`at_node`] and [`token_at_node`]."""
        return WAITS_OF_A_DRAW if self.do_sample and self.in_order else 0

    @staticmethod
    def race(probs: torch.Tensor) -> torch.Tensor:
        """Draws one token each, int64 [...], from probabilities [..., V], without making the host wait.

        The draw is an exponential race, as in `torch.multinomial`. The token is `NO_DISTRIBUTION` where the
        probabilities are not a distribution; [`refuse_no_distribution`] finds it when the tokens are read.
        """
        arrivals = torch.empty_like(probs).exponential_().clamp_min(torch.finfo(probs.dtype).tiny)
        total = probs.sum(-1)
        return torch.where((total > 0) & total.isfinite(), favourite(probs / arrivals), NO_DISTRIBUTION)


def _no_tokens(rows: torch.Tensor) -> torch.Tensor:
    """Empty texts before rows of logits, for processors that do not look at the text."""
    return torch.empty(len(rows), 0, dtype=torch.long, device=rows.device)


def _probs_of_few(
    processors: LogitsProcessorList, input_ids: torch.Tensor, scores: torch.Tensor, most: int
) -> torch.Tensor | None:
    """Probabilities [K, F] of the F highest scores [K, F] of a vocabulary, sorted, of which top-k keeps `most`.

    `None` if ties may make top-k keep other tokens as well, or if scores are NaN.
    """
    for processor in processors:
        if type(processor) is TopKLogitsWarper and not (scores[:, -1] < scores[:, most - 1]).all():
            return None
        scores = processor(input_ids, scores)
    return scores.softmax(-1)


class DraftSampler:
    """Draws the children of draft nodes, without replacement, from the draft's own distribution.

    This distribution q is the softmax of the draft logits after those processors of the call that may be asked about
    text that is never written. transformers' own processors without state see the path of every node. Processors of
    users (`prefix_allowed_tokens_fn`, grammars) and processors with a state are left out. Verification is exact for
    any q from which the children were really drawn. The closer q is to the target's distribution, the more is
    accepted.

    Args:
        logits_processor: Processors and warpers of the call, in the order `generate` prepared them.
        input_ids: int64 [B, T], committed tokens, the root included. For sequences of different lengths, no tokens
            [B, 0]; processors that look at tokens are then left out too.
    """

    def __init__(self, logits_processor: LogitsProcessorList, input_ids: torch.Tensor):
        known = PATH_WISE_PROCESSORS if input_ids.shape[1] else ROW_WISE_PROCESSORS
        self.logits_processor = LogitsProcessorList(p for p in logits_processor if is_among(p, known))
        self.input_ids = input_ids

    def distribution(self, logits: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """Computes q at K nodes, fp32 [B, K, V]. Every row is a distribution.

        Args:
            logits: [B, K, V], draft logits, already divided by the draft temperature.
            paths: int64 [B, K, d], the tokens on the path from the root's child to each node.
        """
        nodes, vocab = logits.shape[1:]
        committed = self.input_ids.repeat_interleave(nodes, dim=0)
        ids = torch.cat([committed, paths.flatten(0, 1).to(committed.device)], dim=1)
        scores = logits.to(committed.device, torch.float32, copy=True).view(-1, vocab)
        probs = self.logits_processor(ids, scores).softmax(-1)
        # If draft logits overflowed or a processor left no token, any distribution is as good as another.
        broken = ~probs.sum(-1, keepdim=True).isfinite()
        return torch.where(broken, 1 / vocab, probs).view(-1, nodes, vocab).to(logits.device)

    @staticmethod
    def draw(probs: torch.Tensor, width: int) -> torch.Tensor:
        """Draws tokens int64 [B, K, width] without replacement from [B, K, V]. Returns them in the order drawn.

        In an exponential race, the first `width` arrivals are draws without replacement. Tokens of probability 0 come
        last, and verification never accepts them.
        """
        arrivals = torch.empty_like(probs).exponential_().clamp_min(torch.finfo(probs.dtype).tiny)
        return (probs / arrivals).topk(width, dim=-1).indices
