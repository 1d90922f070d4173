"""Sides take turns in an order that rotates; timed generations are those of `generate`."""

from __future__ import annotations

import pytest
import torch
from support.targets import plain, prompt, shared_target

from hf_specheads.heads.auto import AutoDraftHead
from hf_specheads.tuning.turns import every_round_drafts, generate_text, take_turns, timed_generation


def test_every_side_runs_every_prompt_in_a_rotating_order() -> None:
    order = []

    def run(side: str, prompt: int, turn: int) -> tuple[str, int, int]:
        order.append(side)
        return side, prompt, turn

    found = take_turns("abc", [10, 20], run, 2, warm_up=lambda side, prompt: order.append(f"warm {side} {prompt}"))
    assert order[:3] == ["warm a 10", "warm b 10", "warm c 10"]
    assert order[3:] == [*"abc", *"bca", *"bca", *"cab"]
    assert found["b"] == [[("b", 10, 0), ("b", 20, 1)], [("b", 10, 2), ("b", 20, 3)]]
    assert list(found) == list("abc")


def test_without_a_warm_up_of_its_own_every_side_runs_once_more() -> None:
    runs = []
    take_turns([None, 1], ["x"], lambda *turn: runs.append(turn), 1)
    assert runs == [(None, "x", 0), (1, "x", 0), (None, "x", 0), (1, "x", 0)]


def test_without_prompts_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="at least one prompt, got none"):
        take_turns("ab", [], print, 1)


def test_a_prompt_is_token_ids_or_what_a_tokenizer_returns() -> None:
    target, ids = shared_target(), prompt()
    expected = plain(target, ids, 7)
    for form in (ids, ids[0].tolist(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        assert torch.equal(generate_text(target, form, max_new_tokens=7), expected)
        new_ids, seconds = timed_generation(target, form, max_new_tokens=7, return_dict_in_generate=True)
        assert new_ids == expected[:, ids.shape[1] :].tolist() and seconds > 0


def test_all_sequences_of_a_batch_are_returned() -> None:
    target = shared_target()
    batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    new_ids, _ = timed_generation(target, batch, max_new_tokens=4, eos_token_id=None)
    assert [len(row) for row in new_ids] == [4, 4]


def test_heads_draft_every_round_while_they_are_measured() -> None:
    heads = AutoDraftHead.from_target(shared_target(), "eagle")
    heads.adaptive = True
    with every_round_drafts(heads) as measured:
        assert not measured.adaptive and not heads.with_tree(kind="chain", depth=1).adaptive
    assert heads.adaptive
