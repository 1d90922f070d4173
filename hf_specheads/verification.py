"""Verification: which path of a draft tree the target accepts, and the bonus token after it.

Drafted children are the head's top-k, a set that does not depend on the target's randomness. Drawing x from the
target's processed distribution at a node, and moving to the child x if there is one, therefore emits exactly the
target's distribution (EAGLE-2's rule without its rejection loop; the total mass of the children is accepted).
Greedy decoding is the same walk with the argmax. Children drawn from the draft distribution have a rule of their own
(`verification_sampled.py`), and so has typical acceptance (`verification_typical.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .sampling import TokenSampler
from .stopping import StopRule
from .tree import DraftTree


@dataclass
class Accepted:
    """What one batch row gains from one round.

    Attributes:
        token_ids: Emitted tokens: accepted draft tokens, then the bonus token; cut where generation stops.
        nodes: The node each token was chosen at, the root first; as many as tokens. Their cache rows stay.
        scores: Processed scores fp32 [1, V] per emitted token, if asked for.
        stopped: Whether generation ends after the last token.
        cut: Whether tokens that the target accepted were dropped because generation stops earlier.
        host_syncs: Times the host waited for the device.
    """

    token_ids: list[int]
    nodes: list[int]
    scores: list[torch.Tensor] = field(default_factory=list)
    stopped: bool = False
    cut: bool = False
    host_syncs: int = 1

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, the bonus token not counted."""
        return len(self.token_ids) - 1


def verify_all_nodes(
    tree: DraftTree,
    lengths: Sequence[int],
    logits: torch.Tensor,
    sampler: TokenSampler,
    stop: StopRule,
    keep_scores: bool,
) -> list[Accepted]:
    """Chooses a token at every node at once and follows the choices from the root. One host sync for all rows.

    Args:
        tree: Draft tree of B rows and N nodes.
        lengths: Tokens committed so far, per batch row.
        logits: [B, N, V], raw target logits at the nodes.
        sampler: Must be row-wise.
        stop: Must not need every token.
        keep_scores: Keep the processed scores of the emitted tokens.
    """
    choices, scores = sampler.at_all_nodes(logits)
    best = deepest_accepted(tree, choices)
    bonus = choices.gather(1, best[:, None])[:, 0]
    return accepted_rows(tree, best, bonus, scores if keep_scores else None, lengths, stop)


def accepted_rows(
    tree: DraftTree,
    best: torch.Tensor,
    bonus: torch.Tensor,
    scores: torch.Tensor | None,
    lengths: Sequence[int],
    stop: StopRule,
) -> list[Accepted]:
    """The accepted path of every row, cut where generation stops. One host sync for all rows.

    Args:
        tree: Draft tree of B rows and N nodes.
        best: int64 [B], the last accepted node.
        bonus: int64 [B], the token after it.
        scores: [B, N, V], processed scores to keep; `None` to keep none.
        lengths: Tokens committed so far, per batch row.
        stop: Criteria that need not see every token; others are ignored.
    """
    path = tree.path_to(best)  # [B, D + 1]
    depth, tokens = tree.depths.gather(1, best[:, None]), tree.token_ids.gather(1, path)
    rows = torch.cat([depth, path, tokens, bonus[:, None]], dim=1).tolist()  # the round's one host sync
    width = path.shape[1]
    results = []
    for row, (num_accepted, *values) in enumerate(rows):
        emitted = [*values[width + 1 : width + 1 + num_accepted], values[-1]]
        kept, stopped = stop.cut(emitted, lengths[row])
        nodes = values[:kept]
        kept_scores = [] if scores is None else [scores[row, node][None].float() for node in nodes]
        results.append(Accepted(emitted[:kept], nodes, kept_scores, stopped, cut=kept < len(emitted)))
    return results


