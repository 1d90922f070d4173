"""Five definitions of acceptance from the same rounds, counted by hand."""

from __future__ import annotations

import pytest

from hf_specheads.bootstrap import difference_interval, ratio_interval
from hf_specheads.evaluation.dialect import PromptRounds, field_metrics, tau_difference, tau_interval
from hf_specheads.metrics import GenerationStats

ROUNDS = [PromptRounds((3, 0, 1), (3, 3, 3)), PromptRounds((2,), (3,))]


def test_all_definitions() -> None:
    found = field_metrics(ROUNDS)
    assert (found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]) == (4, 12, 6)
    assert found["num_accepted_tokens_per_pos"] == [3, 2, 1]
    assert found["acceptance_length"] == 1 + 6 / 4
    assert found["acceptance_length_without_bonus"] == 6 / 4
    assert found["acceptance_length_macro"] == pytest.approx(((1 + 4 / 3) + (1 + 2)) / 2)
    assert found["draft_acceptance_rate"] == 0.5
    assert [found[f"acceptance_at_pos_{i}"] for i in (1, 2, 3)] == [0.75, 0.5, 0.25]
    conditional = [found[f"conditional_acceptance_at_pos_{i}"] for i in (1, 2, 3)]
    assert conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found["histogram"] == {"1": 1, "2": 1, "3": 1, "4": 1}
    low, high = found["acceptance_length_interval"]
    assert low <= found["acceptance_length"] <= high


def test_prompts_without_rounds_count_nowhere() -> None:
    assert field_metrics([]) == {} == field_metrics([PromptRounds((), ())])
    assert field_metrics([*ROUNDS, PromptRounds((), ())]) == field_metrics(ROUNDS)


def test_rounds_of_a_batch() -> None:
    stats = GenerationStats()
    for row, accepted in ((0, 2), (1, 0), (0, 1)):
        stats.record_round(row, accepted, 3)
    assert PromptRounds.of(stats) == [PromptRounds((2, 1), (3, 3)), PromptRounds((0,), (3,))]


def test_intervals_are_of_prompts_and_differences_paired() -> None:
    same = [PromptRounds((count, count), (4, 4)) for count in (0, 1, 2, 3, 4, 1, 2, 3)]
    better = [PromptRounds(tuple(n + 1 for n in one.accepted), (5, 5)) for one in same]
    alone, gap = tau_interval(same), tau_difference(better, same)
    assert alone.high - alone.low > 0.5  # prompts differ much,
    assert gap.mean == gap.low == gap.high == pytest.approx(1)  # and the difference is the same on all of them
    with pytest.raises(ValueError, match="got 8 and 7"):
        tau_difference(better, same[1:])


def test_an_interval_of_one_text_is_a_point() -> None:
    found = ratio_interval([6.0], [4.0])
    assert (found.mean, found.low, found.high) == (1.5, 1.5, 1.5) and str(found) == "1.50 (1.50 to 1.50)"
    assert difference_interval(([1.0, 3.0], [2.0, 2.0]), ([1.0, 3.0], [2.0, 2.0])).mean == 0
