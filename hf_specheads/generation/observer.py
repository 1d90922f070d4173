"""The rounds of a call as plain values, for the observer `heads.on_round`, which is called after every round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..tree.draft_tree import DraftTree
from .verification.accepted import Accepted


class DraftNode(NamedTuple):
    """A node of a draft tree as plain values.

    Attributes:
        token_id: Token of the node.
        parent: Number of the parent, -1 for the root.
        depth: Draft position of the node, 0 for the root.
        probability: The draft head's probability of the token, given the parent. It is 1.0 for the root and for nodes
            copied from the text, which have no probability.
        accepted: Whether the target accepted the node. The root is always accepted.
    """

    token_id: int
    parent: int
    depth: int
    probability: float
    accepted: bool


@dataclass(frozen=True)
class Round:
    """One step of a call: the prompt's forward, a round that drafted, or a plain step.

    Attributes:
        tree: The tree that the target verified for the active sequences. It has a single node if nothing was drafted,
            and is `None` for the prompt's forward. The next round may overwrite its tensors: copy what you keep.
        accepted: What each active sequence gained, in the order of the tree. In a batch whose stopping criteria look
            at the text, it may include tokens past the end of a text, which the call removes later.
        seconds: Wall seconds of the step.
    """

    tree: DraftTree | None
    accepted: dict[int, Accepted]
    seconds: float

    def token_ids(self, sequence: int = 0) -> list[int]:
        """Tokens that a sequence gained; empty if the sequence ended before this round."""
        return list(self.accepted[sequence].token_ids) if sequence in self.accepted else []

    def num_drafted(self, sequence: int = 0) -> int:
        """How many of these tokens were drafted. They come first, and are all if the text ended inside the path."""
        if self.tree is None or sequence not in self.accepted:
            return 0
        result = self.accepted[sequence]
        return len(result.token_ids) if result.cut else result.num_accepted

    def nodes(self, sequence: int = 0) -> list[DraftNode]:
        """The tree of a sequence, parents before their children; empty for the prompt's forward.

        The tree is copied to the host, which waits for the device.
        """
        if self.tree is None or sequence not in self.accepted:
            return []
        tree = self.tree.of_sequence(list(self.accepted).index(sequence))
        tokens, parents, scores, depths = (
            values[0].tolist() for values in (tree.token_ids, tree.parents, tree.scores, tree.depths)
        )
        result = self.accepted[sequence]
        taken = set(result.nodes)
        if result.cut:  # then the last token was drafted too, and is not a bonus token
            taken |= {node for node, parent in enumerate(parents)
                      if parent == result.nodes[-1] and tokens[node] == result.token_ids[-1]}  # fmt: skip
        nodes = []
        for node, (token, parent, score, depth) in enumerate(zip(tokens, parents, scores, depths, strict=True)):
            probability = 1.0 if parent < 0 or score == scores[parent] else math.exp(score - scores[parent])
            nodes.append(DraftNode(token, parent, depth, probability, node in taken))
        return nodes


Observer = Callable[[Round], None]


def tell(observer: Observer | None, tree: DraftTree | None, accepted: dict[int, Accepted], seconds: float) -> None:
    """Calls the observer, if there is one, with a [`Round`]."""
    if observer is not None:
        observer(Round(tree, accepted, seconds))
