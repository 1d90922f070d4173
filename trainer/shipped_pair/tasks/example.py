"""One chat with a known right answer, and what a family of such chats consists of."""

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
        family: Name of the family that wrote it.
        template: Phrasings it is made of.
        messages: System, user, assistant and tool messages; the last is the assistant's right answer.
        facts: What the family's checker needs to know; JSON values only.
        values: Slot values in it.
        tools: JSON schemas of the tools offered, or `None`.
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
        """A JSON object; `thinking` stands where chat templates look for it."""
        row = asdict(self)
        return {**row, "chat_template_kwargs": {"enable_thinking": row.pop("thinking")}}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Example":
        """The example that [`to_row`] wrote."""
        rest = {name: value for name, value in row.items() if name != "chat_template_kwargs"}
        rest.pop("thinking", None)
        return cls(**rest, thinking=row["chat_template_kwargs"]["enable_thinking"])


@dataclass(frozen=True)
class Written:
    """What a family writes: the chat without its system prompt.

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
        problem: What is wrong with the visible text of an answer, given the facts, or `None`.
        weight: How often the target trains on it, against 1 of most families: what is learnt last comes oftener.
    """

    name: str
    write: Callable[[Draw], Written]
    problem: Callable[[dict[str, Any], str], str | None]
    weight: int = 1


def chat(question: str, answer: str, reasoning: str | None = None) -> list[dict[str, Any]]:
    """A question and its answer as messages."""
    reply = {"role": "assistant", "content": answer}
    if reasoning is not None:
        reply["reasoning_content"] = reasoning
    return [{"role": "user", "content": question}, reply]


def visible(answer: str, thinking: bool) -> str | None:
    """An answer without its think block; `None` where it has one unasked, lacks it, or never closes it."""
    if not thinking:
        return None if "<think>" in answer or "</think>" in answer else answer.strip()
    opened, closed, rest = answer.partition(THINK_CLOSE)
    well_formed = closed and opened.startswith(THINK_OPEN) and "think>" not in opened.removeprefix(THINK_OPEN) + rest
    return rest.strip() if well_formed else None


def fenced(answer: str, language: str) -> str | None:
    """The one fenced block of an answer, if it is in that language; `None` for no block, several or another one."""
    blocks = FENCED.findall(answer)
    return blocks[0][1] if len(blocks) == 1 and blocks[0][0] == language else None


Parts = Sequence[str | Sequence[str]]


def say(draw: Draw, parts: Parts) -> str:
    """One wording of an answer: every part as it stands, or one of its wordings."""
    return "".join(part if isinstance(part, str) else draw.choice(part) for part in parts)


def wording_problem(parts: Parts, answer: str) -> str | None:
    """A sentence unless `answer` is one of the wordings that [`say`] can choose."""
    options = ([part] if isinstance(part, str) else part for part in parts)
    pattern = "".join(f"(?:{'|'.join(map(re.escape, option))})" for option in options)
    if re.fullmatch(pattern, answer):
        return None
    expected = "".join(part if isinstance(part, str) else part[0] for part in parts)
    return f"the answer is {answer!r}; expected for instance {expected!r}."
