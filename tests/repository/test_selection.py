"""What the default run leaves out of the full one: cases of which each value occurs in others, and nothing else."""

from __future__ import annotations

import itertools

import pytest
from support.covering import combinations_of, covering, mark_the_rest

pytest_plugins = ("pytester",)
CASES = list(itertools.product("abcdefg", range(4), (True, False)))


@pytest.mark.parametrize(("strength", "most"), [(1, 7), (2, 30), (3, len(CASES))])
def test_every_combination_occurs(strength: int, most: int) -> None:
    chosen = covering(CASES, strength)
    assert 0 < len(chosen) <= most
    found = set().union(*(combinations_of(CASES[index], strength) for index in chosen))
    assert found == set().union(*(combinations_of(case, strength) for case in CASES))


def test_cases_that_are_slow_anyway_stand_for_none(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  slow: s\n  covering: c")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.covering(1)
        @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow)])
        @pytest.mark.parametrize("b", [[1], [2]])
        def test_both(a, b):
            pass

        @pytest.mark.parametrize("a", [1, 2])
        def test_whole(a):
            pass
    """)
    items, _ = pytester.inline_genitems()
    mark_the_rest(items)
    assert [item.name for item in items if item.get_closest_marker("slow")] == ["test_both[b0-2]", "test_both[b1-2]"]
    mark_the_rest(items[:1])
    assert items[0].get_closest_marker("slow") is None, "a case that is run alone"
