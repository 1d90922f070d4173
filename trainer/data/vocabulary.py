"""Chooses a draft vocabulary: the tokens that are supervised most often in the training data (EAGLE-3's code)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_specheads.draft_vocabulary import count_tokens, most_frequent

from .columns import complete_example

logger = logging.getLogger(__name__)


def frequent_tokens(dataset: Iterable[Mapping[str, Any]], size: int, vocab_size: int) -> torch.Tensor:
    """Returns the most often supervised tokens, for `AutoDraftHead.from_target(..., draft_token_ids=...)`.

    Args:
        dataset: Examples with `input_ids` and, where not every token is supervised, `loss_mask` or `labels`.
        size: Size Vd of the draft vocabulary. Among equally frequent tokens, including those never seen, lower ids
            are chosen first.
        vocab_size: Vocabulary size V of the target.

    Returns:
        Token ids, int64 [Vd], ascending.

    Raises:
        ValueError: for a size that is not between 1 and V, or token ids that are not below V.
    """
    supervised = (torch.tensor(ids)[torch.tensor(mask).bool()] for ids, mask in map(complete_example, dataset))
    counts = count_tokens(supervised, vocab_size)
    chosen = most_frequent(counts, size)
    share = counts[chosen].sum() / counts.sum().clamp_min(1)
    logger.info(
        "the draft vocabulary holds %d of %d tokens, which cover %.1f %% of the supervised tokens.",
        size,
        vocab_size,
        100 * share,
    )
    return chosen
