"""The cache of a recurrent or hybrid target during a generation: states are kept, restored, and caught up lazily.

A recurrent state holds the whole text, and no token can be taken out of it. So before a forward over a chain the
states are kept. If all of the chain is accepted, generation goes on from the states after it. Otherwise those from
before are restored, and the *next* forward begins with the tokens that were accepted: a wider forward, and no
additional one. All layers go back together, as all of them get these tokens again.

The sequences of a batch accept different numbers of tokens, and wait for each other: the states hold what all of them
have, and each begins its next forward with what it has beyond.

In a stream of requests sequences join such a batch, behind padding, so that all states hold the same number again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
)
from transformers.utils import ModelOutput

from ..tree.draft_tree import DraftTree
from .joining import drop_columns, put_layer, with_sequence
from .layers import contents_with_states, own_rows, read_on, restore, whole_contents
from .slots import to_device

# Accepted tokens that wait to be caught up with; beyond, a forward that drafts nothing does it.
MOST_WAITING = 16
# Tokens that a sequence of a batch may be ahead of the slowest.
MOST_AHEAD = 32


def tokens_in(cache: Cache, otherwise: int = 0) -> int:
    """Tokens that a cache holds; layers that are recurrent only do not count them."""
    counts = not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    return int(cache.get_seq_length()) if counts else otherwise


@dataclass
class _Forward:
    """The last forward over a chain: what it was given, and the way back.

    Attributes:
        token_ids: int64 [B, Q], tokens caught up with, then the nodes, filled up behind where others have more.
        before: Contents of all layers before it.
    """

    token_ids: torch.Tensor
    before: list[dict[str, Any]]


class RecurrentCache:
    """transformers' own cache with the way back to the states before the last forward.

    The states of all sequences of a batch hold the same number of tokens always. A sequence that has accepted more
    than others waits with the difference: in the next forward its chain begins later, and what is behind the shorter
    ones changes nothing before it. So no kernel has to heed a mask, and the keys and values of attention layers lie
    in the same rows for all.

    Args:
        stock: transformers' cache after the prefill.
        target: The target.
        name: Under which name its forward takes the cache.
        padding_mask: int or bool [B, P], 0 on padding of the prompt; `None` without padding.
        root_positions: [B, 1] or [3, B, 1], position of the token after the prompt.
        takes_positions: Whether the target takes positions.
        tokens: Tokens of the prompt, counted as the caller counts them.
        is_seen: Whether somebody looks at the cache after the generation; otherwise nothing is caught up with then.
        batch: Sequences B.

    Attributes:
        counts: Tokens of every sequence, those that the states do not hold yet included.
        base: Tokens in the states, of every sequence; padding counts, here and in `counts`.
        begins: Columns of padding before sequences that have joined and those they joined.
    """

    def __init__(
        self,
        stock: Cache,
        target: PreTrainedModel,
        name: str,
        padding_mask: torch.Tensor | None,
        root_positions: torch.Tensor,
        takes_positions: bool,
        tokens: int,
        is_seen: bool = True,
        batch: int = 1,
    ):
        self.stock, self.target, self.name, self.padding_mask = stock, target, name, padding_mask
        self.after_prompt = root_positions if takes_positions else None
        self.prompt = self.base = tokens
        self.counts, self.begins = [tokens] * batch, [0] * batch
        self.is_seen = is_seen
        self.prompt_contents: list[dict[str, Any]] | None = None
        if is_seen and batch > 1:  # sequences that end leave the batch, and all belong to what is given back
            self.prompt_contents = [whole_contents(layer) for layer in stock.layers]
        self.prompt_mask = padding_mask
        self._prompt_positions = self.after_prompt
        self._waiting: torch.Tensor | None = None  # int64 [B, W], rejected tokens behind those that wait
        self._last: _Forward | None = None
        self.caught_up = False
        self.additional_forwards = 0

    @property
    def waiting(self) -> list[int]:
        """Accepted tokens that the states do not hold yet, per sequence."""
        width = 0 if self._last is None else self._last.token_ids.shape[1]
        late = [count - self.base for count in self.counts]
        return [0] * len(late) if width and set(late) == {width} else late

    @property
    def must_catch_up(self) -> bool:
        """Whether the next forward should draft nothing: it commits all it is given, whatever the target says."""
        return len(self.counts) == 1 and self.waiting[0] > MOST_WAITING

    def most_accepted(self, sequence: int) -> int | None:
        """How many tokens a sequence of a batch may gain in a round, the bonus token included: the states wait for the
        slowest, and one that is far ahead waits, too. `None` without limit."""
        if len(self.counts) == 1:
            return None
        return max(1, MOST_AHEAD - (self.counts[sequence] - min(self.counts)))

    def verify(self, tree: DraftTree, **asked: Any) -> ModelOutput:
        """The target's forward over tokens to catch up with and chains of N nodes; its outputs at the nodes.

        Args:
            tree: The chains.
            asked: Further arguments of the forward.
        """
        self._go_back()
        if self._waiting is None:
            self._waiting = tree.token_ids[:, :0]
        late = [count - self.base for count in self.counts]
        if len(late) > 1 and max(late) > MOST_WAITING and min(late) > 0:
            self._waiting = self._catch_up(self._waiting, min(late))
            late = [count - self.base for count in self.counts]
        token_ids, nodes = self._waiting[:, : max(late)], None
        if min(late) == max(late):
            token_ids = torch.cat([token_ids, tree.token_ids], dim=1)
        else:
            token_ids = torch.nn.functional.pad(token_ids, (0, tree.num_nodes))
            starts = to_device(late, token_ids.device)[:, None]
            nodes = starts + torch.arange(tree.num_nodes, device=token_ids.device)
            token_ids = token_ids.scatter(1, nodes, tree.token_ids)
        self._last = _Forward(token_ids, [contents_with_states(layer) for layer in self.stock.layers])
        self.caught_up = tree.num_nodes == 1 and token_ids.shape[1] > 1
        outputs = self._forward(token_ids, **asked)
        return at_last_rows(outputs, tree.num_nodes) if nodes is None else at_rows(outputs, nodes)

    def _forward(self, token_ids: torch.Tensor, **asked: Any) -> ModelOutput:
        """The target's forward over the tokens after those in the states."""
        mask = self.padding_mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, self.base - mask.shape[1]), value=1)
        return read_on(self.target, self.name, self.stock, mask, self.root_positions(), token_ids, **asked)

    def root_positions(self) -> torch.Tensor | None:
        """Positions of the tokens after those in the states, [B, 1] or [3, B, 1]; `None` if the target takes none."""
        return None if self.after_prompt is None else self.after_prompt + (self.base - self.prompt)

    def _go_back(self) -> None:
        """Restores the states of before the last forward unless all of it is kept. What they lack then, waits."""
        last, self._last = self._last, None
        if last is None:
            return
        late, width = [count - self.base for count in self.counts], last.token_ids.shape[1]
        if set(late) == {width}:
            self.base += width
            self._waiting = last.token_ids[:, :0]
            return
        for layer, contents in zip(self.stock.layers, last.before, strict=True):
            restore(layer, contents)
        self._waiting = last.token_ids[:, : max(late)]

    def _catch_up(self, waiting: torch.Tensor, tokens: int) -> torch.Tensor:
        """A forward over the first of the tokens [B, W] that wait in all sequences. Returns those that wait then."""
        with torch.no_grad():
            self._forward(waiting[:, :tokens])
        self.additional_forwards += 1
        self.base += tokens
        return waiting[:, tokens:]

    def keep_paths(
        self, nodes: torch.Tensor, counts: list[int], device_counts: torch.Tensor, are_prefixes: bool
    ) -> None:
        """As in [`TreeCache`]; a path of a chain always is a prefix. The states stay until the next forward: how much
        of the path is emitted is not sure before."""
        if self._last is None:
            raise RuntimeError("there is no forward to keep anything of.")
        self.counts = [count + new for count, new in zip(self.counts, counts, strict=True)]

    def select_sequences(self, kept: list[int]) -> None:
        """Keeps only some sequences of the batch."""
        self._go_back()
        index = torch.tensor(kept)
        if self._waiting is not None:
            index = to_device(kept, self._waiting.device)
            self._waiting = self._waiting[index]
        self.counts = [self.counts[sequence] for sequence in kept]
        self.begins = [self.begins[sequence] for sequence in kept]
        self.stock.reorder_cache(index)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[index.to(self.padding_mask.device)]
        if self.after_prompt is not None and self.after_prompt.shape[-2] > 1:
            self.after_prompt = self.after_prompt[..., index.to(self.after_prompt.device), :]
        self._drop_padding()

    # ------------------------------------------------------------------ sequences that join
    def put_sequence(self, place: int, other: RecurrentCache, device: torch.device) -> None:
        """Takes over the only sequence of another cache.

        Args:
            place: Of the sequence it comes in for, or after the last.
            other: The cache after a prompt without padding; its tensors are copied.
            device: Of token ids.
        """
        self._go_back()
        self._catch_up_before(place)
        base = max(self.base, other.base)
        for mine, theirs in zip(self.stock.layers, other.stock.layers, strict=True):
            put_layer(mine, theirs, place, base)
        self._put_positions(place, other)
        self._shift(base - self.base)
        self.counts[place : place + 1], self.begins[place : place + 1] = [base], [base - other.base]
        if self._waiting is not None:
            self._waiting = with_sequence(self._waiting, torch.zeros_like(self._waiting[:1]), place)
        self.padding_mask = (torch.arange(base, device=device) >= to_device(self.begins, device)[:, None]).long()
        self._drop_padding()

    def _catch_up_before(self, place: int) -> None:
        """A newcomer has nothing that waits, and nothing is caught up with before all have: what has piled up until
        then would wait longer."""
        late = [count - self.base for at, count in enumerate(self.counts) if at != place]
        if late and max(late) > MOST_WAITING and min(late) > 0 and self._waiting is not None:
            self._waiting = self._catch_up(self._waiting, min(late))

    def _put_positions(self, place: int, other: RecurrentCache) -> None:
        """Positions are those of the token after the states from now on, wherever that lies."""
        mine, theirs = self.root_positions(), other.root_positions()
        if mine is None or theirs is None:
            return
        if mine.dim() < theirs.dim():  # of several axes where an image was read, of one where none was
            mine = mine.expand(theirs.shape[0], -1, -1)
        theirs = theirs.expand(*mine.shape[:-2], 1, 1)
        self.after_prompt = with_sequence(mine, theirs, place, mine.dim() - 2)
        self.prompt = self.base

    def _shift(self, columns: int) -> None:
        """All tokens lie so many columns later, or earlier."""
        self.base, self.prompt = self.base + columns, self.prompt + columns
        self.counts = [count + columns for count in self.counts]
        self.begins = [begin + columns for begin in self.begins]

    def _drop_padding(self) -> None:
        """Columns that no sequence has a token in any more are given up."""
        if (columns := min(self.begins)) == 0:
            return
        self._shift(-columns)
        for layer in self.stock.layers:
            drop_columns(layer, self.base)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[:, columns:]

    def give_back(self, tokens: int | None, text: torch.Tensor | None = None) -> None:
        """Leaves the cache as plain decoding has it after so many tokens, after an interrupted round too: with a
        forward over the accepted tokens that the states lack, if anybody looks.

        Args:
            tokens: Of the only sequence; `None` for a batch.
            text: Of a batch that has ended, int64 [B, T], what plain decoding has in its cache after the prompt;
                `None` leaves the cache empty.
        """
        if self.prompt_contents is not None:
            self._start_over(self.prompt_contents, text)
        elif tokens is None:
            self.stock.reset()
        else:
            self.counts = [max(min(tokens, self.counts[0]), self.base)]
            self._go_back()
            if self.is_seen and self._waiting is not None and self.counts[0] > self.base:
                self._catch_up(self._waiting, self.counts[0] - self.base)
        for layer in self.stock.layers:
            own_rows(layer)

    def _start_over(self, contents: list[dict[str, Any]], text: torch.Tensor | None) -> None:
        """The prompts' states, and a forward over a text [B, T] after them."""
        for layer, before in zip(self.stock.layers, contents, strict=True):
            restore(layer, before)
        self.base, self.padding_mask, self.after_prompt = self.prompt, self.prompt_mask, self._prompt_positions
        if text is None:
            self.stock.reset()
        elif text.shape[1] > 0:
            with torch.no_grad():
                self._forward(text)


def at_last_rows(outputs: ModelOutput, rows: int) -> ModelOutput:
    """A forward's logits and hidden states at its last rows only."""
    outputs.logits = outputs.logits[:, -rows:]
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(None if h is None else h[:, -rows:] for h in outputs.hidden_states)
    return outputs


def at_rows(outputs: ModelOutput, rows: torch.Tensor) -> ModelOutput:
    """A forward's logits and hidden states at rows int64 [B, N] of its own for every sequence."""

    def picked(states: torch.Tensor) -> torch.Tensor:
        return states.gather(1, rows.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))

    outputs.logits = picked(outputs.logits)
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(None if h is None else picked(h) for h in outputs.hidden_states)
    return outputs
