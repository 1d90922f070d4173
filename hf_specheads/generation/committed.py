"""The rows that were committed since the last draft, which the draft head takes in next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from ..cache.slots import to_device
from .verification.accepted import Accepted


@dataclass
class NewRows:
    """The rows that a draft head takes in at the start of a round.

    Attributes:
        token_ids: int64 [B, M + 1], tokens of the M rows committed since the last draft, then the root.
        features: [B, M, F], the target's features of these rows; `None` for heads that read none.
        valid: bool [B, M], which of the rows are real; `None` if all are. A sequence that has padding, or accepted
            fewer tokens than others, starts with meaningless rows.
        counts: Number of real rows per sequence; `None` if all rows are real.
        later: Features [B, 1, F] of later plain steps, which [`joined`] appends to `features`. They are kept apart so
            that the features of a prompt are not copied with every plain step.
    """

    token_ids: torch.Tensor
    features: torch.Tensor | None
    valid: torch.Tensor | None = None
    counts: list[int] | None = None
    later: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of_prompt(
        cls, token_ids: torch.Tensor, features: torch.Tensor | None, padding_mask: torch.Tensor | None
    ) -> NewRows:
        """Makes the rows of a prompt whose first new token has been chosen.

        Args:
            token_ids: int64 [B, T + 1], the prompt and the first new token.
            features: [B, M, F], features of the last M positions of the prompt. M is less than T if a cache already
                held earlier tokens. M is greater than T if embeddings without tokens come first; only the last of
                their features is kept, because a row pairs a feature with the next token.
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
        # A single sequence needs no meaningless rows: its padding is cut off.
        kept = real[0].nonzero()[:, 0]
        features = None if features is None else features[:, kept.to(features.device)]
        return cls(torch.cat([token_ids[:, kept], token_ids[:, -1:]], dim=1), features)

    def followed_by(self, newer: NewRows) -> NewRows:
        """These rows, followed by the row that a plain step has committed for every sequence."""
        token_ids = torch.cat([self.token_ids, newer.token_ids[:, -1:]], dim=1)
        later = self.later if newer.features is None else [*self.later, newer.features[:, -1:]]
        if self.valid is None or self.counts is None:
            return NewRows(token_ids, self.features, later=later)
        valid = torch.nn.functional.pad(self.valid, (0, 1), value=True)
        return NewRows(token_ids, self.features, valid, [count + 1 for count in self.counts], later)

    def first(self, rows: int) -> NewRows:
        """Only the first `rows` rows, at least one, with the token after them in the place of the root."""
        later = self.token_ids.shape[1] - 1 - rows
        features = None if self.features is None else self.features[:, :rows]
        valid = None if self.valid is None else self.valid[:, :rows]
        counts = None if self.counts is None else [count - later for count in self.counts]
        return NewRows(self.token_ids[:, : rows + 1], features, valid, counts)

    def joined(self) -> NewRows:
        """The same rows, with all features in one tensor."""
        if not self.later or self.features is None:
            return self
        return replace(self, features=torch.cat([self.features, *self.later], dim=1), later=[])

    def with_validity(self) -> NewRows:
        """The same rows, with `valid` and `counts` filled in."""
        if self.valid is not None:
            return self
        batch, rows = self.token_ids.shape[0], self.token_ids.shape[1] - 1
        valid = torch.ones(batch, rows, dtype=torch.bool, device=self.token_ids.device)
        return replace(self, valid=valid, counts=[rows] * batch)

    def with_sequence(self, place: int, newcomer: NewRows) -> NewRows:
        """These rows, with the rows of a newcomer in the place of one sequence, or after the last."""
        whole = self.joined()
        parts = [whole.select_sequences([sequence]).of_one_sequence() for sequence in range(len(self.token_ids))]
        parts[place : place + 1] = [newcomer]
        counts = [part.token_ids.shape[1] - 1 for part in parts]
        most = max(counts)
        token_ids = torch.cat([torch.nn.functional.pad(part.token_ids, (most - count, 0))
                               for part, count in zip(parts, counts, strict=True)])  # fmt: skip
        features = None
        if newcomer.features is not None:
            rows = [torch.nn.functional.pad(part.features, (0, 0, most - count, 0))
                    for part, count in zip(parts, counts, strict=True) if part.features is not None]  # fmt: skip
            features = torch.cat(rows)
        if min(counts) == most:
            return NewRows(token_ids, features)
        index = torch.arange(most, device=token_ids.device)
        return NewRows(token_ids, features, index >= most - to_device(counts, index.device)[:, None], counts)

    def of_one_sequence(self) -> NewRows:
        """Only the real rows of a single sequence."""
        if self.counts is None:
            return self
        [count] = self.counts
        features = None if self.features is None else self.features[:, self.features.shape[1] - count :]
        return NewRows(self.token_ids[:, self.token_ids.shape[1] - count - 1 :], features)

    def select_sequences(self, kept: list[int]) -> NewRows:
        """The rows of some sequences of the batch."""
        index, all_features = to_device(kept, self.token_ids.device), self.joined().features
        features = None if all_features is None else all_features[index.to(all_features.device)]
        valid = None if self.valid is None else self.valid[index.to(self.valid.device)]
        counts = None if self.counts is None else [self.counts[sequence] for sequence in kept]
        return NewRows(self.token_ids[index], features, valid, counts)


