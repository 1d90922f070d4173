"""What a round over any tree tells about chains, and which child was right where the favourite was wrong.

The favourite of a node is its most probable child. A tree contains the chain of its favourites, so its rounds also
tell how that chain would have fared alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...contract import DraftingContract


@dataclass(frozen=True)
class Favourites:
    """What became of the chain of favourites in the tree of one sequence; a chain consists of it alone.

    Attributes:
        accepted: How many favourites in a row were right.
        depth: How many favourites there were to judge.
        rank: Rank of the child that was right where the next favourite (rank 0) was wrong; 0 if all were right.
        at_least: The right child was not in the tree, so `rank` is a lower bound.
    """

    accepted: int
    depth: int
    rank: int = 0
    at_least: bool = False


def favourites_of_tree(parents: Sequence[int], scores: Sequence[float], nodes: Sequence[int]) -> Favourites:
    """What a tree of the most probable children tells about its favourites.

    Args:
        parents: Parent of each node, -1 for the root.
        scores: Scores of the nodes; the favourite has the highest score among siblings.
        nodes: The accepted path, the root first.
    """
    for place, node in enumerate(nodes):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if not children:
            return Favourites(place, place)
        if place + 1 == len(nodes):
            return Favourites(place, place + 1, len(children), at_least=True)
        better = sum(scores[child] > scores[nodes[place + 1]] for child in children)
        if better:
            return Favourites(place, place + 1, better)
    raise ValueError(f"the path {list(nodes)} of a tree was expected to begin with its root, node 0.")


def favourites_of_chain(
    head: DraftingContract, logits: Sequence[torch.Tensor], depth: int, emitted: Sequence[int]
) -> Favourites:
    """What a chain tells about its favourites.

    Args:
        head: Draft head that drafted the chain.
        logits: Draft logits [V] that each link was chosen from.
        depth: Number of links.
        emitted: Accepted tokens, and the bonus token after them.
    """
    accepted = min(len(emitted) - 1, depth)  # tokens copied from the text come after all links
    if accepted == depth:
        return Favourites(depth, depth)
    # The link was wrong, so the rank is at least 1, also for logits that are NaN.
    return Favourites(accepted, depth, max(_rank_of(head, logits[accepted], emitted[-1]), 1))


def _rank_of(head: DraftingContract, logits: torch.Tensor, token: int) -> int:
    """Rank of a token by draft logits [V]; the number of logits if the token is not in the draft vocabulary."""
    if head.draft_vocabulary is not None:
        places = (head.draft_vocabulary == token).nonzero()
        if len(places) == 0:
            return len(logits)
        token = int(places[0])
    return int((logits > logits[token]).sum())
