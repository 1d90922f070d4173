"""Multi-token prediction: layers with which a target was pre-trained to predict further tokens, as draft heads.

    u_j = fc([norm(e(x_{j+1})) ; norm(h_j)])         h: the target's feature, or the state drafted before
    g_j = norm(layer(u_j))                           a whole decoder layer of the target's class
    logits = the target's lm_head(g_j);  g_j is fed back

A single layer drafts all positions, to any depth. Of two layers, the second one drafts the second position and all
later ones. (DeepSeek-V3, arXiv 2412.19437, section 2.2, where every depth has a layer; Qwen's and GLM's reports.)

A row of the second layer reads the first layer's state of one token *earlier*: its row in slot s is made of x_{s+1}
and g_{s-1}, so that both layers write to the same slots. The second layer has no row in slot 0, which is masked.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

import copy
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer

from ..cache.draft import DraftCache
from ..cache.masks import additive_mask, slot_mask
from ..cache.names import CACHE_NAME
from ..configuration import DraftHeadConfig
from ..errors import HeadConfigError, HeadLoadError, UnsupportedGenerationError, refuse_wrong_keys
from ..publishing.card.facts import Published
from ..target.mtp import read_mtp
from ..unroll.rows import DraftedPass, TrainingRows
from ..unroll.streams import document_starts, next_stream, stream_mask, visible_rows
from .base import DraftHead
from .mtp_cache import MtpCache
from .mtp_config import MtpHeadConfig, refuse_layers_of, rotary_options

__all__ = ["MtpHead", "MtpHeadConfig"]

MTP_PAPER = "DeepSeek-V3 Technical Report, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437)"
TRAINED_PASSES = 3


class MtpLayer(nn.Module):
    """One MTP layer around a decoder layer; see the formulas at the top of this file."""

    def __init__(self, config: MtpHeadConfig, block: nn.Module, norm: nn.Module):
        super().__init__()
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.fc = nn.Linear(config.embedding_size + config.feature_size, config.hidden_size, bias=False)
        self.block = block
        self.norm = copy.deepcopy(norm)


class MtpHead(DraftHead):
    """MTP layers that draft recurrently, chains and trees of any depth; embedding and `lm_head` are the target's.

    `load_heads(target_repo, method="mtp")` and `AutoDraftHead.from_target(target, "mtp")` read the layers from the
    target's checkpoint. `from_target(target, "mtp", native=False)` makes fresh layers to train: decoder layers of the
    target's class or, if these cannot be used alone, Llama layers of the target's proportions.
    """

    config_class = MtpHeadConfig
    config: MtpHeadConfig
    published: ClassVar[dict[str, Published]] = {"mtp": Published("MTP", (MTP_PAPER,))}
    _no_split_modules = ["MtpLayer"]
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]
    passes_are_detached = False  # keys and values of earlier passes are read with their gradients

    def __init__(self, config: MtpHeadConfig):
        super().__init__(config)
        described = config.decoder_config()
        asked = config._attn_implementation or "sdpa"
        try:
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(described)]
            # Some classes (GPT-OSS) do not have sdpa, the default of draft heads.
            described._attn_implementation = asked if asked != "sdpa" or model._supports_sdpa else "eager"
            decoder = model(described).get_decoder()
            blocks, norm, self.rotary_emb = decoder.layers, decoder.norm, decoder.rotary_emb
        except (AttributeError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(f"`layer_config` describes layers that cannot be used by themselves: {error}") from error
        # Without rope there is no `rotary_emb`; with several types of layers, it must be told the type.
        self._rotary_options = {} if self.rotary_emb is None else rotary_options(self.rotary_emb)
        self.layers = nn.ModuleList(MtpLayer(config, block, norm) for block in blocks)
        self.post_init()

    # ------------------------------------------------------------------ where the weights come from
    @classmethod
    def weights_elsewhere(cls, config: DraftHeadConfig, **hub: Any) -> dict[str, torch.Tensor] | None:
        """Reads native layers from the checkpoint of the target that they belong to.

        Raises:
            HeadLoadError: if that checkpoint is not known or cannot be read.
        """
        if not isinstance(config, MtpHeadConfig) or not config.native:
            return None
        target = config.target or {}
        if not (source := target.get("name")):
            raise HeadConfigError(
                "these MTP heads are layers of their target, but their config does not name the target; load them "
                "with load_heads(TARGET, method='mtp')."
            )
        return native_tensors(config, source, **{**hub, "revision": target.get("revision")})

    @property
    def weights_are_elsewhere(self) -> bool:
        return self.config.native

    def start_from_target(self, target: PreTrainedModel) -> None:
        """Reads the layers from the target's checkpoint, unless fresh ones are wanted (`native=False`).

        Raises:
            HeadLoadError: if the target was not loaded from a checkpoint, or its checkpoint has no MTP layers.
        """
        if not self.config.native:
            return
        if not (source := target.config.name_or_path):
            raise HeadLoadError(
                "this target was not loaded from a checkpoint, so there are no MTP layers to take; load it with "
                "from_pretrained, or call `from_target(target, 'mtp', native=False)` for fresh ones to train."
            )
        refuse_layers_of(target.config)
        tensors = native_tensors(self.config, source, revision=getattr(target.config, "_commit_hash", None))
        expected = self.state_dict()
        refuse_wrong_keys(missing=set(expected) - set(tensors), unknown=set(tensors) - set(expected))
        self.load_state_dict(tensors)

    # ------------------------------------------------------------------ rows
    def forward(
        self,
        index: int,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: MtpCache | None = None,
    ) -> torch.Tensor:
        """Runs one MTP layer over rows to append. Prefill, drafting and training share this forward.

        Args:
            index: Index of the layer.
            embeddings: [B, R, E], embeddings of the tokens after each row's own token.
            states: [B, R, H], target features or drafted states.
            position_ids: [B, R], rope positions of the rows.
            attention_mask: Additive float [B, 1, R, cached + R].
            past_key_values: Cache to append to, or `None`.

        Returns:
            Drafted states [B, R, H].
        """
        layer = cast(MtpLayer, self.layers[index])
        dtype = layer.fc.weight.dtype
        normed = layer.embedding_norm(embeddings.to(dtype)), layer.hidden_norm(states.to(dtype))
        fused = layer.fc(torch.cat(normed, dim=-1))
        rotary = None
        if self.rotary_emb is not None:
            rotary = self.rotary_emb(fused, position_ids, **self._rotary_options)
        outputs = layer.block(
            fused,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=rotary,
            **{CACHE_NAME: past_key_values},
        )
        return layer.norm(outputs[0] if isinstance(outputs, tuple) else outputs)

    def layer_at(self, position: int) -> int:
        """Layer that drafts a position (0-based); the last layer also drafts all later positions."""
        return min(position, self.config.num_mtp_layers - 1)

    def embed(self, token_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The target's embeddings [B, R, E] of tokens [B, R]."""
        return self.borrowed.look_up(token_ids).to(device)

    # ------------------------------------------------------------------ drafting
    def new_draft_cache(self) -> DraftCache:
        """Returns an empty cache.

        Raises:
            UnsupportedGenerationError: for compiled rounds with two layers, because the state that one round leaves
                for the next would not survive the replay of its graph.
        """
        if self.compiled and self.config.num_mtp_layers > 1:
            raise UnsupportedGenerationError(
                "MTP heads with two layers cannot draft in compiled rounds; set `heads.compiled = False`, or load "
                "them with num_mtp_layers=1."
            )
        return MtpCache(self.config.num_mtp_layers)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(cache, MtpCache)
        embeddings = self.embed(token_ids[:, 1:], features.device)
        positions = cache.open_rows(features.shape[1], features.device).expand(len(features), -1)
        states, drafted = features, features
        for index in range(self.config.num_mtp_layers):
            states = self(index, embeddings, states, positions, self._rows_mask(cache, positions, index), cache)
            if index == 0:
                drafted = states[:, -1:]
            if index + 1 < self.config.num_mtp_layers:
                states = cache.one_later(states)
        cache.commit(features.shape[1])
        return drafted, self.draft_logits(drafted)

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nodes, index = token_ids.shape[1], self.layer_at(position)
        if visible is None:
            visible = torch.ones(len(token_ids), nodes, position, dtype=torch.bool, device=token_ids.device)
        cache.place(visible.shape[2] - nodes, nodes)
        lengths = cache.known_lengths()
        first, end = cache.shown()
        seen = slot_mask(visible, lengths, first, end) & (torch.arange(first, end, device=visible.device) >= index)
        root = lengths[:, None] if isinstance(lengths, torch.Tensor) else lengths
        positions = torch.full_like(token_ids, position - 1) + root
        mask = additive_mask(seen[:, None], self.dtype)
        drafted = self(index, self.embed(token_ids, features.device), features, positions, mask, cache)
        return drafted, self.draft_logits(drafted)

    def _rows_mask(self, cache: DraftCache, slots: torch.Tensor, index: int) -> torch.Tensor:
        """Additive mask [B, 1, M, shown]: a row in `slots` [B, M] sees all slots up to its own in which layer `index`
        has rows."""
        shown = torch.arange(cache.shown()[1], device=slots.device)
        return additive_mask(((shown <= slots[..., None]) & (shown >= index))[:, None], self.dtype)

    # ------------------------------------------------------------------ training
    @property
    def default_passes(self) -> int:
        return self.config.trained_positions or TRAINED_PASSES

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """As for EAGLE heads (see [`unroll.streams`]): pass i reads what pass i - 1 drafted one row earlier, without
        its gradient. A second layer reads drafted streams only, and does not see the first row of a document.

        Training sets `config.native` to `False`: the trained weights are then saved with the heads.
        """
        if torch.is_grad_enabled():
            self.config.native = False
        embeddings, stream = rows.embed(rows.next_token_ids), rows.features
        starts, visible = document_starts(rows.documents), visible_rows(rows.documents)
        itself = torch.eye(visible.shape[1], dtype=torch.bool, device=visible.device)
        caches = [DynamicIndexedLayer() for _ in range(self.config.num_mtp_layers)]
        for position in range(num_passes):
            index = self.layer_at(position)
            seen = visible if index == 0 else visible & (~starts[:, None] | itself)
            mask = stream_mask(seen, position - index + 1, self.dtype).clamp_min(torch.finfo(self.dtype).min)
            drafted = self(index, embeddings, stream, rows.position_ids, mask, _OneLayer(caches[index]))
            yield DraftedPass(hidden=drafted, logits=rows.lm_head)
            stream = next_stream(rows.features, drafted, starts)

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        fields = super().fields_of_source(source)
        return {**fields, "native": False, "num_mtp_layers": source.config.num_mtp_layers}


class _OneLayer:
    """A cache with a single layer, which ignores the index of the layer that writes to it."""

    def __init__(self, layer: DynamicIndexedLayer):
        self._layer = layer

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._layer.update(key, value)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self._layer.update_indexer(keys)


def native_tensors(config: MtpHeadConfig, source: str, **hub: Any) -> dict[str, torch.Tensor]:
    """Reads the MTP layers that a config asks for from a target's checkpoint; see [`target.mtp.read_mtp`].

    Raises:
        HeadLoadError: if the checkpoint does not have them.
    """
    num_layers = int((config.layer_config or {}).get("num_hidden_layers", 0))
    tensors = read_mtp(source, num_layers, **hub)
    wanted = tuple(f"layers.{index}." for index in range(config.num_mtp_layers))
    return {name: tensor for name, tensor in tensors.items() if name.startswith(wanted)}
