"""What was committed since the last round: the rows a draft head takes in next."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass
class NewRows:
    """What a draft head takes in at the start of a round.

    Attributes:
        token_ids: int64 [B, M + 1], tokens of the M rows committed since the last round, then the root.
        features: [B, M, F], the target's features of these rows; `None` for heads that read none.
        valid: bool [B, M], which of the rows are real; `None` if all are. Rows of a batch that accepted fewer tokens
            than others, or have padding, start with columns of no meaning.
        counts: Real rows, per batch row; `None` where all are.
    """

    token_ids: torch.Tensor
    features: torch.Tensor | None
    valid: torch.Tensor | None = None
    counts: list[int] | None = None

    @classmethod
    def of_prompt(
        cls, token_ids: torch.Tensor, features: torch.Tensor | None, padding_mask: torch.Tensor | None
    ) -> NewRows:
        """Rows of a prompt whose first token has been chosen.

        Args:
            token_ids: int64 [B, T + 1], prompt and first token.
            features: [B, M, F], features of the last M tokens of the prompt, or of more: earlier ones came in a cache,
                and embeddings without tokens cannot be paired.
            padding_mask: int or bool [B, >= T], 0 on padding of the prompt; `None` without padding.
        """
        rows = token_ids.shape[1] - 1
        if features is not None:
            rows = min(features.shape[1], token_ids.shape[1])
            features = features[:, -rows:]
        token_ids = token_ids[:, -rows - 1 :]
        if token_ids.shape[1] == rows:
            token_ids = torch.nn.functional.pad(token_ids, (1, 0))
        if padding_mask is None or rows == 0:
            return cls(token_ids, features)
        real = padding_mask[:, -rows:].bool()
        if len(real) > 1:
            return cls(token_ids, features, real, real.sum(1).tolist())
        # Of a single row, padding is left out.
        kept = real[0].nonzero()[:, 0]
        features = None if features is None else features[:, kept.to(features.device)]
        return cls(torch.cat([token_ids[:, kept], token_ids[:, -1:]], dim=1), features)

    def followed_by(self, newer: NewRows) -> NewRows:
        """These rows and those of a plain step after them, which has committed one for every batch row."""
        token_ids = torch.cat([self.token_ids, newer.token_ids[:, -1:]], dim=1)
        features = None if self.features is None else torch.cat([self.features, newer.features[:, -1:]], dim=1)
        if self.valid is None:
            return NewRows(token_ids, features)
        valid = torch.nn.functional.pad(self.valid, (0, 1), value=True)
        return NewRows(token_ids, features, valid, [count + 1 for count in self.counts])

    def with_validity(self) -> NewRows:
        """The same, saying of every row whether it is real."""
        if self.valid is not None:
            return self
        batch, rows = self.token_ids.shape[0], self.token_ids.shape[1] - 1
        valid = torch.ones(batch, rows, dtype=torch.bool, device=self.token_ids.device)
        return replace(self, valid=valid, counts=[rows] * batch)

    def select_rows(self, kept: torch.Tensor) -> NewRows:
        """Some rows of the batch, int64 [B']."""
        features = None if self.features is None else self.features[kept.to(self.features.device)]
        valid = None if self.valid is None else self.valid[kept.to(self.valid.device)]
        counts = None if self.counts is None else [self.counts[row] for row in kept.tolist()]
        return NewRows(self.token_ids[kept.to(self.token_ids.device)], features, valid, counts)
