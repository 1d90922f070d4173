"""Small Python functions with a doctest, written from a description."""

import ast
from typing import Any

from . import programs, sandbox
from .draw import Draw
from .example import Family, Written, chat, fenced

ASKS = (
    "Write a Python function `{head}` that does this: {said} Use {call} as the doctest.",
    "I need `{head}` in Python.\nTask: {said}\nDoctest: {call}",
    "Please write the function `{head}`. {said} Show {call} in a doctest.",
    "Python, please: `{head}`\n- {said}\n- doctest on {call}",
    "Can you write `{head}`? It should do the following. {said} The doctest calls {call}.",
    "Define `{head}` in Python. {said} Include the doctest {call}.",
    "Give me Python code for `{head}`.\n{said}\nThe docstring tests {call}.",
    "How would you write `{head}`? {said} Add a doctest with {call}.",
    "Implement `{head}` with one doctest, {call}. {said}",
    "Complete `{head}` for me: {said} Its docstring has the doctest {call}.",
)
OPENINGS = ("Here is the function:", "This does it:", "The function with its doctest:")


def write(draw: Draw) -> Written:
    """Writes one function task; the doctest is the first of the six calls that the checker compares."""
    function = programs.draw_function(draw)
    inputs = programs.draw_inputs(draw, function, 6)
    call, said = programs.call(function, inputs[0]), programs.description(function)
    head = programs.head(function).removeprefix("def ").removesuffix(":")
    question = draw.phrasing("ask", ASKS).format(head=head, said=said, call=call)
    first, *body = programs.code(function).splitlines()
    doctest = f'    """{said}\n\n    >>> {call}\n    {programs.value(function, inputs[0])}\n    """'
    code = "\n".join([first, doctest, *body])
    answer = f"{draw.choice(OPENINGS)}\n```python\n{code}\n```"
    return Written(chat(question, answer), {"function": function, "inputs": inputs})


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Runs the doctests, and compares the results of six calls with those of the described function."""
    code = fenced(answer, "python")
    if code is None:
        return "the answer has not exactly one fenced block of Python."
    if (found := sandbox.code_problem(code)) is not None:
        return found
    function, inputs = facts["function"], facts["inputs"]
    if not any(isinstance(node, ast.FunctionDef) and node.name == function["name"] for node in ast.parse(code).body):
        return f"the code does not define `{function['name']}`."
    calls = [programs.call(function, arguments) for arguments in inputs]
    doctests = sandbox.doctests(code)
    if calls[0] not in [call for call, _ in doctests]:
        return f"no doctest calls {calls[0]}."
    (outcome,) = sandbox.run_jobs([sandbox.job(code, calls, doctests)])
    if "error" in outcome:
        return f"the code fails: {outcome['error']}."
    expected = [repr(programs.value(function, arguments)) for arguments in inputs]
    if outcome["results"] != expected:
        return f"the calls {calls} give {outcome['results']}, not {expected}."
    return None


FAMILY = Family("python function", write, problem)
