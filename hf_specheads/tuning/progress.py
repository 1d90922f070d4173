"""Progress bars for measurements that take minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from transformers.utils import logging

Item = TypeVar("Item")


def bar(items: Sequence[Item], what: str) -> Sequence[Item]:
    """Iterates over items with a progress bar on stderr.

    The bar is that of transformers: it is not shown without a terminal, or after
    `transformers.utils.logging.disable_progress_bar()`.

    Args:
        items: Items to iterate over.
        what: What is being measured, in a few words.
    """
    return logging.tqdm(items, desc=what, disable=None, leave=False)
