"""Verification of trees whose children were drawn from the draft distribution: Leviathan's rule and its extension.

At a node with target distribution p, and children c1, c2, ... drawn without replacement from q, child cj is accepted
with probability min(1, g(cj) / qj(cj)), where g and qj start as p and q; after a rejection g becomes the normalised
max(g - qj, 0), and qj loses the rejected token. If no child is accepted, the token is drawn from what is left of g.
The token emitted at the node then has exactly the distribution p. With one child, this is speculative sampling
(Leviathan et al. 2023, algorithm 1); with several children, it is the rule of SpecInfer, EAGLE-1 and Sequoia.

The rule divides by the probability of having drawn a child, so it is wrong for children that were not drawn, such as
the most probable ones. These have a rule of their own (`top_k.py`).
"""

from __future__ import annotations

import torch

from ...tree.draft_tree import DraftTree, SampledChildren
from ..sampling import TokenSampler
from ..stopping import StopRule
from .accepted import Accepted, accepted_nodes, accepted_paths, walk


def accept_children(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decides at every node which of its drawn children is accepted.

    Args:
        target: [..., V], the target's processed distribution p at each node.
        draft: [..., V], the distribution q from which its children were drawn without replacement.
        tokens: int64 [..., R], tokens of the children in the order drawn, -1 for none.
        uniforms: [..., R], one uniform random number in [0, 1) per child.

    Returns:
        Rank int64 [...] of the accepted child, -1 for none, and the distribution [..., V] from which to draw the
        node's token if no child is accepted.
    """
    residual = target
    accepted = torch.full_like(tokens[..., 0], -1)
    for rank in range(tokens.shape[-1]):
        child = tokens[..., rank, None]
        token = child.clamp_min(0)
        target_prob, draft_prob = residual.gather(-1, token), draft.gather(-1, token)
        # A token with q = 0 was never drawn: it only pads a node that had fewer tokens to draw than children.
        tested = (accepted[..., None] < 0) & (child >= 0) & (draft_prob > 0)
        rest, mass = _rest(residual, draft)
        # Without mass, p equals q up to rounding, and a rejection would have probability 0.
        takes = tested & ((uniforms[..., rank, None] * draft_prob < target_prob) | (mass <= 0))
        rejects = tested & ~takes
        accepted = torch.where(takes[..., 0], rank, accepted)
        residual = torch.where(rejects, rest, residual)
        draft = torch.where(rejects, _without(draft, token), draft)
    return accepted, residual


def _rest(target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised max(p - q, 0), and its mass [..., 1] before normalising."""
    rest = (target - draft).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    return rest / mass.clamp_min(torch.finfo(rest.dtype).tiny), mass


def _without(draft: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The distribution q after `token` [..., 1] has been drawn without replacement."""
    left = draft.scatter(-1, token, 0.0)
    return left / left.sum(-1, keepdim=True).clamp_min(torch.finfo(left.dtype).tiny)


def _draws(tree: DraftTree) -> SampledChildren:
    if tree.sampled is None:
        raise ValueError(
            "the children of this draft tree were not drawn from the draft distribution; verify it with "
            "`verify_all_nodes` or `verify_token_by_token`."
        )
    return tree.sampled


def verify_sampled_at_once(
    tree: DraftTree,
    logits: torch.Tensor,
    sampler: TokenSampler,
    keep_scores: bool,
) -> list[Accepted]:
    """Decides at all nodes at once, follows the accepted children and draws the bonus token. One host sync in all.

    Args:
        tree: Draft tree of B sequences and N nodes, with drawn children.
        logits: [B, N, V], raw target logits at the nodes.
        sampler: Must be row-wise.
        keep_scores: Whether to keep the processed scores of the emitted tokens.

    Raises:
        ValueError: if the tree's children were not drawn.
    """
    drawn = _draws(tree)
    scores = sampler.scores_at_all_nodes(logits)
    tokens = _child_tokens(tree, drawn)
    probs = scores[:, drawn.parents].softmax(-1)
    uniforms = torch.rand(tokens.shape, dtype=torch.float32, device=tokens.device)
    accepted, residual = accept_children(probs, drawn.probs, tokens, uniforms)
    taken = torch.zeros_like(tree.token_ids, dtype=torch.bool)
    child = drawn.children[torch.arange(len(drawn.parents), device=tokens.device), accepted.clamp_min(0)]  # [B, E]
    taken.scatter_(1, torch.where(accepted >= 0, child, 0), True)
    best = torch.where(accepted_nodes(tree, taken), tree.depths, -1).argmax(dim=1)
    bonus = sampler.race(_bonus_distribution(drawn, scores, residual, best))
    return accepted_paths(tree, best, bonus, scores if keep_scores else None)


def _child_tokens(tree: DraftTree, drawn: SampledChildren) -> torch.Tensor:
    """Tokens int64 [B, E, R] of the drawn children, -1 for none."""
    return torch.where(drawn.children >= 0, tree.token_ids[:, drawn.children.clamp_min(0)], -1)


def _bonus_distribution(
    drawn: SampledChildren, scores: torch.Tensor, residual: torch.Tensor, best: torch.Tensor
) -> torch.Tensor:
    """Distribution [B, V] of the bonus token after node `best` [B]: p at a leaf, otherwise what rejections left."""
    rows = torch.arange(len(best), device=best.device)
    slots = torch.full(scores.shape[1:2], -1, device=best.device)
    slots[drawn.parents] = torch.arange(len(drawn.parents), device=best.device)
    slot = slots[best]
    return torch.where(slot[:, None] >= 0, residual[rows, slot.clamp_min(0)], scores[rows, best].softmax(-1))


def verify_sampled_token_by_token(
    tree: DraftTree,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    sampler: TokenSampler,
    stop: StopRule,
    earlier_scores: tuple[torch.Tensor, ...] | None,
    *,
    most: int | None = None,
) -> list[Accepted]:
    """Applies the same rule with one processor call and one stopping check per emitted token, each a host sync.

    This serves processors that depend on the tokens so far or have a state, and any stopping criteria. The arguments
    are those of [`top_k.verify_token_by_token`].

    Raises:
        ValueError: if there is more than one sequence, or the tree's children were not drawn.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"token-by-token verification takes one sequence at a time, got a batch of {input_ids.shape[0]}."
        )
    drawn = _draws(tree)
    tokens = _child_tokens(tree, drawn)
    uniforms = torch.rand(tokens.shape, dtype=torch.float32, device=tokens.device)
    ranks = tokens.shape[2]
    rows = torch.cat([drawn.parents[:, None], drawn.children, tokens[0]], dim=1).tolist()
    inner = {node: (slot, values[:ranks], values[ranks:]) for slot, (node, *values) in enumerate(rows)}

    def step(node: int, input_ids: torch.Tensor) -> tuple[int, torch.Tensor, int | None]:
        scores = sampler.scores_at_node(input_ids, logits[:, node])
        probs = scores.softmax(-1)
        if node not in inner:
            return int(sampler.race(probs)), scores, None
        slot, child_nodes, child_tokens = inner[node]
        accepted, residual = accept_children(probs, drawn.probs[:, slot], tokens[:, slot], uniforms[:, slot])
        rank, token = torch.cat([accepted, sampler.race(residual)]).tolist()
        return (token, scores, None) if rank < 0 else (child_tokens[rank], scores, child_nodes[rank])

    result = walk(input_ids, step, stop, earlier_scores, most=most)
    result.host_syncs += 1
    return [result]
