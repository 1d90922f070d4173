"""Tasks with known right answers: one file per family writes chats and checks answers.

`examples` yields the chats of a family, which depend on the seed alone. `answer_problem` says what is wrong with an
answer, and `score` returns the share of right answers. Held-out chats share no slot value and no phrasing with
training chats.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from . import (
    arithmetic,
    dialogue,
    json_fields,
    lists,
    mail,
    measures,
    python_function,
    rewriting,
    shell,
    sql,
    tables,
    tool_call,
    unit_test,
)
from .draw import Draw, phrasings_of, value_is_held_out
from .example import Example, Family, visible

FAMILIES: tuple[Family, ...] = (
    json_fields.FAMILY,
    sql.FAMILY,
    python_function.FAMILY,
    unit_test.FAMILY,
    arithmetic.FAMILY,
    measures.FAMILY,
    tables.FAMILY,
    lists.FAMILY,
    rewriting.FAMILY,
    mail.FAMILY,
    shell.FAMILY,
    dialogue.FAMILY,
    tool_call.FAMILY,
)
# No task depends on its system prompt. A share of the chats has none.
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a small assistant that answers exactly.",
    "Answer exactly, in the form that is asked for.",
    "Be brief and correct.",
    "You answer questions of users.",
    "Help the user with the task.",
)
WITHOUT_SYSTEM = 0.4


def example_at(family: Family, index: int, seed: int = 0, held_out: bool = False) -> Example:
    """Returns one chat of a family's endless list.

    Args:
        family: Family that writes the chat.
        index: Index in the list, from 0.
        seed: Seed of the list; lists of different seeds are independent.
        held_out: Whether values and phrasings come from the held-out split or from the training split.
    """
    draw = Draw(f"{family.name}/{'held out' if held_out else 'train'}/{seed}/{index}", held_out)
    written = family.write(draw)
    messages = written.messages
    if draw.random.random() >= WITHOUT_SYSTEM:
        messages = [{"role": "system", "content": draw.phrasing("system", SYSTEM_PROMPTS)}, *messages]
    template = " ".join(draw.phrasings)
    return Example(family.name, template, messages, written.facts, draw.values, written.tools, written.thinking)


def examples(family: Family, seed: int = 0, held_out: bool = False) -> Iterator[Example]:
    """Yields all chats of a family in order, without end; see [`example_at`]."""
    return (example_at(family, index, seed, held_out) for index in count())


def family_named(name: str) -> Family:
    """Returns a family by its name.

    Raises:
        ValueError: for an unknown name.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(f"there is no family {name!r}; the families are {[family.name for family in FAMILIES]}.")


def answer_problem(example: Example, answer: str) -> str | None:
    """Returns what is wrong with an answer, or `None` for a right one.

    Args:
        example: The chat that was answered.
        answer: Text that the target generated, up to its end of turn, including think block and tool call.
    """
    text = visible(answer, example.thinking)
    if text is None:
        return "the think block is missing, not closed, or not asked for."
    return family_named(example.family).problem(example.facts, text)


def score(family: Family, asked: Sequence[Example], answers: Sequence[str]) -> float:
    """Returns the share of right answers.

    Args:
        family: Family of all the examples.
        asked: The chats that were answered, at least one.
        answers: One text per chat, see [`answer_problem`].

    Raises:
        ValueError: if there are no chats, if the numbers of chats and answers differ, or for a chat of another family.
    """
    if not asked or len(asked) != len(answers):
        raise ValueError(f"there are {len(answers)} answers to {len(asked)} chats; give one to each of at least one.")
    if foreign := {example.family for example in asked} - {family.name}:
        raise ValueError(f"chats of {sorted(foreign)} are scored as {family.name!r}; score each family by itself.")
    right = [answer_problem(example, answer) is None for example, answer in zip(asked, answers, strict=True)]
    return sum(right) / len(right)


__all__ = [
    "FAMILIES",
    "Draw",
    "Example",
    "Family",
    "answer_problem",
    "example_at",
    "examples",
    "family_named",
    "phrasings_of",
    "score",
    "value_is_held_out",
]