def deepest_accepted(tree: DraftTree, choices: torch.Tensor) -> torch.Tensor:
    """The deepest node whose every step from the root is the token chosen at its parent.

    Args:
        tree: Draft tree of B rows and N nodes.
        choices: int64 [B, N], token chosen at each node.

    Returns:
        int64 [B], node index; 0 (the root) when no draft token is accepted.
    """
    agrees = tree.token_ids == choices.gather(1, tree.parents.clamp_min(0))
    return torch.where(accepted_nodes(tree, agrees), tree.depths, -1).argmax(dim=1)


def accepted_nodes(tree: DraftTree, taken: torch.Tensor) -> torch.Tensor:
    """bool [B, N]: nodes that are taken with all their ancestors, where `taken` bool [B, N] speaks of single steps."""
    taken = taken.clone()
    taken[:, 0] = True
    return ~(tree.ancestor_mask & ~taken[:, None]).any(-1)


def verify_token_by_token(
    tree: DraftTree,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    sampler: TokenSampler,
    stop: StopRule,
    earlier_scores: tuple[torch.Tensor, ...] | None,
) -> list[Accepted]:
    """Walks from the root with one processor call, one draw and one stopping check per emitted token.

    This is plain `generate`'s own sequence of calls, so processors that depend on the tokens so far, processors with
    state, stopping criteria and seeded draws all behave as without draft heads. One host sync per token.

    Args:
        tree: Draft tree of B rows and N nodes; B must be 1, because a processor call advances its own state.
        input_ids: int64 [B, T].
        logits: [B, N, V].
        sampler: Any processors.
        stop: Any criteria.
        earlier_scores: Scores of all tokens emitted before, for criteria that read them; `None` if not kept.

    Raises:
        ValueError: for more than one row.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"token-by-token verification takes one row at a time, got a batch of {input_ids.shape[0]}.")
    children: dict[tuple[int, int], int] = {}
    if tree.num_nodes > 1:
        pairs = torch.stack([tree.parents[0, 1:], tree.token_ids[0, 1:]], dim=1).tolist()
        for node, (parent, token) in enumerate(pairs, start=1):
            children.setdefault((parent, token), node)

    def step(node: int, input_ids: torch.Tensor) -> tuple[int, torch.Tensor, int | None]:
        chosen, scores = sampler.at_node(input_ids, logits[:, node])
        token = int(chosen)
        return token, scores, children.get((node, token))

    result = walk(input_ids, step, stop, earlier_scores)
    result.host_syncs += 1 if children else 0
    return [result]


def walk(
    input_ids: torch.Tensor,
    step: Callable[[int, torch.Tensor], tuple[int, torch.Tensor, int | None]],
    stop: StopRule,
    earlier_scores: tuple[torch.Tensor, ...] | None,
) -> Accepted:
    """From the root down, one step and one stopping check per emitted token.

    Args:
        input_ids: int64 [1, T].
        step: From a node and the tokens up to it: the token chosen there, its processed scores [1, V], and the child
            it leads to, `None` for none. Waits for the device once.
        stop, earlier_scores: As in [`verify_token_by_token`].
    """
    result = Accepted(token_ids=[], nodes=[], host_syncs=0)
    node: int | None = 0
    while node is not None and not result.stopped:
        result.nodes.append(node)
        token, scores, node = step(node, input_ids)
        input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], dim=1)
        result.token_ids.append(token)
        result.scores.append(scores)
        result.host_syncs += 1
        result.stopped = stops_after(input_ids, result, stop, earlier_scores)
    result.cut = result.stopped and node is not None
    return result


def stops_after(
    input_ids: torch.Tensor, emitted: Accepted, stop: StopRule, earlier_scores: tuple[torch.Tensor, ...] | None
) -> bool:
    """Whether generation ends after the last token of `emitted`, which `input_ids` [1, T'] ends with."""
    if stop.per_token:
        return stop.met(input_ids, None if earlier_scores is None else earlier_scores + tuple(emitted.scores))
    return stop.cut(emitted.token_ids[-1:], input_ids.shape[1] - 1)[1]
