"""What an observer of a call is told after every round: `heads.on_round`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..tree.draft_tree import DraftTree
from .verification.accepted import Accepted


class DraftNode(NamedTuple):
    """A node of a draft tree, in plain values.

    Attributes:
        token_id: Its token.
        parent: Number of its parent, -1 for the root.
        depth: Its draft position, 0 for the root.
        probability: The draft's, given the parent; 1.0 for the root and for nodes copied from the text, which nobody
            gave one.
        accepted: Whether the target took it; the root is.
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
        tree: What the target verified, of the sequences that were active; a single node where nothing was drafted,
            `None` for the prompt's forward. Its tensors belong to the call and may be written again by the next round:
            take out of them what is to be kept.
        accepted: Per active sequence, in the order of the tree, what was emitted. Of a batch whose stopping criteria
            look at the text, tokens past the end may be among them, which the call takes back.
        seconds: Wall seconds of the step.
    """

    tree: DraftTree | None
    accepted: dict[int, Accepted]
    seconds: float

    def token_ids(self, sequence: int = 0) -> list[int]:
        """What a sequence gained; nothing if it has ended before."""
        return list(self.accepted[sequence].token_ids) if sequence in self.accepted else []

    def num_drafted(self, sequence: int = 0) -> int:
        """How many of these tokens, the first ones, were drafted: all where the text ended inside the path."""
        if self.tree is None or sequence not in self.accepted:
            return 0
        result = self.accepted[sequence]
        return len(result.token_ids) if result.cut else result.num_accepted

    def nodes(self, sequence: int = 0) -> list[DraftNode]:
        """The tree of a sequence, parents before their children; empty for the prompt's forward. Copied to the
        host, which waits for the device."""
        if self.tree is None or sequence not in self.accepted:
            return []
        tree = self.tree.of_sequence(list(self.accepted).index(sequence))
        tokens, parents, scores, depths = (
            values[0].tolist() for values in (tree.token_ids, tree.parents, tree.scores, tree.depths)
        )
        result = self.accepted[sequence]
        taken = set(result.nodes)
        if result.cut:  # the last token was drafted too, and nothing was chosen after it
            taken |= {node for node, parent in enumerate(parents)
                      if parent == result.nodes[-1] and tokens[node] == result.token_ids[-1]}  # fmt: skip
        nodes = []
        for node, (token, parent, score, depth) in enumerate(zip(tokens, parents, scores, depths, strict=True)):
            probability = 1.0 if parent < 0 or score == scores[parent] else math.exp(score - scores[parent])
            nodes.append(DraftNode(token, parent, depth, probability, node in taken))
        return nodes


Observer = Callable[[Round], None]


def tell(observer: Observer | None, tree: DraftTree | None, accepted: dict[int, Accepted], seconds: float) -> None:
    """Tells an observer, if there is one."""
    if observer is not None:
        observer(Round(tree, accepted, seconds))
