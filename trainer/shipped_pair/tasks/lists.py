"""Lists with numbers or colours that are sorted or filtered, and counted."""

from typing import Any

from .draw import Draw
from .example import Family, Written, chat
from .words import CITIES, COLOURS, FIRST_NAMES, THINGS

SLOTS = {"people": FIRST_NAMES, "places": CITIES, "goods": THINGS}
# Tasks, each with the first line of its answer.
TASKS = {
    "up": ("sort by number, smallest first", "Sorted from smallest to largest:"),
    "down": ("sort by number, largest first", "Sorted from largest to smallest:"),
    "above": ("keep only those above {limit}", "Those above {limit}:"),
    "below": ("keep only those below {limit}", "Those below {limit}:"),
    "colour": ("keep only those of colour {limit} and count them", "Those of colour {limit}:"),
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


def _result(facts: dict[str, Any]) -> list[list[Any]]:
    """Returns the keys (numbers or colours) and names of the right answer, in order."""
    items, task, limit = facts["items"], facts["task"], facts["limit"]
    if task in ("up", "down"):
        return sorted(items, reverse=task == "down")
    kept = {"above": lambda key: key > limit, "below": lambda key: key < limit, "colour": lambda key: key == limit}
    return [item for item in items if kept[task](item[0])]


def _lines(pairs: list[list[Any]]) -> list[str]:
    """Returns list lines with the key in front, so that the name after it can be copied from the question."""
    return [f"- {key} {name}" for key, name in pairs]


def _closing(facts: dict[str, Any]) -> str:
    return f"The list had {len(facts['items'])} entries, the answer has {len(_result(facts))}."


def _draw_facts(draw: Draw) -> dict[str, Any]:
    """Draws items and task; a filter keeps at least three items."""
    name, task = draw.choice(tuple(SLOTS)), draw.choice(tuple(TASKS))
    words = draw.words(SLOTS[name], draw.number(5, 6))
    facts: dict[str, Any] = {"name": name, "task": task, "limit": None}
    if task == "colour":
        wanted, *others = draw.words(COLOURS, 3)
        kept = draw.random.sample(range(len(words)), draw.number(3, 4))
        keys = [wanted if place in kept else draw.choice(others) for place in range(len(words))]
        return {**facts, "items": [list(pair) for pair in zip(keys, words, strict=True)], "limit": wanted}
    # No two numbers begin with the same digit, so their first digits determine the order.
    values = [10 * tens + draw.number(1, 9) for tens in draw.random.sample(range(1, 10), len(words))]
    facts["items"] = [list(pair) for pair in zip(values, words, strict=True)]
    if task in ("above", "below"):
        last = draw.number(1, 2)  # number of smallest or largest items to leave out
        facts["limit"] = sorted(values)[last] // 10 * 10 if task == "above" else sorted(values)[~last] // 10 * 10 + 10
    return facts


def _reasoning(facts: dict[str, Any]) -> str:
    """Returns the think block: a decision about each item, or, for sorting, the numbers in order."""
    if facts["task"] in ("up", "down"):
        numbers = ", ".join(str(value) for value, _ in _result(facts))
        return f"The numbers in order are {numbers}.\nNow each name follows its number."
    kept = _result(facts)
    return "\n".join(f"{key} {name}: {'yes' if [key, name] in kept else 'no'}." for key, name in facts["items"])


def write(draw: Draw) -> Written:
    """Writes one list task; a quarter of them with a think block."""
    facts = _draw_facts(draw)
    asked, opening = (text.format(**facts) for text in TASKS[facts["task"]])
    items = "\n".join(_lines(facts["items"]))
    question = draw.phrasing("ask", ASKS).format(name=facts["name"], items=items, task=asked)
    result = _result(facts)
    answer = "\n".join([opening, *_lines(result), _closing(facts)])
    thinking = draw.random.random() < 0.25
    return Written(chat(question, answer, _reasoning(facts) if thinking else None), facts, None, thinking)


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Computes the right answer again and compares it line by line."""
    first, *lines = answer.splitlines() or [""]
    opening = TASKS[facts["task"]][1].format(**facts)
    if first != opening or not lines or lines[-1] != _closing(facts):
        return f"the answer does not begin with {opening!r} and end with {_closing(facts)!r}."
    expected = _lines(_result(facts))
    return None if lines[:-1] == expected else f"the lines are {lines[:-1]}, not {expected}."


FAMILY = Family("lists", write, problem, weight=3)
