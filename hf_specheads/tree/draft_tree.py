"""Draft trees as values: tokens, parents and depths in tensors; masks and paths derive from the parents."""

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
    """How the nodes of a tree with sampled children were drawn: what the exact rule for such trees needs.

    Attributes:
        probs: fp32 [B, E, V], distribution each of the E nodes with children drew them from, without replacement.
        parents: int64 [E], these nodes, the same in all sequences.
        children: int64 [E, R], their children in the order drawn, -1 where a node has fewer than R.
    """

    probs: torch.Tensor
    parents: torch.Tensor
    children: torch.Tensor

    def of_sequence(self, sequence: int) -> SampledChildren:
        """Those of one sequence of the batch."""
        return SampledChildren(self.probs[sequence : sequence + 1], self.parents, self.children)

    def to(self, device: torch.device) -> SampledChildren:
        """The same on another device."""
        return SampledChildren(self.probs.to(device), self.parents.to(device), self.children.to(device))


@dataclass(frozen=True)
class DraftTree:
    """A draft tree of N nodes for each of B sequences; node 0 is the root, the newest committed token.

    Attributes:
        token_ids: int64 [B, N].
        parents: int64 [B, N], index of each node's parent, -1 for the root; a parent precedes its children.
        depths: int64 [B, N], the root has depth 0.
        scores: fp32 [B, N], sum of draft log-probabilities from the root (root 0).
        max_depth: Upper bound D of `depths`, known without looking at the tensors.
        sampled: How the children were drawn; `None` where they are the draft's most probable tokens.
        shape: Masks and paths of a shape that was known beforehand; `None` where they have to be made.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    max_depth: int
    sampled: SampledChildren | None = None
    shape: TreeShape | None = None

    @property
    def num_nodes(self) -> int:
        """N, including the root."""
        return self.token_ids.shape[1]

    @staticmethod
    def root_only(root_ids: torch.Tensor) -> DraftTree:
        """A tree without drafted nodes, from root tokens [B]."""
        # A compiler looks through what is kept, and warns its user of that.
        of_roots = _of_roots.__wrapped__ if torch.compiler.is_compiling() else _of_roots
        return DraftTree(root_ids[:, None], *of_roots(len(root_ids), root_ids.device), 0)

    @property
    def ancestor_mask(self) -> torch.Tensor:
        """bool [B, N, N]: `mask[b, i, j]` says that j is i itself or an ancestor of i.

        Doubling: after step s every node knows its ancestors up to 2^s generations back. Kept, because verification
        needs it again after the target's forward.
        """
        if self.shape is not None:
            return self.shape.ancestor_mask.expand(self.parents.shape[0], -1, -1)
        known = getattr(self, "_ancestor_mask", None)  # functools.cached_property locks, which cannot be compiled
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
        """Root-to-node paths, int64 [B, max_depth + 1], padded at the end with the node itself.

        Args:
            nodes: int64 [B], the node each path ends in.
        """
        if self.shape is not None:
            return self.shape.paths[nodes]
        current, steps = nodes, [nodes]
        for _ in range(self.max_depth):
            current = self.parents.gather(1, current[:, None])[:, 0].clamp_min(0)
            steps.append(current)
        # The walk ends in repeated roots; shift each so that it starts at its root exactly once.
        walk = torch.stack(steps[::-1], dim=1)
        depth = self.depths.gather(1, nodes[:, None])
        offset = torch.arange(self.max_depth + 1, device=nodes.device)[None] + self.max_depth - depth
        return walk.gather(1, offset.clamp_max(self.max_depth))

    def of_sequence(self, sequence: int) -> DraftTree:
        """The tree of one sequence of the batch."""
        sampled = None if self.sampled is None else self.sampled.of_sequence(sequence)
        return self._with(lambda tensor: tensor[sequence : sequence + 1], sampled, self.shape)

    def rows_alone(self) -> DraftTree:
        """What a forward over the tree reads, tokens, depths and ancestors; the same for trees of all kinds."""
        tokens, depths, ancestors = map(_packed, (self.token_ids, self.depths, self.ancestor_mask))
        shape = TreeShape((), tokens, depths, ancestors, tokens)
        return DraftTree(tokens, tokens, depths, tokens, 0, shape=shape)

    def to(self, device: torch.device) -> DraftTree:
        """The tree on another device."""
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
        """The tree with all its tensors changed."""
        return DraftTree(
            token_ids=change(self.token_ids),
            parents=change(self.parents),
            depths=change(self.depths),
            scores=change(self.scores),
            max_depth=self.max_depth,
            sampled=sampled,
            shape=shape,
        )


@lru_cache(maxsize=64)
def _of_roots(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents, depths and scores of trees that are a root, [B, 1] each; not to be written to."""
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
    """Keeps the best drafted candidates, in the order they were generated, under a root (EAGLE-2, section 4.2).

    Log-probabilities are at most 0, so a parent never scores below its child and the selection stays connected; ties
    (a child of probability 1) are broken in favour of the earlier candidate, the parent.

    Args:
        token_ids, parents, depths: int64 [B, C] candidates; parents count candidates from 1, 0 is the root.
        scores: fp32 [B, C].
        root_ids: int64 [B].
        num_drafted: Nodes to keep, root excluded.
        max_depth: D.
    """
    batch, candidates = scores.shape
    if num_drafted < candidates:
        # The stable sort, unlike topk, takes the earlier of two equal scores.
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
