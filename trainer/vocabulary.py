"""Which tokens a draft vocabulary should hold: those that the training data asks for most often (EAGLE-3's code)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .data import complete_example

logger = logging.getLogger(__name__)


def frequent_tokens(dataset: Iterable[Mapping[str, Any]], size: int, vocab_size: int) -> torch.Tensor:
    """The tokens that are supervised most often, for `AutoDraftHead.from_target(..., draft_token_ids=...)`.

    Args:
        dataset: Examples with `input_ids` and, where not every token is supervised, `loss_mask` or `labels`.
        size: Vd, how many to choose. Among tokens that are equally frequent, those never seen included, lower ids win.
        vocab_size: V of the target.

    Returns:
        int64 [Vd], ascending.

    Raises:
        ValueError: for a size that is not between 1 and V, or token ids above V.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"`size` of a draft vocabulary must be between 1 and {vocab_size}, got {size}.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in dataset:
        ids, mask = (torch.tensor(values) for values in complete_example(example))
        if ids.numel() and int(ids.max()) >= vocab_size:
            raise ValueError(
                f"the data has the token id {int(ids.max())}, above the target's {vocab_size} ids; tokenize it with "
                "the target's own tokenizer."
            )
        counts += torch.bincount(ids[mask.bool()], minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size]
    share = counts[chosen].sum() / counts.sum().clamp_min(1)
    logger.info("%d of %d tokens make up %.1f %% of the supervised ones.", size, vocab_size, 100 * share)
    return chosen.sort().values
