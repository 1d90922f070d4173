"""Draft trees as values: token ids, parents and depths as tensors, from which masks and paths are derived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from .shape import TreeShape


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone().view(tensor.shape)


@dataclass(frozen=True)
class SampledChildren:
    """How the children of a tree were drawn, as the exact verification rule for sampled children needs it.

    Attributes:
        probs: fp32 [B, E, V], the distribution from which each of the E nodes with children drew them, without
            replacement.
        parents: int64 [E], the nodes with children; they are the same in all sequences.
        children: int64 [E, R], the children of each node in the order drawn, -1 where a node has fewer than R.
    """

    probs: torch.Tensor
    parents: torch.Tensor
    children: torch.Tensor

    def of_sequences(self, sequences: slice | list[int]) -> SampledChildren:
        """Returns the drawn children of some sequences of the batch."""
        return SampledChildren(self.probs[sequences], self.parents, self.children)

    def to(self, device: torch.device) -> SampledChildren:
        """Returns the drawn children on another device."""
        return SampledChildren(self.probs.to(device), self.parents.to(device), self.children.to(device))


@dataclass(frozen=True)
class DraftTree:
    """A draft tree of N nodes for each of B sequences; node 0 is the root, the newest committed token.

    Attributes:
        token_ids: int64 [B, N], token of each node.
        parents: int64 [B, N], index of each node's parent, -1 for the root. A parent precedes its children.
        depths: int64 [B, N], depth of each node; the root has depth 0.
        scores: fp32 [B, N], sum of the draft log-probabilities from the root to each node (0 for the root).
        max_depth: Upper bound D of `depths`, known without reading the tensors.
        sampled: How the children were drawn; `None` if they are the draft's most probable tokens.
        shape: Masks and paths of a tree whose shape was known in advance; `None` if they are computed on demand.
        num_copied: How many nodes, the last ones, were copied from the text and not drafted.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    max_depth: int
    sampled: SampledChildren | None = None
    shape: TreeShape | None = None
    num_copied: int = 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes N, including the root."""
        return self.token_ids.shape[1]

    @staticmethod
    def root_only(root_ids: torch.Tensor) -> DraftTree:
        """Returns trees without drafted nodes, from root tokens [B]."""
        # torch.compile traces through an lru_cache and warns about it, so the cache is bypassed under compilation.
        of_roots = _of_roots.__wrapped__ if torch.compiler.is_compiling() else _of_roots
        return DraftTree(root_ids[:, None], *of_roots(len(root_ids), root_ids.device), 0)

    @property
    def ancestor_mask(self) -> torch.Tensor:
        """bool [B, N, N]: `mask[b, i, j]` is true if node j is node i itself or one of its ancestors.

        Computed by doubling: after step s every node knows its ancestors up to 2^s - 1 generations back. The result
        is cached because verification needs it again after the target's forward.
        """
        if self.shape is not None:
            return self.shape.ancestor_mask.expand(self.parents.shape[0], -1, -1)
        known = getattr(self, "_ancestor_mask", None)  # cached_property may take a lock, which cannot be compiled
        if known is not None:
            return known
        batch, nodes = self.parents.shape
        mask = torch.eye(nodes, dtype=torch.bool, device=self.parents.device).expand(batch, -1, -1)
        jump = self.parents.clamp_min(0)
        reached = 0
        while reached < self.max_depth:
            mask = mask | mask.gather(1, jump[:, :, None].expand(-1, -1, nodes))
            jump = jump.gather(1, jump)
            reached = 2 * reached + 1
        object.__setattr__(self, "_ancestor_mask", mask)
        return mask

    def path_to(self, nodes: torch.Tensor) -> torch.Tensor:
        """Returns root-to-node paths, int64 [B, max_depth + 1], padded at the end with the node itself.

        Args:
            nodes: int64 [B], the last node of each path.
        """
        if self.shape is not None:
            return self.shape.paths[nodes]
        current, steps = nodes, [nodes]
        for _ in range(self.max_depth):
            current = self.parents.gather(1, current[:, None])[:, 0].clamp_min(0)
            steps.append(current)
        # A walk upwards repeats the root until max_depth steps are done; the shift leaves each root only once.
        walk = torch.stack(steps[::-1], dim=1)
        depth = self.depths.gather(1, nodes[:, None])
        offset = torch.arange(self.max_depth + 1, device=nodes.device)[None] + self.max_depth - depth
        return walk.gather(1, offset.clamp_max(self.max_depth))

    def of_sequence(self, sequence: int) -> DraftTree:
        """Returns the tree of one sequence of the batch."""
        return self.of_sequences(slice(sequence, sequence + 1))

    def of_sequences(self, sequences: slice | list[int]) -> DraftTree:
        """Returns the trees of some sequences of the batch."""
        sampled = None if self.sampled is None else self.sampled.of_sequences(sequences)
        return self._with(lambda tensor: tensor[sequences], sampled, self.shape)

    def rows_alone(self) -> DraftTree:
        """Returns only what a forward over the tree reads (tokens, depths, ancestors), in one form for all kinds."""
        tokens, depths, ancestors = map(_packed, (self.token_ids, self.depths, self.ancestor_mask))
        shape = TreeShape((), tokens, depths, ancestors, tokens)
        return DraftTree(tokens, tokens, depths, tokens, 0, shape=shape)

    def to(self, device: torch.device) -> DraftTree:
        """Returns the tree on another device."""
        if self.token_ids.device == device:
            return self
        sampled = None if self.sampled is None else self.sampled.to(device)
        shape = None if self.shape is None else self.shape.to(device)
        return self._with(lambda tensor: tensor.to(device), sampled, shape)

    def _with(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        sampled: SampledChildren | None,
        shape: TreeShape | None,
    ) -> DraftTree:
        """Returns the tree with `change` applied to all its tensors."""
        return DraftTree(
            token_ids=change(self.token_ids),
            parents=change(self.parents),
            depths=change(self.depths),
            scores=change(self.scores),
            max_depth=self.max_depth,
            sampled=sampled,
            shape=shape,
            num_copied=self.num_copied,
        )


@lru_cache(maxsize=64)
def _of_roots(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents, depths and scores [B, 1] of trees that consist of a root. They are cached: never write to them."""
    depths = torch.zeros(batch, 1, dtype=torch.long, device=device)
    return depths - 1, depths, torch.zeros(batch, 1, dtype=torch.float32, device=device)


