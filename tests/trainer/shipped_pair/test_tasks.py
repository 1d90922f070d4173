"""Every family: its own answers are right, and changed ones are found out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import islice

import pytest

from hf_specheads.trainer.shipped_pair.chat import answer_text
from hf_specheads.trainer.shipped_pair.tasks import (
    FAMILIES,
    Example,
    Family,
    answer_problem,
    example_at,
    examples,
    family_named,
    score,
)

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def right(example: Example) -> str:
    return answer_text(example.messages[-1], example.thinking)


def other_digit(match: re.Match[str], rng: random.Random) -> str:
    return rng.choice([digit for digit in "123456789" if digit != match[0]])


def change(pattern: str, replace: Callable[[re.Match[str], random.Random], str]) -> Callable:
    """A mutation of one random match in the visible answer; `None` where nothing matches."""

    def mutate(text: str, rng: random.Random) -> str | None:
        head, opened, body = text.rpartition("</think>\n\n")
        matches = list(re.finditer(pattern, body))
        if not matches:
            return None
        match = rng.choice(matches)
        return head + opened + body[: match.start()] + replace(match, rng) + body[match.end() :]

    return mutate


MUTATIONS = {
    "a digit changes": change(r"\d", other_digit),
    "a word goes": change(r"(?<![\w<])[A-Za-z]{4,}(?![\w>])", lambda match, rng: ""),
    "a word doubles its first letter": change(r"(?<![\w<])[a-z]{4,}", lambda match, rng: match[0][0] + match[0]),
    "a line goes": change(r"(?m)^.+\n", lambda match, rng: ""),
    "the last word is cut": change(r"\w+\W*$", lambda match, rng: match[0][0]),
}
# Answers of these families are judged by what they do: the sentence in front of code is free, and a doctest or an
# assert may hold with another number too. A good part of such changes must be found all the same.
FREE = {
    "fields to json": ("a word goes", "a word doubles its first letter", "a line goes"),
    "python function": ("a word goes", "a word doubles its first letter", "a digit changes", "a line goes"),
    "unit test": ("a word goes", "a word doubles its first letter", "a line goes", "a digit changes"),
}
# Answers without digits, and of one line.
INAPPLICABLE = {("rewriting", "a digit changes"), ("rewriting", "a line goes")}


@families
def test_own_answers_are_right(family: Family) -> None:
    asked = list(islice(examples(family), 60)) + list(islice(examples(family, held_out=True), 20))
    assert [problem for example in asked if (problem := answer_problem(example, right(example)))] == []
    assert score(family, asked[:5], [right(example) for example in asked[:5]]) == 1.0


@families
@pytest.mark.parametrize("name", MUTATIONS)
def test_changed_answers_are_wrong(family: Family, name: str) -> None:
    """All of them, or a good part where words are free."""
    if (family.name, name) in INAPPLICABLE:
        assert all(
            MUTATIONS[name](right(e), random.Random(1)) in (None, right(e)) for e in islice(examples(family), 40)
        )
        return
    rng = random.Random(1)
    pairs = ((example, MUTATIONS[name](right(example), rng)) for example in examples(family, seed=2))
    tried = list(islice(((example, text) for example, text in pairs if text not in (None, right(example))), 15))
    missed = [text for example, text in tried if answer_problem(example, text) is None]
    assert len(missed) <= (0.8 * len(tried) if name in FREE.get(family.name, ()) else 0), missed[:3]


@families
def test_the_answer_to_another_question_is_wrong(family: Family) -> None:
    asked = list(islice(examples(family, seed=3), 20))
    swapped = [right(example) for example in [*asked[1:], asked[0]]]
    assert score(family, asked, swapped) == 0.0
    assert score(family, asked, ["" for _ in asked]) == 0.0


def test_json_is_compared_by_value_and_type() -> None:
    family = family_named("fields to json")
    example = next(e for e in examples(family) if "age" in str(e.facts) and isinstance(e.facts["value"], dict))
    value = example.facts["value"]
    for said, expected in [
        (json.dumps(value, separators=(",", ":")), True),
        (json.dumps(dict(reversed(value.items()))), True),
        (json.dumps({**value, "age": str(value["age"])}), False),
        (json.dumps({**value, "more": 1}), False),
        ("{", False),
    ]:
        assert (answer_problem(example, f"JSON:\n```json\n{said}\n```") is None) == expected


def of_kind(name: str, kind: str) -> Example:
    key = {"text to sql": "query", "python function": "function", "unit test": "function"}[name]
    family = family_named(name)
    return next(e for e in examples(family) if e.facts[key]["kind"] == kind and not e.thinking)


def test_sql_is_judged_by_the_rows_it_returns() -> None:
    example = of_kind("text to sql", "rows")
    answer, query = right(example), example.facts["query"]
    assert answer_problem(example, answer.replace("\nWHERE", " AS t\nWHERE")) is None
    (column, *_), shown = query["condition"], query["shown"]
    for wrong in (
        answer.replace(", ".join(shown), ", ".join(reversed(shown))),
        answer.replace(f"LIMIT {query['limit']}", f"LIMIT {query['limit'] - 1}"),
        answer.replace("ASC", "X").replace("DESC", "ASC").replace("X", "DESC"),
        answer.replace("WHERE", "WHERE NOT"),
        answer.replace(f"WHERE {column}", "WHERE nothing"),
        re.sub(r"```sql\n.*?;", f"```sql\nDROP TABLE {query['table']};", answer, flags=re.DOTALL),
        re.sub(r"```sql\n.*?;", "```sql\nATTACH 'x.db' AS x;", answer, flags=re.DOTALL),
    ):
        assert wrong != answer and answer_problem(example, wrong) is not None, wrong


def test_sql_that_never_ends_is_stopped() -> None:
    example = of_kind("text to sql", "count")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT COUNT(*) FROM n;"
    answer = re.sub(r"```sql\n.*?;", f"```sql\n{endless}", right(example), flags=re.DOTALL)
    assert answer_problem(example, answer) is not None


def test_a_function_is_judged_by_what_it_returns() -> None:
    example = of_kind("python function", "count")
    answer, argument = right(example), example.facts["function"]["arguments"][0]
    assert answer_problem(example, answer.replace(" value ", " number ").replace("if value", "if number")) is None
    for wrong in (
        answer.replace(f"in {argument}", f"in {argument}[1:]"),
        re.sub(r"(>>> .*\n    )\d+", r"\g<1>77", answer),
        answer.replace("    >>> ", "    "),
        answer.replace("    return", "    import os\n    return"),
        answer.replace("    return", "    open('x', 'w')\n    return"),
        answer.replace("    return", "    (1).__class__\n    return"),
        answer.replace("    >>> ", "    >>> __import__('os').getcwd() and "),
        answer.replace("    return", "    for _ in iter(int, 1): pass\n    return"),
        answer.replace("    return", "    [0] * 10**12\n    return"),
        answer.replace("    return", "    [0] * 1000000000000\n    return"),
    ):
        assert wrong != answer and answer_problem(example, wrong) is not None, wrong


def test_a_unit_test_is_judged_by_what_it_catches() -> None:
    example = of_kind("unit test", "formula")
    answer = right(example)
    assert answer_problem(example, re.sub(r"assert (.*) == (\d+)", r"assert \2 == \1", answer)) is None
    for wrong in (
        re.sub(r"== \d+", "> 0", answer),
        re.sub(r"assert ", "", answer),
        re.sub(r"    assert .*\n", "", answer, count=1),
        answer.replace("def test_", "def check_"),
        answer.replace("```python\n", "```python\nassert True\n"),
    ):
        assert wrong != answer and answer_problem(example, wrong) is not None, wrong


def test_a_shell_command_is_read_as_a_shell_does() -> None:
    family = family_named("shell command")
    example = next(e for e in examples(family) if e.facts["command"].startswith("tar"))
    answer, command = right(example), example.facts["command"]
    _, _, _, _, archive, folder = command.split()
    assert answer_problem(example, answer.replace("tar -c -z -f", "tar -cz -f")) is None
    assert answer_problem(example, answer.replace(command, f"tar -z -c {folder} -f '{archive}'")) is None
    for wrong in (command.replace("-z ", ""), f"{command}; ls", f"{command} > x", f"{command} '", f"sudo {command}"):
        assert answer_problem(example, answer.replace(command, wrong, 1)) is not None


def test_cells_of_a_table_may_be_padded() -> None:
    family = family_named("table and text")
    example = next(e for e in examples(family) if e.facts["to"] == "table")
    answer = right(example)
    assert answer_problem(example, answer.replace(" | ", "   |  ")) is None
    assert answer_problem(example, "\n".join(line for line in answer.splitlines() if "---" not in line)) is not None


def test_a_think_block_stands_where_it_is_asked_for() -> None:
    family = family_named("word problem")
    asked = list(islice(examples(family), 40))
    plain, thinking = (next(e for e in asked if e.thinking == flag) for flag in (False, True))
    assert answer_problem(plain, f"<think>\nHm.\n</think>\n\n{right(plain)}") is not None
    body = right(thinking).rpartition("</think>\n\n")[2]
    for wrong in (body, f"<think>\n{body}", f"</think>\n\n{body}", f"<think>\n<think>\n</think>\n\n{body}"):
        assert answer_problem(thinking, wrong) is not None
    assert answer_problem(thinking, f"<think>\nHm.\n</think>\n\n{body}") is None


@families
def test_examples_depend_on_seed_and_place_alone(family: Family) -> None:
    first = [example.to_row() for example in islice(examples(family, seed=5), 6)]
    assert first == [example_at(family, index, seed=5).to_row() for index in range(6)]
    assert first != [example.to_row() for example in islice(examples(family, seed=6), 6)]
    again = [Example.from_row(json.loads(json.dumps(row))) for row in first]
    assert [example.to_row() for example in again] == first
    assert all(answer_problem(example, right(example)) is None for example in again)


def test_score_refuses_what_it_cannot_count() -> None:
    first, second = FAMILIES[:2]
    asked = list(islice(examples(first), 2))
    with pytest.raises(ValueError, match="1 answers to 2 chats"):
        score(first, asked, ["x"])
    with pytest.raises(ValueError, match="score each family by itself"):
        score(second, asked, ["x", "y"])
    with pytest.raises(ValueError, match="there is no family 'poetry'"):
        family_named("poetry")
    assert score(first, asked, [right(asked[0]), "x"]) == 0.5
