"""Questions about a table with a given schema, answered with SQL and a sentence about the query."""

import random
import sqlite3
from typing import Any

from .draw import Draw
from .example import Family, Written, chat, fenced, wording_problem
from .words import CITIES, COLOURS, FIRST_NAMES, THINGS

# A column's name is a thing followed by one of these.
TEXTS = {"owner": FIRST_NAMES, "city": CITIES, "colour": COLOURS, "buyer": FIRST_NAMES, "origin": CITIES}
NUMBERS = ("price", "weight", "stock", "height", "cost", "rating", "length", "age", "sales")
ASKS = (
    "{schema}\n\nWrite SQL: {asked}",
    "Given this schema:\n{schema}\nWhich query answers this: {asked}",
    "Schema: {schema}\nQuestion: {asked}",
    "{asked}\nThe table is:\n{schema}",
    "Please write a query for SQLite.\n{schema}\n{asked}",
    "Here is my table.\n{schema}\nI want a query. {asked}",
    "Translate to SQL. {asked}\n{schema}",
    "For the table\n{schema}\nwrite one SELECT. {asked}",
    "How do I ask this in SQL? {asked}\n\n{schema}",
    "SQL, please, for this request on the table below. {asked}\n\n{schema}",
)
CONDITIONS = {">": "is above", "<": "is below", "=": "is"}
ROWS = 60  # rows of each generated table, enough to exceed a LIMIT on both sides of a condition
BELOW = (30, 58, 1)  # rows below the condition's number, per table, so that LIMIT cannot hide a wrong number in all
MAX_STEPS = 200  # thousands of steps of SQLite's virtual machine


def _condition(draw: Draw, query: dict[str, Any]) -> list[Any]:
    """Draws a column, an operator and a value."""
    if draw.random.random() < 0.5:
        column = draw.choice(query["texts"])
        return [column, "=", draw.word(TEXTS[column.rsplit("_", 1)[1]])]
    return [draw.choice(query["numbers"]), draw.choice("<>"), draw.number(5, 95)]


def _draw_query(draw: Draw) -> dict[str, Any]:
    """Draws a schema and a query as plain values; `kind` is `rows`, `count` or `groups`."""
    table, *stems = draw.words(THINGS, 5)
    texts = [f"{stem}_{column}" for stem, column in zip(stems[:2], draw.random.sample(list(TEXTS), 2), strict=True)]
    numbers = [f"{stem}_{column}" for stem, column in zip(stems[2:], draw.random.sample(NUMBERS, 2), strict=True)]
    columns = texts + numbers
    draw.random.shuffle(columns)
    query: dict[str, Any] = {"table": f"{table}s", "columns": columns, "texts": texts, "numbers": numbers}
    query |= {"kind": draw.choice(("rows", "rows", "count", "groups")), "condition": _condition(draw, query)}
    if query["kind"] == "rows":
        query |= {"shown": draw.random.sample(columns, 2), "order": draw.choice(numbers), "limit": draw.number(2, 9)}
        query["direction"] = draw.choice(("ASC", "DESC"))
    elif query["kind"] == "groups":
        query |= {"group": draw.choice(texts), "summed": draw.choice(numbers), "function": draw.choice(("SUM", "MAX"))}
    return query


def _said(query: dict[str, Any]) -> tuple[str, list[str]]:
    """Returns the question, and two wordings of the sentence that follows the query."""
    column, operator, value = query["condition"]
    where = f"{column} {CONDITIONS[operator]} {value}"
    if query["kind"] == "count":
        return f"Count the rows where {where}.", [
            f"It counts the rows of {query['table']} where {where} and returns one number.",
            f"The result is one number, the count of rows in {query['table']} where {where}.",
        ]
    if query["kind"] == "groups":
        what = {"SUM": "sum", "MAX": "maximum"}[query["function"]]
        return f"For each {query['group']}, show the {what} of {query['summed']}, only where {where}.", [
            f"It groups by {query['group']} and shows the {what} of {query['summed']} where {where}.",
            f"Every {query['group']} gets one row with the {what} of {query['summed']} where {where}.",
        ]
    first = {"ASC": "lowest", "DESC": "highest"}[query["direction"]]
    shown = " and ".join(query["shown"])
    return f"Show {shown} where {where}, {first} {query['order']} first, at most {query['limit']} rows.", [
        f"It keeps the rows where {where} and sorts them by {query['order']}, {first} first.",
        f"At most {query['limit']} rows are shown, {first} {query['order']} first.",
    ]