def select_nodes(
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    root_ids: torch.Tensor,
    num_drafted: int,
    max_depth: int,
) -> DraftTree:
    """Keeps the best drafted candidates under a root, in the order they were generated (EAGLE-2, section 4.2).

    Log-probabilities are at most 0, so a parent never scores below its child and the selection stays connected. Ties
    (a child of probability 1) are broken in favour of the earlier candidate, which is the parent.

    Args:
        token_ids, parents, depths: int64 [B, C], the candidates. `parents` count candidates from 1; 0 is the root.
        scores: fp32 [B, C], cumulative log-probabilities of the candidates.
        root_ids: int64 [B], tokens of the roots.
        num_drafted: Number of nodes to keep, root excluded.
        max_depth: Upper bound D of `depths`.
    """
    batch, candidates = scores.shape
    if num_drafted < candidates:
        # Unlike topk, a stable sort takes the earlier of two candidates with equal scores.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_drafted]
        kept = order.sort(dim=1).values
    else:
        kept = torch.arange(candidates, device=scores.device)[None].expand(batch, -1)
    new_index = torch.zeros(batch, candidates + 1, dtype=torch.long, device=scores.device)
    numbers = torch.arange(1, kept.shape[1] + 1, device=scores.device)[None].expand(batch, -1)
    new_index.scatter_(1, kept + 1, numbers)
    root = DraftTree.root_only(root_ids)
    return DraftTree(
        token_ids=torch.cat([root.token_ids, token_ids.gather(1, kept)], dim=1),
        parents=torch.cat([root.parents, new_index.gather(1, parents.gather(1, kept))], dim=1),
        depths=torch.cat([root.depths, depths.gather(1, kept)], dim=1),
        scores=torch.cat([root.scores, scores.gather(1, kept)], dim=1),
        max_depth=max_depth,
    )
