"""Growing a draft tree: the draft head is called once per level, and every level has a fixed number of nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from ...cache.draft import DraftCache
from ...contract import DraftingContract
from ...tree.config import DraftTreeConfig
from ...tree.draft_tree import DraftTree, SampledChildren, select_nodes
from ...tree.shape import FixedLevel, TreeShape, fixed_children, shape_of
from ..sampling import DraftSampler
from .chains import Link, favourites, fixed_tree, grow_at_once, grow_links, numbers
from .foresight import Reach


def grow_tree(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    token_ids: torch.Tensor,
    features: torch.Tensor | None,
    depth: int,
    sampler: DraftSampler | None = None,
    reach: Reach | None = None,
) -> DraftTree:
    """Drafts one round: takes in the newly committed rows, then grows a tree level by level. Without `reach` and
    `stop_below` there is no host sync.

    Args:
        head: Draft head, bound to its target.
        cache: Draft cache of this generation.
        tree: How the tree grows.
        token_ids: int64 [B, M + 1], tokens of the newly committed rows, then the root.
        features: [B, M, F], target features of the M newly committed rows; `None` for draft heads that read none.
        depth: Draft positions D of this round, at least 1.
        sampler: Draws the children of trees that ask for sampled children. Without it these are the top-k: in greedy
            decoding a drawn child could only be worse than the most probable one.
        reach: Decides where a chain ends before its depth, with a host sync per level.
    """
    if tree.kind == "dynamic":
        return grow_dynamic(head, cache, tree, token_ids, features, depth)
    return grow_fixed(head, cache, tree, token_ids, features, depth, sampler, reach=reach)


def top_children(
    head: DraftingContract, logits: torch.Tensor, width: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and token ids of the best children, [B, K, width] each, from draft logits [B, K, V]."""
    if width == 1:
        scores, tokens = favourites(logits, temperature, head.draft_vocabulary)
        return numbers(scores), tokens
    logits = logits if temperature == 1 else logits / temperature
    scores, tokens = torch.log_softmax(logits, dim=-1).topk(width, dim=-1)
    if head.draft_vocabulary is not None:
        tokens = head.draft_vocabulary[tokens]
    return numbers(scores), tokens


def gives_up(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    position: int,
    token_ids: torch.Tensor,
    scores: torch.Tensor,
) -> bool:
    """Whether every node about to be expanded, in every sequence, is less probable than `stop_below`. For draft heads
    that predict acceptance, the predicted acceptance is compared instead. A `stop_below` above 0 costs a host sync.

    Whether a level is left out depends on what was drafted before it, never on what it would have held, so sampled
    children keep their distribution.

    Args:
        head: Draft head.
        cache: Draft cache of this generation.
        tree: How the tree grows.
        position: Draft position (0-based) of the level that would be drafted.
        token_ids: int64 [B, K], tokens of the nodes.
        scores: [B, K], cumulative log-probabilities of the nodes.
    """
    if tree.stop_below == 0:
        return False
    if head.predicts_acceptance:
        return bool((head.predicted_acceptance(cache, position, token_ids) < tree.stop_below).all())
    return position > 0 and bool((scores < math.log(tree.stop_below)).all())


# ---------------------------------------------------------------------- dynamic trees
@dataclass
class _Level:
    """The frontier: K nodes per sequence about to be expanded.

    Attributes:
        tokens: int64 [B, K].
        scores: [B, K], cumulative log-probabilities.
        features: [B, K, *], state of each node's parent.
        candidate: [B, K], number of each node among all candidates of the round, counted from 1.
        visible: bool [B, K, rows drafted so far], which of these rows are the node's ancestors.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    features: torch.Tensor
    candidate: torch.Tensor
    visible: torch.Tensor


def grow_dynamic(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    token_ids: torch.Tensor,
    features: torch.Tensor | None,
    depth: int,
) -> DraftTree:
    """Grows a tree whose shape follows the draft (EAGLE-2, sections 4.1 and 4.2).

    Per level the K best nodes by cumulative log-probability are expanded with K children each. At the end the best
    `total_tokens - 1` of all candidates are kept. Draft heads whose positions are independent get the optimal tree
    instead ([`_grow_best_first`]). Arguments as in [`grow_tree`].
    """
    drafted, logits = head.start_draft(cache, token_ids, cast(torch.Tensor, features))
    width = min(tree.top_k, logits.shape[-1])
    if gives_up(head, cache, tree, 0, token_ids[:, -1:], logits):
        return DraftTree.root_only(token_ids[:, -1])
    if head.independent_positions:
        return _grow_best_first(head, cache, tree, token_ids[:, -1], (drafted, logits), depth)
    scores, tokens = top_children(head, logits, width, tree.draft_temperature)  # [B, 1, K]
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
        if gives_up(head, cache, tree, position, level.tokens, level.scores):
            break
        level, children = _expand(head, cache, tree, position, level)
        candidates.append(children)
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
    depths = torch.cat([torch.full_like(part[0], i + 1) for i, part in enumerate(candidates)], dim=1)
    return select_nodes(tokens, parents, depths, scores, token_ids[:, -1], tree.num_nodes - 1, len(candidates))


def _expand(
    head: DraftingContract, cache: DraftCache, tree: DraftTreeConfig, position: int, level: _Level
) -> tuple[_Level, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Expands the frontier by the draft head; returns the next one and all K*K children (tokens, parents, scores)."""
    batch, width = level.tokens.shape
    own_row = torch.eye(width, dtype=torch.bool, device=level.tokens.device).expand(batch, -1, -1)
    visible = torch.cat([level.visible, own_row], dim=-1)
    features, logits = head.extend_draft(cache, position, level.tokens, level.features, visible)
    scores, tokens = top_children(head, logits, width, tree.draft_temperature)  # [B, K, K]
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


