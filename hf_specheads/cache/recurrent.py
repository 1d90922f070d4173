"""The cache of a recurrent or hybrid target during a generation: states are saved, restored and brought up to date.

A recurrent state summarises the whole text, and no token can be removed from it. So the states are saved before every
forward over a chain. If the whole chain is accepted, generation continues from the states after it. Otherwise the
saved states are restored, and the *next* forward begins with the accepted tokens: it gets wider, but no additional
forward is needed. All layers go back together, since all of them read these tokens again.

The sequences of a batch accept different numbers of tokens and wait for each other. The states hold the tokens up to
the shortest sequence, and each sequence begins its next forward with the tokens it has beyond that.

In a stream of requests, a sequence joins such a batch behind padding, so that all states hold the same number of
tokens again.
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

# Most accepted tokens that may wait to be read into the states. With more, a forward without drafts reads them.
MOST_WAITING = 16
# Most tokens that a sequence of a batch may be ahead of the slowest one.
MOST_AHEAD = 32


def tokens_in(cache: Cache, otherwise: int = 0) -> int:
    """Returns the number of tokens in a cache, or `otherwise` if all its layers are recurrent and do not count."""
    counts = not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    return int(cache.get_seq_length()) if counts else otherwise


@dataclass
class _Forward:
    """The last forward over a chain: its input, and how to undo it.

    Attributes:
        token_ids: int64 [B, Q], the waiting tokens, then the nodes, padded at the end in sequences with fewer tokens.
        before: Contents of all layers before the forward.
    """

    token_ids: torch.Tensor
    before: list[dict[str, Any]]


class RecurrentCache:
    """Wraps transformers' own cache and can restore the states from before the last forward.

    The states of all sequences of a batch always hold the same number of tokens. If a sequence has accepted more than
    others, the surplus waits: its chain begins later in the next forward. Shorter sequences are padded at the end,
    which does not affect earlier tokens. Therefore no kernel needs a mask, and the keys and values of attention layers
    lie in the same rows for all sequences.

    Args:
        stock: transformers' cache after the prefill.
        target: The target.
        name: Name of the argument through which the target's forward takes the cache.
        padding_mask: int or bool [B, P], 0 on padding of the prompt; `None` without padding.
        root_positions: [B, 1] or [3, B, 1], position of the token after the prompt.
        takes_positions: Whether the target takes positions.
        tokens: Number of tokens of the prompt, as the caller counts them.
        is_seen: Whether the cache is read after the generation. If not, waiting tokens are not read at the end.
        batch: Number of sequences B.

    Attributes:
        counts: Tokens of every sequence, including those that the states do not hold yet.
        base: Tokens in the states, the same for every sequence. Padding is counted here and in `counts`.
        begins: Columns of padding before each sequence, which arise when sequences join.
        caught_up: Whether the last forward drafted nothing and read waiting tokens.
        additional_forwards: Number of forwards that only read waiting tokens.
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
        if is_seen and batch > 1:  # sequences leave the batch when they end, but all of them must be given back
            self.prompt_contents = [whole_contents(layer) for layer in stock.layers]
        self.prompt_mask = padding_mask
        self._prompt_positions = self.after_prompt
        self._waiting: torch.Tensor | None = None  # int64 [B, W], waiting tokens, with rejected ones after them
        self._last: _Forward | None = None
        self.caught_up = False
        self.additional_forwards = 0

    @property
    def waiting(self) -> list[int]:
        """Number of accepted tokens that the states do not hold yet, per sequence."""
        width = 0 if self._last is None else self._last.token_ids.shape[1]
        late = [count - self.base for count in self.counts]
        return [0] * len(late) if width and set(late) == {width} else late

    @property
    def must_catch_up(self) -> bool:
        """Whether too many tokens wait, so that the next forward should draft nothing and commit all it reads."""
        return len(self.counts) == 1 and self.waiting[0] > MOST_WAITING

    def most_accepted(self, sequence: int) -> int | None:
        """Returns how many tokens a sequence may gain in the next round, bonus token included; `None` if unlimited.

        In a batch the states wait for the slowest sequence, so a sequence that is far ahead has to wait as well.
        """
        if len(self.counts) == 1:
            return None
        return max(1, MOST_AHEAD - (self.counts[sequence] - min(self.counts)))

    def verify(self, tree: DraftTree, **asked: Any) -> ModelOutput:
        """Runs the target's forward over the waiting tokens and chains of N nodes.

        Args:
            tree: The chains to verify.
            asked: Further arguments of the forward.

        Returns:
            The outputs at the nodes.
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
        """Runs the target's forward over tokens that follow those in the states."""
        mask = self.padding_mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, self.base - mask.shape[1]), value=1)
        return read_on(self.target, self.name, self.stock, mask, self.root_positions(), token_ids, **asked)

    def root_positions(self) -> torch.Tensor | None:
        """Returns the position of the token after those in the states, [B, 1] or [3, B, 1]; `None` if not taken."""
        return None if self.after_prompt is None else self.after_prompt + (self.base - self.prompt)

    def _go_back(self) -> None:
        """Restores the states from before the last forward, unless all its tokens are kept.

        The accepted tokens that the restored states lack then wait for the next forward.
        """
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
        """Reads the first `tokens` of the waiting tokens [B, W] into the states, and returns the remaining ones."""
        with torch.no_grad():
            self._forward(waiting[:, :tokens])
        self.additional_forwards += 1
        self.base += tokens
        return waiting[:, tokens:]

    def keep_paths(
        self, nodes: torch.Tensor, counts: list[int], device_counts: torch.Tensor, are_prefixes: bool
    ) -> None:
        """Commits the accepted path, see [`TreeCache.keep_paths`]; a path of a chain always is a prefix.

        The states do not change until the next forward, because until then the round may still emit less than the
        whole path.

        Raises:
            RuntimeError: if there was no forward to keep a path of.
        """
        if self._last is None:
            raise RuntimeError("there was no forward of which a path could be kept.")
        self.counts = [count + new for count, new in zip(self.counts, counts, strict=True)]

    def select_sequences(self, kept: list[int]) -> None:
        """Keeps only the sequences `kept` of the batch."""
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
            place: Index of the sequence to replace, or the number of sequences to append.
            other: The other cache, after a prompt without padding. Its tensors are copied.
            device: Device of token ids.
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
        """Reads waiting tokens into the states before a sequence joins, if too many have accumulated.

        Waiting tokens are only read when every sequence has some. A joining sequence has none, so those of the others
        would have to wait longer.
        """
        late = [count - self.base for at, count in enumerate(self.counts) if at != place]
        if late and max(late) > MOST_WAITING and min(late) > 0 and self._waiting is not None:
            self._waiting = self._catch_up(self._waiting, min(late))

    def _put_positions(self, place: int, other: RecurrentCache) -> None:
        """Merges the positions of a joining sequence; from now on they are counted from the tokens in the states."""
        mine, theirs = self.root_positions(), other.root_positions()
        if mine is None or theirs is None:
            return
        if mine.dim() < theirs.dim():  # positions have several axes after a prompt with images, else one
            mine = mine.expand(theirs.shape[0], -1, -1)
        theirs = theirs.expand(*mine.shape[:-2], 1, 1)
        self.after_prompt = with_sequence(mine, theirs, place, mine.dim() - 2)
        self.prompt = self.base

    def _shift(self, columns: int) -> None:
        """Moves all tokens so many columns later, or earlier if `columns` is negative."""
        self.base, self.prompt = self.base + columns, self.prompt + columns
        self.counts = [count + columns for count in self.counts]
        self.begins = [begin + columns for begin in self.begins]

    def _drop_padding(self) -> None:
        """Drops the columns in which no sequence has a token any more."""
        if (columns := min(self.begins)) == 0:
            return
        self._shift(-columns)
        for layer in self.stock.layers:
            drop_columns(layer, self.base)
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[:, columns:]

    def give_back(self, tokens: int | None, text: torch.Tensor | None = None) -> None:
        """Leaves the cache as plain decoding would after `tokens` tokens, even if a round was interrupted.

        If the cache is read later, accepted tokens that the states lack are read by another forward.

        Args:
            tokens: Number of tokens of the only sequence; `None` for a batch.
            text: int64 [B, T], the tokens of a batch that plain decoding would have in its cache after the prompt;
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
        """Restores the states after the prompts, then reads a text [B, T]; without one the cache is left empty."""
        for layer, before in zip(self.stock.layers, contents, strict=True):
            restore(layer, before)
        self.base, self.padding_mask, self.after_prompt = self.prompt, self.prompt_mask, self._prompt_positions
        if text is None:
            self.stock.reset()
        elif text.shape[1] > 0:
            with torch.no_grad():
                self._forward(text)


def at_last_rows(outputs: ModelOutput, rows: int) -> ModelOutput:
    """Keeps a forward's logits and hidden states at its last `rows` rows only."""
    outputs.logits = outputs.logits[:, -rows:]
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(None if h is None else h[:, -rows:] for h in outputs.hidden_states)
    return outputs


def at_rows(outputs: ModelOutput, rows: torch.Tensor) -> ModelOutput:
    """Keeps a forward's logits and hidden states at rows int64 [B, N], which differ between sequences."""

    def picked(states: torch.Tensor) -> torch.Tensor:
        return states.gather(1, rows.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))

    outputs.logits = picked(outputs.logits)
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(None if h is None else picked(h) for h in outputs.hidden_states)
    return outputs
