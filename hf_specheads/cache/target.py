"""The target's cache during a generation: where a tree's keys and values go, what it sees, what of it is kept.

[`TreeCache`] takes over what the prefill left in transformers' cache, into pre-allocated slots: trees, batches whose
sequences accept different numbers of tokens, static shapes. Targets and caches that take no trees have a
[`chain.ChainCache`] or a [`recurrent.RecurrentCache`].
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs

from ..tree.draft_tree import DraftTree
from .layers import hold_rows, is_static, own_rows, read_on, rows_of
from .masks import additive_mask, block_mask, shown_whole, slot_mask, tree_position_ids
from .names import CACHE_NAME
from .rooms import Room, Rooms, stays
from .slots import SlotCache, SlotCacheLayer, to_device

# Tensors moved by one indexed copy. More would save launches, and hold more of a prompt twice while it is taken over.
TENSORS_PER_GROUP = 8
# Slots beyond the prompt that a cache starts with; it doubles from there.
FIRST_SLOTS = 256


def layer_windows(target: PreTrainedModel) -> list[int | None]:
    """Sliding window of every layer's attention, `None` without, by the target's config.

    A cache that was made without a config knows of no windows, and the attention slides all the same.
    """
    layer_types, options = get_layer_types_and_kwargs(target.config.get_text_config(decoder=True))
    return [kwargs.get("sliding_window") for _, kwargs in zip(layer_types, options, strict=True)]


def root_positions_of(model_kwargs: dict[str, Any], length: int, device: torch.device) -> torch.Tensor:
    """Position of the token after the prompt, [B, 1] or [3, B, 1], from the kwargs `generate` prepared.

    Args:
        model_kwargs: As after the prefill; `position_ids` are the prompt's.
        length: Tokens in the cache.
        device: Where to count if nobody has.
    """
    if (positions := model_kwargs.get("position_ids")) is not None:
        return positions[..., -1:] + 1
    if (mask := model_kwargs.get("attention_mask")) is not None:
        return mask.long().sum(1, keepdim=True)
    return torch.full((1, 1), length, device=device)


class TreeCache(SlotCache):
    """Slots that hold the target's keys and values, all layers of one shape in one buffer.

    Args:
        stock: transformers' cache after the prefill. It is emptied, and given its
            contents back by [`give_back`].
        target: The target.
        batch: Sequences B.
        padding_mask: int or bool [B, P], 0 on padding of the prompt; `None` without padding.
        root_positions: int64 [B, 1] or [3, B, 1], positions of the tokens after the prompt.
        dtype: The target's compute dtype.
        static_capacity: Slots, fixed; by default they grow.
        rooms: Where buffers of a fixed size are left from call to call, if they are.
        keeps_prompt: Whether transformers' cache keeps the prompts of a batch meanwhile, as it is given back at the
            end with rows of sequences that have left.
        most: Slots that the call needs at most, `None` where nobody knows.
    """

    def __init__(
        self,
        stock: Cache,
        target: PreTrainedModel,
        batch: int,
        padding_mask: torch.Tensor | None,
        root_positions: torch.Tensor,
        dtype: torch.dtype,
        static_capacity: int | None = None,
        rooms: Rooms | None = None,
        keeps_prompt: bool = False,
        most: int | None = None,
    ):
        super().__init__()
        self.stock, self.dtype, self.keeps_prompt = stock, dtype, keeps_prompt
        self.read_on = functools.partial(read_on, target, CACHE_NAME, stock, padding_mask, root_positions)
        self.root_positions = root_positions.expand(*root_positions.shape[:-2], batch, 1)
        self.counts = [int(stock.get_seq_length())] * batch
        self.padding_mask = padding_mask
        if padding_mask is not None and bool(padding_mask.all()):
            self.padding_mask = None
        config = target.config.get_text_config(decoder=True)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.layer_types: list[str] | None = getattr(config, "layer_types", None)
        self.takes_blocks = config._attn_implementation == "flex_attention"
        self.device = root_positions.device
        self.most = most
        self.capacity = self.longest + FIRST_SLOTS if most is None else min(self.longest + FIRST_SLOTS, most)
        if static_capacity is not None:
            self.fix_capacity(static_capacity, rooms)
            self.become_ragged(batch, self.device)
            self._fix_padding_mask(batch)
        self.regions: tuple[PreTrainedModel | None] | None = None  # the target as compiled steps take it
        self.groups: list[_Group] = []
        try:
            self._take_over(stock, layer_windows(target))
        except BaseException:  # out of memory, say: the tokens that a caller's cache held stay in it
            self.give_back(self.counts[0])
            raise

    def _fix_padding_mask(self, batch: int) -> None:
        """A mask of one width, with or without padding: prompts of any length share the graphs of compiled steps."""
        if self.padding_mask is None:
            self.padding_mask = torch.ones(batch, self.capacity, dtype=torch.bool, device=self.device)
            return
        longer = self.capacity - self.padding_mask.shape[1]
        self.padding_mask = torch.nn.functional.pad(self.padding_mask.bool(), (0, longer), value=True)

    # ------------------------------------------------------------------ buffers
    def _take_over(self, stock: Cache, windows: list[int | None]) -> None:
        by_shape: dict[tuple, list[tuple[SlotCacheLayer, CacheLayerMixin, str]]] = defaultdict(list)
        for index, layer in enumerate(stock.layers):
            if isinstance(layer, DummyLayer) or not layer.is_initialized:
                self.layers.append(layer)
                continue
            ours = SlotCacheLayer(self, windows[index] if index < len(windows) else None)
            ours.is_initialized, ours.dtype, ours.device = True, layer.keys.dtype, layer.keys.device
            self.layers.append(ours)
            for name in ("keys", "values"):
                states = rows_of(layer, name, self.counts[0])
                by_shape[(states.shape[1], states.shape[3], states.dtype, states.device)].append((ours, layer, name))
        # Of tensors that share a buffer, a compiler that writes into one of them copies all.
        together = 1 if self.static else TENSORS_PER_GROUP
        for members in by_shape.values():
            for first in range(0, len(members), together):
                part = members[first : first + together]
                group = _Group(part, self.counts[0], self.capacity, self.room, f"group {len(self.groups)}")
                self.groups.append(group)
                if not self.keeps_prompt:
                    group.empty_stock()

    def grow(self) -> None:
        for group in self.groups:
            group.grow(self.capacity)

    def select_sequences(self, kept: list[int]) -> None:
        self.become_ragged(len(self.counts), self.device)
        super().select_sequences(kept)
        self.root_positions = self.root_positions[..., to_device(kept, self.device), :]
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[to_device(kept, self.padding_mask.device)]

    def select_buffers(self, kept: list[int]) -> None:
        for group in self.groups:
            group.select_sequences(kept, self.room)

    def put_sequence(self, place: int, other: SlotCache, batch: int, device: torch.device) -> None:
        assert isinstance(other, TreeCache)
        super().put_sequence(place, other, batch, device)
        positions, theirs = self.root_positions, other.root_positions
        if positions.dim() < theirs.dim():  # of several axes where an image was read, of one where none was
            positions = positions.expand(theirs.shape[0], -1, -1)
        theirs = theirs.expand(*positions.shape[:-2], 1, 1)
        before, after = positions[..., :place, :], positions[..., place + 1 :, :]
        self.root_positions = torch.cat([before, theirs, after], dim=-2)

    def put_buffers(self, place: int, other: SlotCache, batch: int) -> None:
        assert isinstance(other, TreeCache)
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.put_sequence(place, theirs, other.longest)

    def give_back(self, tokens: int | None, text: torch.Tensor | None = None) -> None:
        """Ends the generation: transformers' cache is what plain decoding has after so many tokens, or empty; where it
        has kept the prompts of a batch, with a text [B, T] after them."""
        for group in self.groups:
            group.give_back(None if self.keeps_prompt else tokens)
        if tokens is None and text is None:
            self.stock.reset()
        elif text is not None and text.shape[1] > 0:
            with torch.no_grad():
                self.read_on(text)
            for layer in self.stock.layers:
                own_rows(layer)
        if any(group.lent for group in self.groups):
            self.room = None  # the caller's cache reads what lies there
        self.leave_room()
        self.groups.clear()
        self.layers.clear()

    # ------------------------------------------------------------------ a round
    def forward_inputs(self, tree: DraftTree) -> dict[str, Any]:
        """Arguments of the one forward over a tree, whose rows are written into the slots after the committed ones."""
        self.place(0, tree.num_nodes)
        return {
            "attention_mask": self.attention_masks(tree),
            "position_ids": tree_position_ids(self.root_positions, tree),
            CACHE_NAME: self,
        }

    def attention_masks(self, tree: DraftTree) -> Any:
        """Additive masks of one tree forward, [B, 1, N, slots shown] per layer type; block masks for flex attention.

        A dict keyed by layer type exactly when the target's config has `layer_types`, as transformers' own
        `create_masks_for_generate` does. Additive, because eager attention silently mishandles boolean masks.
        """

        def mask(window: int | None) -> Any:
            (first, end), lengths = self.shown(window), self.known_lengths()
            if isinstance(lengths, int) and self.padding_mask is None and end == lengths + tree.num_nodes:
                in_window = window is None or tree.num_nodes == 1 or lengths + tree.max_depth < window
                if in_window and not self.takes_blocks:
                    return shown_whole(tree, lengths - first, self.dtype)
            allowed = slot_mask(tree.ancestor_mask, lengths, first, end, window, tree.depths, self.padding_mask)
            return block_mask(allowed) if self.takes_blocks else additive_mask(allowed, self.dtype)[:, None]

        if self.layer_types is not None:
            return {kind: mask(self.window if kind == "sliding_attention" else None) for kind in set(self.layer_types)}
        slides = self.window is not None and any(getattr(layer, "window", None) is not None for layer in self.layers)
        return mask(self.window if slides else None)

    def keep_paths(
        self, nodes: torch.Tensor, counts: list[int], device_counts: torch.Tensor, are_prefixes: bool
    ) -> None:
        """Commits the rows of the accepted paths; those of other nodes are written over by the next round.

        Args:
            nodes: int64 [B, A], nodes to keep, the root first; a sequence's entries past its count do not matter.
            counts: How many of them count, per sequence.
            device_counts: The same, int64 [B].
            are_prefixes: Whether all paths are the nodes 0, 1, 2, ...: they are where they belong then.
        """
        if len(set(counts)) > 1:
            self.become_ragged(len(counts), self.device)
        if not are_prefixes:
            lengths = self.known_lengths()
            for group in self.groups:
                group.move(nodes, lengths)
        kept = device_counts.to(self.device)
        if self.lengths is not None:
            self.lengths = self.lengths + kept
        self.counts = [count + new for count, new in zip(self.counts, counts, strict=True)]
        self.root_positions = self.root_positions + kept[:, None]


class _Group:
    """Tensors of one shape in one buffer [tensors, B, heads, capacity, head_dim]: one indexed copy moves them all.

    Args:
        members: Our layer, transformers', and `keys` or `values`.
        length: Tokens in the cache.
        capacity: Slots.
        room, name: Where the buffer comes from, if not anew, and what it is called there.

    Attributes:
        lent: Whether rows that were given back still lie in the buffer.
    """

    def __init__(
        self,
        members: list[tuple[SlotCacheLayer, CacheLayerMixin, str]],
        length: int,
        capacity: int,
        room: Room | None = None,
        name: str = "",
    ):
        self.members, self.name, self.lent = members, name, False
        _, stock, first = members[0]
        batch, heads, _, width = getattr(stock, first).shape
        self.buffer = self._new(getattr(stock, first), room, len(members), batch, heads, capacity, width)
        for index, (_, stock, name) in enumerate(members):
            # Of a sliding layer only the newest are left, the window hides the others.
            states = rows_of(stock, name, length)
            self.buffer[index, :, :, length - states.shape[2] : length] = states
        self._show()

    def _new(self, like: torch.Tensor, room: Room | None, *shape: int) -> torch.Tensor:
        return like.new_zeros(shape) if room is None else room.buffer(self.name, like, *shape)

    def empty_stock(self) -> None:
        """Frees what has been copied, none of which is lost before."""
        for _, stock, name in self.members:
            if not is_static(stock):  # of those, buffers stay where they are
                setattr(stock, name, getattr(stock, name)[:, :, :0].clone())

    def _show(self) -> None:
        for index, (ours, _, name) in enumerate(self.members):
            rows = self.buffer[index]
            setattr(ours, name, stays(rows) if ours.cache.room is not None else rows)

    def grow(self, capacity: int) -> None:
        old = self.buffer
        self.buffer = old.new_zeros(*old.shape[:3], capacity, old.shape[4])
        self.buffer[:, :, :, : old.shape[3]] = old
        self._show()

    def put_sequence(self, place: int, other: _Group, rows: int) -> None:
        """The first rows of another's only sequence, in the place of one of these, or after the last."""
        if place == self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, 0, 0, 0, 0, 0, 0, 1))
            self._show()
        self.buffer[:, place, :, :rows] = other.buffer[:, 0, :, :rows]

    def select_sequences(self, kept: list[int], room: Room | None) -> None:
        rows = self.buffer[:, to_device(kept, self.buffer.device)]
        self.buffer = rows if room is None else self._new(rows, room, *rows.shape).copy_(rows)
        self._show()

    def move(self, path: torch.Tensor, lengths: int | torch.Tensor) -> None:
        """Moves the rows of the path [B, A] to the first slots after the committed ones."""
        path = path[:, 1:].to(self.buffer.device)  # the root's row is where it belongs
        if isinstance(lengths, int):
            lengths = torch.full((path.shape[0],), lengths, device=path.device)
        lengths = lengths.to(path.device)
        ends = torch.arange(1, path.shape[1] + 1, device=path.device) + lengths[:, None]
        starts = path + lengths[:, None]
        if path.shape[0] == 1:
            self.buffer.index_copy_(3, ends[0], self.buffer.index_select(3, starts[0]))
            return
        layers, _, heads, _, width = self.buffer.shape
        shape = (layers, -1, heads, -1, width)
        moved = self.buffer.gather(3, starts[None, :, None, :, None].expand(shape))
        self.buffer.scatter_(3, ends[None, :, None, :, None].expand(shape), moved)

    def give_back(self, tokens: int | None) -> None:
        """The rows of the first tokens, for `None` none."""
        for index, (ours, stock, name) in enumerate(self.members):
            if tokens is not None:
                self._give_back_rows(index, ours, stock, name, tokens)
            setattr(ours, name, None)
        del self.buffer

    def _give_back_rows(
        self, index: int, ours: SlotCacheLayer, stock: CacheLayerMixin, name: str, tokens: int
    ) -> None:
        if is_static(stock):
            hold_rows(stock, name, self.buffer[index], tokens)
            return
        setattr(stock, name, self._rows(index, ours.window if stock.is_sliding else None, tokens))
        if stock.is_sliding:
            stock.cumulative_length = tokens

    def _rows(self, index: int, window: int | None, tokens: int) -> torch.Tensor:
        oldest = 0 if window is None else max(tokens - window + 1, 0)
        rows = self.buffer[index, :, :, oldest:tokens]
        try:
            return rows.clone()  # nobody keeps the whole buffer alive with a few rows of it
        except RuntimeError:  # out of memory, perhaps for the second time: better a large buffer than lost rows
            self.lent = True
            return rows
