"""Acceptance length and pos-acc, checked against counts made by hand."""

import pytest

from hf_specheads import GenerationStats
from hf_specheads.metrics import acceptance_length, position_acceptance


def test_acceptance_length_counts_the_bonus_token():
    assert acceptance_length([[0, 2, 4]]) == pytest.approx(3.0)
    assert acceptance_length([[0], [3, 3]]) == pytest.approx(3.0)
    assert acceptance_length([]) == 0.0


def test_pos_acc_is_conditional_on_the_positions_before():
    accepted = [[0, 1, 3, 3]]
    # position 1: 3 of 4; position 2: 2 of the 3 that came so far; position 3: 2 of 2.
    assert position_acceptance(accepted, [[3, 3, 3, 3]]) == pytest.approx([3 / 4, 2 / 3, 1.0])


def test_pos_acc_ignores_positions_that_were_not_drafted():
    """A round near the length limit drafts less deep; it says nothing about the positions it did not draft."""
    assert position_acceptance([[2, 1]], [[2, 1]]) == pytest.approx([1.0, 1.0])
    assert position_acceptance([[2, 1]], [[2, 3]]) == pytest.approx([1.0, 0.5])


def test_pos_acc_ends_at_the_deepest_position_ever_reached():
    assert position_acceptance([[0, 0]], [[5, 5]]) == [0.0]
    assert position_acceptance([], []) == []


def test_stats_keep_rows_apart():
    stats = GenerationStats()
    stats.record_round(0, 2, 3)
    stats.record_round(1, 0, 3)
    stats.record_round(0, 1, 3)
    assert stats.num_accepted == [[2, 1], [0]]
    assert stats.rounds == 2
    assert stats.acceptance_length == pytest.approx(2.0)
    assert stats.pos_acc == pytest.approx([2 / 3, 1 / 2, 0.0])


@pytest.mark.parametrize("profile", [True, False])
def test_stages_are_timed_only_when_profiling(profile):
    stats = GenerationStats(profile=profile)
    for _ in range(2):
        with stats.stage("draft"):
            pass
    assert list(stats.seconds) == (["draft"] if profile else [])
