"""E-mails written from bullet points."""

from collections.abc import Callable
from typing import Any

from .draw import Draw
from .example import Family, Parts, Written, chat, say, wording_problem
from .records import DAYS, time_of_day
from .words import CITIES, FIRST_NAMES, THINGS, TOPICS

ASKS = (
    "Write an e-mail from {sender} to {receiver} about {topic}:\n{points}",
    "{points}\n\nMake an e-mail of these points. From: {sender}. To: {receiver}. Subject: {topic}.",
    "Please draft an e-mail on {topic}. It goes to {receiver} and is signed by {sender}.\n{points}",
    "{sender} wants to mail {receiver} about {topic}. The points are:\n{points}",
    "Compose a short mail.\nTo: {receiver}\nFrom: {sender}\nSubject: {topic}\n{points}",
    "From these notes, write {receiver} an e-mail in the name of {sender} (subject {topic}).\n{points}",
    "E-mail, please. Receiver {receiver}, sender {sender}, subject {topic}.\n{points}",
    "Help {sender} to answer {receiver} by mail, subject {topic}:\n{points}",
    "An e-mail is needed: {sender} writes to {receiver} about {topic}.\n{points}",
    "Put this into an e-mail about {topic}, to {receiver}, from {sender}.\n{points}",
)


def _moved(draw: Draw) -> tuple[str, list[str]]:
    day, time = draw.choice(DAYS), time_of_day(draw)
    return f"meeting moved to {day} {time}", [
        f"Our meeting has been moved to {day} at {time}.",
        f"The meeting now takes place on {day} at {time}.",
    ]


def _missing(draw: Draw) -> tuple[str, list[str]]:
    count, thing = draw.number(2, 60), draw.word(THINGS)
    return f"{count} {thing}s missing", [
        f"We are still missing {count} {thing}s.",
        f"There are {count} {thing}s that have not arrived.",
    ]


def _travel(draw: Draw) -> tuple[str, list[str]]:
    city, day = draw.word(CITIES), draw.choice(DAYS)
    return f"I travel to {city} on {day}", [f"I will travel to {city} on {day}.", f"On {day} I am going to {city}."]


def _ask(draw: Draw) -> tuple[str, list[str]]:
    thing, day = draw.word(THINGS), draw.choice(DAYS)
    return f"need the {thing} by {day}", [
        f"Could you send me the {thing} by {day}?",
        f"Please let me have the {thing} by {day}.",
    ]


def _cost(draw: Draw) -> tuple[str, list[str]]:
    thing, price = draw.word(THINGS), draw.number(15, 950)
    return f"{thing} costs {price} euros", [
        f"The price of the {thing} is {price} euros.",
        f"For the {thing} we pay {price} euros.",
    ]


def _colleague(draw: Draw) -> tuple[str, list[str]]:
    name, topic = draw.word(FIRST_NAMES), draw.word(TOPICS)
    return f"{name} takes over {topic}", [
        f"From now on {name} takes care of {topic}.",
        f"{name} will be responsible for {topic}.",
    ]


POINTS: tuple[Callable[[Draw], tuple[str, list[str]]], ...] = (_moved, _missing, _travel, _ask, _cost, _colleague)


def write(draw: Draw) -> Written:
    """Writes a request for an e-mail of two to four points, and the e-mail."""
    sender, receiver = draw.words(FIRST_NAMES, 2)
    topic = draw.word(TOPICS)
    points = [point(draw) for point in draw.random.sample(POINTS, draw.number(2, 4))]
    bullets = "\n".join(f"- {bullet}" for bullet, _ in points)
    question = draw.phrasing("ask", ASKS).format(sender=sender, receiver=receiver, topic=topic, points=bullets)
    parts: Parts = [
        f"Subject: {topic}\n\n",
        [f"Dear {receiver},", f"Hello {receiver},"],
        "\n\n",
        [f"I am writing about {topic}.", f"Here is some news about {topic}."],
        *(part for _, wordings in points for part in (" ", wordings)),
        f"\n\nKind regards,\n{sender}",
    ]
    return Written(chat(question, say(draw, parts)), {"parts": parts})


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Checks subject, greeting, one right sentence per point in order, and the sender's name."""
    return wording_problem(facts["parts"], answer)


FAMILY = Family("e-mail", write, problem)
