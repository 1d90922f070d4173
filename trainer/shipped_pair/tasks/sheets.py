"""Exercise sheets: pages of the small steps that answers consist of.

A chat holds two sums among eighty tokens, so a small model would need a hundred thousand chats to learn addition.
Sheets are used for training only. Numbers of one calculation are split as in the families.
"""

from collections.abc import Callable

from . import arithmetic, measures, programs
from .draw import Draw

Line = tuple[str, str]  # given text, and text to predict


def _sums(draw: Draw) -> list[Line]:
    """Draws the equations of a word problem."""
    operations = draw.choice([story["operations"] for story in arithmetic.STORIES])
    numbers = draw.numbers(lambda rng: arithmetic.draw_numbers(operations, rng))
    return [(f"{a} {sign} {b} =", f" {result}") for a, sign, b, result in arithmetic.equations(operations, [*numbers])]


def _steps(draw: Draw) -> list[Line]:
    """Draws the steps of a conversion, an end time or a date."""
    return [_cut(step) for step in measures.steps_of(draw)]


def _cut(step: str) -> Line:
    """Splits a step after its equals sign or verb, at the last occurrence of the first separator found."""
    for word in (" = ", " are ", " is ", " makes "):
        told, found, rest = step.rpartition(word)
        if found:
            return told + found.rstrip(), f" {rest}"
    raise ValueError(f"{step!r} has nothing to find.")


def _calls(draw: Draw) -> list[Line]:
    """Draws calls of a function: its expression with the arguments filled in, and the value."""
    function = programs.draw_function(draw)
    lines = []
    for arguments in programs.draw_inputs(draw, function, 2):
        told = programs.expression(function)
        for name, value in zip(function["arguments"], arguments, strict=True):
            told = told.replace(name, str(value))
        lines.append((f"{told} ==", f" {programs.value(function, arguments)}"))
    return lines


def _orders(draw: Draw) -> list[Line]:
    """Draws numbers to sort, to compare with a limit, and to count."""
    numbers = [10 * tens + draw.number(1, 9) for tens in draw.random.sample(range(1, 10), draw.number(4, 7))]
    limit, told = 10 * draw.number(2, 8), draw.choice((", ", "\n- ")).join(map(str, numbers))
    above = ", ".join(str(number) for number in numbers if number > limit)
    below = ", ".join(str(number) for number in numbers if number < limit)
    return [
        (f"{told}; smallest first:", f" {', '.join(map(str, sorted(numbers)))}"),
        (f"{told}; largest first:", f" {', '.join(map(str, sorted(numbers, reverse=True)))}"),
        (f"{told}; above {limit}:", f" {above or 'none'}"),
        (f"{told}; below {limit}:", f" {below or 'none'}"),
        (f"{told}; how many:", f" {len(numbers)}"),
    ]


KINDS: tuple[Callable[[Draw], list[Line]], ...] = (_sums, _steps, _calls, _orders)


def sheet(draw: Draw) -> list[Line]:
    """Returns the exercises of one page, a hundred or slightly more of one kind; callers use as many as fit."""
    kind = draw.choice(KINDS)
    lines: list[Line] = []
    while len(lines) < 100:
        lines += kind(draw)
    return lines
