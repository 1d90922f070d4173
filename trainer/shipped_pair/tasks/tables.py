"""Tables turned into sentences, and sentences turned into tables."""

from typing import Any

from . import records
from .draw import Draw
from .example import Family, Written, chat

TO_SENTENCES = (
    "Write one sentence for each row of this table of {name}:\n{table}",
    "{table}\nDescribe these {name} in sentences, one per row.",
    "Turn the table into text, row by row.\n{table}",
    "Here are some {name}:\n{table}\nPlease tell me about each in a sentence.",
    "Sentences instead of a table, please ({name}).\n{table}",
    "What does this table say? Use one sentence per row.\n{table}",
)
TO_TABLE = (
    "Make a Markdown table with the columns {keys}:\n{text}",
    "{text}\nPut that in a Markdown table. Columns: {keys}.",
    "Please arrange these {name} as a table ({keys}).\n{text}",
    "Tabulate the following, columns {keys}.\n\n{text}",
    "I want a table with {keys} from these sentences:\n{text}",
    "Collect the {name} in a Markdown table with {keys}.\n{text}",
)


def _table(kind: records.RecordKind, rows: list[dict[str, Any]]) -> str:
    """Returns records as a Markdown table."""
    cells = [kind.keys, ["---"] * len(kind.keys), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write(draw: Draw) -> Written:
    """Writes two or three records as a task in one of the two directions."""
    kind = draw.choice(records.KINDS)
    rows = [kind.draw(draw) for _ in range(draw.number(2, 3))]
    text, table = "\n".join(map(kind.sentence, rows)), _table(kind, rows)
    facts = {"kind": kind.name, "rows": rows, "to": draw.choice(("sentences", "table"))}
    if facts["to"] == "sentences":
        return Written(chat(draw.phrasing("tell", TO_SENTENCES).format(name=kind.name, table=table), text), facts)
    question = draw.phrasing("tabulate", TO_TABLE).format(name=kind.name, keys=", ".join(kind.keys), text=text)
    return Written(chat(question, table), facts)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Parses the table and compares its cells, or compares the sentences in order."""
    kind = next(kind for kind in records.KINDS if kind.name == facts["kind"])
    lines = answer.splitlines()
    if facts["to"] == "sentences":
        expected = [kind.sentence(row) for row in facts["rows"]]
        return None if lines == expected else f"the sentences are {lines}, not {expected}."
    rule = set(lines[1].replace("|", "").replace(" ", "").replace(":", "")) if len(lines) > 2 else set()
    if rule != {"-"}:
        return "the answer is no Markdown table: its second line is no rule."
    found = [_cells(line) for line in (lines[0], *lines[2:])]
    wanted = [kind.keys, *([_cell(value) for value in row.values()] for row in facts["rows"])]
    return None if found == wanted else f"the cells are {found}, not {wanted}."


FAMILY = Family("table and text", write, problem)
