"""What block drafters share (DFlash, arXiv 2602.06036): all draft positions of a round from one forward of a block.

    context rows   c_j = norm(fc([r_1 ; ... ; r_n]))        one per committed token, of hidden states of the target
    block rows     e(x_n), e(mask), ..., e(mask)            the root and mask tokens, at positions n, n + 1, ...

Context rows are keys and values of every layer, never queries, and all the draft cache keeps. Block rows attend to
them and to one another, mostly both ways, and are forgotten when the round is over. What slot s says after the last
norm goes through the target's `lm_head`. The slot of the root, the anchor, either predicts the next token ("drafts")
or nothing ("idle", slot s then predicts its own token); no weight tells which.
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

# Attention of a layer by whether it is a sliding one.
ByKind = Mapping[bool, Any]


class BlockRowAttention(DraftAttention):
    """Attention of block rows, of which each may see what comes after it."""

    def __init__(self, config: BlockHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class BlockDecoderLayer(NormedDecoderLayer):
    """A Qwen 3 decoder layer over block rows; context rows come in through the cache alone, without its norm.

    Shapes: as [`DraftDecoderLayer`].
    """

    def __init__(self, config: BlockHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = BlockRowAttention(config, layer_idx)


class BlockHead(DraftHead):
    """L layers over [context ; block]: drafting, and training at sampled anchors.

    Families say what becomes of the slots' states: by default, logits of the target's `lm_head` that do not depend on
    the drafted path.
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
        """One decoder layer."""
        return BlockDecoderLayer(config, index)

    # ------------------------------------------------------------------ what the family states about itself
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
        """A chain of the whole block, as the authors of DFlash draft."""
        depth = self.max_draft_positions
        return DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1)

    def draft_rows(self, tree: DraftTreeConfig) -> int:
        """A block, whatever the tree."""
        return self.config.block_size

    def check_sizes(self, target: PreTrainedModel) -> None:
        super().check_sizes(target)
        config = target.config.get_text_config(decoder=True)
        if max(self.feature_layers) > config.num_hidden_layers:
            raise WrongTargetError(
                f"these {self.config.method} heads read the hidden states {list(self.feature_layers)} of their "
                f"target, and this one has {config.num_hidden_layers} layers; load heads trained for this target."
            )
        if config.hidden_size != self.config.feature_size:
            raise WrongTargetError(
                f"these {self.config.method} heads read hidden states of width {self.config.feature_size}, and the "
                f"target's have {config.hidden_size}; load heads trained for this target."
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
        """What is left to do after the target's own logits, which files of its drafters repeat."""
        own = self._own_logit_function
        if own.is_identity or own == theirs:
            return IDENTITY
        if theirs.is_identity:
            return own
        raise WrongTargetError(
            f"these {self.config.method} heads make their logits with {own}, and the target has {theirs}; load heads "
            "trained for this target."
        )

    # ------------------------------------------------------------------ rows, states, logits
    def context_rows(self, features: torch.Tensor) -> torch.Tensor:
        """Rows of committed tokens, [B, M, F] -> [B, M, h]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def take_in(self, rows: torch.Tensor, position_ids: torch.Tensor, cache: Cache | ContextCache) -> None:
        """Keys and values of context rows [B, M, h] at positions [B, M], into the cache of every layer."""
        rotary = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            cast(BlockDecoderLayer, layer).self_attn.cache_rows(rows, rotary, cast(Cache, cache))

    def scaled(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Embeddings as the target's module gives them, scaled as the heads are used to: [..., h]."""
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
        """The layers over block rows: the only forward, for drafting and training.

        Args:
            rows: [B, Q, h], block rows.
            position_ids: int64 [B, Q], their rope positions.
            attention_masks: Additive float [B, 1, Q, cached + Q] of full layers (`False`) and sliding ones (`True`);
                `None` where every row sees everything.
            past_key_values: Holds the context of every layer; block rows are appended.
            attention_functions: Replacements for the attention implementation, likewise.

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
        """Draft logits of slots' states in fp32, [..., h] -> [..., Vd]."""
        return self.capped(self.project(features))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's logits, scaled and capped where the heads are used to that and the target does not do it."""
        return self._after(logits)

    # ------------------------------------------------------------------ who sees whom
    def block_visible(self, sliding: bool, device: torch.device) -> torch.Tensor:
        """bool [R, R], which rows of a block see which, in full or sliding layers."""
        config, rows = self.config, torch.arange(self.config.block_size, device=device)
        ahead = rows - rows[:, None]
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if config.causal or (sliding and config.sliding_causal):
            visible = ahead <= 0
        if sliding and config.window_from == "query":
            visible = visible & (ahead.abs() < cast(int, config.sliding_window))
        return visible

    def window(self, sliding: bool) -> int | None:
        """Rows before the oldest one shown to a block, `None` for all of them; one more where the window counts from
        the anchor, which then sees `sliding_window` rows besides itself."""
        if not sliding or self.config.sliding_window is None:
            return None
        return self.config.sliding_window + (self.config.window_from == "anchor")

    def _block_mask(self, cache: DraftCache, sliding: bool, batch: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Additive [B, 1, R, shown] for a block whose rows are placed; `None` where every row sees everything."""
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
        """Takes in the committed rows, and runs the block after the root; arguments as in [`start_draft`].

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
        """As in the contract; the logits of all positions of the round's tree are computed here, at once."""
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
        """As in the contract; no layer runs."""
        return self.node_logits(cache, position, token_ids, features)

    def drafted_logits(self, cache: DraftCache, depth: int) -> torch.Tensor | None:
        logits = cache.drafted_inputs[1]
        return logits[:, :depth] if self.independent_positions and depth <= logits.shape[1] else None

    def root_state(self, block: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """What the root [B, 1] hands on, [B, 1, *], from the states of all slots [B, R, h]; nothing here."""
        return block[:, :1, :1]

    def node_logits(
        self, cache: DraftCache, position: int, token_ids: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, K, *] and draft logits [B, K, Vd] of a draft position after nodes with tokens [B, K], whose
        parents' states are `states` [B, K, *]; here every node has what the slot says."""
        return states, self.slot_logits(cache, position).expand(-1, token_ids.shape[1], -1)

    def slot_states(self, cache: DraftCache, position: int) -> torch.Tensor:
        """State of the slot of a draft position, [B, 1, h]."""
        return cache.drafted_inputs[0][:, position : position + 1]

    def slot_logits(self, cache: DraftCache, position: int) -> torch.Tensor:
        """Draft logits of a draft position by its slot alone, [B, 1, Vd]."""
        slots, logits = cache.drafted_inputs
        if position < logits.shape[1]:
            return logits[:, position : position + 1]
        return self.draft_logits(slots[:, position : position + 1])

    # ------------------------------------------------------------------ training
    @property
    def default_passes(self) -> int:
        return self.max_draft_positions

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i is the slot of draft position i of all blocks; see [`drafted_slots`]."""
        slots = self.drafted_slots(rows)
        for position in range(num_passes):
            hidden = slots[:, :, position + self.config.first_slot]
            yield DraftedPass(hidden=hidden, logits=partial(self.row_logits, rows), offset=position)

    def row_logits(self, rows: TrainingRows, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits in training: [R, h] -> [R, V]."""
        return self.capped(rows.lm_head(hidden))

    def drafted_slots(self, rows: TrainingRows) -> torch.Tensor:
        """A block after each of A anchors: row t makes the round whose root is the token after it. It sees the context
        up to row t of its document, and itself, no other block.

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
