"""Chains of favourites (most probable children), link by link, and trees made of drafted levels of a known shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ...tree.config import DraftTreeConfig
from ...tree.draft_tree import DraftTree, SampledChildren
from ...tree.shape import TreeShape, shape_of
from ..kernels.few_rows_native import best_of_rows
from .foresight import Reach

# A link: the state [B, 1, *] that its child is drafted from, and the log-probability (which may be NaN) and the token
# of its favourite child, [B, 1] each.
Link = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BLOCKS, MANY_LOGITS = 256, 4096  # compiled on CUDA, a row of at least MANY_LOGITS is searched in this many blocks


def favourites(
    logits: torch.Tensor, temperature: float, vocabulary: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability (which may be NaN) and token id of the best child, [..., 1] each, from draft logits [..., Vd].

    Args:
        logits: Draft logits [..., Vd].
        temperature: Temperature of the draft.
        vocabulary: int64 [Vd], target tokens of the logits; `None` if the draft has the whole vocabulary.
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
    """Log-probability and index of the highest of logits [..., V], searched in two steps: within blocks, then over the
    blocks' results. A compiler would let a single thread block of the device search the whole row."""
    vocab, lowest = logits.shape[-1], torch.finfo(logits.dtype).min
    blocks = torch.nn.functional.pad(logits, (0, -vocab % BLOCKS), value=lowest).unflatten(-1, (BLOCKS, -1))
    highest, place = blocks.max(dim=-1)
    highest = highest.clamp_min(lowest)  # a block may have nothing but logits of -inf
    mass = (blocks.float() - highest[..., None].float()).exp().sum(-1)
    best, block = highest.max(dim=-1, keepdim=True)
    total = (mass * (highest.float() - best.float()).exp()).sum(-1, keepdim=True)
    return (-total.log()).to(logits.dtype), block * blocks.shape[-1] + place.gather(-1, block)


def numbers(scores: torch.Tensor) -> torch.Tensor:
    """Replaces NaN by -inf: a draft head that overflows drafts nonsense, but NaN would outrank the parent's score and
    leave nodes without their parents."""
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def grow_links(
    tree: DraftTreeConfig,
    root: torch.Tensor,
    link: Link,
    follow: Callable[[int, torch.Tensor, torch.Tensor], Link],
    shape: TreeShape,
    reach: Reach | None,
) -> DraftTree:
    """Grows a chain link by link, to its full depth unless `reach` ends it earlier.

    Args:
        tree: Config of the chain.
        root: int64 [B, 1].
        link: The first link.
        follow: Makes the next link from its draft position (0-based) and the token and state of the link above.
        shape: Shape of the chain.
        reach: As in [`grow_tree`].
    """
    links, one = [link], len(root) == 1

    def sureness() -> Iterator[list[float]]:
        while True:
            states, score, token = links[-1]
            yield [] if reach is None else [score.item()] if one else score[:, 0].tolist()  # `item` is faster
            links.append(follow(len(links), token, states))

    kept = _links_kept(reach, sureness(), len(shape.levels))
    if kept < len(shape.levels):
        shape = shape_of(tree, kept, root.device)
    _, scores, tokens = zip(*links[:kept], strict=True)
    none = scores[0].new_zeros(len(root), 1)  # the root's score
    return fixed_tree(root, tokens, numbers(torch.cat([none, *scores], dim=1).cumsum(1)), shape, None)


def grow_at_once(
    tree: DraftTreeConfig,
    root: torch.Tensor,
    logits: torch.Tensor,
    vocabulary: torch.Tensor | None,
    shape: TreeShape,
    reach: Reach | None,
) -> DraftTree:
    """Grows a chain whose links were all drafted at once; where it ends is decided without asking the device again.

    Args:
        tree, root, shape, reach: As in [`grow_links`].
        logits: Draft logits [B, D, Vd] of all draft positions the chain may have.
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
    """How many of at most `most` links a chain keeps. `sureness` yields their log-probabilities, one list over
    sequences per position, and is advanced only while the chain goes on."""
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
    """Makes a tree of a known shape from its root [B, 1], tokens [B, n] per level, and scores [B, N] of all nodes."""
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
