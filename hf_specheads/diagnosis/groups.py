"""Acceptance by group of tokens: form of the prompt, distance from the start of a turn, context, special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..bootstrap import Interval, careful, difference_interval, ratio_interval
from ..heads.base import DraftHead
from ..texts import Text, all_token_ids, chat_token_ids
from .evidence import Evidence
from .teacher_forced import FIRST_TOKENS, Drafts, guessed_text, hits, own_text

CONTEXT_BINS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 30)


@dataclass(frozen=True)
class Group:
    """Guesses of draft position 1 for a group of tokens, with one value per text.

    Attributes:
        name: Common property of the tokens.
        right, guesses: Number of right guesses, and of all guesses.
        expected: Sum over guesses of how predictable the token is; see [`foreseeable`].
        longest: Upper end of the context length, for groups by context.
    """

    name: str
    right: tuple[float, ...]
    guesses: tuple[float, ...]
    expected: tuple[float, ...]
    longest: int | None = None

    @property
    def acceptance(self) -> Interval:
        """Acceptance of draft position 1."""
        return ratio_interval(self.right, self.guesses)

    @property
    def predictability(self) -> float:
        """Mean of how predictable the tokens are to the target."""
        return sum(self.expected) / max(sum(self.guesses), 1)

    @property
    def count(self) -> int:
        """Number of guesses."""
        return int(sum(self.guesses))

    def worse_than(self, other: Group) -> Interval:
        """How much worse acceptance is in this group than in the other, relative to predictability.

        The shortfall of a group is its predictability minus its acceptance, so that harder text does not count against
        the heads. With few texts the interval is wide.
        """
        sides = [
            ([e - r for e, r in zip(group.expected, group.right, strict=True)], group.guesses)
            for group in (self, other)
        ]
        units = min(sum(count > 0 for count in group.guesses) for group in (self, other))
        if len(self.guesses) == len(other.guesses):
            return careful(difference_interval(sides[0], sides[1]), units)
        ours, theirs = ratio_interval(*sides[0]), ratio_interval(*sides[1])
        width = ((ours.mean - ours.low) ** 2 + (theirs.high - theirs.mean) ** 2) ** 0.5
        mean = ours.mean - theirs.mean
        return careful(Interval(mean, mean - width, mean + width), units)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        found = self.acceptance
        return {"name": self.name, "position_1": found.mean, "interval": [found.low, found.high],
                "guesses": self.count, "predictability": self.predictability}  # fmt: skip


def group_of(name: str, drafts: Drafts, evidence: Evidence, where: torch.Tensor, longest: int | None = None) -> Group:
    """Group of the tokens given by `where`, bool [B, T], for which there is a guess."""
    where = where & (drafts.slots[0] >= 0)
    right = hits(drafts, evidence)[0] & where
    expected = foreseeable(drafts, evidence) * where
    return Group(
        name,
        tuple(right.sum(-1).float().tolist()),
        tuple(where.sum(-1).float().tolist()),
        tuple(expected.sum(-1).tolist()),
        longest,
    )


def foreseeable(drafts: Drafts, evidence: Evidence) -> torch.Tensor:
    """How predictable token t is, fp32 [B, T].

    This is the product of the target's confidence in token t and in the tokens before it that the heads have not read.
    On texts that are drawn from the target, guesses from the target's own probabilities are right at least this often.
    """
    likely = torch.ones_like(evidence.confidence)
    for step in range(1, drafts.unread + 2):
        likely = likely * evidence.confidence.roll(step, dims=1)  # confidence at token t - 1 is about token t
    return likely


def by_turn(drafts: Drafts, evidence: Evidence) -> tuple[Group, Group]:
    """Groups of the first guesses of every answer, and of all later ones."""
    text = guessed_text(drafts, evidence)
    places = torch.arange(text.shape[1], device=text.device)[None]
    starts = torch.tensor(evidence.starts, device=text.device)[:, None]
    early = text & (places <= starts + FIRST_TOKENS)
    return (
        group_of(f"first {FIRST_TOKENS} tokens of a turn", drafts, evidence, early),
        group_of("later tokens", drafts, evidence, text & ~early),
    )


def by_context(drafts: Drafts, evidence: Evidence) -> list[Group]:
    """Groups by the number of tokens before the guessed one."""
    text = guessed_text(drafts, evidence)
    places = torch.arange(text.shape[1], device=text.device)[None]
    found = []
    for low, high in pairwise(CONTEXT_BINS):
        inside = text & (places >= low) & (places < high)
        if bool(inside.any()):
            name = f"context {low} to {high}" if high < 1 << 30 else f"context from {low}"
            found.append(group_of(name, drafts, evidence, inside, high))
    return found


def special_tokens(drafts: Drafts, evidence: Evidence, ids: Sequence[int]) -> Group:
    """Group of special tokens that the target wrote, such as ends of turns."""
    special = torch.isin(evidence.token_ids, torch.tensor(list(ids) or [-1], device=evidence.token_ids.device))
    return group_of("special tokens", drafts, evidence, own_text(evidence, 0) & special)


def given_text(drafts: Drafts, evidence: Evidence) -> Group:
    """Group of the prompts' tokens, which the target did not write; a right guess is the target's favourite there."""
    places = torch.arange(evidence.token_ids.shape[1], device=evidence.token_ids.device)[None]
    starts = torch.tensor(evidence.starts, device=places.device)[:, None]
    where = (places >= 2) & (places < starts) & (drafts.tokens[0] >= 0)
    right = (drafts.tokens[0] == evidence.favourites.roll(1, dims=1)) & where
    expected = foreseeable(drafts, evidence) * where
    columns = (right.float(), where.float(), expected)
    return Group("prompts (not its own text)", *(tuple(column.sum(-1).tolist()) for column in columns))


# ---------------------------------------------------------------------- modes of a prompt
def modes(prompts: Sequence[Text], tokenizer: Any) -> dict[str, list[Any]]:
    """The same prompts in other forms, by name: raw text, a user's message, with and without thinking.

    The form in which the prompts are given is not included.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template or not all(isinstance(prompt, str) or _is_chat(prompt) for prompt in prompts):
        return {}
    chats = [prompt if _is_chat(prompt) else [{"role": "user", "content": prompt}] for prompt in prompts]
    found: dict[str, list[Any]] = {}
    if all(_is_chat(prompt) for prompt in prompts):
        found["raw text"] = [chat[-1]["content"] for chat in chats]
    else:
        found["chat"] = chats
    if "enable_thinking" in str(template):
        for value, name in ((True, "chat, thinking"), (False, "chat, no thinking")):
            found[name] = [chat_token_ids(chat, tokenizer, enable_thinking=value) for chat in chats]
    return found


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and bool(len(prompt)) and isinstance(prompt[0], Mapping)


