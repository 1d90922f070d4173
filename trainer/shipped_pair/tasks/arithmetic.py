"""Word problems solved step by step; the checker recomputes every equation."""

import random
import re
from typing import Any

from .draw import Draw
from .example import Family, Written, chat
from .words import FIRST_NAMES, THINGS

EQUATION = re.compile(r"(\d+) ([+*-]) (\d+) = (\d+)")
# Each story has a text, a question, the operations on the running number, and a text for each step and the answer.
STORIES: tuple[dict[str, Any], ...] = (
    {
        "told": "{name} has {0} {things}. {name} buys {1} more and then gives away {2}.",
        "asked": "How many {things} does {name} have now?",
        "operations": "+-",
        "steps": ("After buying, {name} has", "After giving some away, {name} has"),
        "final": "{name} has {answer} {things}.",
    },
    {
        "told": "{name} packs {1} {things} into each of {0} crates and keeps {2} {things} outside.",
        "asked": "How many {things} are there in all?",
        "operations": "*+",
        "steps": ("The crates hold", "With those outside it makes"),
        "final": "There are {answer} {things} in all.",
    },
    {
        "told": "A shop has {0} {things}. It sells {1} in the morning and {2} in the afternoon.",
        "asked": "How many {things} are left for {name}?",
        "operations": "--",
        "steps": ("After the morning there remain", "After the afternoon there remain"),
        "final": "{answer} {things} are left for {name}.",
    },
    {
        "told": "{name} sorts {things} into {0} rows of {1}. Then {2} {things} break.",
        "asked": "How many whole {things} remain?",
        "operations": "*-",
        "steps": ("The rows have", "Without the broken ones there remain"),
        "final": "{answer} whole {things} remain.",
    },
    {
        "told": "{name} collects {0} {things} in May, {1} in June and {2} in July.",
        "asked": "How many {things} has {name} collected?",
        "operations": "++",
        "steps": ("May and June give", "With July it makes"),
        "final": "{name} has collected {answer} {things}.",
    },
    {
        "told": "{name} loses {1} of {0} {things} and later finds {2} others.",
        "asked": "How many {things} does {name} own then?",
        "operations": "-+",
        "steps": ("After the loss, {name} owns", "After the find, {name} owns"),
        "final": "{name} owns {answer} {things}.",
    },
)
ASKS = (
    "{told} {asked}",
    "{told} {asked} Show the steps.",
    "Solve this step by step. {told} {asked}",
    "A word problem: {told}\n{asked}",
    "Please work this out.\n{told} {asked}",
    "{asked} Here is what is known: {told}",
    "Can you solve it? {told} {asked} Explain each step.",
    "Homework: {told} {asked}",
    "Think about this story. {told} Now the question: {asked}",
    "Calculate and show how. {told}\n\n{asked}",
)
APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def equations(operations: str, numbers: list[int]) -> list[tuple[int, str, int, int]]:
    """Returns left operand, operation, right operand and result of every step."""
    running, found = numbers[0], []
    for operation, number in zip(operations, numbers[1:], strict=True):
        result = APPLY[operation](running, number)
        found.append((running, operation, number, result))
        running = result
    return found


def draw_numbers(operations: str, rng: random.Random) -> tuple[int, ...]:
    """Draws numbers whose results stay between 1 and 99; every equation has an operand below ten, to keep it easy."""
    while True:
        first = rng.randint(2, 9) if operations[0] == "*" else rng.randint(11, 95)
        numbers = (first, rng.randint(2, 9), rng.randint(2, 9))
        if all(0 < result < 100 for *_, result in equations(operations, list(numbers))):
            return numbers


def _solution(facts: dict[str, Any]) -> tuple[list[str], str, str]:
    """Returns the lines of the steps, the line of the last equation alone, and the line of the answer."""
    story, words = STORIES[facts["story"]], facts["words"]
    found = equations(story["operations"], facts["numbers"])
    steps = [
        f"Step {i}: {text.format(**words)} {a} {operation} {b} = {result} {words['things']}."
        for i, (text, (a, operation, b, result)) in enumerate(zip(story["steps"], found, strict=True), 1)
    ]
    a, operation, b, result = found[-1]
    last = f"The last step is {a} {operation} {b} = {result}."
    return steps, last, f"Answer: {story['final'].format(answer=result, **words)}"


def write(draw: Draw) -> Written:
    """Writes one problem. In a third of them, the steps are in a think block and the answer repeats only the last
    equation."""
    place = draw.random.randrange(len(STORIES))
    story = STORIES[place]
    numbers = list(draw.numbers(lambda rng: draw_numbers(story["operations"], rng)))
    words = {"name": draw.word(FIRST_NAMES), "things": f"{draw.word(THINGS)}s"}
    told, asked = story["told"].format(*numbers, **words), story["asked"].format(**words)
    question = draw.phrasing("ask", ASKS).format(told=told, asked=asked)
    thinking = draw.random.random() < 0.33
    facts = {"story": place, "numbers": numbers, "words": words, "thinking": thinking}
    steps, last, final = _solution(facts)
    if thinking:
        return Written(chat(question, f"{last}\n{final}", "\n".join(steps)), facts, None, True)
    return Written(chat(question, "\n".join([*steps, final])), facts)


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Recomputes every equation of the answer, then compares the lines of the answer with the story's steps."""
    for a, operation, b, result in EQUATION.findall(answer):
        if APPLY[operation](int(a), int(b)) != int(result):
            return f"{a} {operation} {b} is not {result}."
    steps, last, final = _solution(facts)
    expected = [last, final] if facts["thinking"] else [*steps, final]
    if answer.splitlines() != expected:
        return f"the answer's lines are {answer.splitlines()}, not {expected}."
    return None


FAMILY = Family("word problem", write, problem)
