"""Chooses the collator for the prepared data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_specheads.heads.base import DraftHead

from ..arguments import DraftHeadTrainingArguments
from .batches import PaddedCollator, default_collator
from .images import ImageChats, ImageCollator, tokenizer_of
from .stored_features import collator_of


def choose_collator(
    datasets: Sequence[Any],
    heads: DraftHead,
    target: PreTrainedModel,
    processing_class: Any,
    args: DraftHeadTrainingArguments,
    trains_target: bool = False,
) -> PaddedCollator:
    """Returns the collator for prepared data sets: for images, for stored features, or for packed or padded sequences.

    Args:
        datasets: Training and evaluation data sets; each may be `None`, or a dict of data sets.
        heads: Draft heads to train.
        target: Target of the draft heads.
        processing_class: Tokenizer or processor, which defines the padding token.
        args: Training arguments, completed with the method's defaults.
        trains_target: Whether an adapter of the target is trained too.

    Raises:
        ValueError: for data that cannot be used with `args`, see [`stored_features.collator_of`].
    """
    default = default_collator(tokenizer_of(processing_class), args.max_length, args.packing)
    flat = [one for given in datasets for one in (given.values() if isinstance(given, dict) else [given])]
    if any(isinstance(dataset, ImageChats) for dataset in flat):
        refuse_with_images(args, trains_target)
        return ImageCollator(default.pad_token_id, args.max_length)
    return collator_of(datasets, heads, target, default.pad_token_id, args) or default


def refuse_with_images(args: DraftHeadTrainingArguments, trains_target: bool) -> None:
    """Raises a `ValueError` for options that training with images does not support."""
    if args.packing:
        raise ValueError("packing=True cannot be used with chats that a processor reads; set packing=False.")
    if args.shard_target:
        raise ValueError(
            "shard_target cannot be used with chats that a processor reads, because processes whose chats have no "
            "image would skip forwards that the others wait for; spread the target over devices (device_map) instead."
        )
    if trains_target:
        raise ValueError("joint training cannot use chats that a processor reads; use text data and a tokenizer.")
