"""Adding a further path to a draft tree, without duplicating the part of the path that the tree already holds."""

from __future__ import annotations

import torch

from .draft_tree import DraftTree


def graft_path(tree: DraftTree, path: torch.Tensor, nodes: int) -> DraftTree:
    """Returns the tree with a path of tokens below its root, which always adds exactly `nodes` new nodes.

    The longest prefix of the path that the tree already holds is reused, and the new nodes continue from there. The
    shapes are therefore known in advance, the path never gives two siblings the same token, and the host does not wait
    for the device. The new nodes have no draft probability, so they take the score of the node they are attached to.

    Args:
        tree: Draft tree of B sequences and N nodes, whose children were chosen, not drawn.
        path: int64 [B, >= nodes + tree.max_depth], the tokens from the root's child on.
        nodes: New nodes per sequence, at least 1.

    Raises:
        ValueError: if the path may be too short, or the children of the tree were drawn.
    """
    if tree.sampled is not None:
        raise ValueError("a path cannot be grafted into a tree of drawn children; use children='top_k'.")
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
        num_copied=tree.num_copied + nodes,
    )
