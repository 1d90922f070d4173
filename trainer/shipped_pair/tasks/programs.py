"""Small Python functions by their description: the code, how it is said, and near misses of it.

A function is a dictionary of JSON values (`kind`, `name`, `arguments`, constants), so that it can stand in the facts
of an example; the rest is computed from it.
"""

from typing import Any

from .draw import Draw
from .words import COLOURS, THINGS

VERBS = (
    "adjust",
    "compute",
    "derive",
    "find",
    "gather",
    "keep",
    "make",
    "pick",
    "prepare",
    "scale",
    "select",
    "update",
)
# How numbers are kept: the condition as code, and as it is said.
CONDITIONS = {
    "above": ("value > {limit}", "greater than {limit}"),
    "below": ("value < {limit}", "less than {limit}"),
    "at_least": ("value >= {limit}", "of at least {limit}"),
    "multiple": ("value % {limit} == 0", "divisible by {limit}"),
}
CHANGES = {
    "add": ("value + {step}", "add {step} to each"),
    "subtract": ("value - {step}", "subtract {step} from each"),
    "multiply": ("value * {step}", "multiply each by {step}"),
}
NEAR_CONDITIONS = {"above": "at_least", "at_least": "above", "below": "above", "multiple": "above"}
NEAR_CHANGES = {"add": "subtract", "subtract": "add", "multiply": "add"}


def draw_function(draw: Draw) -> dict[str, Any]:
    """A function of one of three kinds: `keep` (a filter and a change of a list), `count`, `formula` (two numbers)."""
    kind = draw.choice(("keep", "count", "formula"))
    name = f"{draw.choice(VERBS)}_{draw.word(THINGS)}s"
    if kind == "formula":
        first, second = (f"{word}_count" for word in draw.words(THINGS, 2))
        return {"kind": kind, "name": name, "arguments": [first, second], "factor": draw.number(2, 9)}
    function = {
        "kind": kind,
        "name": name,
        "arguments": [f"{draw.word(COLOURS)}_values"],
        "condition": draw.choice(tuple(CONDITIONS)),
        "limit": draw.number(2, 9),
    }
    if kind == "keep":
        function |= {"change": draw.choice(tuple(CHANGES)), "step": draw.number(2, 9)}
    return function


def draw_inputs(draw: Draw, function: dict[str, Any], count: int) -> list[list[Any]]:
    """Arguments of `count` different calls."""
    inputs: list[list[Any]] = []
    while len(inputs) < count:
        if function["kind"] == "formula":
            arguments: list[Any] = [draw.number(1, 9), draw.number(1, 9)]
        else:
            near = [max(function["limit"] + draw.number(-1, 1), 1), draw.number(1, 20), draw.number(1, 20)]
            draw.random.shuffle(near)
            arguments = [near]
        if arguments not in inputs:
            inputs.append(arguments)
    return inputs


def description(function: dict[str, Any]) -> str:
    """What the function does, as the first line of its docstring says it."""
    if function["kind"] == "formula":
        first, second = function["arguments"]
        return f"Return {function['factor']} times {first} plus {second}."
    kept = CONDITIONS[function["condition"]][1].format(**function)
    if function["kind"] == "count":
        return f"Count the numbers {kept}."
    return f"Keep the numbers {kept} and {CHANGES[function['change']][1].format(**function)}."


def expression(function: dict[str, Any]) -> str:
    """What the function returns, as code."""
    if function["kind"] == "formula":
        first, second = function["arguments"]
        return f"{function['factor']} * {first} + {second}"
    condition = CONDITIONS[function["condition"]][0].format(**function)
    if function["kind"] == "count":
        return f"sum(1 for value in {function['arguments'][0]} if {condition})"
    change = CHANGES[function["change"]][0].format(**function)
    return f"[{change} for value in {function['arguments'][0]} if {condition}]"


def head(function: dict[str, Any]) -> str:
    """The `def` line."""
    return f"def {function['name']}({', '.join(function['arguments'])}):"


def code(function: dict[str, Any]) -> str:
    """The function without a docstring."""
    return f"{head(function)}\n    return {expression(function)}\n"


def call(function: dict[str, Any], arguments: list[Any]) -> str:
    """A call of the function."""
    return f"{function['name']}({', '.join(map(str, arguments))})"


def value(function: dict[str, Any], arguments: list[Any]) -> Any:
    """What a call returns."""
    if function["kind"] == "formula":
        x, y = arguments
        return function["factor"] * x + y
    limit, (numbers,) = function["limit"], arguments
    holds = {
        "above": lambda number: number > limit,
        "below": lambda number: number < limit,
        "at_least": lambda number: number >= limit,
        "multiple": lambda number: number % limit == 0,
    }[function["condition"]]
    kept = [number for number in numbers if holds(number)]
    if function["kind"] == "count":
        return len(kept)
    step = function["step"]
    return [{"add": n + step, "subtract": n - step, "multiply": n * step}[function["change"]] for n in kept]


def near_misses(function: dict[str, Any]) -> list[dict[str, Any]]:
    """Functions of the same name that differ in one place."""
    if function["kind"] == "formula":
        return [{**function, "factor": function["factor"] + 1}, {**function, "factor": function["factor"] - 1}]
    missed = [
        {**function, "limit": function["limit"] + 1},
        {**function, "condition": NEAR_CONDITIONS[function["condition"]]},
    ]
    if function["kind"] == "keep":
        missed += [
            {**function, "step": function["step"] + 1},
            {**function, "change": NEAR_CHANGES[function["change"]]},
        ]
    return missed
