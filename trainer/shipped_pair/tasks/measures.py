"""Conversions of units, dates and times, with answers that show their steps."""

from datetime import date, timedelta
from typing import Any

from .draw import Draw
from .example import Family, Parts, Written, chat, say, wording_problem
from .records import DAYS, MONTHS
from .words import FIRST_NAMES, THINGS, TOPICS

# (larger unit, smaller unit, factor). Units are not split into training and held-out.
UNITS = (
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000), ("hours", "minutes", 60), ("minutes", "seconds", 60), ("weeks", "days", 7),
    ("dozens", "pieces", 12), ("euros", "cents", 100), ("days", "hours", 24),
)  # fmt: skip
UNIT_ASKS = (
    "{name} has {amount} {large} and {rest} {small} of {topic} work. How much is that in {small}?",
    "Convert {amount} {large} and {rest} {small} to {small} for {name}'s {topic} plan.",
    "For the {topic} report of {name}: what is {amount} {large} plus {rest} {small}, in {small}?",
    "{name} asks about {topic}: how many {small} are {amount} {large} and {rest} {small}?",
    "In the {topic} notes of {name} stands: {amount} {large}, {rest} {small}. Give it in {small}.",
    "Please express {amount} {large} and {rest} {small} in {small} ({topic}, {name}).",
    "How many {small} make up {amount} {large} and {rest} {small}? {name} needs it for {topic}.",
    "{amount} {large} and {rest} {small}: write that in {small} only, for the {topic} list by {name}.",
    "{name} measured {amount} {large} and {rest} {small} for {topic}. Tell me the number of {small}.",
    "What are {amount} {large} and {rest} {small} in {small}? It is for the {topic} folder of {name}.",
    "What do {amount} {large}, {rest} {small} give in {small}? It is a question on {topic} from {name}.",
    "The folder of {name} on {topic} says: {amount} {large}, {rest} {small}. Write it in {small}.",
    "Which number of {small} is {amount} {large} and {rest} {small}? It goes into the {topic} folder of {name}.",
    "In {small}, please: {amount} {large}, {rest} {small}. That is in the {topic} notes of {name}.",
    "{name} works on {topic}: turn {amount} {large} and {rest} {small} into {small}.",
)
TIME_ASKS = (
    "The {topic} class of {name} starts at {start} and takes {minutes} minutes. When does it end?",
    "{name} begins with {topic} at {start} and needs {minutes} minutes. At what time is it over?",
    "If the {topic} talk by {name} starts at {start} and lasts {minutes} minutes, when is it finished?",
    "When is {name} done with {topic}, starting at {start} and working {minutes} minutes?",
    "{topic} with {name}: start {start}, length {minutes} minutes. What is the end time?",
    "Add {minutes} minutes to {start} for the {topic} calendar of {name}.",
    "{name} opens the {topic} evening at {start}. It goes on for {minutes} minutes. When is the end?",
    "A {topic} meeting with {name} at {start} needs {minutes} minutes. Until when does it last?",
    "Which time is {minutes} minutes after {start}? {name} asks because of {topic}.",
    "Tell {name} when {topic} ends. It starts at {start} and takes {minutes} minutes.",
    "{topic}, {name}: from {start}, {minutes} minutes long. What is the end?",
    "Start of {topic} with {name}: {start}. Length: {minutes} minutes. When is it over?",
    "{name} is at {topic}: start {start}, then {minutes} minutes. What time is the end?",
    "{topic} begins at {start}, with {name}. Its length is {minutes} minutes; when does it end?",
    "At {start} {name} starts with {topic}, which takes {minutes} minutes. When is the end?",
)
DATE_ASKS = (
    "{name} orders a {thing} on {day}, {number} {month}. It arrives {later} days later. Which day and date is that?",
    "Today is {day}, {number} {month}. In {later} days {name} gets a {thing}. What day is it then?",
    "From {day}, {number} {month}, count {later} days: when does {name} receive the {thing}?",
    "The {thing} of {name} leaves on {day}, {number} {month}, and takes {later} days. Which day does it arrive?",
    "Which weekday and date come {later} days after {day}, {number} {month}? It is for the {thing} of {name}.",
    "{name} rents a {thing} from {day}, {number} {month}, for {later} days. On which day does that end?",
    "It is {day}, {number} {month}, and the {thing} for {name} comes {later} days from now. When is that?",
    "Count {later} days from {day}, {number} {month}. On that day {name} returns the {thing}. Give day and date.",
    "{day}, {number} {month}: {name} sends a {thing}, and it needs {later} days. Tell me day and date of its arrival.",
    "The {thing} of {name} is due {later} days after {day}, {number} {month}. Which day is that?",
    "Which day and date is {later} days after {day}, {number} {month}? {name} gets the {thing} then.",
    "What day comes {later} days after {day}, {number} {month}? Then {name} has the {thing}; give the date too.",
    "{later} days after {day}, {number} {month}, {name} wants the {thing}. Which weekday and date is that?",
    "{name} waits {later} days for the {thing}, from {day}, {number} {month}. Which weekday is it then?",
    "The {thing} comes to {name} {later} days after {day}, {number} {month}. Tell me day and date.",
)
YEAR = 2026  # any year without a leap day works: only differences matter, and no date leaves its month


