"""The target cache during a generation: where a tree's keys and values are written, what its nodes see, what is kept.

[`TreeCache`] moves the rows that the prefill left in transformers' cache into pre-allocated slots. That allows trees,
batches whose sequences accept different numbers of tokens, and static shapes. Targets and caches that cannot verify
trees use a [`chain.ChainCache`] or a [`recurrent.RecurrentCache`] instead.
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

# Tensors moved by one indexed copy. Larger groups would save kernel launches, but keep more of the prompt in memory
# twice while its rows are moved into slots.
TENSORS_PER_GROUP = 8
# Slots beyond the prompt that a new cache has. A growing cache doubles from there.
FIRST_SLOTS = 256


def layer_windows(target: PreTrainedModel) -> list[int | None]:
    """Returns the sliding window of every layer's attention from the target's config; `None` for full attention.

    The cache is not asked because a cache made without a config knows no windows, although the attention has them.
    """
    layer_types, options = get_layer_types_and_kwargs(target.config.get_text_config(decoder=True))
    return [kwargs.get("sliding_window") for _, kwargs in zip(layer_types, options, strict=True)]


def root_positions_of(model_kwargs: dict[str, Any], length: int, device: torch.device) -> torch.Tensor:
    """Returns the position of the token after the prompt, [B, 1] or [3, B, 1], from the kwargs `generate` prepared.

    Args:
        model_kwargs: The kwargs after the prefill; their `position_ids` are those of the prompt.
        length: Number of tokens in the cache.
        device: Device of the result if the kwargs have neither position ids nor an attention mask.
    """
    if (positions := model_kwargs.get("position_ids")) is not None:
        return positions[..., -1:] + 1
    if (mask := model_kwargs.get("attention_mask")) is not None:
        return mask.long().sum(1, keepdim=True)
    return torch.full((1, 1), length, device=device)


class TreeCache(SlotCache):
    """The target's keys and values in slots; layers of equal shape share buffers.

    Args:
        stock: transformers' cache after the prefill. It is emptied, and gets its contents back from [`give_back`].
        target: The target.
        batch: Number of sequences B.
        padding_mask: int or bool [B, P], 0 on padding of the prompt; `None` without padding.
        root_positions: int64 [B, 1] or [3, B, 1], positions of the tokens after the prompt.
        dtype: The target's compute dtype.
        static_capacity: Fixed number of slots; by default the buffers grow.
        rooms: Where buffers of a fixed size are kept from call to call; `None` to allocate new ones.
        keeps_prompt: Whether transformers' cache keeps the prompts of a batch during the generation. Needed if the
            cache is to be given back, since sequences that have ended leave this cache.
        most: Upper bound of the slots that the call needs; `None` if unknown.
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
        self.regions: tuple[PreTrainedModel | None] | None = None  # the target in the form that compiled steps use
        self.groups: list[_Group] = []
        try:
            self._take_over(stock, layer_windows(target))
        except BaseException:  # e.g. out of memory: a cache passed in by the caller must keep its tokens
            self.give_back(self.counts[0])
            raise

    def _fix_padding_mask(self, batch: int) -> None:
        """Gives the padding mask a fixed width, so that prompts of all lengths share the graphs of compiled steps."""
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
        # Compiled writes to one tensor of a shared buffer would copy the whole buffer, so static caches do not share.
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
        if positions.dim() < theirs.dim():  # positions have several axes after a prompt with images, else one
            positions = positions.expand(theirs.shape[0], -1, -1)
        theirs = theirs.expand(*positions.shape[:-2], 1, 1)
        before, after = positions[..., :place, :], positions[..., place + 1 :, :]
        self.root_positions = torch.cat([before, theirs, after], dim=-2)

    def put_buffers(self, place: int, other: SlotCache, batch: int) -> None:
        assert isinstance(other, TreeCache)
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.put_sequence(place, theirs, other.longest)

    def give_back(self, tokens: int | None, text: torch.Tensor | None = None) -> None:
        """Ends the generation and gives transformers' cache its contents back.

        Args:
            tokens: The cache is left as plain decoding would leave it after so many tokens; `None` for a batch.
            text: int64 [B, T], tokens to read after the prompts of a batch, if the cache has kept those. Without
                `tokens` and `text` the cache is left empty.
        """
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
            self.room = None  # the caller's cache now holds views of these buffers, so no later call may reuse them
        self.leave_room()
        self.groups.clear()
        self.layers.clear()

    # ------------------------------------------------------------------ a round
    def forward_inputs(self, tree: DraftTree) -> dict[str, Any]:
        """Returns the arguments of the target's forward over a tree.

        The forward writes the rows of the tree into the slots after the committed ones.
        """
        self.place(0, tree.num_nodes)
        return {
            "attention_mask": self.attention_masks(tree),
            "position_ids": tree_position_ids(self.root_positions, tree),
            CACHE_NAME: self,
        }

    def attention_masks(self, tree: DraftTree) -> Any:
        """Returns the additive masks of a tree forward, [B, 1, N, slots shown], or block masks for flex attention.

        If the target's config has `layer_types`, this is a dict keyed by layer type, as transformers' own
        `create_masks_for_generate` returns. The masks are additive because eager attention silently mishandles boolean
        masks.
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
        """Commits the rows of the accepted paths; the next round overwrites the rows of all other nodes.

        Args:
            nodes: int64 [B, A], nodes to keep, the root first. Entries past a sequence's count are ignored.
            counts: Number of nodes to keep, per sequence.
            device_counts: The same numbers on the device, int64 [B].
            are_prefixes: Whether all paths are the nodes 0, 1, 2, ..., so that no row has to be moved.
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
    """Tensors of equal shape in one buffer [tensors, B, heads, capacity, head_dim], moved by a single indexed copy.

    Args:
        members: One entry per tensor: our layer, transformers' layer, and `keys` or `values`.
        length: Number of tokens in the cache.
        capacity: Number of slots.
        room, name: Room that the buffer is taken from and its name there; without a room the buffer is newly
            allocated.

    Attributes:
        lent: Whether tensors that were given back are views of the buffer.
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
            # A sliding layer holds only its newest rows. The missing ones are outside its window and never seen.
            states = rows_of(stock, name, length)
            self.buffer[index, :, :, length - states.shape[2] : length] = states
        self._show()

    def _new(self, like: torch.Tensor, room: Room | None, *shape: int) -> torch.Tensor:
        return like.new_zeros(shape) if room is None else room.buffer(self.name, like, *shape)

    def empty_stock(self) -> None:
        """Frees the rows of transformers' layers; all of them have been copied into the buffer by now."""
        for _, stock, name in self.members:
            if not is_static(stock):  # static layers keep their buffers
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
        """Copies the first `rows` rows of another group's only sequence over sequence `place`, or appends them."""
        if place == self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, 0, 0, 0, 0, 0, 0, 1))
            self._show()
        self.buffer[:, place, :, :rows] = other.buffer[:, 0, :, :rows]

    def select_sequences(self, kept: list[int], room: Room | None) -> None:
        rows = self.buffer[:, to_device(kept, self.buffer.device)]
        self.buffer = rows if room is None else self._new(rows, room, *rows.shape).copy_(rows)
        self._show()

    def move(self, path: torch.Tensor, lengths: int | torch.Tensor) -> None:
        """Moves the rows of the paths [B, A] to the first slots after the committed ones."""
        path = path[:, 1:].to(self.buffer.device)  # the root's row already is in its slot
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
        """Gives the rows of the first `tokens` tokens back to transformers' layers (none for `None`), then ends."""
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
            return rows.clone()  # a view of a few rows would keep the whole buffer alive
        except RuntimeError:  # out of memory: keeping the large buffer alive is better than losing the rows
            self.lent = True
            return rows
