"""What EAGLE, HASS, POSS and EAGLE-3 heads share: decoder layers over fused rows, one layer per position specialist.

A *row* fuses what is known of one token: the embedding of the token after it and a feature, the target's or a drafted
one. A layer reads the rows of committed tokens and of the tree so far; its output is the drafted state that the next
draft position's rows are fused with. (EAGLE, arXiv 2401.15077, section 3.2; POSS, arXiv 2506.03566.)
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..cache.draft import CommittedRows, DraftCache, Links, Rotary, joined, joined_rotary
from ..cache.masks import chain_mask
from ..cache.slots import OwnSlots
from ..errors import WarmStartError
from .base import DraftHead, trained_weights
from .layers import DraftDecoderLayer, LayerHeadConfig, validate_layer

# What heads of a warm start hand on, besides their weights.
LAYER_FIELDS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "rope_parameters", "max_position_embeddings", "attention_bias", "attention_out_bias", "mlp_bias",
)  # fmt: skip
MOVING_ROPES = ("dynamic", "longrope")  # whose cosines depend on the highest position that is asked for


@strict
class SpecialistHeadConfig(LayerHeadConfig):
    r"""Configuration of heads made of Llama decoder layers; see [`LayerHeadConfig`] for the layers.

    Args:
        num_specialists: Decoder layers L.
        positions_per_specialist: Draft positions per specialist (`position_per_layer` in PosS's code).
        trained_positions: Draft positions the training unrolled, `None` if unknown.
    """

    required_fields: ClassVar[tuple[str, ...]] = (
        *LayerHeadConfig.required_fields, "intermediate_size", "num_attention_heads",
    )  # fmt: skip

    num_specialists: int = 1
    positions_per_specialist: int = 1
    trained_positions: int | None = None

    def validate_architecture(self) -> None:
        super().validate_architecture()
        validate_layer(self)
        self.validate_specialists()

    def validate_specialists(self) -> None:
        """Any number of specialists and positions, both at least 1."""
        for name in ("num_specialists", "positions_per_specialist"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


class SpecialistHead(DraftHead):
    """Decoder layers over fused rows: drafting with one draft cache per layer, and warm starts.

    Families say how a row is fused ([`fuse`], [`fuse_drafted`]), what layers are made of ([`build_layers`]), and how
    they are trained.
    """

    config_class = SpecialistHeadConfig
    config: SpecialistHeadConfig
    layers: nn.ModuleList
    rotary_emb: LlamaRotaryEmbedding

    def __init__(self, config: SpecialistHeadConfig):
        super().__init__(config)
        # Asked for in every link, and a config is slow to answer.
        self._in_charge = config.positions_per_specialist, config.num_specialists - 1

    def build_layers(self, config: SpecialistHeadConfig) -> nn.ModuleList:
        """The decoder layers, one per specialist."""
        return nn.ModuleList(DraftDecoderLayer(config, index) for index in range(config.num_specialists))

    @property
    def link_layers(self) -> Sequence[nn.Module] | None:
        return list(self.layers)

    def layer_of(self, specialist: int) -> Callable[..., torch.Tensor]:
        """What a specialist computes, called as [`DraftDecoderLayer.forward`]."""
        return self.layers[specialist]

    def specialist_state(self, specialist: int) -> dict[str, torch.Tensor]:
        """Weights of one specialist, by the names of its decoder layer."""
        return self.layers[specialist].state_dict()

    def layers_from(self, source: "SpecialistHead") -> dict[str, torch.Tensor]:
        """Weights for our layers in a warm start, by our names."""
        last = source.config.num_specialists - 1
        weights: dict[str, torch.Tensor] = {}
        for index in range(self.config.num_specialists):
            layer = source.specialist_state(min(index, last))
            weights |= {f"layers.{index}.{name}": value for name, value in layer.items()}
        return weights

    def specialist_of(self, position: int) -> int:
        """Specialist in charge of draft position `position` (0-based); the last one continues past its positions."""
        positions, last = self._in_charge
        return min(position // positions, last)

    def embed(self, token_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Embeddings of tokens [B, R] on a device, the target's unless the heads have their own: [B, R, E]."""
        return self.borrowed.look_up(token_ids).to(device)

    def fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Rows of target features: [B, R, E] and [B, R, F] -> [B, R, *]."""
        raise NotImplementedError

    def fuse_drafted(self, embeddings: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Rows of drafted states: [B, R, E] and [B, R, h] -> [B, R, *], as wide as those of [`fuse`]."""
        return self.fuse(embeddings, drafted)

    def drafted_state(self, outputs: torch.Tensor) -> torch.Tensor:
        """What is fed back of a layer's outputs, [B, Q, h]."""
        return outputs

    def forward(
        self,
        fused: torch.Tensor,
        position_ids: torch.Tensor | Rotary,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        specialist: int = 0,
        num_queries: int | None = None,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        """One specialist over rows to append: the only forward, for prefill, drafting and training.

        Args:
            fused: [B, R, *], rows from [`fuse`].
            position_ids: [1 or B, R], rope positions of the rows, or what `rotary_emb` makes of them.
            attention_mask: Additive float [B, 1, Q, cached + R] over cached and new rows; `None` only for one query
                that sees everything, or for Q = R rows of plain causal attention on an empty cache.
            past_key_values: Cache to append to, or `None`.
            specialist: Index of the decoder layer.
            num_queries: Q, how many of the last rows to compute outputs for; default all, 0 only fills the cache.
            attention_function: Replacement for the attention implementation, of transformers' signature.

        Returns:
            Drafted states of the last Q rows, [B, Q, h].
        """
        rotary = self.rotary_of(fused, position_ids)
        queries = fused.shape[1] if num_queries is None else num_queries
        layer = self.layer_of(specialist)
        return self.drafted_state(layer(fused, rotary, attention_mask, past_key_values, queries, attention_function))

    def rotary_of(self, rows: torch.Tensor, position_ids: torch.Tensor | Rotary) -> Rotary:
        """Cosines and sines of the positions of rows, unless that is what was given."""
        return position_ids if isinstance(position_ids, tuple) else self.rotary_emb(rows, position_ids)

    # ------------------------------------------------------------------ drafting
    def new_draft_cache(self) -> DraftCache:
        return DraftCache(self.config.num_specialists, self._take_in)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fused = self.fuse(self.embed(token_ids[:, 1:], features.device), features)
        rows = fused.shape[1]
        start = None if self._rope_moves else cache.open_in_a_row(rows)
        if start is None:
            rotary = self.rotary_of(fused, cache.open_rows(rows, fused.device))
        else:
            rotary = self._rotary_at(cache, fused, start)
        mask = cache.last_row_mask(rows, fused.dtype)
        drafted = self(fused, rotary, mask, cache, specialist=0, num_queries=1)
        # Every later specialist in use commits the same rows: at once in a compiled step, else before it drafts next.
        deepest = cache.deepest or self.tree_config.depth
        later = range(1, self.specialist_of(deepest - 1) + 1)
        if cache.static:
            for specialist in later:
                self._take_in(cache, fused, rotary, specialist)
        taken_in = cache.taken_in
        cache.commit(rows)
        if not cache.static:
            owed = CommittedRows(fused, rotary, None if taken_in is None else taken_in.valid)
            for specialist in later:
                cache.owe(specialist, owed)
        return drafted, self.draft_logits(drafted)

    def _take_in(self, cache: DraftCache, fused: torch.Tensor, rotary: Rotary, specialist: int) -> None:
        """A specialist's layer gets rows to commit, [B, R, *], and computes nothing else."""
        self(fused, rotary, None, cache, specialist, num_queries=0)

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = token_ids.shape[1]
        specialist = self.specialist_of(position)
        if cache.links is not None and visible is None:
            lacked = cache.lacked(specialist)
            if cache.links.catch_up or not lacked:
                return self._next_link(cache, specialist, token_ids, features, lacked)
        fused = self.fuse_drafted(self.embed(token_ids, features.device), features)
        cache.drafted_inputs.append(fused)
        # A specialist that starts here takes over the committed rows it is owed and the earlier levels first: their
        # rows were never in its cache.
        owed, first = cache.take_owed(specialist), cache.take_level(specialist)
        levels = cache.drafted_inputs[first:]
        rows = joined([*(committed.fused for committed in owed), *levels])
        drafted_rows = sum(level.shape[1] for level in cache.drafted_inputs)
        cache.place(drafted_rows - rows.shape[1], rows.shape[1])
        mask = cache.tree_mask(visible, fused.dtype)
        if cache.rotary_table is not None and cache.slots is None and drafted_rows == len(cache.drafted_inputs):
            rotary = self._rotary_at(cache, rows, cache.start)  # of a chain: positions in a row
        else:
            rotary = self._rotary_of_levels(cache, first, levels)
            rotary = joined_rotary([*(committed.rotary for committed in owed), rotary])
        drafted = self(rows, rotary, mask, cache, specialist, num_queries=nodes)
        return drafted, self.draft_logits(drafted)

    def _next_link(
        self,
        cache: DraftCache,
        specialist: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        lacked: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`extend_draft`] for the only node [B, 1] of a level, with rows of levels above that the specialist's
        layer lacks."""
        links, layer, own = cast(Links, cache.links), self.layers[specialist], cache.layers[specialist]
        place = (cast(torch.Tensor, cache.lengths), links.offsets[len(cache.drafted_inputs)])
        rows = [torch.cat(lacked, dim=1)] if lacked else []
        tensors = (own.keys, own.values, *place, token_ids, features, *rows)
        if links.run is None:
            fused, drafted, logits = self.link(layer, *tensors)
        else:
            fused, drafted, logits = links.run(links.kinds[specialist], self, layer, *tensors)
        cache.drafted_inputs.append(fused)
        cache.take_level(specialist)
        return drafted, logits

    def link(
        self,
        layer: nn.Module,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        offset: torch.Tensor,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        lacked: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One link of a chain, of tensors alone: whatever the link's number, a compiler sees the same.

        Args:
            layer: The specialist's decoder layer.
            keys, values: [B, key-value heads, capacity, head_dim], its draft cache; the link's row is written there.
            lengths: int64 [B], committed rows.
            offset: int64 [1], how far after them the link's row lies.
            token_ids: int64 [B, 1].
            features: [B, 1, *], state of the link above.
            lacked: [B, R, *], fused rows of the links right above that the layer takes in as well; `None` without.

        Returns:
            The fused row [B, 1, *], the drafted state [B, 1, h], and draft logits [B, 1, V].
        """
        fused = self.fuse_drafted(self.embed(token_ids, features.device), features)
        rows, slots = fused, lengths[:, None] + offset
        mask = chain_mask(slots, keys.shape[2], fused.dtype)
        if lacked is not None:
            rows = torch.cat([lacked, fused], dim=1)
            slots = slots + torch.arange(-lacked.shape[1], 1, device=slots.device)
        rotary = self.rotary_emb(rows, slots)
        drafted = self.drafted_state(layer(rows, rotary, mask, OwnSlots(keys, values, slots), 1))
        return fused, drafted, self.draft_logits(drafted)

    @property
    def _rope_moves(self) -> bool:
        """Whether cosines of a position depend on the highest that is asked for."""
        return self.rotary_emb.rope_type in MOVING_ROPES

    def _rotary_at(self, cache: DraftCache, like: torch.Tensor, start: int, rows: int | None = None) -> Rotary:
        """Cosines and sines of positions in a row: from a table, made once for all slots of the cache."""
        rows = like.shape[1] if rows is None else rows
        end = start + rows
        if cache.rotary_table is None or cache.rotary_table[0].shape[1] < end:
            positions = torch.arange(max(cache.capacity, end), device=like.device)
            cache.rotary_table = self.rotary_of(like, positions[None])
        cos, sin = cache.rotary_table
        return cos.narrow(1, start, rows), sin.narrow(1, start, rows)  # a slice takes twice as long

    def _rotary_of_levels(self, cache: DraftCache, first: int, levels: list[torch.Tensor]) -> Rotary:
        """Cosines and sines of the rows of some levels, from the `first` on. Nodes of a level share a position, one
        after that of the level above."""
        lengths = cache.known_lengths()
        if isinstance(lengths, int) and cache.rotary_table is not None:
            cos, sin = self._rotary_at(cache, levels[0], lengths + first, len(levels))
        else:
            cos, sin = self._rotary_of_round(cache, lengths, first, first + len(levels), levels[0])
        widths = [level.shape[1] for level in levels]
        if max(widths) > 1:
            nodes = [[table[:, i : i + 1].expand(-1, width, -1) for i, width in enumerate(widths)]
                     for table in (cos, sin)]  # fmt: skip
            cos, sin = torch.cat(nodes[0], dim=1), torch.cat(nodes[1], dim=1)
        return cos, sin

    def _rotary_of_round(
        self, cache: DraftCache, lengths: int | torch.Tensor, first: int, end: int, like: torch.Tensor
    ) -> Rotary:
        """Of one row per level, made once a round."""
        if cache.rotary is None or cache.rotary[0].shape[1] < end:
            ahead = 0 if self._rope_moves else cache.deepest or self.tree_config.depth
            lengths = lengths[:, None] if isinstance(lengths, torch.Tensor) else lengths
            after = torch.arange(max(end, ahead), device=like.device)
            cache.rotary = self.rotary_of(like, torch.atleast_2d(after + lengths))
        cos, sin = cache.rotary
        return cos[:, first:end], sin[:, first:end]

    # ------------------------------------------------------------------ training
    @property
    def default_passes(self) -> int:
        config = self.config
        passes = config.trained_positions or config.num_specialists * config.positions_per_specialist
        return max(passes, 1)

    def passes_problem(self, num_passes: int) -> str | None:
        config, reached = self.config, self.specialist_of(num_passes - 1) + 1
        if reached >= config.num_specialists:
            return None
        needed = (config.num_specialists - 1) * config.positions_per_specialist + 1
        return (
            f"trains {reached} of {config.num_specialists} specialists with {config.positions_per_specialist} "
            f"position(s) each; set num_passes to at least {needed}."
        )

    @torch.no_grad()
    def start_from(self, source: DraftHead) -> None:
        """Copies the shared weights and the layers of `source`; specialists it lacks start as its last layer."""
        weights = {name: value for name, value in trained_weights(source).items() if not name.startswith("layers.")}
        try:
            # That it is of this kind, `fields_of_source` has asked.
            self.load_state_dict(weights | self.layers_from(cast(SpecialistHead, source)))
        except RuntimeError as error:
            raise WarmStartError(
                f"the heads to start from do not fit the new ones; leave sizes and biases out, they are taken from "
                f"`from_heads`, or drop `from_heads`. {error}"
            ) from error
