"""Prompt lookup on the host: finds what followed the last n-gram at its previous occurrence in the text.

The tokens of a call come to the host anyway, where the stopping criteria read them. So the text is indexed there, with
a few dictionary entries per token, and a round knows whether there is anything to copy without asking the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cache.slots import to_device

# Sizes of the n-grams to look for, longest first. A single token predicts too little to be worth its nodes.
LONGEST, SHORTEST = 3, 2


class TextIndex:
    """Where the n-grams of one text were last seen; it grows with the text.

    Args:
        token_ids: The text so far.
        longest, shortest: Sizes of the n-grams; longer ones are preferred.
    """

    def __init__(self, token_ids: Sequence[int] = (), longest: int = LONGEST, shortest: int = SHORTEST):
        self.token_ids: list[int] = []
        self._followed: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in range(longest, shortest - 1, -1)}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens to the text. An n-gram is indexed once there is a token after it."""
        for token in token_ids:
            end = len(self.token_ids)
            for size, followed in self._followed.items():
                if size <= end:
                    followed[tuple(self.token_ids[end - size :])] = end
            self.token_ids.append(token)

    def match(self) -> int | None:
        """Index of the token that followed the previous occurrence of the text's last n-gram; `None` without one."""
        for size, followed in self._followed.items():
            if size <= len(self.token_ids):
                place = followed.get(tuple(self.token_ids[-size:]))
                if place is not None:
                    return place
        return None

    def continuation(self, length: int) -> list[int] | None:
        """The next `length` tokens from the match on, `None` without a match. Where the text ends before that, it is
        assumed to repeat what it has had since the match: such a text is in a loop."""
        place = self.match()
        if place is None:
            return None
        period = len(self.token_ids) - place
        return [self.token_ids[place + step % period] for step in range(length)]


class TextLookup:
    """The indices of all sequences of a call that are still active.

    Args:
        longest, shortest: As in [`TextIndex`].
    """

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST):
        self.longest, self.shortest = longest, shortest
        self.texts: list[TextIndex] = []

    def begin(self, token_ids: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Takes in the prompts, by one copy to the host.

        Args:
            token_ids: int64 [B, T].
            padding_mask: int or bool [B, >= T], 0 on padding.
        """
        rows = token_ids.tolist()
        if padding_mask is not None:
            real = padding_mask[:, : token_ids.shape[1]].bool().tolist()
            rows = [[t for t, keep in zip(row, kept, strict=True) if keep]
                    for row, kept in zip(rows, real, strict=True)]  # fmt: skip
        self.texts = [TextIndex(row, self.longest, self.shortest) for row in rows]

    def extend(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Adds the tokens a round has emitted, one list per sequence."""
        for text, new in zip(self.texts, token_ids, strict=True):
            text.extend(new)

    def follow(self, token_ids: torch.Tensor) -> None:
        """Takes in the new tokens of a text [1, T], or all of them if the text is new."""
        if not self.texts:
            self.begin(token_ids)
        known = len(self.texts[0].token_ids)
        self.texts[0].extend(token_ids[0, known:].tolist())

    def select_sequences(self, kept: Sequence[int]) -> None:
        """Keeps only some sequences of the batch."""
        self.texts = [self.texts[index] for index in kept]

    def put_sequence(self, place: int, other: TextLookup) -> None:
        """Puts the only text of another lookup in the place of one of these, or after the last."""
        self.texts[place : place + 1] = other.texts

    @property
    def found(self) -> bool:
        """Whether there is anything to copy, in any sequence."""
        return any(text.match() is not None for text in self.texts)

    def continuations(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Tokens to copy, int64 [B, length], `None` if no sequence has any. If only some sequences have a match, the
        others repeat their last token: it is as good a guess as any, and no mask is needed."""
        rows = [text.continuation(length) for text in self.texts]
        if all(row is None for row in rows):
            return None
        filled = [row or text.token_ids[-1:] * length for row, text in zip(rows, self.texts, strict=True)]
        return to_device(filled, device)
