"""Chains of favourites, link by link; and the tree that drafted levels of a known shape make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ...tree.config import DraftTreeConfig
from ...tree.draft_tree import DraftTree, SampledChildren
from ...tree.shape import TreeShape, shape_of
from ..kernels.few_rows_native import best_of_rows
from .foresight import Reach

# A link: the state [B, 1, *] that its child is drafted from, and the log-probability (it may be NaN) and token of its
# favourite child, [B, 1] each.
Link = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BLOCKS, MANY_LOGITS = 256, 4096  # that one row of logits is searched in, and from which length on


def favourites(
    logits: torch.Tensor, temperature: float, vocabulary: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability, which may be NaN, and token id of the best child, [..., 1] each, from draft logits [..., Vd].

    Args:
        vocabulary: int64 [Vd], tokens of the logits; `None` for all.
    """
    logits = logits if temperature == 1 else logits / temperature
    if (found := best_of_rows(logits, vocabulary)) is not None:
        return found
    if torch.compiler.is_compiling() and logits.is_cuda and logits.shape[-1] >= MANY_LOGITS:
        scores, places = best_of_blocks(logits)
    else:
        scores, places = torch.log_softmax(logits, dim=-1).max(dim=-1, keepdim=True)
    return scores, places if vocabulary is None else vocabulary[places]


def best_of_blocks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and place of the highest of logits [..., V], by two steps: of blocks, and of what they found.
    Compilers make a kernel of one block of the device of a search through one row."""
    vocab, lowest = logits.shape[-1], torch.finfo(logits.dtype).min
    blocks = torch.nn.functional.pad(logits, (0, -vocab % BLOCKS), value=lowest).unflatten(-1, (BLOCKS, -1))
    highest, place = blocks.max(dim=-1)
    highest = highest.clamp_min(lowest)  # a block may have nothing but logits of -inf
    mass = (blocks.float() - highest[..., None].float()).exp().sum(-1)
    best, block = highest.max(dim=-1, keepdim=True)
    total = (mass * (highest.float() - best.float()).exp()).sum(-1, keepdim=True)
    return (-total.log()).to(logits.dtype), block * blocks.shape[-1] + place.gather(-1, block)


def numbers(scores: torch.Tensor) -> torch.Tensor:
    """A head that overflows drafts nonsense, but NaN would outrank its parent and tear the tree apart."""
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def grow_links(
    tree: DraftTreeConfig,
    root: torch.Tensor,
    link: Link,
    follow: Callable[[int, torch.Tensor, torch.Tensor], Link],
    shape: TreeShape,
    reach: Reach | None,
) -> DraftTree:
    """A chain from links that are made one after the other, all of them whatever they score unless a reach ends it.

    Args:
        tree, shape: The chain's.
        root: int64 [B, 1].
        link: The first one.
        follow: Makes the next one of its draft position (0-based) and the token and state of the link above.
        reach: As in [`grow_tree`].
    """
    links, one = [link], len(root) == 1

    def sureness() -> Iterator[list[float]]:
        while True:
            states, score, token = links[-1]
            yield [] if reach is None else [score.item()] if one else score[:, 0].tolist()  # quicker of one
            links.append(follow(len(links), token, states))

    kept = _links_kept(reach, sureness(), len(shape.levels))
    if kept < len(shape.levels):
        shape = shape_of(tree, kept, root.device)
    _, scores, tokens = zip(*links[:kept], strict=True)
    none = scores[0].new_zeros(len(root), 1)  # of the root
    return fixed_tree(root, tokens, numbers(torch.cat([none, *scores], dim=1).cumsum(1)), shape, None)


def grow_at_once(
    tree: DraftTreeConfig,
    root: torch.Tensor,
    logits: torch.Tensor,
    vocabulary: torch.Tensor | None,
    shape: TreeShape,
    reach: Reach | None,
) -> DraftTree:
    """A chain whose links are all known: what it has of them is decided without another look at the device.

    Args:
        tree, root, shape, reach: As in [`grow_links`].
        logits: Of the draft positions it may have, [B, D, Vd].
        vocabulary: As in [`favourites`].
    """
    scores, tokens = (part[..., 0] for part in favourites(logits, tree.draft_temperature, vocabulary))  # [B, D]
    if reach is not None:
        kept = _links_kept(reach, iter(scores.T.tolist()), len(shape.levels))
        if reach.offered is not None:
            reach.offered.extend(logits[:, :kept].unbind(1))
        if kept < len(shape.levels):
            scores, tokens, shape = scores[:, :kept], tokens[:, :kept], shape_of(tree, kept, root.device)
    scores = torch.nn.functional.pad(numbers(scores.cumsum(1)), (1, 0))
    return fixed_tree(root, [tokens], scores, shape, None)


def _links_kept(reach: Reach | None, sureness: Iterator[Sequence[float]], most: int) -> int:
    """Of links with these log-probabilities, by position and sequence, which are asked for one by one; of a chain that
    may have `most`."""
    kept = 0
    for sure in itertools.islice(sureness, most):
        if reach is not None and not reach.keeps(sure):
            break
        kept += 1
        if kept < most and reach is not None and not reach.goes_on():
            break
    return kept


def fixed_tree(
    root: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    scores: torch.Tensor,
    shape: TreeShape,
    sampled: SampledChildren | None,
) -> DraftTree:
    """A tree of a shape from its root [B, 1], the tokens [B, n] of all levels, in parts, and all scores [B, N]."""
    batch = root.shape[0]
    return DraftTree(
        token_ids=torch.cat([root, *tokens], dim=1),
        parents=shape.parents.expand(batch, -1),
        depths=shape.depths.expand(batch, -1),
        scores=scores,
        max_depth=len(shape.levels),
        sampled=sampled,
        shape=shape,
    )
