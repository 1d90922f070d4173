"""Selects few of many cases so that every value, or every pair of values, of several parameters still occurs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

import pytest


def combinations_of(case: Sequence[Hashable], strength: int) -> set[tuple]:
    """Returns all combinations of `strength` values of a case, with the places of the values."""
    return set(itertools.combinations(enumerate(case), min(strength, len(case))))


def covering(cases: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Returns indices of cases that together contain each combination of values that occurs in any case.

    Args:
        cases: Each case has one value per parameter.
        strength: Number of values in a combination: 1 covers every value, 2 covers every pair of values.
    """
    offered = [combinations_of(case, strength) for case in cases]
    missing: set[tuple] = set().union(*offered)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(offered[index] & missing))
        missing -= offered[best]
        chosen.append(best)
    return sorted(chosen)


def values_of(item: pytest.Function) -> tuple[Hashable, ...]:
    """Returns the parameter values of a test, in the order of the parameters' names."""
    params = sorted(item.callspec.params.items())
    return tuple(value if isinstance(value, Hashable) else repr(value) for _, value in params)


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Marks cases of tests marked `covering` as `slow`, except for a selection that contains every combination."""
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") and not is_slow(item):
            tests.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    for cases in tests.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        chosen = covering([values_of(case) for case in cases], strength)
        for index in set(range(len(cases))) - set(chosen):
            cases[index].add_marker("slow")


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None
