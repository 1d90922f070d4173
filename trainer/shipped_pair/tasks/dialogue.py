"""Short dialogues whose last question is about earlier turns."""

from typing import Any

from .draw import Draw
from .example import Family, Written, say, wording_problem
from .records import DAYS, time_of_day
from .words import CITIES, FIRST_NAMES, THINGS, TOPICS

LIST_ASKS = (
    "What is on my list now?",
    "Please show me the whole list.",
    "Now read the list back to me.",
    "Which things are on the list at the end?",
    "Tell me the final list.",
)
WHO_ASKS = (
    "Who does what? Repeat it for me.",
    "Please sum up who does what.",
    "Remind me of everybody's part.",
    "Give me the plan of all three again.",
    "So what is each of them doing?",
)
FIRST_ASKS = (
    "What did I ask you first, and what did you answer?",
    "Remind me of my first question and your answer.",
    "What was the beginning of our talk?",
    "Repeat my first question with your reply.",
    "How did our conversation start?",
)
LIST_STARTS = (
    "Please keep a shopping list: {items}.",
    "Start a list with {items}.",
    "I need to buy these: {items}.",
    "Shopping list: {items}.",
    "Let us make a list with {items}.",
)

Turns = list[tuple[str, str]]


def _joined(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _list(draw: Draw) -> tuple[Turns, str, str]:
    """Writes a dialogue about a list that is started, changed twice and read back."""
    names = [f"{draw.number(2, 20)} {word}s" for word in draw.words(THINGS, 7)]
    items, added = names[:5], names[5:]
    changes = []
    turns = [(draw.phrasing("start", LIST_STARTS).format(items=_joined(items)), f"The list has {_joined(items)}.")]
    for thing in added:
        if draw.random.random() < 0.5:
            removed = items.pop(draw.random.randrange(len(items)))
            turns.append((f"Remove the {removed.split()[1]}.", f"I removed {removed}."))
            changes.append(f"{removed} removed")
        else:
            items.append(thing)
            turns.append((f"Add {thing}.", f"I added {thing}."))
            changes.append(f"{thing} added")
    listed = [f"- {item}" for item in items]
    answer = "\n".join(["Your list:", *listed, f"That is {len(items)} entries. Changes: {_joined(changes)}."])
    return turns, draw.phrasing("list", LIST_ASKS), answer


def _who(draw: Draw) -> tuple[Turns, str, str]:
    """Writes a dialogue about the tasks of three people, told in two turns."""
    parts = []
    for name in draw.words(FIRST_NAMES, 3):
        day, time = draw.choice(DAYS), time_of_day(draw)
        task = draw.choice((f"brings the {draw.word(THINGS)}", f"talks about {draw.word(TOPICS)}"))
        parts.append(f"{name} {task} in {draw.word(CITIES)} on {day} at {time}.")
    told = " ".join(parts[:2])
    turns = [
        (f"Please remember this. {told}", "I will remember it."),
        (f"And {parts[2]}", f"Noted: {parts[2]}"),
    ]
    return turns, draw.phrasing("who", WHO_ASKS), "\n".join(["You told me:", *(f"- {part}" for part in parts)])


def _first(draw: Draw) -> tuple[Turns, str, str]:
    """Writes two questions that contain their answers, and a last question about the first."""
    turns = []
    names = draw.words(FIRST_NAMES, 2)
    for name in names:
        city, thing, day = draw.word(CITIES), draw.word(THINGS), draw.choice(DAYS)
        question = draw.choice(
            (
                f"{name} takes a {thing} to {city} on {day}. Where does {name} go?",
                f"On {day}, {name} is in {city} with a {thing}. Where is {name}?",
            )
        )
        turns.append((question, f"{name} is in {city} on {day}, with a {thing}."))
    question, reply = turns[0]
    later = f"After that you asked about {names[1]}."
    answer = f'You first asked: "{question}"\nI answered: "{reply}"\n{later}'
    return turns, draw.phrasing("first", FIRST_ASKS), answer


KINDS = (_list, _who, _first)


def write(draw: Draw) -> Written:
    """Writes two or three turns and a question about them."""
    turns, question, answer = draw.choice(KINDS)(draw)
    messages: list[dict[str, Any]] = []
    for asked, replied in [*turns, (question, answer)]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    opening = ["Here it is.\n", "Of course.\n"]
    messages[-1]["content"] = say(draw, [opening, answer])
    return Written(messages, {"parts": [opening, answer]})


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Checks that the answer repeats the earlier turns literally."""
    return wording_problem(facts["parts"], answer)


FAMILY = Family("dialogue", write, problem)
