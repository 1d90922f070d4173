"""Compiled rounds on CUDA: the next draft begins before the host knows what the target accepted.

The rows that the draft head takes in next (the accepted nodes, their tokens and features) follow from the target's
choices, which are on the device. Computing the rows there allows the next draft to be queued right behind the target's
forward, before the host waits for the choices. The device then never waits for the host's work in a round. A draft
that turns out to be useless, because a text has ended or the next round drafts another tree, is undone.
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

QUEUES = ("cuda",)  # types of devices that work through a queue while the host goes on


class DraftAhead:
    """Begins the next draft of a generation early, and hands it out or undoes it.

    Args:
        candidates: The candidate generator of the call, whose rounds are compiled.

    Attributes:
        in_vain: Whether the draft that had begun for the current round was discarded.
    """

    def __init__(self, candidates: DraftHeadCandidateGenerator):
        self.candidates = candidates
        self._tree: DraftTree | None = None
        self._rows: NewRows | None = None
        self._drafts: DraftTreeConfig | None = None  # what `_tree` was drafted from
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
        """Drafts the next tree, unless a limit may make it smaller.

        The draft may overwrite what the compiled steps of the current round returned.

        Args:
            tree: The tree of the current round, of B sequences and N nodes.
            choices: int64 [B, N], the target's choice at each node.
            features: [B, N, F], the target's features at the nodes; `None` for heads that read none.
            lengths: Tokens committed before the round, per sequence.
            context_length: Slots that the longest sequence used in the target's cache before the round.
        """
        candidates, compiled = self.candidates, self.candidates.compiled
        most = tree.max_depth + 1  # most tokens that this round emits
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
        """The rows that the early draft took in, completed by what the host now knows; `None` without a draft.

        Args:
            paths: The accepted paths of the round.
        """
        if self._tree is None or self._rows is None:
            return None
        before, cache = self._before["counts"], self.candidates.draft_cache
        cache.counts = [old + new for old, new in zip(before, paths.counts, strict=True)]
        return NewRows(paths.token_ids, self._rows.features, self._rows.valid, paths.counts)

    def take(self, drafts: bool) -> DraftTree | None:
        """Returns the early draft if it is of the tree that the round is to draft; otherwise undoes it.

        Args:
            drafts: Whether the round drafts.
        """
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
        """Takes the early draft, if there is one, out of the draft cache again."""
        if self._tree is not None:
            self.candidates.draft_cache.go_back(self._before)
        self._tree = self._rows = None


def drafts_ahead(
    candidates: DraftHeadCandidateGenerator, options: DraftingOptions, outputs: EmittedOutputs, device: torch.device
) -> bool:
    """Whether the rounds of a call may begin the next draft early.

    They may if steps are replayed as CUDA graphs, the draft head is on the target's device, and nothing else needs the
    outputs of the compiled steps, timings, or the text on the host before the next draft begins.

    Args:
        candidates, options, outputs: Those of the call.
        device: The target's device.
    """
    if candidates.compiled is None or not candidates.compiled.replays:
        return False
    looked_at = options.profile or options.trace or options.on_round is not None or outputs.as_dict
    asks_host = candidates.lookup is not None or options.tree.stop_below > 0 or options.tree.children == "sampled"
    return not (looked_at or asks_host) and candidates.device == device and device.type in QUEUES


def rows_of_choices(tree: DraftTree, choices: torch.Tensor, features: torch.Tensor | None, longest: int) -> NewRows:
    """Computes the rows that the draft head takes in next, without waiting for the host.

    The rows are those of [`PackedPaths.rows`] for the paths that [`verification.accepted.agreed_paths`] finds.

    Args:
        tree, choices, features: As in [`DraftAhead.begin`].
        longest: Number of rows to pad to.
    """
    path, counts = agreed_path(tree, choices)
    place = torch.arange(longest, device=path.device) - (longest - counts[:, None])
    valid, place = place >= 0, place.clamp_min(0)
    nodes = path.gather(1, place)
    # A choice may be `NO_DISTRIBUTION`, which no embedding has a row for. The host raises when it reads the choice.
    emitted = torch.where(valid, choices.gather(1, nodes).clamp_min(0), 0)
    token_ids = torch.nn.functional.pad(emitted, (1, 0)).scatter_(1, longest - counts[:, None], tree.token_ids[:, :1])
    return NewRows(token_ids, at_nodes(features, nodes), valid, [0] * len(counts))


def agreed_path(tree: DraftTree, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the longest path on which every node is the token chosen at its parent.

    Returns:
        Nodes int64 [B, D + 1] of the path, padded at the end with meaningless nodes, and their number, int64 [B].
    """
    batch, nodes = tree.token_ids.shape
    if tree.shape is not None and tree.shape.is_chain:
        agrees = tree.token_ids[:, 1:] == choices[:, :-1]
        path = torch.arange(nodes, device=choices.device).expand(batch, -1)
        return path, 1 + agrees.long().cumprod(1).sum(1)
    agrees = tree.token_ids == choices.gather(1, tree.parents.clamp_min(0))
    order = torch.arange(nodes, device=choices.device)
    # Among equally deep nodes the first one wins, as in `verification.accepted`.
    deepest = torch.where(accepted_nodes(tree, agrees), tree.depths * nodes - order, -nodes).argmax(1)
    return tree.path_to(deepest), 1 + tree.depths.gather(1, deepest[:, None])[:, 0]
