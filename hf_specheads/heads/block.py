"""The base of block drafters (DFlash, arXiv 2602.06036): one forward of a block drafts all positions of a round.

    context rows   c_j = norm(fc([r_1 ; ... ; r_k]))        one per committed token j, from k of the target's states
    block rows     e(x_n), e(mask), ..., e(mask)            the root and mask tokens, at positions n, n + 1, ...

Context rows provide keys and values to every layer, but no queries; the draft cache keeps nothing else. Block rows
attend to the context and to one another, in most families in both directions, and are forgotten at the end of the
round. A slot is a row of the block; its state after the last norm goes through the target's `lm_head`. The slot of the
root, called the anchor, either predicts the next token (`"drafts"`) or nothing (`"idle"`; slot s > 0 then predicts its
own token). The weights do not tell which of the two it is, so the config must (`anchor_slot`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..cache.draft import DraftCache
from ..cache.masks import additive_mask, slot_mask
from ..cache.slots import SlotCacheLayer
from ..errors import WrongTargetError
from ..target.logits import IDENTITY, LogitFunction
from ..tree.config import DraftTreeConfig
from ..unroll.blocks import AnchoredAttention, ContextCache
from ..unroll.rows import DraftedPass, TrainingRows
from .base import DraftHead
from .block_config import BlockHeadConfig, embedding_scale_of
from .layers import DraftAttention, NormedDecoderLayer, rotary_embedding

# Masks or attention functions per kind of layer: `True` for layers with a sliding window, `False` for full attention.
ByKind = Mapping[bool, Any]


class BlockRowAttention(DraftAttention):
    """Attention of block rows, which may also see rows that come after them."""

    def __init__(self, config: BlockHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class BlockDecoderLayer(NormedDecoderLayer):
    """A Qwen 3 decoder layer over block rows. Context rows enter through the cache only, without the layer's norm.

    Shapes: as [`DraftDecoderLayer`].
    """

    def __init__(self, config: BlockHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = BlockRowAttention(config, layer_idx)


class BlockHead(DraftHead):
    """L decoder layers over [context ; block]: drafting, and training at sampled anchors.

    Families define how the slots' states become draft logits. By default the target's `lm_head` is applied to them,
    and the logits do not depend on the drafted path.
    """

    config_class = BlockHeadConfig
    config: BlockHeadConfig
    passes_are_detached = False
    trains_at_anchors = True
    _no_split_modules = ["BlockDecoderLayer"]

    def __init__(self, config: BlockHeadConfig):
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * config.feature_size, width, bias=False)
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(self.build_layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = rotary_embedding(config)
        self._embedding_factor, self._after = 1.0, self._own_logit_function

    def build_layer(self, config: BlockHeadConfig, index: int) -> BlockDecoderLayer:
        """Makes one decoder layer."""
        return BlockDecoderLayer(config, index)

    # ------------------------------------------------------------------ properties of the family
    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.feature_layers)

    @property
    def max_draft_positions(self) -> int:
        return self.config.block_size - self.config.first_slot

    @property
    def independent_positions(self) -> bool:
        return True

    @property
    def drafts_in_one_forward(self) -> bool:
        return True

    @property
    def published_tree(self) -> DraftTreeConfig:
        """A chain over the whole block, as the authors of DFlash draft."""
        depth = self.max_draft_positions
        return DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1)

    def draft_rows(self, tree: DraftTreeConfig) -> int:
        """The rows of one block, whatever the tree."""
        return self.config.block_size

    def check_sizes(self, target: PreTrainedModel) -> None:
        super().check_sizes(target)
        config = target.config.get_text_config(decoder=True)
        if max(self.feature_layers) > config.num_hidden_layers:
            raise WrongTargetError(
                f"these {self.config.method} heads read the hidden states {list(self.feature_layers)} of their "
                f"target, but this one has {config.num_hidden_layers} layers; load heads trained for this target."
            )
        if config.hidden_size != self.config.feature_size:
            raise WrongTargetError(
                f"these {self.config.method} heads read hidden states of width {self.config.feature_size}, but those "
                f"of this target have width {config.hidden_size}; load heads trained for this target."
            )

    def bind(self, target: PreTrainedModel, *, follow: bool = True) -> Self:
        super().bind(target, follow=follow)
        self._embedding_factor = self.config.embedding_scale / embedding_scale_of(target.get_input_embeddings())
        self._after = self._beside(self.borrowed.logit_function)
        return self

    @property
    def _own_logit_function(self) -> LogitFunction:
        return LogitFunction(self.config.logit_multiplier, self.config.logit_softcap)

    def _beside(self, theirs: LogitFunction) -> LogitFunction:
        """Logit function to apply after the target's own: the heads' function, or none if it repeats the target's."""
        own = self._own_logit_function
        if own.is_identity or own == theirs:
            return IDENTITY
        if theirs.is_identity:
            return own
        raise WrongTargetError(
            f"these {self.config.method} heads compute their logits with {own}, but the target uses {theirs}; load "
            "heads trained for this target."
        )

    # ------------------------------------------------------------------ rows, states, logits
    def context_rows(self, features: torch.Tensor) -> torch.Tensor:
        """Context rows of committed tokens, [B, M, F] -> [B, M, h]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def take_in(self, rows: torch.Tensor, position_ids: torch.Tensor, cache: Cache | ContextCache) -> None:
        """Writes keys and values of context rows [B, M, h] at positions [B, M] to the cache of every layer."""
        rotary = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            cast(BlockDecoderLayer, layer).self_attn.cache_rows(rows, rotary, cast(Cache, cache))

    def scaled(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Rescales embeddings [..., h] from the target's module to the scale that the heads were trained with."""
        embeddings = embeddings.to(self.fc.weight.dtype)
        return embeddings if self._embedding_factor == 1 else embeddings * self._embedding_factor

    def forward(
        self,
        rows: torch.Tensor,
        position_ids: torch.Tensor,
        attention_masks: ByKind,
        past_key_values: Cache | ContextCache,
        attention_functions: ByKind | None = None,
    ) -> torch.Tensor:
        """Runs the layers over block rows. Drafting and training share this forward.

        Args:
            rows: [B, Q, h], block rows.
            position_ids: int64 [B, Q], rope positions of the block rows.
            attention_masks: Additive float masks [B, 1, Q, cached + Q] for layers with full attention (`False`) and
                with a sliding window (`True`); `None` where every row sees everything.
            past_key_values: Cache with the context of every layer; the block rows are appended to it.
            attention_functions: Replacements for the attention implementation, for the same two kinds of layers.

        Returns:
            States of the slots after the last norm, [B, Q, h].
        """
        rotary, hidden = self.rotary_emb(rows, position_ids), rows
        for index, layer in enumerate(self.layers):
            sliding = index in self.config.sliding_layers
            function = None if attention_functions is None else attention_functions[sliding]
            hidden = layer(hidden, rotary, attention_masks[sliding], past_key_values, rows.shape[1], function)
        return self.norm(hidden)

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Draft logits in fp32 from the states of slots, [..., h] -> [..., Vd]."""
        return self.capped(self.project(features))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the multiplier and soft-cap that the heads were trained with, unless the target applies them."""
        return self._after(logits)

    # ------------------------------------------------------------------ which rows see which
    def block_visible(self, sliding: bool, device: torch.device) -> torch.Tensor:
        """bool [R, R], which rows of a block see which, in layers with full or with sliding attention."""
        config, rows = self.config, torch.arange(self.config.block_size, device=device)
        ahead = rows - rows[:, None]
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if config.causal or (sliding and config.sliding_causal):
            visible = ahead <= 0
        if sliding and config.window_from == "query":
            visible = visible & (ahead.abs() < cast(int, config.sliding_window))
        return visible

    def window(self, sliding: bool) -> int | None:
        """Window of a layer: a row sees context less than that many positions away; `None` for all of it. A window
        that counts from the anchor is one wider, because the anchor sees `sliding_window` rows besides itself."""
        if not sliding or self.config.sliding_window is None:
            return None
        return self.config.sliding_window + (self.config.window_from == "anchor")

    def _block_mask(self, cache: DraftCache, sliding: bool, batch: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Additive mask [B, 1, R, shown] for a block already placed in the cache; `None` if every row sees all."""
        if not sliding and not self.config.causal and cache.lengths is None and not cache.static:
            return None
        window, size = self.window(sliding), self.config.block_size
        visible = self.block_visible(sliding, rows.device).expand(batch, -1, -1)
        depths = torch.arange(size, device=rows.device).expand(batch, -1)
        if self.config.window_from == "anchor":
            depths = torch.zeros_like(depths)
        shown = cache.shown(window)
        return additive_mask(slot_mask(visible, cache.known_lengths(), *shown, window, depths)[:, None], rows.dtype)

    # ------------------------------------------------------------------ drafting
    def new_draft_cache(self) -> DraftCache:
        cache = DraftCache(self.config.num_hidden_layers)
        for index in self.config.sliding_layers:
            cast(SlotCacheLayer, cache.layers[index]).window = self.window(True)
        return cache

    def draft_block(self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Takes in the committed rows and runs the block that begins with the root; arguments as in [`start_draft`].

        Returns:
            States of all slots, [B, R, h].
        """
        context, batch = self.context_rows(features), features.shape[0]
        self.take_in(context, cache.open_rows(context.shape[1], context.device).expand(batch, -1), cache)
        cache.commit(context.shape[1])
        size, root = self.config.block_size, token_ids[:, -1:]
        ids = torch.cat([root, torch.full_like(root, self.config.mask_token_id).expand(-1, size - 1)], dim=1)
        rows = self.scaled(self.borrowed.embed_tokens(ids).to(features.device))
        cache.place(0, size)
        lengths = cache.known_lengths()
        first = lengths[:, None] if isinstance(lengths, torch.Tensor) else lengths
        positions = (torch.arange(size, device=rows.device)[None] + first).expand(batch, -1)
        masks = {
            kind: self._block_mask(cache, kind, batch, rows) for kind in {False, bool(self.config.sliding_layers)}
        }
        return self(rows, positions, masks, cache)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. Computes the logits of all positions of the round's tree at once."""
        block, root = self.draft_block(cache, token_ids, features), token_ids[:, -1:]
        slots = block[:, self.config.first_slot :]
        used = min(cache.levels or self.tree_config.depth, slots.shape[1])
        cache.drafted_inputs = [slots, self.draft_logits(slots[:, :used])]
        return self.node_logits(cache, 0, root, self.root_state(block, root))

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. Runs no layer."""
        return self.node_logits(cache, position, token_ids, features)

    def drafted_logits(self, cache: DraftCache, depth: int) -> torch.Tensor | None:
        logits = cache.drafted_inputs[1]
        return logits[:, :depth] if self.independent_positions and depth <= logits.shape[1] else None

    def root_state(self, block: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """State [B, 1, *] that the root [B, 1] passes on, given the states of all slots [B, R, h]; unused here."""
        return block[:, :1, :1]

    def node_logits(
        self, cache: DraftCache, position: int, token_ids: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, K, *] and draft logits [B, K, Vd] of a draft position after nodes with tokens [B, K] and parent
        states `states` [B, K, *]. Here all nodes share the logits of the position's slot."""
        return states, self.slot_logits(cache, position).expand(-1, token_ids.shape[1], -1)

    def slot_states(self, cache: DraftCache, position: int) -> torch.Tensor:
        """State [B, 1, h] of the slot of a draft position."""
        return cache.drafted_inputs[0][:, position : position + 1]

    def slot_logits(self, cache: DraftCache, position: int) -> torch.Tensor:
        """Draft logits [B, 1, Vd] of a draft position, from its slot alone."""
        slots, logits = cache.drafted_inputs
        if position < logits.shape[1]:
            return logits[:, position : position + 1]
        return self.draft_logits(slots[:, position : position + 1])

    # ------------------------------------------------------------------ training
    @property
    def default_passes(self) -> int:
        return self.max_draft_positions

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i yields the slots of draft position i in all blocks; see [`drafted_slots`]."""
        slots = self.drafted_slots(rows)
        for position in range(num_passes):
            hidden = slots[:, :, position + self.config.first_slot]
            yield DraftedPass(hidden=hidden, logits=partial(self.row_logits, rows), offset=position)

    def row_logits(self, rows: TrainingRows, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits in training: [R, h] -> [R, V]."""
        return self.capped(rows.lm_head(hidden))

    def drafted_slots(self, rows: TrainingRows) -> torch.Tensor:
        """Runs one block after each of A anchor rows. The block of anchor row t is a round whose root is the token
        after row t: it sees the context of its document up to row t and its own rows, but no other block.

        Returns:
            States of all slots, [B, A, R, h].
        """
        anchors, size = rows.anchor_rows().clamp_min(0), self.config.block_size
        (batch, count), device = anchors.shape, rows.features.device
        cache = ContextCache()
        self.take_in(self.context_rows(rows.features), rows.position_ids, cache)
        with torch.no_grad():
            embeddings = rows.embed(rows.next_token_ids)
            masks = rows.embed(torch.full_like(rows.next_token_ids, self.config.mask_token_id))[:, :1, None]
        roots = embeddings.gather(1, anchors[..., None].expand(-1, -1, embeddings.shape[-1]))[:, :, None]
        block = self.scaled(torch.cat([roots, masks.expand(-1, count, size - 1, -1)], dim=2).flatten(1, 2))
        first = rows.position_ids.gather(1, anchors) + 1
        positions = (first[..., None] + torch.arange(size, device=device)).flatten(1)
        kinds = {False, bool(self.config.sliding_layers)}
        functions = {kind: self._anchored_attention(rows, anchors, kind) for kind in kinds}
        hidden = self(block, positions, dict.fromkeys(kinds), cache, functions)
        return hidden.view(batch, count, size, -1)

    def _anchored_attention(self, rows: TrainingRows, anchors: torch.Tensor, sliding: bool) -> Callable:
        return AnchoredAttention(
            rows.documents,
            anchors,
            self.block_visible(sliding, anchors.device),
            self.window(sliding),
            window_from_anchor=self.config.window_from == "anchor",
        )
