"""What `python -m benchmarks doctor` plants in tiny heads is named first; of sound ones nothing is said."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis.doctor import examined
from benchmarks.diagnosis.lab import Lab, recorded_names, tiny_tokenizer
from benchmarks.diagnosis.plantings import PLANTINGS, Planting
from benchmarks.diagnosis.tiny import METHOD_OPTIONS, fresh_heads
from hf_specheads.diagnosis.alternative import partial_frequencies, partial_rotation
from hf_specheads.diagnosis.hypotheses import partial_ropes
from hf_specheads.heads.auto import METHODS

TINY = [one for one in PLANTINGS if one.heads.startswith("tiny")]
FAST = ("the slot of the anchor, tiny dflash", "labels off by one, tiny eagle3")


def plantings() -> list:
    """Those that take a second are always tried."""
    names = [f"{one.planted}, {one.heads}" for one in TINY]
    return [pytest.param(one, id=name, marks=[] if name in FAST else pytest.mark.slow)
            for one, name in zip(TINY, names, strict=True)]  # fmt: skip


@pytest.mark.parametrize("planting", plantings())
def test_plantings_are_named_first(lab: Lab, planting: Planting) -> None:
    found = examined(planting.make(lab))
    assert found.findings and found.findings[0].cause in planting.named, str(found)


def test_all_ten_causes_are_planted() -> None:
    assert {one.number for one in PLANTINGS} == set(range(1, 11))
    assert set(METHOD_OPTIONS) <= set(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", *METHOD_OPTIONS])
def test_nothing_is_said_of_sound_tiny_heads(lab: Lab, method: str) -> None:
    found = examined(lab.tiny(method))
    assert found.sound, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", recorded_names())
def test_nothing_is_said_of_recorded_heads(lab: Lab, name: str) -> None:
    """Their targets have never seen text and no tokenizer, and pieces of one text are no turns: nothing can be known
    of either, so nothing may be said."""
    case = lab.recorded(name)
    if case is None:
        pytest.skip("a recording without weights")
    found = examined(case)
    assert found.sound, str(found)


def test_a_part_that_is_rotated() -> None:
    """Pairs (0, 2), (1, 3) of the first four of eight dimensions stand where pairs (0, 4), (1, 5) are rotated."""
    order = partial_rotation(8, 0.5)
    assert sorted(order) == list(range(8)) and (order[0], order[4]) == (0, 2) and (order[1], order[5]) == (1, 3)
    assert partial_frequencies(8, 0.5, 10000.0).tolist() == pytest.approx([1.0, 0.01, 0.0, 0.0])
    assert partial_rotation(8, 1.0) == list(range(8))


def test_the_tiny_tokenizer_knows_chats() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "w20 w21"}], return_dict=True)["input_ids"]
    assert ids[2:4] == [20, 21] and len(ids) == 7


def test_projections_in_two_factors_are_not_reordered(lab: Lab) -> None:
    for method, count in (("poss", 2), ("poss-lora", 0)):
        heads = fresh_heads(lab.tiny_target, method)
        assert len(partial_ropes(heads, lab.tiny_target)) == count
