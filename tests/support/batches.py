"""Batches of prompts of different lengths, and the text that each prompt gives alone."""

from __future__ import annotations

from typing import Any

import torch

from support.stubs import StubHead
from support.targets import VOCAB, plain, prompt

NEW = 22
LENGTHS = (19, 4, 12, 19)
MIXED = (0, 0, 1, 0, None, 0, 0, 0, 2)


def batch_of(lengths=LENGTHS, vocab: int = VOCAB) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Makes left-padded inputs, and returns each row's prompt alone, too."""
    alone = [prompt(length, seed=seed, vocab=vocab) for seed, length in enumerate(lengths)]
    longest = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in alone])
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    return {"input_ids": ids, "attention_mask": mask}, alone


def greedy(target, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    return target.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


def alone_texts(target, alone: list[torch.Tensor], **options: Any) -> list[list[int]]:
    """Returns the new tokens of plain generation, row by row."""
    new_tokens = options.pop("max_new_tokens", NEW)
    return [plain(target, ids, new_tokens, **options)[0, ids.shape[1] :].tolist() for ids in alone]


def oracle(target, alone: list[torch.Tensor], texts: list[list[int]], ranks=MIXED, **tree: Any) -> StubHead:
    truths = [torch.tensor(ids[0].tolist() + text) for ids, text in zip(alone, texts, strict=True)]
    return StubHead(target, truths, ranks, **tree)


def assert_rows(got: torch.Tensor, prompt_length: int, texts: list[list[int]], pad: int = 0) -> None:
    longest = max(map(len, texts))
    assert got.shape[1] == prompt_length + longest
    for row, text in zip(got[:, prompt_length:].tolist(), texts, strict=True):
        assert row == text + [pad] * (longest - len(text))
