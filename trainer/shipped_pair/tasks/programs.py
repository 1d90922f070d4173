"""Small Python functions: their description, their code, and near misses of them.

A function is a dictionary of JSON values (`kind`, `name`, `arguments`, constants), so that the facts of an example can
hold it. Everything else is computed from the dictionary.
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
# Conditions for keeping numbers, as code and in words.
CONDITIONS = {
    "above": ("value > {limit}", "greater than {limit}"),
    "below": ("value < {limit}", "less than {limit}"),
    "at_least": ("value >= {limit}", "of at least {limit}"),
}
CHANGES = {
    "add": ("value + {step}", "Add {step} to each number"),
    "subtract": ("value - {step}", "Subtract {step} from each number"),
}
NEAR_CONDITIONS = {"above": "at_least", "at_least": "above", "below": "above"}
NEAR_CHANGES = {"add": "subtract", "subtract": "add"}
FACTORS = (2, 5, 10)


def draw_function(draw: Draw) -> dict[str, Any]:
    """Draws a function of one of four kinds: `keep` and `count` (numbers that meet a condition), `change` (every
    number), `formula` (of two numbers). Its result takes one small step per number: nothing is both filtered and
    changed, and the tens digit decides a condition except next to the limit."""
    kind = draw.choice(("keep", "count", "change", "formula"))
    name = f"{draw.choice(VERBS)}_{draw.word(THINGS)}s"
    if kind == "formula":
        first, second = (f"{word}_count" for word in draw.words(THINGS, 2))
        return {"kind": kind, "name": name, "arguments": [first, second], "factor": draw.choice(FACTORS)}
    function = {"kind": kind, "name": name, "arguments": [f"{draw.word(COLOURS)}_values"]}
    if kind == "change":
        return {**function, "change": draw.choice(tuple(CHANGES)), "step": draw.number(2, 9)}
    return {**function, "condition": draw.choice(tuple(CONDITIONS)), "limit": 10 * draw.number(2, 8)}


def draw_inputs(draw: Draw, function: dict[str, Any], count: int) -> list[list[Any]]:
    """Draws the arguments of `count` different calls."""
    inputs: list[list[Any]] = []
    while len(inputs) < count:
        if function["kind"] == "formula":
            arguments: list[Any] = [draw.number(1, 9), draw.number(1, 9)]
        else:
            first = function["limit"] + draw.number(-1, 1) if "limit" in function else draw.number(11, 90)
            numbers = [first, draw.number(11, 90), draw.number(11, 90)]
            draw.random.shuffle(numbers)
            arguments = [numbers]
        if arguments not in inputs:
            inputs.append(arguments)
    return inputs


def description(function: dict[str, Any]) -> str:
    """Returns a description of the function, which is the first line of its docstring."""
    if function["kind"] == "formula":
        first, second = function["arguments"]
        return f"Return {function['factor']} times {first} plus {second}."
    if function["kind"] == "change":
        return f"{CHANGES[function['change']][1].format(**function)}."
    kept = CONDITIONS[function["condition"]][1].format(**function)
    return f"{'Count' if function['kind'] == 'count' else 'Keep'} the numbers {kept}."


def expression(function: dict[str, Any]) -> str:
    """Returns the expression that the function returns, as code."""
    if function["kind"] == "formula":
        first, second = function["arguments"]
        return f"{function['factor']} * {first} + {second}"
    (numbers,) = function["arguments"]
    if function["kind"] == "change":
        return f"[{CHANGES[function['change']][0].format(**function)} for value in {numbers}]"
    condition = CONDITIONS[function["condition"]][0].format(**function)
    if function["kind"] == "count":
        return f"sum(1 for value in {numbers} if {condition})"
    return f"[value for value in {numbers} if {condition}]"


def head(function: dict[str, Any]) -> str:
    """Returns the `def` line."""
    return f"def {function['name']}({', '.join(function['arguments'])}):"


def code(function: dict[str, Any]) -> str:
    """Returns the code of the function, without a docstring."""
    return f"{head(function)}\n    return {expression(function)}\n"


def call(function: dict[str, Any], arguments: list[Any]) -> str:
    """Returns a call of the function, as code."""
    return f"{function['name']}({', '.join(map(str, arguments))})"


def value(function: dict[str, Any], arguments: list[Any]) -> Any:
    """Computes the result of a call."""
    if function["kind"] == "formula":
        x, y = arguments
        return function["factor"] * x + y
    (numbers,) = arguments
    if function["kind"] == "change":
        step = function["step"]
        return [{"add": number + step, "subtract": number - step}[function["change"]] for number in numbers]
    limit = function["limit"]
    holds = {
        "above": lambda number: number > limit,
        "below": lambda number: number < limit,
        "at_least": lambda number: number >= limit,
    }[function["condition"]]
    kept = [number for number in numbers if holds(number)]
    return len(kept) if function["kind"] == "count" else kept


def near_misses(function: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns functions of the same name that differ in one place."""
    if function["kind"] == "formula":
        return [{**function, "factor": function["factor"] + 1}, {**function, "factor": function["factor"] - 1}]
    if function["kind"] == "change":
        return [{**function, "step": function["step"] + 1}, {**function, "change": NEAR_CHANGES[function["change"]]}]
    return [
        {**function, "limit": function["limit"] + 1},
        {**function, "condition": NEAR_CONDITIONS[function["condition"]]},
    ]
