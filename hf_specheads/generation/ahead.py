"""Compiled rounds on CUDA: the next draft begins before the host knows what the target accepted.

What the heads take in next follows from the target's choices, which are on the device: which nodes it accepted, their
tokens, their features. Computed there, the next draft stands in the device's queue right behind the target's forward,
and the host waits for the choices only then: what it does in a round, the device does not wait for. A draft that turns
out to be for nothing, because a text has ended or the next round drafts another tree, is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..tree.config import DraftTreeConfig
from ..tree.draft_tree import DraftTree
from .candidates import DraftHeadCandidateGenerator
from .committed import NewRows, PackedPaths, at_nodes
from .options import DraftingOptions
from .outputs import EmittedOutputs
from .verification.accepted import accepted_nodes

QUEUES = ("cuda",)  # kinds of devices that work on while the host does


class DraftAhead:
    """The next draft of one generation, where it has begun already.

    Args:
        candidates: Of the call, whose rounds are compiled.

    Attributes:
        in_vain: Whether the device drafted in this round what the round did not take.
    """

    def __init__(self, candidates: DraftHeadCandidateGenerator):
        self.candidates = candidates
        self._tree: DraftTree | None = None
        self._rows: NewRows | None = None
        self._drafts: DraftTreeConfig | None = None  # what the tree is one of
        self._before: dict[str, Any] = {}
        self._call = 0
        self.in_vain = False

    def begin(
        self,
        tree: DraftTree,
        choices: torch.Tensor,
        features: torch.Tensor | None,
        lengths: Sequence[int],
        context_length: int,
    ) -> None:
        """Drafts the next tree, unless it may have to be a smaller one. What the compiled steps of this round returned
        is written over.

        Args:
            tree: Of the round, B sequences and N nodes.
            choices: int64 [B, N], the target's choice at each node.
            features: [B, N, F], the target's; `None` for heads that read none.
            lengths: Tokens committed before the round, per sequence.
            context_length: Slots in use in the target's cache before it, by the longest sequence.
        """
        candidates, compiled = self.candidates, self.candidates.compiled
        most = tree.max_depth + 1  # tokens that this round may emit
        longest, context_length = [length + most for length in lengths], context_length + most
        room = candidates.room(longest, context_length)
        if compiled is None or candidates.reach is not None or room < candidates.tree.depth:
            return
        cache = candidates.draft_cache
        rows = candidates.largest.most_levels + 1
        self._rows, self._before = rows_of_choices(tree, choices, features, rows), cache.state()
        compiled.begin_step()
        self._tree = candidates.draft(self._rows, longest, context_length)
        self._drafts, self._call = candidates.tree, compiled.calls

    def accepted(self, paths: PackedPaths) -> NewRows | None:
        """The rows that the draft took in, now that the host knows the accepted paths as well; `None` if none has
        begun."""
        if self._tree is None or self._rows is None:
            return None
        before, cache = self._before["counts"], self.candidates.draft_cache
        cache.counts = [old + new for old, new in zip(before, paths.counts, strict=True)]
        return NewRows(paths.token_ids, self._rows.features, self._rows.valid, paths.counts)

    def take(self, drafts: bool) -> DraftTree | None:
        """The tree that was drafted, if it is one of those that the round is to draft now, and still there."""
        tree, compiled, self.in_vain = self._tree, self.candidates.compiled, False
        if tree is None or compiled is None:
            return None
        if not drafts or self._drafts is not self.candidates.tree or self._call != compiled.calls:
            self.undo()
            self.in_vain = True
            return None
        self._tree = self._rows = None
        return tree

    def undo(self) -> None:
        """The heads know no more than before the draft, if one has begun."""
        if self._tree is not None:
            self.candidates.draft_cache.go_back(self._before)
        self._tree = self._rows = None


def drafts_ahead(
    candidates: DraftHeadCandidateGenerator, options: DraftingOptions, outputs: EmittedOutputs, device: torch.device
) -> bool:
    """Whether rounds of a call may begin the next draft early: nobody looks at what the compiled steps return once
    the target's choices are known, at clocks or at the text meanwhile.

    Args:
        candidates, options, outputs: Of the call.
        device: Of the target.
    """
    if candidates.compiled is None or not candidates.compiled.replays:
        return False
    looked_at = options.profile or options.trace or options.on_round is not None or outputs.as_dict
    asks_host = candidates.lookup is not None or options.tree.stop_below > 0 or options.tree.children == "sampled"
    return not (looked_at or asks_host) and candidates.device == device and device.type in QUEUES


def rows_of_choices(tree: DraftTree, choices: torch.Tensor, features: torch.Tensor | None, longest: int) -> NewRows:
    """What the draft head takes in next, without the host: as [`PackedPaths.rows`] of the paths that
    [`verification.accepted.agreed_paths`] finds.

    Args:
        tree, choices, features: As in [`DraftAhead.begin`].
        longest: Rows to fill up to.
    """
    path, counts = agreed_path(tree, choices)
    place = torch.arange(longest, device=path.device) - (longest - counts[:, None])
    valid, place = place >= 0, place.clamp_min(0)
    nodes = path.gather(1, place)
    # A choice that is no token (`NO_DISTRIBUTION`) is refused when the host reads it; no embedding has a row for it.
    emitted = torch.where(valid, choices.gather(1, nodes).clamp_min(0), 0)
    token_ids = torch.nn.functional.pad(emitted, (1, 0)).scatter_(1, longest - counts[:, None], tree.token_ids[:, :1])
    return NewRows(token_ids, at_nodes(features, nodes), valid, [0] * len(counts))


def agreed_path(tree: DraftTree, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest path on which every node is what was chosen above it: its nodes, int64 [B, D + 1], filled up at the
    end with nodes of no meaning, and how many there are, int64 [B]."""
    batch, nodes = tree.token_ids.shape
    if tree.shape is not None and tree.shape.is_chain:
        agrees = tree.token_ids[:, 1:] == choices[:, :-1]
        path = torch.arange(nodes, device=choices.device).expand(batch, -1)
        return path, 1 + agrees.long().cumprod(1).sum(1)
    agrees = tree.token_ids == choices.gather(1, tree.parents.clamp_min(0))
    order = torch.arange(nodes, device=choices.device)
    # Of nodes equally deep the first one, as the host takes it.
    deepest = torch.where(accepted_nodes(tree, agrees), tree.depths * nodes - order, -nodes).argmax(1)
    return tree.path_to(deepest), 1 + tree.depths.gather(1, deepest[:, None])[:, 0]
