"""Verification of trees with the most probable children: the path that the target accepts, and the bonus token.

The children of a node are the draft head's top-k, a set that does not depend on the target's randomness. Drawing x
from the target's processed distribution at a node, and moving to the child x if there is one, therefore emits exactly
the target's distribution. (This is EAGLE-2's rule without its rejection loop: the total mass of the children is
accepted.) Greedy decoding is the same walk with the argmax. Children drawn from the draft distribution have a rule of
their own (`sampled.py`), and so has typical acceptance (`typical.py`).
"""

from __future__ import annotations

import torch

from ...tree.draft_tree import DraftTree
from ..sampling import TokenSampler
from ..stopping import StopRule
from .accepted import Accepted, Meanwhile, agreed_paths, walk


def verify_all_nodes(
    tree: DraftTree,
    logits: torch.Tensor,
    sampler: TokenSampler,
    keep_scores: bool,
    meanwhile: Meanwhile | None = None,
) -> list[Accepted]:
    """Chooses tokens at all nodes at once and follows the choices from the root. One host sync for all sequences.

    Args:
        tree: Draft tree of B sequences and N nodes.
        logits: [B, N, V], raw target logits at the nodes.
        sampler: Must be row-wise.
        keep_scores: Whether to keep the processed scores of the emitted tokens.
        meanwhile: As in [`agreed_paths`].
    """
    choices, scores = sampler.at_all_nodes(logits) if keep_scores else (sampler.tokens_at_all_nodes(logits), None)
    return agreed_paths(tree, choices, scores, meanwhile)


def verify_token_by_token(
    tree: DraftTree,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    sampler: TokenSampler,
    stop: StopRule,
    earlier_scores: tuple[torch.Tensor, ...] | None,
    *,
    most: int | None = None,
) -> list[Accepted]:
    """Walks from the root with one processor call, one draw and one stopping check per emitted token.

    This is plain `generate`'s own sequence of calls, so processors that depend on the tokens so far, processors with
    state, stopping criteria and seeded draws all behave as without draft heads. Each token costs one host sync, and
    those of its draw.

    Args:
        tree: Draft tree of B sequences and N nodes. B must be 1, because a processor call may change its state.
        input_ids: int64 [B, T], the committed tokens.
        logits: [B, N, V], raw target logits at the nodes.
        sampler: Any processors.
        stop: Any criteria.
        earlier_scores: Scores of all tokens emitted before, for criteria that read them; `None` if not kept.
        most: Most tokens to emit; `None` without a limit. Processors and criteria are not asked about later ones.

    Raises:
        ValueError: if there is more than one sequence.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"token-by-token verification takes one sequence at a time, got a batch of {input_ids.shape[0]}."
        )
    keep_scores, children = earlier_scores is not None, dict[tuple[int, int], int]()
    if tree.num_nodes > 1:
        pairs = torch.stack([tree.parents[0, 1:], tree.token_ids[0, 1:]], dim=1).tolist()
        for node, (parent, token) in enumerate(pairs, start=1):
            children.setdefault((parent, token), node)

    def step(node: int, input_ids: torch.Tensor) -> tuple[int, torch.Tensor | None, int | None]:
        call = (input_ids, logits[:, node])
        chosen, scores = sampler.at_node(*call) if keep_scores else (sampler.token_at_node(*call), None)
        token = int(chosen)
        return token, scores, children.get((node, token))

    result = walk(input_ids, step, stop, earlier_scores, 1 + sampler.waits_at_node, most)
    result.host_syncs += 1 if children else 0
    return [result]
