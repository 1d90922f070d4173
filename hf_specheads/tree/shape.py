"""Trees whose shape is known in advance (chains, static and optimal trees): levels, masks and paths, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .config import DraftTreeConfig

Paths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FixedLevel:
    """One level of a tree of fixed shape, with n nodes of which e have children.

    Attributes:
        width: Number of children to take per node of the level above: the highest rank + 1.
        parent: int64 [n], each node's parent as an index into those nodes of the level above that have children.
        rank: int64 [n], rank of each node among its parent's children.
        parent_node: int64 [n], index of each node's parent in the whole tree.
        expanded: int64 [e], the nodes of this level that have children.
        visible: bool [e, R], which of the R nodes expanded so far (root excluded) are ancestors of each expanded node,
            or the node itself.
        link: Whether the level is a link of a chain: a single node, the favourite child of the only node above.
        sees_all: Whether every expanded node descends from all nodes expanded so far.
    """

    width: int
    parent: torch.Tensor
    rank: torch.Tensor
    parent_node: torch.Tensor
    expanded: torch.Tensor
    visible: torch.Tensor
    link: bool
    sees_all: bool


@dataclass(frozen=True, eq=False)
class TreeShape:
    """The shape of a whole tree of N nodes and D levels. Instances compare and hash by identity.

    Attributes:
        levels: The levels below the root.
        parents, depths: int64 [1, N], as in [`DraftTree`].
        ancestor_mask: bool [1, N, N], as in [`DraftTree`].
        paths: int64 [N, D + 1], the nodes from the root to each node, padded at the end with the node itself.
    """

    levels: tuple[FixedLevel, ...]
    parents: torch.Tensor
    depths: torch.Tensor
    ancestor_mask: torch.Tensor
    paths: torch.Tensor

    @property  # cached_property takes a lock before Python 3.12, which torch.compile cannot trace
    def is_chain(self) -> bool:
        """Whether the tree is known to be a chain, i.e. every level is a link."""
        return len(self.levels) > 0 and all(level.link for level in self.levels)

    def to(self, device: torch.device) -> TreeShape:
        """Returns the shape for verification on another device. The levels, which only drafting needs, stay behind."""
        tensors = (self.parents, self.depths, self.ancestor_mask, self.paths)
        return TreeShape(self.levels, *(tensor.to(device) for tensor in tensors))


def shape_of(tree: DraftTreeConfig, depth: int, device: torch.device) -> TreeShape:
    """Returns the shape of a tree whose shape is known in advance, cut at `depth`.

    This is called in every round, so the cached shape of a chain is found by its depth, without building its paths.
    """
    if tree.kind == "chain":
        return chain_shape(min(depth, tree.depth), device)
    return fixed_shape(tree.paths, depth, device)


@lru_cache(maxsize=128)
def chain_shape(depth: int, device: torch.device) -> TreeShape:
    """Returns the shape of a chain of `depth` drafted nodes."""
    return fixed_shape(tuple((0,) * length for length in range(1, depth + 1)), depth, device)


@lru_cache(maxsize=128)
def fixed_shape(paths: Paths, depth: int, device: torch.device) -> TreeShape:
    """Returns the shape of a tree given by its paths of child ranks (sorted by length), cut at `depth`."""
    paths = tuple(path for path in paths if len(path) <= depth)
    nodes = ((), *paths)
    node_of = {path: node for node, path in enumerate(nodes)}
    depth = max(map(len, paths))
    way = [[node_of[path[:length]] for length in range(depth + 1)] for path in nodes]
    table = torch.tensor(way, device=device)
    return TreeShape(
        levels=_levels(paths, depth, node_of, device),
        parents=torch.tensor([[-1, *(node_of[path[:-1]] for path in paths)]], device=device),
        depths=torch.tensor([[len(path) for path in nodes]], device=device),
        ancestor_mask=(table[:, :, None] == torch.arange(len(nodes), device=device)).any(1)[None],
        paths=table,
    )


def _levels(paths: Paths, depth: int, node_of: dict, device: torch.device) -> tuple[FixedLevel, ...]:
    inner = {path[:-1] for path in paths}
    drafted = [path for path in paths if path in inner]
    levels = []
    above: list[tuple[int, ...]] = [()]
    for length in range(1, depth + 1):
        here = [path for path in paths if len(path) == length]
        expanded = [path for path in here if path in inner]
        seen = [path for path in drafted if len(path) <= length]
        visible = [[path[: len(other)] == other for other in seen] for path in expanded]
        levels.append(
            FixedLevel(
                width=1 + max(path[-1] for path in here),
                parent=torch.tensor([above.index(path[:-1]) for path in here], device=device),
                rank=torch.tensor([path[-1] for path in here], device=device),
                parent_node=torch.tensor([node_of[path[:-1]] for path in here], device=device),
                expanded=torch.tensor([here.index(path) for path in expanded], dtype=torch.long, device=device),
                visible=torch.tensor(visible, dtype=torch.bool, device=device).view(len(expanded), len(seen)),
                link=len(above) == len(here) == 1 and here[0][-1] == 0,
                sees_all=all(all(row) for row in visible),
            )
        )
        above = expanded
    return tuple(levels)


@lru_cache(maxsize=128)
def fixed_children(paths: Paths, depth: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nodes with children, int64 [E], level by level, and their children by rank, int64 [E, R].

    Missing children are -1. Nodes are numbered as in [`fixed_shape`].
    """
    paths = tuple(path for path in paths if len(path) <= depth)
    inner = sorted({path[:-1] for path in paths}, key=lambda path: (len(path), path))
    node_of = {(): 0} | {path: node for node, path in enumerate(paths, start=1)}
    ranks = range(1 + max(path[-1] for path in paths))
    children = [[node_of.get((*path, rank), -1) for rank in ranks] for path in inner]
    return torch.tensor([node_of[path] for path in inner], device=device), torch.tensor(children, device=device)