def _units(draw: Draw) -> tuple[str, dict[str, Any]]:
    large, small, factor = draw.choice(UNITS)
    amount, rest = draw.numbers(lambda rng: (rng.randint(2, 12), rng.randint(1, min(factor, 99) - 1)))
    words = {"name": draw.word(FIRST_NAMES), "topic": draw.word(TOPICS)}
    facts = {"kind": "units", "large": large, "small": small, "amount": amount, "rest": rest, **words}
    return draw.phrasing("units", UNIT_ASKS).format(**facts), facts


def _times(draw: Draw) -> tuple[str, dict[str, Any]]:
    hour, minute, minutes = draw.numbers(  # minutes are multiples of five, as on a clock face
        lambda rng: (rng.randint(6, 20), 5 * rng.randrange(12), 5 * rng.randint(1, 35))
    )
    words = {"name": draw.word(FIRST_NAMES), "topic": draw.word(TOPICS)}
    facts = {"kind": "times", "hour": hour, "minute": minute, "minutes": minutes, **words}
    return draw.phrasing("times", TIME_ASKS).format(start=f"{hour:02}:{minute:02}", **facts), facts


def _dates(draw: Draw) -> tuple[str, dict[str, Any]]:
    month, number, later = draw.numbers(lambda rng: (rng.randint(1, 12), rng.randint(1, 14), rng.randint(2, 14)))
    words = {"name": draw.word(FIRST_NAMES), "thing": draw.word(THINGS)}
    facts = {"kind": "dates", "month": MONTHS[month - 1], "number": number, "later": later, **words}
    facts["day"] = draw.choice(DAYS)
    return draw.phrasing("dates", DATE_ASKS).format(**facts), facts


def _unit_steps(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    factor = next(factor for large, small, factor in UNITS if (large, small) == (facts["large"], facts["small"]))
    small, amount, rest = facts["small"], facts["amount"], facts["rest"]
    whole = amount * factor
    steps = [
        f"One of the {facts['large']} is {factor} {small}.",
        f"{amount} * {factor} = {whole}.",
        f"{whole} + {rest} = {whole + rest}.",
    ]
    return steps, [f"For {facts['topic']}, {facts['name']} has {whole + rest} {small}."]


def _time_steps(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    hours, left = divmod(facts["minutes"], 60)
    hour, minute = facts["hour"] + hours, facts["minute"] + left
    carried, clock = divmod(minute, 60)
    steps = [
        f"{facts['minutes']} minutes are {hours} hours and {left} minutes.",
        f"{facts['hour']} + {hours} = {hour} hours.",
        f"{facts['minute']} + {left} = {minute} minutes.",
        f"That makes {hour + carried} hours and {clock} minutes.",
    ]
    end = f"{hour + carried:02}:{clock:02}"
    return steps, [f"The {facts['topic']} of {facts['name']} ends at {end}.", f"{facts['name']} is done at {end}."]


def _date_steps(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    start = date(YEAR, MONTHS.index(facts["month"]) + 1, facts["number"])
    end = start + timedelta(days=facts["later"])
    weeks, left = divmod(facts["later"], 7)
    day = DAYS[(DAYS.index(facts["day"]) + left) % 7]
    steps = [
        f"{facts['later']} days are {weeks} weeks and {left} days.",
        f"{left} days after {facts['day']} is {day}.",
        f"{facts['number']} + {facts['later']} = {end.day}.",
    ]
    said = f"{day}, {end.day} {MONTHS[end.month - 1]}"
    return steps, [f"For the {facts['thing']} of {facts['name']} that is {said}."]


KINDS = {"units": (_units, _unit_steps), "times": (_times, _time_steps), "dates": (_dates, _date_steps)}


def _parts(facts: dict[str, Any]) -> tuple[list[str], Parts]:
    """Returns the steps, and the wordings of the answer: after a think block the last two steps and the result, else
    all steps and the result."""
    steps, results = KINDS[facts["kind"]][1](facts)
    shown = ["So:", *steps[-2:]] if facts["thinking"] else steps
    return steps, ["\n".join(shown), "\n", [f"Result: {result}" for result in results]]


def steps_of(draw: Draw) -> list[str]:
    """Draws one problem and returns its steps."""
    asked, steps = KINDS[draw.choice(tuple(KINDS))]
    return steps(asked(draw)[1])[0]


def write(draw: Draw) -> Written:
    """Writes a conversion, end time or date; a quarter of them with a think block."""
    question, facts = KINDS[draw.choice(tuple(KINDS))][0](draw)
    facts["thinking"] = draw.random.random() < 0.25
    steps, parts = _parts(facts)
    reasoning = "\n".join(steps) if facts["thinking"] else None
    return Written(chat(question, say(draw, parts), reasoning), facts, None, facts["thinking"])


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Checks the answer against steps and result computed from the numbers of the question."""
    return wording_problem(_parts(facts)[1], answer)


FAMILY = Family("units and dates", write, problem, weight=3)
