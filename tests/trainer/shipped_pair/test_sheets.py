"""Exercises are right, of their split, and fill blocks whose labels are what is to be found."""

from __future__ import annotations

import re

import pytest
import torch

from hf_specheads.trainer.shipped_pair.mixture import IGNORED, MixtureBlocks
from hf_specheads.trainer.shipped_pair.tasks import value_is_held_out
from hf_specheads.trainer.shipped_pair.tasks.draw import Draw
from hf_specheads.trainer.shipped_pair.tasks.sheets import KINDS, sheet

SUMS, STEPS, CALLS, ORDERS = KINDS


@pytest.mark.parametrize("kind", [SUMS, CALLS])
def test_sums_and_values_are_python(kind) -> None:
    for seed in range(40):
        for told, found in kind(Draw(f"{seed}", False)):
            asked = told.removesuffix("==").removesuffix("=").strip()
            assert eval(asked) == eval(found), (told, found)


def test_orders_hold_all_numbers_that_belong() -> None:
    for seed in range(20):
        up, down, above, below, many = ORDERS(Draw(f"{seed}", False))
        numbers = [int(number) for number in re.findall(r"\d+", up[0])]
        listed = [[int(n) for n in found.split(", ") if n.strip() != "none"] for _, found in (up, down, above, below)]
        assert listed[0] == sorted(numbers) and listed[1] == sorted(numbers, reverse=True)
        assert sorted(listed[2] + listed[3]) == sorted(numbers)
        assert int(many[1]) == len(numbers)


def test_steps_have_something_to_find() -> None:
    for seed in range(60):
        for told, found in STEPS(Draw(f"{seed}", False)):
            assert found.strip() and told


@pytest.mark.parametrize("held_out", [False, True])
def test_numbers_are_of_the_split(held_out: bool) -> None:
    draw = Draw("one", held_out)
    for _ in range(20):
        sheet(draw)
    assert draw.values and all(value_is_held_out(value) == held_out for value in draw.values)


def test_labels_are_what_is_to_be_found(chat_tokenizer) -> None:
    stream = torch.zeros(400, dtype=torch.int32)
    blocks = MixtureBlocks(chat_tokenizer, stream, 200, num_blocks=8, text_share=0.0, sheet_share=1.0)
    for block in map(blocks.__getitem__, range(len(blocks))):
        ids, labels = block["input_ids"], block["labels"]
        assert len(ids) == 200 and ((labels == ids) | (labels == IGNORED)).all()
        assert 0.04 < (labels != IGNORED).float().mean() < 0.9
        said = chat_tokenizer.decode(ids[labels != IGNORED])
        assert "=" not in said and said.count("\n") > 3
