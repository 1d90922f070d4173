"""Chats with a known right answer, and families of such chats."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .draw import Draw

THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n\n"
FENCED = re.compile(r"```(\w*)\n(.*?)\n```", flags=re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A chat whose last message is a right answer.

    Attributes:
        family: Name of the family that wrote the chat.
        template: Names of the phrasings in the chat.
        messages: System, user, assistant and tool messages; the last is the assistant's right answer.
        facts: Facts that the family's checker needs, as JSON values.
        values: Slot values in the chat.
        tools: JSON schemas of the offered tools, or `None`.
        thinking: Whether the chat asks for a think block; then the last message has a `reasoning_content`.
    """

    family: str
    template: str
    messages: list[dict[str, Any]]
    facts: dict[str, Any]
    values: list[str]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages before the answer."""
        return self.messages[:-1]

    def to_row(self) -> dict[str, Any]:
        """Returns the example as a JSON object, with `thinking` where chat templates look for it."""
        row = asdict(self)
        return {**row, "chat_template_kwargs": {"enable_thinking": row.pop("thinking")}}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Example":
        """Rebuilds an example from a row made by [`to_row`]."""
        rest = {name: value for name, value in row.items() if name != "chat_template_kwargs"}
        rest.pop("thinking", None)
        return cls(**rest, thinking=row["chat_template_kwargs"]["enable_thinking"])


@dataclass(frozen=True)
class Written:
    """A chat as a family writes it, without a system prompt.

    Attributes:
        messages: As in [`Example`].
        facts: As in [`Example`].
        tools: As in [`Example`].
        thinking: As in [`Example`].
    """

    messages: list[dict[str, Any]]
    facts: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False


@dataclass(frozen=True)
class Family:
    """A kind of task.

    Attributes:
        name: Name in files and tables.
        write: Writes one chat with a right answer.
        problem: Given the facts and the visible text of an answer, returns what is wrong, or `None`.
        weight: Relative frequency in the target's training, 1 for most families; higher for families that are learnt
            late.
    """

    name: str
    write: Callable[[Draw], Written]
    problem: Callable[[dict[str, Any], str], str | None]
    weight: int = 1


def chat(question: str, answer: str, reasoning: str | None = None) -> list[dict[str, Any]]:
    """Returns a question and its answer as messages."""
    reply = {"role": "assistant", "content": answer}
    if reasoning is not None:
        reply["reasoning_content"] = reasoning
    return [{"role": "user", "content": question}, reply]


def visible(answer: str, thinking: bool) -> str | None:
    """Returns an answer without its think block; `None` if the block is unasked for, missing, or not closed."""
    if not thinking:
        return None if "<think>" in answer or "</think>" in answer else answer.strip()
    opened, closed, rest = answer.partition(THINK_CLOSE)
    well_formed = closed and opened.startswith(THINK_OPEN) and "think>" not in opened.removeprefix(THINK_OPEN) + rest
    return rest.strip() if well_formed else None


def fenced(answer: str, language: str) -> str | None:
    """Returns the only fenced block of an answer; `None` if there is no block, several, or one in another language."""
    blocks = FENCED.findall(answer)
    return blocks[0][1] if len(blocks) == 1 and blocks[0][0] == language else None


Parts = Sequence[str | Sequence[str]]


def say(draw: Draw, parts: Parts) -> str:
    """Chooses a wording of an answer; a part that is a list of wordings contributes one of them at random."""
    return "".join(part if isinstance(part, str) else draw.choice(part) for part in parts)


def wording_problem(parts: Parts, answer: str) -> str | None:
    """Returns `None` if `answer` is a wording that [`say`] can choose, else a sentence that says what was expected."""
    options = ([part] if isinstance(part, str) else part for part in parts)
    pattern = "".join(f"(?:{'|'.join(map(re.escape, option))})" for option in options)
    if re.fullmatch(pattern, answer):
        return None
    expected = "".join(part if isinstance(part, str) else part[0] for part in parts)
    return f"the answer is {answer!r}; expected for instance {expected!r}."
