"""Tasks with right answers: one file per family writes chats and checks answers.

`examples` gives the chats of a family, the same ones for the same seed everywhere; `answer_problem` says what is wrong
with an answer, and `score` how many are right. Held-out chats share no slot value and no phrasing with training.
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
# A system prompt says nothing a task depends on; a share of the chats has none.
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
    """The chat at one place of a family's endless list.

    Args:
        family: Who writes it.
        index: Place, from 0.
        seed: Lists of different seeds have nothing to do with each other.
        held_out: Whether values and phrasings are the held-out ones, or none of them.
    """
    draw = Draw(f"{family.name}/{'held out' if held_out else 'train'}/{seed}/{index}", held_out)
    written = family.write(draw)
    messages = written.messages
    if draw.random.random() >= WITHOUT_SYSTEM:
        messages = [{"role": "system", "content": draw.phrasing("system", SYSTEM_PROMPTS)}, *messages]
    template = " ".join(draw.phrasings)
    return Example(family.name, template, messages, written.facts, draw.values, written.tools, written.thinking)


def examples(family: Family, seed: int = 0, held_out: bool = False) -> Iterator[Example]:
    """All chats of a family in order, without end; see [`example_at`]."""
    return (example_at(family, index, seed, held_out) for index in count())


def family_named(name: str) -> Family:
    """A family by its name.

    Raises:
        ValueError: for a name that none has.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(f"there is no family {name!r}; the families are {[family.name for family in FAMILIES]}.")


def answer_problem(example: Example, answer: str) -> str | None:
    """What is wrong with an answer, or `None` for a right one.

    Args:
        example: The chat that was answered.
        answer: Text that the target generated, up to its end of turn: think block and tool call as they stand.
    """
    text = visible(answer, example.thinking)
    if text is None:
        return "the think block is missing, not closed, or not asked for."
    return family_named(example.family).problem(example.facts, text)


def score(family: Family, asked: Sequence[Example], answers: Sequence[str]) -> float:
    """Share of right answers.

    Args:
        family: Family of all the examples.
        asked: The chats that were answered, at least one.
        answers: One text per chat, see [`answer_problem`].

    Raises:
        ValueError: for no chats, another number of answers, or a chat of another family.
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
