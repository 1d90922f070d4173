"""Training data of the target: blocks of whole chats, with shares of blocks of standard-library text and of exercises.

A block depends only on seed and index, so a run can stop and resume anywhere, and use any number of loading processes.
"""

import random

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .chat import END_OF_TEXT, chat_tokens
from .tasks import FAMILIES, example_at
from .tasks.draw import Draw
from .tasks.sheets import sheet

IGNORED = -100
MOST_CHATS = 64  # most chats drawn for one block
MISFITS = 10  # a block is closed after this many chats that do not fit into the rest of it


def text_stream(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Tokenizes all texts into one stream, each text followed by the end-of-text token; int32 [tokens]."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    stream: list[int] = []
    for start in range(0, len(texts), 64):
        for ids in tokenizer(texts[start : start + 64], add_special_tokens=False)["input_ids"]:
            stream += [*ids, end]
    return torch.tensor(stream, dtype=torch.int32)


class MixtureBlocks(Dataset):
    """Blocks of `block_size` tokens: `input_ids`, `labels` and `position_ids`, int64 [block_size] each.

    Positions restart at 0 with every chat or piece of text. Without a cache and a padding mask, transformers separates
    documents by these positions, so a chat sees the same context as in serving. Labels are the assistant's tokens of a
    chat, and all but the first token of a block of text. When no further chat fits, the block is filled with text
    without labels: the loss of text is seven times that of an answer, so a tenth of the tokens would dominate the
    gradient.

    Args:
        tokenizer: Tokenizer with the chat template, see `tokenizer.py`.
        stream: Token ids of the text to cut from, int32 [tokens], longer than a block.
        block_size: Tokens per block.
        num_blocks: Number of blocks.
        seed: Seed of blocks and chats.
        text_share: Share of blocks that consist of text alone.
        sheet_share: Share of blocks that consist of exercises, whose answers are the labels.
        held_out: Whether to use held-out chats instead of training chats.

    Raises:
        ValueError: for a stream that is too short for a block.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stream: torch.Tensor,
        block_size: int,
        num_blocks: int,
        seed: int = 0,
        text_share: float = 0.03,
        sheet_share: float = 0.1,
        held_out: bool = False,
    ):
        if len(stream) <= block_size:
            raise ValueError(f"the text has {len(stream)} tokens, too few for blocks of {block_size}; give more text.")
        self.tokenizer, self.stream, self.block_size = tokenizer, stream, block_size
        self.num_blocks, self.seed, self.held_out = num_blocks, seed, held_out
        self.text_share, self.sheet_share = text_share, sheet_share

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"block/{self.held_out}/{self.seed}/{index}")
        kind = rng.random()
        if kind < self.text_share:
            ids = self._text(rng, self.block_size)
            documents = [(ids, [IGNORED, *ids[1:]])]
        elif kind < self.text_share + self.sheet_share:
            documents = [self._sheet(index)]
        else:
            documents = self._chats(rng, index)
            left = self.block_size - sum(len(ids) for ids, _ in documents)
            documents += [(self._text(rng, left), [IGNORED] * left)] if left else []
        return {
            "input_ids": torch.tensor([token for ids, _ in documents for token in ids]),
            "labels": torch.tensor([label for _, labels in documents for label in labels]),
            "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in documents]),
        }

    def _chats(self, rng: random.Random, index: int) -> list[tuple[list[int], list[int]]]:
        """Draws chats, with families chosen by weight, until `MISFITS` of them did not fit; returns ids and labels."""
        documents: list[tuple[list[int], list[int]]] = []
        left, misfits = self.block_size, 0
        for place in range(MOST_CHATS):
            (family,) = rng.choices(FAMILIES, [family.weight for family in FAMILIES])
            example = example_at(family, MOST_CHATS * index + place, self.seed, self.held_out)
            ids, mask = chat_tokens(example, self.tokenizer)
            if len(ids) > left:
                misfits += 1
                if misfits == MISFITS:
                    break
                continue
            left -= len(ids)
            documents.append((ids, [token if chosen else IGNORED for token, chosen in zip(ids, mask, strict=True)]))
        return documents

    def _sheet(self, index: int) -> tuple[list[int], list[int]]:
        """Returns ids and labels of exercises, line by line; the last line is cut at the end of the block."""
        ids, labels = [], []
        for told, found in sheet(Draw(f"sheet/{self.held_out}/{self.seed}/{index}", self.held_out)):
            asked, answer = (
                self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (told, f"{found}\n")
            )
            ids += asked + answer
            labels += [IGNORED] * len(asked) + answer
            if len(ids) >= self.block_size:
                break
        return ids[: self.block_size], labels[: self.block_size]

    def _text(self, rng: random.Random, length: int) -> list[int]:
        start = rng.randrange(len(self.stream) - length)
        return self.stream[start : start + length].tolist()