def begins_turns(prompts: Sequence[Text], tokenizer: Any) -> bool:
    """Whether an answer begins where the prompts end.

    This holds for chats, and for texts that end with the generation prompt of the tokenizer's chat template.
    """
    if all(_is_chat(prompt) for prompt in prompts):
        return True
    if not getattr(tokenizer, "chat_template", None) or any(_is_chat(prompt) for prompt in prompts):
        return False
    chat = [{"role": "user", "content": "text"}]
    asks, states = (
        tokenizer.apply_chat_template(chat, add_generation_prompt=asked, return_dict=True)["input_ids"]
        for asked in (True, False)
    )
    question = asks[len(states) :] if asks[: len(states)] == states else []
    ids = [one[0].tolist() for one in all_token_ids(prompts, tokenizer)]
    return bool(question) and all(one[-len(question) :] == question for one in ids)


def given_mode(prompts: Sequence[Text]) -> str:
    """Name of the form in which the prompts are given."""
    if all(_is_chat(prompt) for prompt in prompts):
        return "chat"
    return "raw text" if all(isinstance(prompt, str) for prompt in prompts) else "as given"


def coverage(heads: DraftHead, evidence: Evidence) -> float:
    """Share of the target's own tokens that are in the draft vocabulary."""
    vocabulary = heads.draft_vocabulary
    if vocabulary is None:
        return 1.0
    text = own_text(evidence, 0)
    inside = torch.isin(evidence.token_ids, vocabulary.to(evidence.token_ids.device))
    return float(inside[text].float().mean()) if bool(text.any()) else 1.0
