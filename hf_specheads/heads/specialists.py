"""The base of EAGLE, HASS, POSS and EAGLE-3 heads: decoder layers over fused rows, one layer per position specialist.

A *row* fuses what is known about one token: its feature, which is the target's or a drafted one, and the embedding of
the token after it. A layer reads the rows of the committed tokens and of the tree so far. Its output is the drafted
state, which goes into the rows of the next draft position. (EAGLE, arXiv 2401.15077, section 3.2; POSS, arXiv
2506.03566.)
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

# Config fields that a warm start copies, besides the weights.
LAYER_FIELDS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "rope_parameters", "max_position_embeddings", "attention_bias", "attention_out_bias", "mlp_bias",
)  # fmt: skip
MOVING_ROPES = ("dynamic", "longrope")  # rope types whose cosines depend on the highest position requested


@strict
class SpecialistHeadConfig(LayerHeadConfig):
    r"""Configuration of heads made of Llama decoder layers; see [`LayerHeadConfig`] for the layers.

    Args:
        num_specialists: Number L of specialists (decoder layers).
        positions_per_specialist: Number of draft positions per specialist (`position_per_layer` in PosS's code).
        trained_positions: Number of draft positions that training unrolled; `None` if unknown.
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

    Families define how a row is fused ([`fuse`], [`fuse_drafted`]), what the layers consist of ([`build_layers`]), and
    how the heads are trained.
    """

    config_class = SpecialistHeadConfig
    config: SpecialistHeadConfig
    layers: nn.ModuleList
    rotary_emb: LlamaRotaryEmbedding

    def build_layers(self, config: SpecialistHeadConfig) -> nn.ModuleList:
        """Makes the decoder layers, one per specialist."""
        return nn.ModuleList(DraftDecoderLayer(config, index) for index in range(config.num_specialists))

    @property
    def link_layers(self) -> Sequence[nn.Module] | None:
        return list(self.layers)

    def layer_of(self, specialist: int) -> Callable[..., torch.Tensor]:
        """Function that runs a specialist's layer, with the signature of [`DraftDecoderLayer.forward`]."""
        return self.layers[specialist]

    def specialist_state(self, specialist: int) -> dict[str, torch.Tensor]:
        """Weights of one specialist, by their names in a decoder layer."""
        return self.layers[specialist].state_dict()

    def layers_from(self, source: "SpecialistHead") -> dict[str, torch.Tensor]:
        """Weights that a warm start from `source` copies into our layers, by our names."""
        last = source.config.num_specialists - 1
        weights: dict[str, torch.Tensor] = {}
        for index in range(self.config.num_specialists):
            layer = source.specialist_state(min(index, last))
            weights |= {f"layers.{index}.{name}": value for name, value in layer.items()}
        return weights

    def specialist_of(self, position: int) -> int:
        """Specialist in charge of draft position `position` (0-based); the last one continues past its positions."""
        return min(position // self.config.positions_per_specialist, self.config.num_specialists - 1)

    def embed(self, token_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Embeddings [B, R, E] of tokens [B, R] on a device; the target's, unless the heads have their own."""
        return self.borrowed.look_up(token_ids).to(device)

    def fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Makes rows from embeddings and target features: [B, R, E] and [B, R, F] -> [B, R, *]."""
        raise NotImplementedError

    def fuse_drafted(self, embeddings: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Makes rows of embeddings and drafted states: [B, R, E] and [B, R, h] -> [B, R, *], wide as in [`fuse`]."""
        return self.fuse(embeddings, drafted)

    def drafted_state(self, outputs: torch.Tensor) -> torch.Tensor:
        """State that is fed back, from the outputs of a layer: [B, Q, h] -> [B, Q, h]."""
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
        """Runs one specialist over rows to append. Prefill, drafting and training share this forward.

        Args:
            fused: [B, R, *], rows from [`fuse`].
            position_ids: [1 or B, R], rope positions of the rows, or their cosines and sines from `rotary_emb`.
            attention_mask: Additive float [B, 1, Q, cached + R] over cached and new rows; `None` only for one query
                that sees everything, or for Q = R rows of plain causal attention on an empty cache.
            past_key_values: Cache to append to, or `None`.
            specialist: Index of the decoder layer.
            num_queries: Number Q of last rows to compute outputs for; defaults to all. 0 only fills the cache.
            attention_function: Replacement for the attention implementation, with transformers' signature.

        Returns:
            Drafted states of the last Q rows, [B, Q, h].
        """
        rotary = self.rotary_of(fused, position_ids)
        queries = fused.shape[1] if num_queries is None else num_queries
        layer = self.layer_of(specialist)
        return self.drafted_state(layer(fused, rotary, attention_mask, past_key_values, queries, attention_function))

    def rotary_of(self, rows: torch.Tensor, position_ids: torch.Tensor | Rotary) -> Rotary:
        """Cosines and sines of the positions of rows; returned as they are if they were passed already."""
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
        # All later specialists in use must commit the same rows: now in a compiled step, else before they draft next.
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
        """Writes rows to commit [B, R, *] to the cache of a specialist's layer, without computing outputs."""
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
        # A specialist that starts at this position first takes in the committed rows owed to it and the earlier
        # levels, because those rows are not in its cache yet.
        owed, first = cache.take_owed(specialist), cache.take_level(specialist)
        levels = cache.drafted_inputs[first:]
        rows = joined([*(committed.fused for committed in owed), *levels])
        drafted_rows = sum(level.shape[1] for level in cache.drafted_inputs)
        cache.place(drafted_rows - rows.shape[1], rows.shape[1])
        mask = cache.tree_mask(visible, fused.dtype)
        if cache.rotary_table is not None and cache.slots is None and drafted_rows == len(cache.drafted_inputs):
            rotary = self._rotary_at(cache, rows, cache.start)  # rows of a chain have consecutive positions
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
        """As [`extend_draft`], for a level with a single node [B, 1]; `lacked` are rows of the levels above that the
        specialist's layer does not have yet."""
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
        """Drafts one link of a chain. All arguments that vary are tensors, so that a compiler sees the same code for
        every link.

        Args:
            layer: The specialist's decoder layer.
            keys, values: [B, key-value heads, capacity, head_dim], the layer's draft cache, to which the row of the
                link is written.
            lengths: int64 [B], numbers of committed rows.
            offset: int64 [1], slot of the link's row, counted from the end of the committed rows.
            token_ids: int64 [B, 1], token of the link.
            features: [B, 1, *], state of the link above.
            lacked: [B, R, *], fused rows of the links directly above that the layer takes in as well, or `None`.

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
        """Whether the cosines of a position depend on the highest position requested."""
        return self.rotary_emb.rope_type in MOVING_ROPES

    def _rotary_at(self, cache: DraftCache, like: torch.Tensor, start: int, rows: int | None = None) -> Rotary:
        """Cosines and sines of consecutive positions, from a table computed once for all slots of the cache."""
        rows = like.shape[1] if rows is None else rows
        end = start + rows
        if cache.rotary_table is None or cache.rotary_table[0].shape[1] < end:
            positions = torch.arange(max(cache.capacity, end), device=like.device)
            cache.rotary_table = self.rotary_of(like, positions[None])
        cos, sin = cache.rotary_table
        return cos.narrow(1, start, rows), sin.narrow(1, start, rows)  # `narrow` takes half as long as a slice

    def _rotary_of_levels(self, cache: DraftCache, first: int, levels: list[torch.Tensor]) -> Rotary:
        """Cosines and sines of the rows of some levels, the first of which is level number `first`. The nodes of a
        level share a position, which is one more than that of the level above."""
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
        """Cosines and sines for one row per level, of levels `first` to `end`; computed once per round."""
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
        """Copies the shared weights and the layers of `source`. Specialists that it lacks start as its last layer."""
        weights = {name: value for name, value in trained_weights(source).items() if not name.startswith("layers.")}
        try:
            # `fields_of_source` has already checked the type of `source`.
            self.load_state_dict(weights | self.layers_from(cast(SpecialistHead, source)))
        except RuntimeError as error:
            raise WarmStartError(
                f"the weights of `from_heads` do not fit the new heads; leave out the sizes and biases, so that they "
                f"are taken from `from_heads`, or drop `from_heads`. {error}"
            ) from error
