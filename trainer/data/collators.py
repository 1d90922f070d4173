"""Which collator makes batches of which data."""

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
    """The collator for prepared data sets: of images, of stored features, or of packed or padded sequences.

    Args:
        datasets: For training and evaluation, or `None`.
        heads: To be trained.
        target: Their target.
        processing_class: Tokenizer or processor; says what padding is.
        args: Complete.
        trains_target: Whether the target is trained too.

    Raises:
        ValueError: for data that do not go together with `args`, see [`stored_features.collator_of`].
    """
    default = default_collator(tokenizer_of(processing_class), args.max_length, args.packing)
    flat = [one for given in datasets for one in (given.values() if isinstance(given, dict) else [given])]
    if any(isinstance(dataset, ImageChats) for dataset in flat):
        refuse_with_images(args, trains_target)
        return ImageCollator(default.pad_token_id, args.max_length)
    return collator_of(datasets, heads, target, default.pad_token_id, args) or default


def refuse_with_images(args: DraftHeadTrainingArguments, trains_target: bool) -> None:
    """Raises for what training with images leaves out."""
    if args.packing:
        raise ValueError("packing=True cannot be used with a processor's chats; set packing=False.")
    if args.shard_target:
        raise ValueError(
            "shard_target cannot be used with a processor's chats: processes whose chats have no image would leave "
            "out forwards that the others wait for; spread the target over devices (device_map) instead."
        )
    if trains_target:
        raise ValueError("a target cannot be trained too on a processor's chats; use data of text and a tokenizer.")
