"""Fields extracted from sentences or lines into JSON objects."""

import json
from typing import Any

from . import records
from .draw import Draw
from .example import Family, Written, chat, fenced

ASKS = (
    "Turn this into JSON with the keys {keys}:\n{text}",
    "{text}\nWrite that as JSON. Keys: {keys}.",
    "Extract {keys} as a JSON object.\n\n{text}",
    "Please give me JSON ({keys}) for the following:\n{text}",
    "Read the text and answer in JSON, with the keys {keys}.\nText: {text}",
    "I need the keys {keys} as JSON from this note: {text}",
    "Convert to JSON.\nKeys: {keys}\nInput: {text}",
    "{text}\n\nWhat are {keys}? Answer with a JSON object.",
    "Fill a JSON object with {keys} from what follows.\n{text}",
    "Make JSON out of this note, keys {keys}.\n\n{text}",
)
OPENINGS = ("Here is the JSON:", "As JSON:", "The fields as JSON:")


def write(draw: Draw) -> Written:
    """Writes one record, or two in a third of the tasks, as sentences or as lines in random order."""
    kind = draw.choice(records.KINDS)
    rows = [kind.draw(draw) for _ in range(draw.choice((1, 1, 2)))]
    as_lines = draw.random.random() < 0.4
    told = [kind.lines(draw, row) if as_lines else kind.sentence(row) for row in rows]
    text = ("\n\n" if as_lines else "\n").join(told)
    question = draw.phrasing("ask", ASKS).format(keys=", ".join(kind.keys), text=text)
    value = rows[0] if len(rows) == 1 else rows
    body = json.dumps(value, indent=2, ensure_ascii=False)
    return Written(chat(question, f"{draw.choice(OPENINGS)}\n```json\n{body}\n```"), {"value": value})


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Parses the JSON and compares its values, including their types."""
    body = fenced(answer, "json")
    if body is None:
        return "the answer has not exactly one fenced block of JSON."
    try:
        value = json.loads(body)
    except ValueError as error:
        return f"the JSON does not parse: {error}."
    if json.dumps(value, sort_keys=True) != json.dumps(facts["value"], sort_keys=True):
        return f"the JSON says {value}, not {facts['value']}."
    return None


FAMILY = Family("fields to json", write, problem)
