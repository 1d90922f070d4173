"""What a round over any tree tells of the chain of its favourites, and which child was right where that was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...contract import DraftingContract


@dataclass(frozen=True)
class Favourites:
    """What became of the chain of favourites in a sequence's tree, which a chain is alone.

    Attributes:
        accepted: How many in a row were right.
        depth: How many there were.
        rank: Of the child that was right in the place of the next one, whose own rank is 0; 0 where all were right.
        at_least: The tree had no such child: the rank is that or a higher one.
    """

    accepted: int
    depth: int
    rank: int = 0
    at_least: bool = False


def favourites_of_tree(parents: Sequence[int], scores: Sequence[float], nodes: Sequence[int]) -> Favourites:
    """What a tree tells whose children are the most probable ones.

    Args:
        parents: Node above each node, -1 of the root.
        scores: Of the nodes; the favourite is the best of siblings.
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
    """What a chain tells.

    Args:
        head: That drafted it.
        logits: Draft logits [V] that every link was chosen from.
        depth: Links.
        emitted: Accepted tokens, and the one that was right after them.
    """
    accepted = min(len(emitted) - 1, depth)  # what is copied from the text comes after all links
    if accepted == depth:
        return Favourites(depth, depth)
    # No less than the second best, also where a head says nothing (NaN).
    return Favourites(accepted, depth, max(_rank_of(head, logits[accepted], emitted[-1]), 1))


def _rank_of(head: DraftingContract, logits: torch.Tensor, token: int) -> int:
    """Place of a token among the children that draft logits [V] offer; their number, if it is none of them."""
    if head.draft_vocabulary is not None:
        places = (head.draft_vocabulary == token).nonzero()
        if len(places) == 0:
            return len(logits)
        token = int(places[0])
    return int((logits > logits[token]).sum())
