"""A few sentences rewritten in another tense, person or tone."""

from typing import Any

from .draw import Draw
from .example import Family, Parts, Written, chat, say, wording_problem
from .records import DAYS
from .words import CITIES, COLOURS, FIRST_NAMES, THINGS, TOPICS

# Verbs in first person, third person and past tense, and the words that follow. They are not split into training and
# held-out.
ACTIONS = (
    ("buy", "buys", "bought", "a {colour} {thing} in {city}"),
    ("write", "writes", "wrote", "a note about {topic}"),
    ("bring", "brings", "brought", "the {thing} to {city}"),
    ("repair", "repairs", "repaired", "the {colour} {thing}"),
    ("teach", "teaches", "taught", "{topic} in {city}"),
    ("find", "finds", "found", "a {thing} near {city}"),
    ("sell", "sells", "sold", "the {colour} {thing} to {other}"),
    ("call", "calls", "called", "{other} about {topic}"),
    ("meet", "meets", "met", "{other} in {city}"),
    ("paint", "paints", "painted", "the {thing} {colour}"),
    ("carry", "carries", "carried", "a {thing} for {other}"),
    ("study", "studies", "studied", "{topic} with {other}"),
    ("lose", "loses", "lost", "the {colour} {thing}"),
    ("plan", "plans", "planned", "a {topic} day in {city}"),
    ("visit", "visits", "visited", "{city} with {other}"),
    ("clean", "cleans", "cleaned", "the {thing} for {other}"),
)
REQUESTS = (
    ("send me the {colour} {thing}", "send the {colour} {thing} to {city}"),
    ("call {other} about {topic}", "tell {other} about {topic}"),
    ("finish the {topic} report", "finish the {topic} plan"),
    ("bring the {thing} to {city}", "bring a {thing} for {other}"),
    ("answer {other} today", "answer the {topic} team today"),
    ("clean the {colour} {thing}", "clean the {thing} of {other}"),
)
TENSE_ASKS = (
    "Rewrite in the past tense: {text}",
    "Put this into the past tense.\n{text}",
    "{text}\nPlease change the tense to past.",
    "How does this read in the past tense?\n{text}",
    "Past tense, please: {text}",
    "Change every verb to the past tense.\n{text}",
    "{text}\nI want all of this in the past tense.",
    "Use the past tense for these sentences: {text}",
    "Can you turn this into past tense?\n{text}",
    "Tell this again, in the past tense.\n{text}",
)
PERSON_ASKS = (
    "Rewrite so that {name} speaks as I: {text}",
    "{text}\nPut this into the first person, with I for {name}.",
    "First person, please (I am {name}): {text}",
    "How would {name} say this as I?\n{text}",
    "Change the text to the first person for {name}: {text}",
    "Make this a text that {name} tells as I.\n{text}",
    "Use I in place of {name}: {text}",
    "{text}\nWrite it again as {name} would, with I.",
    "Can you put this into the first person? I am {name}.\n{text}",
    "In the first person, as {name}, please.\n{text}",
)
TONE_ASKS = (
    "Make this polite: {text}",
    "{text}\nPlease say that in a polite tone.",
    "Rewrite in a polite tone, for {name}.\n{text}",
    "How do I say this politely to {name}?\n{text}",
    "Too rude! Polite version, please: {text}",
    "Change the tone to polite.\n{text}",
    "{text}\nA polite version of this, please.",
    "Can you write this in polite words? {text}",
    "Be polite to {name} and say this again:\n{text}",
    "This should sound polite.\n{text}",
)


def _told(draw: Draw) -> tuple[str, list[str], list[tuple[str, str, str, str]]]:
    """Draws a name, and days and actions of four or five sentences."""
    count = draw.number(4, 5)
    name, *others = draw.words(FIRST_NAMES, count + 1)
    days = [f"On {day}" for day in draw.random.sample(DAYS, count)]
    actions = []
    for action, other in zip(draw.random.sample(ACTIONS, count), others, strict=True):
        slots = {"colour": COLOURS, "thing": THINGS, "city": CITIES, "topic": TOPICS}
        words = {slot: draw.word(words) for slot, words in slots.items() if f"{{{slot}}}" in action[3]}
        one, other_form, past, rest = action
        actions.append((one, other_form, past, rest.format(other=other, **words)))
    return name, days, actions


def _tense(draw: Draw) -> tuple[str, Parts]:
    name, days, actions = _told(draw)
    now = " ".join(f"{day}, {name} {verb} {rest}." for day, (_, verb, _, rest) in zip(days, actions, strict=True))
    past = " ".join(f"{day}, {name} {verb} {rest}." for day, (_, _, verb, rest) in zip(days, actions, strict=True))
    return draw.phrasing("tense", TENSE_ASKS).format(text=now), [past]


def _person(draw: Draw) -> tuple[str, Parts]:
    name, days, actions = _told(draw)
    third = " ".join(f"{day}, {name} {verb} {rest}." for day, (_, verb, _, rest) in zip(days, actions, strict=True))
    first = " ".join(f"{day}, I {verb} {rest}." for day, (verb, _, _, rest) in zip(days, actions, strict=True))
    return draw.phrasing("person", PERSON_ASKS).format(text=third, name=name), [first]


def _tone(draw: Draw) -> tuple[str, Parts]:
    name, *others = draw.words(FIRST_NAMES, 5)
    rude, polite = [], []
    for (first, second), other in zip(draw.random.sample(REQUESTS, 4), others, strict=True):
        request = draw.choice((first, second))
        slots = {"colour": COLOURS, "thing": THINGS, "city": CITIES, "topic": TOPICS}
        words = {slot: draw.word(words) for slot, words in slots.items() if f"{{{slot}}}" in request}
        request = request.format(other=other, **words)
        rude.append(f"{request[0].upper()}{request[1:]}.")
        polite.append(request)
    parts = [
        f"Dear {name}, ",
        [f"could you please {polite[0]}?", f"would you kindly {polite[0]}?"],
        [f" It would be great if you could {polite[1]}.", f" I would be glad if you could {polite[1]}."],
        f" Please also {polite[2]}, and then {polite[3]}. Thank you very much, and kind regards to everybody!",
    ]
    return draw.phrasing("tone", TONE_ASKS).format(text=f"{name}! {' '.join(rude)}", name=name), parts


KINDS = {"tense": _tense, "person": _person, "tone": _tone}


def write(draw: Draw) -> Written:
    """Writes four or five sentences to rewrite."""
    question, parts = KINDS[draw.choice(tuple(KINDS))](draw)
    return Written(chat(question, say(draw, parts)), {"parts": parts})


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Checks that the answer is literally one of the right wordings."""
    return wording_problem(facts["parts"], answer)


FAMILY = Family("rewriting", write, problem)
