"""Growing a draft tree: the head is called once per level, every level is a fixed number of nodes."""

from __future__ import annotations

import torch

from .cache import DraftCache
from .modeling import DraftHead
from .tree import DraftTree, select_nodes


def grow_tree(
    head: DraftHead,
    cache: DraftCache,
    token_ids: torch.Tensor,
    features: torch.Tensor,
    depth: int,
) -> DraftTree:
    """One round of drafting: takes in the newly committed rows, then grows a tree level by level.

    Per level the K best nodes by cumulative log-probability are expanded with K children each; at the end the best
    `total_tokens - 1` of all candidates are kept (EAGLE-2, sections 4.1 and 4.2). A chain is the case K = 1.
    No host sync.

    Args:
        head: Draft head, bound to its target.
        cache: Its draft cache of this generation.
        token_ids: int64 [B, M], tokens that follow the newly committed features; the last one is the root.
        features: [B, M, H], target features of the M newly committed positions.
        depth: Draft positions D of this round, at least 1.
    """
    config = head.tree_config
    drafted, logits = head.start_draft(cache, token_ids, features)
    width = min(config.nodes_per_level, logits.shape[-1])
    scores, tokens = _top_children(logits, width)  # [B, 1, K]
    scores, tokens = scores[:, 0], tokens[:, 0]
    level = _Level(
        tokens=tokens,
        scores=scores,
        features=drafted.expand(-1, width, -1),
        candidate=torch.arange(1, width + 1, device=tokens.device)[None].expand_as(tokens),
        visible=torch.zeros(*tokens.shape, 0, dtype=torch.bool, device=tokens.device),
    )
    candidates = [(tokens, torch.zeros_like(tokens), scores)]
    for position in range(1, depth):
        level, children = _expand(head, cache, position, level)
        candidates.append(children)
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
    depths = torch.cat([torch.full_like(part[0], i + 1) for i, part in enumerate(candidates)], dim=1)
    return select_nodes(tokens, parents, depths, scores, token_ids[:, -1], config.num_nodes - 1, depth)


class _Level:
    """The frontier: K nodes per row about to be expanded.

    tokens, scores, candidate: [B, K]; candidate counts all candidates of the round from 1.
    features: [B, K, H], drafted feature of each node's parent.
    visible: bool [B, K, drafted rows so far], the node's ancestors among them.
    """

    def __init__(self, tokens, scores, features, candidate, visible):
        self.tokens, self.scores, self.features = tokens, scores, features
        self.candidate, self.visible = candidate, visible


def _top_children(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores, tokens = torch.log_softmax(logits, dim=-1).topk(width, dim=-1)
    # A head that overflows drafts nonsense, but NaN would outrank its parent and tear the tree apart.
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf), tokens


def _expand(
    head: DraftHead, cache: DraftCache, position: int, level: _Level
) -> tuple[_Level, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Runs the head on the frontier; returns the next frontier and all K*K children (tokens, parents, scores)."""
    batch, width = level.tokens.shape
    own_row = torch.eye(width, dtype=torch.bool, device=level.tokens.device).expand(batch, -1, -1)
    visible = torch.cat([level.visible, own_row], dim=-1)
    features, logits = head.extend_draft(cache, position, level.tokens, level.features, visible)
    scores, tokens = _top_children(logits, width)  # [B, K, K]
    scores, tokens = (scores + level.scores[..., None]).flatten(1), tokens.flatten(1)
    parents = level.candidate.repeat_interleave(width, dim=1)
    best, chosen = scores.topk(width, dim=1)  # [B, K]
    parent = chosen // width
    first_child = 1 + width + (position - 1) * width * width
    following = _Level(
        tokens=tokens.gather(1, chosen),
        scores=best,
        features=features.gather(1, parent[..., None].expand(-1, -1, features.shape[-1])),
        candidate=first_child + chosen,
        visible=visible.gather(1, parent[..., None].expand(-1, -1, visible.shape[-1])),
    )
    return following, (tokens, parents, scores)
