"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1; also Hydra's): **lossy** verification for sampling.

A draft token x is accepted at a node whose processed target distribution is p, with entropy H(p), if
p(x) > min(threshold, alpha * exp(-H(p))). The longest accepted path wins; among equally long paths, the path with the
highest joint probability under the target wins. The bonus token is the target's most probable token. Nothing is drawn:
the text does not follow the target's distribution, and temperature and warpers affect it only through p.
"""

from __future__ import annotations

import torch

from ...tree.draft_tree import DraftTree
from ..sampling import TokenSampler, favourite
from ..stopping import StopRule
from .accepted import Accepted, accepted_nodes, accepted_paths, cut_where_it_stops

# Added inside the logarithm of the entropy, as in the authors' code, because it matters near the threshold.
ENTROPY_EPSILON = 1e-5


def typical_threshold(probs: torch.Tensor, posterior_threshold: float, posterior_alpha: float) -> torch.Tensor:
    """Probability [...] that a token must exceed, from the target's processed distributions [..., V]."""
    entropy = -(probs * (probs + ENTROPY_EPSILON).log()).sum(-1)
    return (posterior_alpha * (-entropy).exp()).clamp_max(posterior_threshold)


def best_typical_node(
    tree: DraftTree, probs: torch.Tensor, posterior_threshold: float, posterior_alpha: float
) -> torch.Tensor:
    """The last node, int64 [B], of the longest accepted path; the root if no path is accepted.

    Args:
        tree: Draft tree of B sequences and N nodes.
        probs: [B, N, V], the target's processed distribution at each node.
        posterior_threshold, posterior_alpha: See [`DraftHead`].
    """
    parents = tree.parents.clamp_min(0)
    token_probs = probs.flatten(1).gather(1, parents * probs.shape[-1] + tree.token_ids)  # [B, N]
    needed = typical_threshold(probs, posterior_threshold, posterior_alpha).gather(1, parents)
    accepted = accepted_nodes(tree, token_probs > needed)
    depths = torch.where(accepted, tree.depths, -1)
    longest = depths == depths.amax(1, keepdim=True)
    log_probs = token_probs.log()
    log_probs[:, 0] = 0.0  # the root is committed already
    path_scores = torch.where(tree.ancestor_mask, log_probs[:, None], 0.0).sum(-1)
    return torch.where(longest, path_scores, -torch.inf).argmax(dim=1)


def verify_typical(
    tree: DraftTree,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    sampler: TokenSampler,
    stop: StopRule,
    earlier_scores: tuple[torch.Tensor, ...] | None,
    posterior_threshold: float,
    posterior_alpha: float,
    *,
    most: int | None = None,
) -> list[Accepted]:
    """Verifies a whole tree by typical acceptance. One host sync, and one per level for processors that read the text.

    Args:
        tree: Draft tree of B sequences and N nodes.
        input_ids: int64 [B, T], committed tokens.
        logits: [B, N, V], raw target logits at the nodes.
        sampler: Its processors must be path-wise, because paths that are not taken are processed too.
        stop: Any criteria.
        earlier_scores: Scores of all tokens emitted before; `None` if scores are not kept.
        posterior_threshold, posterior_alpha: See [`DraftHead`].
        most: Most tokens of a sequence to emit; `None` without a limit.
    """
    if sampler.row_wise:
        scores = sampler.scores_at_all_nodes(logits)
    else:
        scores = scores_on_paths(tree, input_ids, logits, sampler)
    best = best_typical_node(tree, scores.softmax(-1), posterior_threshold, posterior_alpha)
    bonus = favourite(scores[torch.arange(len(best), device=best.device), best])
    results = accepted_paths(tree, best, bonus, None if earlier_scores is None else scores)
    for result in results:
        result.host_syncs += 0 if sampler.row_wise else tree.max_depth + 1
    results = [result.limited(most) for result in results]
    return cut_where_it_stops(results, input_ids.split(1), [stop] * len(results), lambda row: earlier_scores)


def scores_on_paths(
    tree: DraftTree, input_ids: torch.Tensor, logits: torch.Tensor, sampler: TokenSampler
) -> torch.Tensor:
    """Processed scores fp32 [B, N, V], where processors see the text up to each node. One host sync per level.

    The arguments are those of [`verify_typical`].
    """
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for depth in range(tree.max_depth + 1):
        row, node = (tree.depths == depth).nonzero(as_tuple=True)
        # Ancestors precede their descendants, so the true columns in order are the path. The root, their first, is in
        # `input_ids` already.
        columns = tree.ancestor_mask[row, node].to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        path = columns[:, 1 : depth + 1]
        ids = torch.cat([input_ids[row], tree.token_ids[row].gather(1, path)], dim=1)
        scores[row, node] = sampler.scores_at_node(ids, logits[row, node])
    return scores
