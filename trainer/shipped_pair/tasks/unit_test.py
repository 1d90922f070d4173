"""A unit test for a given function and given inputs."""

import ast
from typing import Any

from . import programs, sandbox
from .draw import Draw
from .example import Family, Written, chat, fenced

ASKS = (
    "Write a pytest test for this function:\n```python\n{code}```\nCheck the calls {calls}.",
    "```python\n{code}```\nPlease write a test function with asserts for {calls}.",
    "I wrote this:\n```python\n{code}```\nTest it with {calls}.",
    "Here is some code.\n```python\n{code}```\nAdd a unit test that covers {calls}.",
    "Can you test the following function?\n```python\n{code}```\nUse {calls}.",
    "Unit test, please, for {calls}:\n```python\n{code}```",
    "What would a test of this look like?\n```python\n{code}```\nThe calls are {calls}.",
    "Give me a pytest function that asserts the results of {calls}:\n```python\n{code}```",
    "A test is missing here:\n```python\n{code}```\nAssert what {calls} return.",
    "Cover this code with a test of {calls}.\n```python\n{code}```",
)
OPENINGS = ("Here is the test:", "This test covers the calls:", "A test for pytest:")


def write(draw: Draw) -> Written:
    """Writes a function and three calls to test."""
    function = programs.draw_function(draw)
    inputs = programs.draw_inputs(draw, function, 3)
    calls = [programs.call(function, arguments) for arguments in inputs]
    asked = f"{calls[0]}, {calls[1]} and {calls[2]}"
    question = draw.phrasing("ask", ASKS).format(code=programs.code(function), calls=asked)
    expected = [programs.value(function, arguments) for arguments in inputs]
    asserts = [f"    assert {call} == {result}" for call, result in zip(calls, expected, strict=True)]
    test = "\n".join([f"def test_{function['name']}():", *asserts])
    answer = f"{draw.choice(OPENINGS)}\n```python\n{test}\n```"
    return Written(chat(question, answer), {"function": function, "inputs": inputs})


def _missed(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the near misses of the function that give other results for the given inputs."""
    function, inputs = facts["function"], facts["inputs"]
    right = [programs.value(function, arguments) for arguments in inputs]
    candidates = programs.near_misses(function)
    return [other for other in candidates if [programs.value(other, arguments) for arguments in inputs] != right]


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Checks that the test passes for the function, makes every requested call, and fails for every near miss that the
    calls can detect."""
    test = fenced(answer, "python")
    if test is None:
        return "the answer has not exactly one fenced block of Python."
    if (found := sandbox.code_problem(test)) is not None:
        return found
    function = facts["function"]
    tree = ast.parse(test)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if len(names) != 1 or len(tree.body) != 1 or not names[0].startswith("test_"):
        return f"the code defines {names}, not one test function alone."
    called = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for arguments in facts["inputs"]:
        if (call := programs.call(function, arguments)) not in called:
            return f"the test does not call {call}."
    tested = [function, *_missed(facts)]
    jobs = [sandbox.job(f"{programs.code(other)}\n{test}", [f"{names[0]}()"]) for other in tested]
    right, *wrong = sandbox.run_jobs(jobs)
    if "error" in right:
        return f"the test fails for the right function: {right['error']}."
    if any("error" not in outcome for outcome in wrong):
        return "the test passes for a wrong function."
    return None


FAMILY = Family("unit test", write, problem, weight=2)
