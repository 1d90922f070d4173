"""Draft trees of every kind, random trees, and naive Python code to compare the tensor code with."""

from __future__ import annotations

import random

import torch

from hf_specheads import DraftTreeConfig
from hf_specheads.tree.draft_tree import DraftTree

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0), (0, 1, 1), (0, 0, 0, 0))
OPTIMAL = ((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))
# A small tree of every kind.
TREES = {
    "chain": DraftTreeConfig(kind="chain", depth=4),
    "static": DraftTreeConfig(kind="static", choices=CHOICES),
    "dynamic": DraftTreeConfig(depth=4, top_k=3, total_tokens=12),
    "optimal": DraftTreeConfig(kind="optimal", choices=OPTIMAL),
}


def random_tree(seed: int, nodes: int = 14, depth: int = 4, batch: int = 1, vocab: int = 99) -> DraftTree:
    """Makes a random tree per row. Siblings have different tokens (so `vocab` > `nodes`), and parents precede
    children."""
    rng = random.Random(seed)
    tokens, parents, depths = [], [], []
    for _ in range(batch):
        row_tokens, row_parents, row_depths, taken = [rng.randrange(3, vocab)], [-1], [0], set()
        while len(row_tokens) < nodes:
            parent = rng.choice([node for node in range(len(row_tokens)) if row_depths[node] < depth])
            token = rng.randrange(3, vocab)
            if (parent, token) in taken:
                continue
            taken.add((parent, token))
            row_tokens.append(token)
            row_parents.append(parent)
            row_depths.append(row_depths[parent] + 1)
        tokens.append(row_tokens)
        parents.append(row_parents)
        depths.append(row_depths)
    ids = torch.tensor(tokens)
    return DraftTree(ids, torch.tensor(parents), torch.tensor(depths), torch.zeros(ids.shape), depth)


def path_of(parents: list[int], node: int) -> list[int]:
    """Returns the path from the root to a node, by following the parents."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def row(tree: DraftTree, index: int) -> DraftTree:
    """Returns one batch row as a tree of its own."""
    part = slice(index, index + 1)
    return DraftTree(tree.token_ids[part], tree.parents[part], tree.depths[part], tree.scores[part], tree.max_depth)