def _sql(query: dict[str, Any]) -> str:
    column, operator, value = query["condition"]
    where = f"WHERE {column} {operator} {value!r}"
    if query["kind"] == "count":
        return f"SELECT COUNT(*)\nFROM {query['table']}\n{where};"
    if query["kind"] == "groups":
        aggregate = f"{query['function']}({query['summed']})"
        return f"SELECT {query['group']}, {aggregate}\nFROM {query['table']}\n{where}\nGROUP BY {query['group']};"
    order = f"ORDER BY {query['order']} {query['direction']}\nLIMIT {query['limit']};"
    return f"SELECT {', '.join(query['shown'])}\nFROM {query['table']}\n{where}\n{order}"


def _reasoning(query: dict[str, Any]) -> str:
    column, operator, value = query["condition"]
    steps = [f"Table: {query['table']}.", f"Condition: {column} {operator} {value}."]
    if query["kind"] == "rows":
        steps.append(f"Columns: {', '.join(query['shown'])}. Order: {query['order']} {query['direction']}.")
    elif query["kind"] == "groups":
        steps.append(f"Group: {query['group']}. Value: {query['function']} of {query['summed']}.")
    else:
        steps.append("Value: the number of rows.")
    return "\n".join(steps)


def write(draw: Draw) -> Written:
    """Writes one query task; a quarter of them with a think block."""
    query = _draw_query(draw)
    types = {**dict.fromkeys(query["texts"], "TEXT"), **dict.fromkeys(query["numbers"], "INTEGER")}
    columns = ", ".join(f"{column} {types[column]}" for column in query["columns"])
    schema = f"CREATE TABLE {query['table']} (id INTEGER, {columns});"
    asked, notes = _said(query)
    question = draw.phrasing("ask", ASKS).format(schema=schema, asked=asked)
    thinking = draw.random.random() < 0.25
    answer = f"```sql\n{_sql(query)}\n```\n{draw.choice(notes)}"
    return Written(chat(question, answer, _reasoning(query) if thinking else None), {"query": query}, None, thinking)


def _table(query: dict[str, Any], seed: int) -> sqlite3.Connection:
    """Generates a table in memory and makes it read-only.

    The numbers of a column are consecutive; those of the condition's column lie around the condition's number. Texts
    repeat, and some groups hold no row that meets the condition.
    """
    rng = random.Random(seed)
    column, _, wanted = query["condition"]
    data: dict[str, list[Any]] = {"id": list(range(ROWS))}
    for name in query["numbers"]:
        around = wanted if name == column else 50
        data[name] = rng.sample(range(around - BELOW[seed], around - BELOW[seed] + ROWS), ROWS)
    for name in query["texts"]:
        words = [f"text {i}" for i in range(ROWS // 3)]
        data[name] = rng.choices([*words, *([wanted] * len(words) if name == column else [])], k=ROWS)
    names = ["id", *query["columns"]]
    base = sqlite3.connect(":memory:")
    base.execute(f"CREATE TABLE {query['table']} ({', '.join(names)})")
    rows = list(zip(*(data[name] for name in names), strict=True))
    base.executemany(f"INSERT INTO {query['table']} VALUES ({', '.join('?' * len(names))})", rows)
    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
    base.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY)
    steps = iter(range(MAX_STEPS))
    base.set_progress_handler(lambda: next(steps, None) is None, 1000)
    return base


def _result(base: sqlite3.Connection, sql: str, ordered: bool) -> list[tuple[Any, ...]]:
    rows = base.execute(sql).fetchall()
    return rows if ordered else sorted(rows, key=repr)


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Runs the query on generated tables and compares its rows with those of the right query; then checks the
    sentence."""
    sql, query = fenced(answer, "sql"), facts["query"]
    if sql is None:
        return "the answer has not exactly one fenced block of SQL."
    ordered = query["kind"] == "rows"
    for seed in range(len(BELOW)):
        base = _table(query, seed)
        try:
            if _result(base, sql, ordered) != _result(base, _sql(query), ordered):
                return f"the query {sql!r} gives other rows than {_sql(query)!r}."
        except sqlite3.Error as error:
            return f"the query {sql!r} fails: {error}."
        finally:
            base.close()
    return wording_problem([_said(query)[1]], answer.rpartition("```")[2].strip())


FAMILY = Family("text to sql", write, problem)
