"""Lists with numbers: sorted, filtered, or counted by kind."""

import re
from typing import Any

from .draw import Draw
from .example import Family, Written, chat
from .words import CITIES, COLOURS, FIRST_NAMES, THINGS

SLOTS = {"people": FIRST_NAMES, "places": CITIES, "goods": THINGS}
# What is asked of the list; each has an opening of its own, so that any phrasing around it is understood.
TASKS = {
    "up": ("sort by number, smallest first", "Sorted from smallest to largest:"),
    "down": ("sort by number, largest first", "Sorted from largest to smallest:"),
    "above": ("keep only those above {limit}", "Those above {limit}:"),
    "below": ("keep only those below {limit}", "Those below {limit}:"),
    "groups": ("name those of each colour and count them", "Counted by colour:"),
}
ASKS = (
    "Here is a list of {name}:\n{items}\nPlease {task}.",
    "{items}\n\nTask: {task}.",
    "For these {name}, {task}:\n{items}",
    "Can you {task}? The {name} are:\n{items}",
    "List of {name}: please {task}.\n{items}",
    "Take this list and {task}.\n{items}",
    "I have some {name}. I want you to {task}.\n{items}",
    "{task}:\n{items}",
    "The following {name} are given; {task}.\n{items}",
    "Work on this list of {name}, {task}.\n\n{items}",
)
LINE = re.compile(r"- (\w+): (?:(\d+)|(\D.*))")


def _result(facts: dict[str, Any]) -> list[list[Any]]:
    """Names and numbers of the right answer in its order; for colours, the names and their count."""
    items, task = facts["items"], facts["task"]
    if task == "groups":
        return [[colour, _named(facts, colour)] for colour in dict.fromkeys(colour for _, colour in items)]
    if task in ("up", "down"):
        return sorted(items, key=lambda item: item[1], reverse=task == "down")
    return [item for item in items if (item[1] > facts["limit"]) == (task == "above") and item[1] != facts["limit"]]


def _named(facts: dict[str, Any], colour: str) -> str:
    names = [name for name, own in facts["items"] if own == colour]
    return f"{', '.join(names)} ({len(names)})"


def _lines(pairs: list[list[Any]]) -> list[str]:
    return [f"- {name}: {value}" for name, value in pairs]


def _closing(facts: dict[str, Any]) -> str:
    return f"The list had {len(facts['items'])} entries, the answer has {len(_result(facts))}."


def _draw_facts(draw: Draw) -> dict[str, Any]:
    """Items and task; a filter keeps three or more of them."""
    name, task = draw.choice(tuple(SLOTS)), draw.choice(tuple(TASKS))
    words = draw.words(SLOTS[name], draw.number(5, 6))
    if task == "groups":
        colours = draw.words(COLOURS, 3)
        return {"name": name, "task": task, "items": [[word, draw.choice(colours)] for word in words], "limit": None}
    # No two begin with the same digit, so a glance at the first digits sorts them.
    values = [10 * tens + draw.number(1, 9) for tens in draw.random.sample(range(1, 10), len(words))]
    items = [list(pair) for pair in zip(words, values, strict=True)]
    facts: dict[str, Any] = {"name": name, "task": task, "items": items, "limit": None}
    if task in ("above", "below"):
        last = draw.number(1, 2)  # to be left out, from one end of the numbers
        facts["limit"] = sorted(values)[last] // 10 * 10 if task == "above" else sorted(values)[~last] // 10 * 10 + 10
    return facts


def _reasoning(facts: dict[str, Any]) -> str:
    """Each item with a decision about it; for sorting, the numbers in order."""
    if facts["task"] in ("up", "down"):
        numbers = ", ".join(str(value) for _, value in _result(facts))
        return f"The numbers in order are {numbers}.\nNow each name follows its number."
    if facts["task"] == "groups":
        return "\n".join(f"{name} is {colour}." for name, colour in facts["items"])
    kept = _result(facts)
    return "\n".join(f"{item[1]}: {'yes' if item in kept else 'no'}." for item in facts["items"])


def write(draw: Draw) -> Written:
    """One list; every fourth time with a think block."""
    facts = _draw_facts(draw)
    asked, opening = (text.format(**facts) for text in TASKS[facts["task"]])
    items = "\n".join(_lines(facts["items"]))
    question = draw.phrasing("ask", ASKS).format(name=facts["name"], items=items, task=asked)
    result = _result(facts)
    answer = "\n".join([opening, *_lines(result), _closing(facts)])
    thinking = draw.random.random() < 0.25
    return Written(chat(question, answer, _reasoning(facts) if thinking else None), facts, None, thinking)


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Sorts, filters or counts the list anew and compares line by line."""
    first, *lines = answer.splitlines() or [""]
    result = _result(facts)
    opening = TASKS[facts["task"]][1].format(**facts)
    if first != opening or not lines or lines[-1] != _closing(facts):
        return f"the answer does not begin with {opening!r} and end with {_closing(facts)!r}."
    matched = [LINE.fullmatch(line) for line in lines[:-1]]
    found = [[match[1], match[3] or int(match[2])] if match else None for match in matched]
    return None if found == result else f"the lines say {found}, not {result}."


FAMILY = Family("lists", write, problem)
