"""Runs Python code written by a model, after a check, in a separate process with limits.

The check refuses everything that small functions on numbers and texts do not need: imports, dunder names, and names
that reach files or the interpreter. The process has an empty environment, an empty folder, and limits on time, memory
and file size.
"""

import ast
import doctest
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

TIME_LIMIT = 5.0  # seconds, including the start of the interpreter
REFUSED_NODES = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Global, ast.Nonlocal, ast.While, ast.Pow, ast.LShift)
REFUSED_NAMES = {"breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "help", "input",
                 "locals", "memoryview", "open", "quit", "setattr", "super", "type", "vars"}  # fmt: skip
RUNNER = """
import io, json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

def run(job):
    names = {"__name__": "answer"}
    try:
        exec(compile(job["code"], "answer", "exec"), names)
        for call, expected in job["doctests"]:
            if (found := repr(eval(call, dict(names)))) != expected:
                return {"error": f"the doctest {call} gives {found}, not {expected}"}
        return {"results": [repr(eval(call, dict(names))) for call in job["calls"]]}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}

answer, sys.stdout = sys.stdout, io.StringIO()
json.dump([run(job) for job in json.load(sys.stdin)], answer)
"""


def doctests(code: str) -> list[tuple[str, str]]:
    """Returns the expressions and expected results of all doctests in the strings of `code`.

    Raises:
        SyntaxError, ValueError, RecursionError: for code or doctests that cannot be read.
    """
    strings = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    found = [doctest.DocTestParser().get_examples(text) for text in strings if isinstance(text, str)]
    return [(example.source.strip(), example.want.strip()) for examples in found for example in examples]


def code_problem(code: str) -> str | None:
    """Returns why `code` or a doctest in it is refused (parse errors or forbidden features), else `None`."""
    try:
        trees = [ast.parse(code), *(ast.parse(call, mode="eval") for call, _ in doctests(code))]
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"the code does not parse: {error}."
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, REFUSED_NODES):
            return f"the code uses {type(node).__name__}, which answers may not."
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        if isinstance(name, str) and (name in REFUSED_NAMES or name.startswith("__")):
            return f"the code uses `{name}`, which answers may not."
    return None


def job(code: str, calls: Sequence[str], doctests: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Describes one program to run: its code, doctests that must hold, and expressions to evaluate afterwards."""
    return {"code": code, "doctests": doctests, "calls": calls}


def run_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs programs that passed [`code_problem`] one after another in one restricted process.

    Returns:
        Per job, `{"results": [repr, ...]}` or `{"error": sentence}`.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", RUNNER],
                input=json.dumps(jobs),
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
                cwd=folder,
                env={},
            )
        except subprocess.TimeoutExpired:
            return [{"error": f"not done within {TIME_LIMIT} s"}] * len(jobs)
    if done.returncode != 0:
        return [{"error": f"the process ended with {done.returncode}"}] * len(jobs)
    return json.loads(done.stdout)
