"""Bars for what takes minutes: what is being measured, how much of it is done, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from transformers.utils import logging

Item = TypeVar("Item")


def bar(items: Sequence[Item], what: str) -> Sequence[Item]:
    """The items, one after the other, under a bar on stderr.

    It is transformers' bar: nothing is shown where there is no terminal, or after
    `transformers.utils.logging.disable_progress_bar()`.

    Args:
        items: What is gone through.
        what: What is being measured, in a few words.
    """
    return logging.tqdm(items, desc=what, disable=None, leave=False)
