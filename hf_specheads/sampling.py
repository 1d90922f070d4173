"""From target logits to tokens, through transformers' processors. The only place that draws random numbers."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

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


class TokenSampler:
    """Chooses the target's token at a node exactly as plain `generate` would.

    Args:
        logits_processor: Processors and warpers, in the order `generate` prepared them.
        do_sample: Draw from the processed distribution instead of taking its argmax.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool):
        self.logits_processor = logits_processor
        self.do_sample = do_sample

    @property
    def row_wise(self) -> bool:
        """Whether every processor looks at one row of logits only, never at the tokens before it."""
        module = "transformers.generation.logits_process"
        return all(
            type(p).__name__ in ROW_WISE_PROCESSORS and type(p).__module__ == module for p in self.logits_processor
        )

    def at_all_nodes(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens at all nodes of a tree at once, for row-wise processors.

        Args:
            input_ids: int64 [B, T], committed tokens.
            logits: [B, N, V], raw target logits.

        Returns:
            Tokens int64 [B, N] and processed scores [B, N, V] (the raw logits where nothing had to be processed).
        """
        if not self.logits_processor and not self.do_sample:
            return logits.argmax(-1), logits
        batch, nodes, vocab = logits.shape
        rows = input_ids.repeat_interleave(nodes, dim=0)
        scores = self.logits_processor(rows, logits.to(torch.float32, copy=True).view(-1, vocab))
        return self._choose(scores).view(batch, nodes), scores.view(batch, nodes, vocab)

    def at_node(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token at one node: one call of the processors, one draw.

        Args:
            input_ids: int64 [1, T'], committed tokens and the path to the node.
            logits: [1, V], raw target logits at the node.

        Returns:
            Token int64 [1] and processed scores fp32 [1, V].
        """
        scores = self.logits_processor(input_ids, logits.to(torch.float32, copy=True))
        return self._choose(scores), scores

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