def _grow_best_first(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    root_ids: torch.Tensor,
    root: tuple[torch.Tensor, torch.Tensor],
    depth: int,
) -> DraftTree:
    """Keeps the n = `total_tokens - 1` most probable of all paths over each position's K best tokens (DDTree, arXiv
    2604.12989).

    A path is never more probable than its beginning. So the n best paths have at most n nodes on any level, and these
    are children of the n best nodes of the level above: keeping n per level loses none of them. All nodes of a level
    have the same children, so the draft head computes them once per level.

    Args:
        head, cache, tree, depth: As in [`grow_tree`].
        root_ids: int64 [B].
        root: State and draft logits of the root, from `start_draft`.
    """
    most, candidates = tree.num_nodes - 1, []
    width = min(tree.top_k, root[1].shape[-1], most)
    above, number = root[1].new_zeros(len(root_ids), 1), torch.zeros_like(root_ids)[:, None]  # scores, numbers
    first = 1
    for position, (scores, tokens) in enumerate(_children_by_position(head, cache, tree, root, width, depth)):
        scores, chosen = (above[..., None] + scores).flatten(1).topk(min(most, above.shape[1] * width), dim=1)
        candidates.append((tokens[:, 0].gather(1, chosen % width), number.gather(1, chosen // width), scores))
        best = tokens[:, 0, :1]
        if position + 1 == depth or gives_up(head, cache, tree, position + 1, best, scores[:, :1]):
            break
        above, number = scores, torch.arange(first, first + scores.shape[1], device=scores.device).expand_as(scores)
        first += scores.shape[1]
    tokens, parents, scores = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
    depths = torch.cat([torch.full_like(part[0], i + 1) for i, part in enumerate(candidates)], dim=1)
    return select_nodes(tokens, parents, depths, scores, root_ids, most, len(candidates))


def _children_by_position(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    root: tuple[torch.Tensor, torch.Tensor],
    width: int,
    depth: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields, level by level, log-probabilities and tokens of the best children, [B, 1, K] each. All nodes of the
    level above share these children."""
    if (together := head.drafted_logits(cache, depth)) is not None:
        scores, tokens = top_children(head, together, width, tree.draft_temperature)
        yield from zip(scores.split(1, dim=1), tokens.split(1, dim=1), strict=True)
        return
    states, logits = root
    for position in range(1, depth + 1):
        scores, tokens = top_children(head, logits, width, tree.draft_temperature)
        yield scores, tokens
        if position < depth:
            states, logits = head.extend_draft(cache, position, tokens[:, 0, :1], states, None)


# ---------------------------------------------------------------------- trees of a shape known beforehand
def _drawn_children(
    head: DraftingContract,
    logits: torch.Tensor,
    width: int,
    temperature: float,
    paths: torch.Tensor,
    sampler: DraftSampler,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As [`top_children`], but children are drawn without replacement, at nodes with the paths [B, K, d]. Also returns
    the draft distribution q, fp32 [B, K, V]."""
    logits = logits / temperature
    if (vocabulary := head.draft_vocabulary) is not None:
        whole = logits.new_full((*logits.shape[:-1], head.target_vocab_size), -torch.inf)
        logits = whole.index_copy(-1, vocabulary, logits)
    probs = sampler.distribution(logits, paths)
    tokens = sampler.draw(probs, width)
    return probs.gather(-1, tokens).log(), tokens, probs


def grow_fixed(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    token_ids: torch.Tensor,
    features: torch.Tensor | None,
    depth: int,
    sampler: DraftSampler | None = None,
    shape: TreeShape | None = None,
    reach: Reach | None = None,
) -> DraftTree:
    """Grows a chain, static or optimal tree: every node is the child of a fixed rank (Medusa, section 2.1; EAGLE-1).

    The draft head runs once per level on the nodes that have children. Ranks count the most probable children or, if
    the tree config asks for sampled children and `sampler` is given, children in the order they were drawn (EAGLE-1,
    Sequoia). Arguments as in [`grow_tree`]; `shape` is the tree's shape if it was made beforehand.
    """
    shape = shape_of(tree, depth, token_ids.device) if shape is None else shape
    sampler = sampler if tree.children == "sampled" else None
    drafted = head.start_draft(cache, token_ids, cast(torch.Tensor, features))
    root = token_ids[:, -1:]
    if gives_up(head, cache, tree, 0, root, drafted[1]):
        return DraftTree.root_only(root[:, 0])
    if sampler is None and tree.stop_below == 0 and cache.links is None and shape.is_chain:
        return _grow_chain(head, cache, tree, root, drafted, shape, reach)
    return _grow_levels(head, cache, tree, root, drafted, shape, sampler, reach)


def _grow_levels(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    root: torch.Tensor,
    drafted: tuple[torch.Tensor, torch.Tensor],
    shape: TreeShape,
    sampler: DraftSampler | None,
    reach: Reach | None = None,
) -> DraftTree:
    """Grows any tree of a fixed shape, level by level.

    Args:
        head, cache, tree: As in [`grow_tree`].
        root: int64 [B, 1].
        drafted: State and draft logits of the root, from `start_draft`.
        shape: Shape of the tree.
        sampler: Draws the children; `None` for the most probable ones.
        reach: As in [`grow_tree`].
    """
    (states, logits), batch = drafted, len(root)
    parent_scores = logits.new_zeros(batch, 1)
    paths = root[:, :1, None][..., :0]  # [B, K, d], tokens drafted down to each node about to be expanded
    parts, drawn_from = [], []
    for position, level in enumerate(shape.levels, start=1):
        width = min(level.width, logits.shape[-1])
        if sampler is None:
            best = top_children if cache.links is None else cache.links.best
            scores, tokens = best(head, logits, width, tree.draft_temperature)
        else:
            scores, tokens, probs = _drawn_children(head, logits, width, tree.draft_temperature, paths, sampler)
            drawn_from.append(probs)
        tokens, scores = _nodes_of(level, tokens, scores, parent_scores)
        parts.append((tokens, scores))
        if reach is not None:
            reach.keeps((scores - parent_scores)[:, 0].tolist())  # drawn links are always kept
        if len(level.expanded) == 0 or (reach is not None and not reach.goes_on()):
            break
        chosen = slice(None) if level.link else level.expanded
        if gives_up(head, cache, tree, position, tokens[:, chosen], scores[:, chosen]):
            break
        frontier, parent_scores = tokens, scores
        if not level.link:
            above = level.parent[level.expanded]
            frontier, parent_scores = tokens[:, level.expanded], scores[:, level.expanded]
            states, paths = states[:, above], paths[:, above]
        if sampler is not None:
            paths = torch.cat([paths, frontier[..., None]], dim=-1)
        in_step = level.sees_all and (cache.lengths is None or cache.links is not None)
        visible = None if in_step else level.visible[None].expand(batch, -1, -1)
        states, logits = head.extend_draft(cache, position, frontier, states, visible)
    if len(parts) < len(shape.levels):
        shape = shape_of(tree, len(parts), root.device)
    sampled = None
    if sampler is not None:
        children = fixed_children(tree.paths, len(parts), root.device)
        sampled = SampledChildren(torch.cat(drawn_from, 1), *children)
    all_tokens, all_scores = zip(*parts, strict=True)
    scores = torch.cat([all_scores[0].new_zeros(batch, 1), *all_scores], dim=1)
    return fixed_tree(root, all_tokens, scores, shape, sampled)


def _grow_chain(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    root: torch.Tensor,
    drafted: tuple[torch.Tensor, torch.Tensor],
    shape: TreeShape,
    reach: Reach | None,
) -> DraftTree:
    """Grows a chain of the most probable children; arguments as in [`_grow_levels`]."""
    most = len(shape.levels) if reach is None else int(min(len(shape.levels), reach.farthest))
    if (together := head.drafted_logits(cache, most)) is not None:
        return grow_at_once(tree, root, together, head.draft_vocabulary, shape, reach)
    offered, vocabulary = None if reach is None else reach.offered, head.draft_vocabulary

    def link(states: torch.Tensor, logits: torch.Tensor) -> Link:
        if offered is not None:
            offered.append(logits[:, 0])
        return states, *favourites(logits[:, 0], tree.draft_temperature, vocabulary)

    def follow(position: int, token: torch.Tensor, states: torch.Tensor) -> Link:
        level = shape.levels[position - 1]
        visible = None if cache.lengths is None else level.visible[None].expand(len(root), -1, -1)
        return link(*head.extend_draft(cache, position, token, states, visible))

    return grow_links(tree, root, link(*drafted), follow, shape, reach)


def _nodes_of(
    level: FixedLevel, tokens: torch.Tensor, scores: torch.Tensor, parent_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and cumulative scores [B, n] of a level's nodes, from all children [B, K, width] of the level above."""
    if level.link:
        return tokens[:, 0, :1], parent_scores + scores[:, 0, :1]
    rank = level.rank.clamp_max(tokens.shape[2] - 1)
    return tokens[:, level.parent, rank], parent_scores[:, level.parent] + scores[:, level.parent, rank]
