"""Reads `d2t` and `t2d`, the tensors that describe the draft vocabulary of heads that draft only some tokens."""

from __future__ import annotations

import torch

from ...draft_vocabulary import mapping_of, mapping_problem
from ...errors import CheckpointKeysError, CheckpointShapeError, CheckpointValueError
from .fields import Tensors
from .keys import D2T, T2D


def draft_vocabulary_of(d2t: torch.Tensor | None, t2d: torch.Tensor | None, drafted: int, vocab_size: int) -> Tensors:
    """Checks `d2t` and `t2d` and converts them to int64 and bool; returns nothing if the whole vocabulary is drafted.

    Args:
        d2t: Integers [Vd]: the offset from a row's index to its token id; `None` if the file has none.
        t2d: Truth values [V]: which tokens are drafted; `None` if the file has none.
        drafted: Vd, the number of rows of the file's `lm_head`.
        vocab_size: V.

    Raises:
        CheckpointKeysError: If `d2t` is missing and Vd < V.
        CheckpointShapeError: If a shape or dtype is wrong.
        CheckpointValueError: If the tensors do not describe a draft vocabulary, or contradict one another.
    """
    if d2t is None:
        if drafted < vocab_size:
            raise CheckpointKeysError(
                f"lm_head.weight drafts {drafted} of {vocab_size} tokens, but `d2t`, which says which ones, is "
                "missing; use a file that was saved with it."
            )
        if t2d is None:
            return {}
        d2t = torch.zeros(drafted, dtype=torch.long, device=t2d.device)
    if d2t.is_meta:
        return _of_header(d2t, t2d, drafted, vocab_size)
    if d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32) or len(d2t) != drafted:
        raise CheckpointShapeError(
            f"`d2t` is {d2t.dtype} {list(d2t.shape)}, expected {drafted} integers, one per row of lm_head.weight."
        )
    d2t = d2t.long()
    t2d = _drafted_tokens(d2t, vocab_size) if t2d is None else t2d
    if t2d.dim() != 1 or t2d.dtype.is_floating_point or bool(((t2d != 0) & (t2d != 1)).any()):
        raise CheckpointShapeError(f"`t2d` is {t2d.dtype} {list(t2d.shape)}, expected one truth value per token.")
    if problem := mapping_problem(d2t, t2d.bool()):
        raise CheckpointValueError(f"{problem}; the file is damaged, download it again.")
    return {D2T: d2t, T2D: t2d.bool()} if drafted < vocab_size else {}


def _drafted_tokens(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Computes `t2d` from `d2t`, for files that have only the latter."""
    token_ids = torch.arange(len(d2t)) + d2t
    try:
        _, t2d = mapping_of(token_ids, vocab_size)
    except ValueError as error:
        raise CheckpointValueError(f"`d2t` does not describe a draft vocabulary: {error}") from error
    if bool((token_ids[1:] <= token_ids[:-1]).any()):
        raise CheckpointValueError("the token ids that `d2t` maps to are not in ascending order; the file is damaged.")
    return t2d


def _of_header(d2t: torch.Tensor, t2d: torch.Tensor | None, drafted: int, vocab_size: int) -> Tensors:
    """`d2t` and `t2d` on the device `meta`, for files of which only headers were read."""
    if tuple(d2t.shape) != (drafted,) or (t2d is not None and tuple(t2d.shape) != (vocab_size,)):
        raise CheckpointShapeError(
            f"`d2t` must have the shape [{drafted}] and `t2d` [{vocab_size}], got other shapes."
        )
    if drafted == vocab_size:
        return {}
    return {D2T: d2t.long(), T2D: torch.empty(vocab_size, dtype=torch.bool, device="meta")}
