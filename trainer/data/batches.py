"""Collators: turn examples `{"input_ids": [...], "loss_mask": [...]}` into padded or packed tensors.

`loss_mask` is 1 at every token the target would have generated: the assistant's tokens of a chat, every token of a
plain text. [`preparing`], [`columns`] and [`chats`] turn data into examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from .columns import complete_example


# ---------------------------------------------------------------------- batches
class PaddedCollator:
    """Collates one example per sequence, padded on the right.

    Returns `input_ids`, `attention_mask` and `loss_mask`, int64 [B, T] each. `loss_mask` is 0 at the first token of an
    example, which no row predicts, so the sum of `loss_mask` is the number of supervised rows.

    Args:
        pad_token_id: Token id of padding.
        max_length: Longest sequence in tokens; longer examples are cut.
    """

    def __init__(self, pad_token_id: int, max_length: int):
        self.pad_token_id = pad_token_id
        self.max_length = max_length

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.batch([[example] for example in self.complete(examples)])

    def complete(self, examples: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
        """Returns token ids and loss mask of every example, cut to `max_length`."""
        pairs = (complete_example(example) for example in examples)
        return [(ids[: self.max_length], mask[: self.max_length]) for ids, mask in pairs]

    def batch(self, sequences: list[list[tuple[list[int], list[int]]]]) -> dict[str, torch.Tensor]:
        """Pads sequences, each made of one or more examples (ids, loss mask), to the longest."""
        length = max(sum(len(ids) for ids, _ in sequence) for sequence in sequences)
        shape = (len(sequences), length)
        input_ids = torch.full(shape, self.pad_token_id)
        attention_mask, loss_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for index, sequence in enumerate(sequences):
            start = 0
            for ids, mask in sequence:
                end = start + len(ids)
                input_ids[index, start:end] = torch.tensor(ids)
                attention_mask[index, start:end] = 1
                loss_mask[index, start + 1 : end] = torch.tensor(mask[1:])
                start = end
        return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}


class PackedCollator(PaddedCollator):
    """Packs several examples into each sequence of up to `max_length` tokens, first fit in the given order. Rows that
    [`packing.pack_dataset`] has packed stay as they are.

    Adds `document_ids` (-1 on padding) and `position_ids` (from 0 in every example), int64 [B, T] each.
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        sequences = [documents_of(example) for example in examples if "lengths" in example]
        packed = len(sequences)
        for example in self.complete([example for example in examples if "lengths" not in example]):
            lengths = (sum(len(ids) for ids, _ in sequence) for sequence in sequences[packed:])
            fitting = (i for i, length in enumerate(lengths, packed) if length + len(example[0]) <= self.max_length)
            index = next(fitting, None)
            if index is None:
                sequences.append([example])
            else:
                sequences[index].append(example)
        batch = self.batch(sequences)
        document_ids = torch.full_like(batch["input_ids"], -1)
        position_ids = torch.zeros_like(document_ids)
        for index, sequence in enumerate(sequences):
            start = 0
            for document, (ids, _) in enumerate(sequence):
                document_ids[index, start : start + len(ids)] = document
                position_ids[index, start : start + len(ids)] = torch.arange(len(ids))
                start += len(ids)
        return {**batch, "document_ids": document_ids, "position_ids": position_ids}


def documents_of(row: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Splits a packed row into token ids and loss mask of each example."""
    ids, mask = complete_example(row)
    documents, start = [], 0
    for length in row["lengths"]:
        documents.append((ids[start : start + length], mask[start : start + length]))
        start += length
    return documents


def default_collator(tokenizer: PreTrainedTokenizerBase | None, max_length: int, packing: bool) -> PaddedCollator:
    """Returns a padding or packing collator; its padding is the tokenizer's pad token, else its end token, else 0."""
    candidates = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0)
    pad = next(token for token in candidates if token is not None)
    return (PackedCollator if packing else PaddedCollator)(pad, max_length)


# ---------------------------------------------------------------------- prompts
def cut_prompts(dataset: TorchDataset, count: int, prompt_length: int) -> list[list[int]]:
    """Cuts prompts for evaluation: a chat up to its first reply, or the beginning of a text.

    Args:
        dataset: Prepared examples, see [`prepare_dataset`].
        count: Number of prompts, taken from the front of the data set.
        prompt_length: Longest prompt, in tokens, cut from a text that is supervised from the start. At most half of
            the text is used.

    Returns:
        Token ids per prompt. Examples that are too short for a prompt are skipped.
    """
    prompts: list[list[int]] = []
    # Python iterates a torch dataset without `__iter__` by index, which type checkers do not know.
    for example in cast("Iterable[Mapping[str, Any]]", dataset):
        if len(prompts) >= count:
            break
        ids, mask = complete_example(example)
        first = mask.index(1) if 1 in mask else len(ids)
        prompt = ids[:first] if first > 1 else ids[: min(prompt_length, len(ids) // 2)]
        if 0 < len(prompt) < len(ids):
            prompts.append(prompt)
    return prompts