@dataclass
class PackedPaths:
    """The accepted paths of one round, brought to the device in a single copy.

    Attributes:
        nodes: int64 [B, A], nodes of every path, the root first, padded with 0 on the right.
        late_nodes: int64 [B, A], the same nodes, padded with 0 on the left.
        token_ids: int64 [B, A + 1], the root and the emitted tokens, padded with 0 on the left.
        device_counts: int64 [B], number of nodes of every path.
        counts: The same numbers on the host.
        are_prefixes: Whether every path consists of the nodes 0, 1, 2, ...
    """

    nodes: torch.Tensor
    late_nodes: torch.Tensor
    token_ids: torch.Tensor
    device_counts: torch.Tensor
    counts: list[int]
    are_prefixes: bool

    @classmethod
    def of(
        cls, results: list[Accepted], roots: list[int], device: torch.device, longest: int | None = None
    ) -> PackedPaths:
        """Packs the accepted paths.

        Args:
            results: What was accepted, for every active sequence.
            roots: Token of the root, for every active sequence.
            device: Device of the tree.
            longest: Path length A to pad to; by default that of the longest path.
        """
        counts = [len(result.nodes) for result in results]
        most = longest or max(counts)
        are_prefixes = all(result.nodes == list(range(len(result.nodes))) for result in results)
        if counts == [most]:  # a single sequence without padding
            token_ids = to_device([[roots[0], *results[0].token_ids]], device)
            prefix, device_counts = _prefix(most, device)
            nodes = prefix if are_prefixes else to_device([results[0].nodes], device)
            return cls(nodes, nodes, token_ids, device_counts, counts, are_prefixes)
        packed = []
        for root, result, count in zip(roots, results, counts, strict=True):
            fill = [0] * (most - count)
            packed.append([*result.nodes, *fill, *fill, *result.nodes, *fill, root, *result.token_ids, count])
        nodes, late_nodes, token_ids, device_counts = to_device(packed, device).split([most, most, most + 1, 1], dim=1)
        return cls(nodes, late_nodes, token_ids, device_counts[:, 0], counts, are_prefixes)

    def rows(self, features: torch.Tensor | None) -> NewRows:
        """Makes the rows that the draft head takes in next, from the features [B, N, F] of the tree's nodes."""
        most = self.nodes.shape[1]
        if set(self.counts) == {most}:
            if features is not None and self.are_prefixes:
                return NewRows(self.token_ids, features[:, :most].clone())  # a copy, as in `at_nodes`
            return NewRows(self.token_ids, at_nodes(features, self.nodes))
        valid = torch.arange(most, device=self.nodes.device) >= most - self.device_counts[:, None]
        return NewRows(self.token_ids, at_nodes(features, self.late_nodes), valid, self.counts)


@lru_cache(maxsize=128)
def _prefix(nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes 0, 1, 2, ... of a path, int64 [1, nodes], and their number, int64 [1]. Shared: do not write to them."""
    return torch.arange(nodes, device=device)[None], torch.full((1,), nodes, device=device)


def at_nodes(features: torch.Tensor | None, nodes: torch.Tensor) -> torch.Tensor | None:
    """Features [B, A, F] at nodes [B, A] of a tree with features [B, N, F].

    The result is a copy, because the next replay of a CUDA graph overwrites the outputs of the last one.
    """
    if features is None:
        return None
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
