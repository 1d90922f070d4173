"""Draft trees with a further path in them: what of the path the tree holds already is not drafted twice."""

from __future__ import annotations

import torch

from .draft_tree import DraftTree


def graft_path(tree: DraftTree, path: torch.Tensor, nodes: int) -> DraftTree:
    """The tree with a path of tokens below its root: `nodes` new nodes, whatever part of the path it had before.

    The longest beginning of the path that the tree holds is shared with it, and the new nodes go on from there. So
    shapes are known beforehand, no two siblings carry the same token on account of the path, and nothing waits for the
    device. New nodes have the score of the node they hang on: nobody gave them a probability.

    Args:
        tree: Draft tree of B sequences and N nodes, its children chosen, not drawn.
        path: int64 [B, >= nodes + tree.max_depth], tokens from the root's child on.
        nodes: New nodes per sequence, at least 1.

    Raises:
        ValueError: for a path that may end too early, or a tree whose children were drawn.
    """
    if tree.sampled is not None:
        raise ValueError("a path cannot be grafted into a tree of drawn children; draw none, children='top_k'.")
    if path.shape[1] < nodes + tree.max_depth:
        raise ValueError(
            f"{nodes} new nodes in a tree of depth {tree.max_depth} need a path of {nodes + tree.max_depth} tokens, "
            f"got {path.shape[1]}."
        )
    batch, before = tree.token_ids.shape
    node, shared = tree.parents.new_zeros(batch), tree.parents.new_zeros(batch)
    on_path = torch.ones_like(node, dtype=torch.bool)
    for step in range(tree.max_depth):
        child = (tree.parents == node[:, None]) & (tree.token_ids == path[:, step, None])  # [B, N]
        on_path = on_path & child.any(dim=1)
        node = torch.where(on_path, child.int().argmax(dim=1), node)
        shared = shared + on_path
    steps = shared[:, None] + torch.arange(nodes, device=path.device)  # [B, nodes]
    chain = torch.arange(before, before + nodes - 1, device=path.device).expand(batch, -1)
    return DraftTree(
        token_ids=torch.cat([tree.token_ids, path.gather(1, steps)], dim=1),
        parents=torch.cat([tree.parents, node[:, None], chain], dim=1),
        depths=torch.cat([tree.depths, steps + 1], dim=1),
        scores=torch.cat([tree.scores, tree.scores.gather(1, node[:, None]).expand(-1, nodes)], dim=1),
        max_depth=tree.max_depth + nodes,
    )
