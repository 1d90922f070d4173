"""Transcript of a running generation: tokens, their draft positions, and the rounds that they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..generation.observer import DraftNode, Round
from ..metrics import GenerationStats, acceptance_length, position_acceptance


class Pieces:
    """Texts of tokens that arrive one by one. A character of several tokens is assigned to the last of them.

    Args:
        decode: Function that decodes token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode, self.ids, self.pieces = decode, [], list[str]()
        self._read = self._done = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens."""
        for token in token_ids:
            self.ids.append(token)
            text = self.decode(self.ids[self._read :])
            if text.endswith("\ufffd"):  # an incomplete character
                self.pieces.append("")
                continue
            known = self.decode(self.ids[self._read : self._done])
            self.pieces.append(text[len(known) :])
            self._read, self._done = self._done, len(self.ids)


@dataclass(frozen=True)
class SeenRound:
    """One step of a generation, in plain values.

    Attributes:
        first: Index of its first token in the reply.
        token_ids: Tokens that it emitted.
        num_drafted: Number of these tokens that were drafted; they come first.
        nodes: Nodes of its draft tree, the root first; empty for the prompt's forward.
        seconds: Wall seconds of the step.
    """

    first: int
    token_ids: list[int]
    num_drafted: int
    nodes: list[DraftNode]
    seconds: float

    @property
    def drafted(self) -> bool:
        """Whether the step verified a draft."""
        return len(self.nodes) > 1


@dataclass
class Transcript:
    """One reply while it is written.

    Attributes:
        token_ids: Tokens so far.
        positions: Draft position of every token; 0 for the target's own tokens.
        round_of: Number of the step that every token came from; the prompt's forward is step 0.
        rounds: Steps of the generation; empty for plain decoding.
        seconds: Wall seconds from the call to the newest token.
        done, stopped: Whether the generation has ended, and whether the visitor stopped it.
        error: Why it failed, in one line; `None` if it did not.
        stats: Statistics of the engine, available after the end of a reply with heads.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    round_of: list[int] = field(default_factory=list)
    rounds: list[SeenRound] = field(default_factory=list)
    seconds: float = 0.0
    done: bool = False
    stopped: bool = False
    error: str | None = None
    stats: GenerationStats | None = None

    def add_round(self, one: Round, seconds: float) -> None:
        """Adds a round that was observed `seconds` after the start of the call."""
        tokens, drafted = one.token_ids(), one.num_drafted()
        self.rounds.append(SeenRound(len(self.token_ids), tokens, drafted, one.nodes(), one.seconds))
        self.positions += [index + 1 if index < drafted else 0 for index in range(len(tokens))]
        self.round_of += [len(self.rounds) - 1] * len(tokens)
        self.seconds = seconds
        self.token_ids += tokens  # last, because readers in other threads go by the number of tokens

    def add_token(self, token_id: int, seconds: float) -> None:
        """Adds one token of plain decoding."""
        self.positions.append(0)
        self.round_of.append(len(self.token_ids))
        self.seconds = seconds
        self.token_ids.append(token_id)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, the prompt's forward included; `None` before the first token."""
        return len(self.token_ids) / self.seconds if self.token_ids and self.seconds > 0 else None

    @property
    def num_accepted(self) -> list[int]:
        """Number of accepted draft tokens of every round that drafted."""
        return [len(one.token_ids) - 1 for one in self.rounds if one.drafted]

    @property
    def acceptance_length(self) -> float | None:
        """tau of the rounds that drafted; `None` if there are none."""
        if self.stats is not None:
            return self.stats.acceptance_length or None
        return acceptance_length([self.num_accepted]) or None

    @property
    def pos_acc(self) -> list[float]:
        """Conditional acceptance per draft position."""
        if self.stats is not None:
            return self.stats.pos_acc
        drafted = [one for one in self.rounds if one.drafted]
        depths = [max(node.depth for node in one.nodes) for one in drafted]
        cut = [one.num_drafted == len(one.token_ids) for one in drafted]
        accepted = self.num_accepted
        offered = [n if ends else depth for n, depth, ends in zip(accepted, depths, cut, strict=True)]
        return position_acceptance([accepted], [offered])

    @property
    def forwards(self) -> int:
        """Number of target forwards."""
        return len(self.rounds) if self.rounds else len(self.token_ids)
