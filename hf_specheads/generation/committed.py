"""What was committed since the last round: the rows a draft head takes in next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from ..cache.slots import to_device
from .verification.accepted import Accepted


@dataclass
class NewRows:
    """What a draft head takes in at the start of a round.

    Attributes:
        token_ids: int64 [B, M + 1], tokens of the M rows committed since the last round, then the root.
        features: [B, M, F], the target's features of these rows; `None` for heads that read none.
        valid: bool [B, M], which of the rows are real; `None` if all are. Rows of a batch that accepted fewer tokens
            than others, or have padding, start with columns of no meaning.
        counts: Real rows, per sequence; `None` where all are.
        later: Features [B, 1, F] of plain steps since, with which `features` ends once they are [`joined`]: a prompt's
            are not copied with every step.
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
        # Of a single sequence, padding is left out.
        kept = real[0].nonzero()[:, 0]
        features = None if features is None else features[:, kept.to(features.device)]
        return cls(torch.cat([token_ids[:, kept], token_ids[:, -1:]], dim=1), features)

    def followed_by(self, newer: NewRows) -> NewRows:
        """These rows and those of a plain step after them, which has committed one for every sequence."""
        token_ids = torch.cat([self.token_ids, newer.token_ids[:, -1:]], dim=1)
        later = self.later if newer.features is None else [*self.later, newer.features[:, -1:]]
        if self.valid is None or self.counts is None:
            return NewRows(token_ids, self.features, later=later)
        valid = torch.nn.functional.pad(self.valid, (0, 1), value=True)
        return NewRows(token_ids, self.features, valid, [count + 1 for count in self.counts], later)

    def first(self, rows: int) -> NewRows:
        """The first rows alone, at least one, with the token after them in the place of the root."""
        later = self.token_ids.shape[1] - 1 - rows
        features = None if self.features is None else self.features[:, :rows]
        valid = None if self.valid is None else self.valid[:, :rows]
        counts = None if self.counts is None else [count - later for count in self.counts]
        return NewRows(self.token_ids[:, : rows + 1], features, valid, counts)

    def joined(self) -> NewRows:
        """The same, with all features in one tensor."""
        if not self.later or self.features is None:
            return self
        return replace(self, features=torch.cat([self.features, *self.later], dim=1), later=[])

    def with_validity(self) -> NewRows:
        """The same, saying of every row whether it is real."""
        if self.valid is not None:
            return self
        batch, rows = self.token_ids.shape[0], self.token_ids.shape[1] - 1
        valid = torch.ones(batch, rows, dtype=torch.bool, device=self.token_ids.device)
        return replace(self, valid=valid, counts=[rows] * batch)

    def with_sequence(self, place: int, newcomer: NewRows) -> NewRows:
        """These rows, with those of another sequence in the place of one of these, or after the last."""
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
        """The real rows alone, of rows of a single sequence."""
        if self.counts is None:
            return self
        [count] = self.counts
        features = None if self.features is None else self.features[:, self.features.shape[1] - count :]
        return NewRows(self.token_ids[:, self.token_ids.shape[1] - count - 1 :], features)

    def select_sequences(self, kept: list[int]) -> NewRows:
        """Those of some sequences of the batch."""
        index, all_features = to_device(kept, self.token_ids.device), self.joined().features
        features = None if all_features is None else all_features[index.to(all_features.device)]
        valid = None if self.valid is None else self.valid[index.to(self.valid.device)]
        counts = None if self.counts is None else [self.counts[sequence] for sequence in kept]
        return NewRows(self.token_ids[index], features, valid, counts)


@dataclass
class PackedPaths:
    """The accepted paths of one round, on the device by a single copy.

    Attributes:
        nodes: int64 [B, A], nodes of every path, the root first, filled up with 0 behind.
        late_nodes: int64 [B, A], the same, filled up with 0 before.
        token_ids: int64 [B, A + 1], root and emitted tokens, filled up with 0 before.
        device_counts: int64 [B], nodes of every path.
        counts: The same on the host.
        are_prefixes: Whether all paths are the nodes 0, 1, 2, ...
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
        """Packs what was accepted.

        Args:
            results: Of every active sequence.
            roots: Its root's token.
            device: Of the tree.
            longest: A to fill up to; by default the longest path.
        """
        counts = [len(result.nodes) for result in results]
        most = longest or max(counts)
        are_prefixes = all(result.nodes == list(range(len(result.nodes))) for result in results)
        if counts == [most]:  # of one sequence, nothing to fill up
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
        """What the draft head takes in next, from the features [B, N, F] of the tree's nodes."""
        most = self.nodes.shape[1]
        if set(self.counts) == {most}:
            if features is not None and self.are_prefixes:
                return NewRows(self.token_ids, features[:, :most].clone())  # as of other nodes: a copy
            return NewRows(self.token_ids, at_nodes(features, self.nodes))
        valid = torch.arange(most, device=self.nodes.device) >= most - self.device_counts[:, None]
        return NewRows(self.token_ids, at_nodes(features, self.late_nodes), valid, self.counts)


@lru_cache(maxsize=128)
def _prefix(nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The nodes 0, 1, 2, ... of a path, int64 [1, nodes], and how many they are, int64 [1]; not to be written to."""
    return torch.arange(nodes, device=device)[None], torch.full((1,), nodes, device=device)


def at_nodes(features: torch.Tensor | None, nodes: torch.Tensor) -> torch.Tensor | None:
    """Features [B, A, F] at nodes [B, A] of a tree with features [B, N, F]: a copy, as the next replay of a CUDA graph
    writes over what the last one has left."""
    if features is None:
        return None
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
