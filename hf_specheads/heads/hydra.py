"""Hydra heads: one MLP per draft position that reads the tokens drafted before it (arXiv 2402.05109).

Head i reads `[s_t ; e(x_{t+1}) ; ... ; e(x_{t+1+i})]`, where s_t stands for the committed text. It is the target's
feature (Hydra), or the output of the heads' own decoder layer over all features up to t (Hydra++). Unlike Medusa's,
these heads thus predict different tokens at different nodes of a level. The drafted state of a node is this
concatenation, which grows with its depth.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..cache.draft import DraftCache
from ..errors import WrongTargetError
from ..publishing.card.facts import Published
from ..unroll.attention import Documents, StreamAttention
from ..unroll.rows import DraftedPass, TrainingRows, later
from .layers import LayerHeadConfig, NormedDecoderLayer, rotary_embedding, validate_layer
from .per_position import MAX_HEADS, PerPositionHead, PerPositionHeadConfig, ResidualBlock

__all__ = ["HydraHead", "HydraHeadConfig"]

ARCHITECTURES = ("mlp", "prefix-mlp")
HYDRA_PAPER = (
    "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, "
    "[arXiv:2402.05109](https://arxiv.org/abs/2402.05109)"
)


@strict
class HydraHeadConfig(PerPositionHeadConfig, LayerHeadConfig):
    r"""Configuration of Hydra heads.

    Args:
        num_heads: Number n of heads, one per draft position.
        num_blocks: Number of blocks per head (`hydra_num_layers` in the authors' code).
        tied_blocks: Whether the blocks after the first of a head share one set of weights, as in the authors' code (in
            ungrounded heads, all blocks do).
        grounded: Whether the heads read the drafted tokens; if not, they are Medusa heads.
        head_arch: `"mlp"`: s_t is the target's feature; `"prefix-mlp"` (Hydra++): s_t is the output of one Llama layer
            over all features so far.
        lm_head: `"own"`: each head has a projection [V, H] with bias; `"target"`: all share the target's `lm_head`.
        hidden_state_offset: Number of layers below the final hidden state at which the target's features are read.
        dropout: Probability of dropout, in training, on the input of every block and projection (Hydra++: 0.2).
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps,
            rope_parameters, max_position_embeddings, attention_bias, attention_out_bias, mlp_bias: Fields of the Llama
            layer of `"prefix-mlp"`; not used by `"mlp"`.
        trained_positions: Number of heads that were trained; `None` if unknown.
    """

    model_type = "specheads_hydra"
    required_fields: ClassVar[tuple[str, ...]] = (
        *PerPositionHeadConfig.required_fields, "num_blocks", "head_arch",
    )  # fmt: skip

    method: str = "hydra"
    grounded: bool = True
    head_arch: str = "mlp"
    hidden_state_offset: int = 0
    dropout: float = 0.0

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.head_arch not in ARCHITECTURES:
            raise ValueError(f"`head_arch` must be one of {list(ARCHITECTURES)}, got {self.head_arch!r}.")
        if not 0 <= self.hidden_state_offset <= MAX_HEADS:
            raise ValueError(
                f"`hidden_state_offset` must be between 0 and {MAX_HEADS}, got {self.hidden_state_offset}."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and below 1, got {self.dropout}.")
        if self.head_arch == "prefix-mlp":
            validate_layer(self)


class GroundedBlock(nn.Module):
    """`y = R c + SiLU(W c)`, [..., c] -> [..., H]: a residual block that narrows its input; R and W have biases."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.residual = nn.Linear(inputs, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.residual(inputs) + nn.functional.silu(self.linear(inputs))


class PrefixLayer(NormedDecoderLayer):
    """A complete one-layer Llama stack: both norms of the layer, and a final norm (Hydra++).

    Shapes: features [B, R, H] -> [B, Q, H], the outputs of the last Q = `num_queries` rows.
    """

    def __init__(self, config: LayerHeadConfig):
        super().__init__(config, layer_idx=0)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As [`DraftDecoderLayer.forward`], followed by the final norm."""
        return self.norm(super().forward(*args, **kwargs))


class HydraHead(PerPositionHead):
    """n heads, `logits_i = lm_head_i(blocks_i([s_t ; e(x_{t+1}) ; ... ; e(x_{t+1+i})]))`.

    Inputs of head i are s_t and the embeddings after it, [..., H + (i + 1) * E]; for ungrounded heads, [..., H].

    In fresh heads for a target, the first blocks of grounded heads are random, because the identity on s_t would
    confidently repeat the target's last token. Later blocks are the identity, and own projections are copies of the
    target's `lm_head`.
    """

    config_class = HydraHeadConfig
    config: HydraHeadConfig
    published: ClassVar[dict[str, Published]] = {"hydra": Published("Hydra", (HYDRA_PAPER,))}

    def __init__(self, config: HydraHeadConfig):
        super().__init__(config)
        width = config.hidden_size
        stored = min(config.num_blocks, 1 + config.grounded) if config.tied_blocks else config.num_blocks
        self.blocks = nn.ModuleList()
        for head in range(config.num_heads):
            blocks: list[nn.Module] = [ResidualBlock(width) for _ in range(stored)]
            if config.grounded:
                blocks[0] = GroundedBlock(width + (head + 1) * config.embedding_size, width)
            self.blocks.append(nn.ModuleList(blocks))
        self.lm_heads = None
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(nn.Linear(width, config.vocab_size) for _ in range(config.num_heads))
        self.prefix = None
        if config.head_arch == "prefix-mlp":
            self.prefix = PrefixLayer(config)
            self.rotary_emb = rotary_embedding(config)
        self.post_init()

    def check_target(self, target: PreTrainedModel) -> None:
        super().check_target(target)
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        if self.config.hidden_state_offset > layers:
            raise WrongTargetError(
                f"these {self.config.method} heads read the hidden state {self.config.hidden_state_offset} layers "
                f"below the final one, but the target has {layers} layers; load heads trained for this target."
            )

    def prefix_states(
        self,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        num_queries: int = 1,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        """s_t of the last `num_queries` rows, [B, R, H] -> [B, Q, H]; for `"mlp"`, the features themselves.

        Args:
            features: [B, R, H], target features of the rows to append.
            position_ids: [B, R], positions of their tokens.
            attention_mask: Additive float [B, 1, Q, cached + R]; `None` for one query that sees everything.
            past_key_values: Draft cache to append to, or `None`.
            num_queries: Number Q of rows to return.
            attention_function: Replacement for the attention implementation, with transformers' signature.
        """
        features = features.to(self.dtype)
        if self.prefix is None:
            return features[:, -num_queries:]
        rotary = self.rotary_emb(features, position_ids)
        return self.prefix(features, rotary, attention_mask, past_key_values, num_queries, attention_function)

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(values, self.config.dropout, self.training)

    # ------------------------------------------------------------------ drafting
    @property
    def borrows(self) -> bool:
        return super().borrows or self.config.grounded

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (-1 - self.config.hidden_state_offset,)

    def new_draft_cache(self) -> DraftCache:
        """Cache with one layer for Hydra++, for rows of committed tokens only; otherwise it only counts rows."""
        return DraftCache(0 if self.prefix is None else 1)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. The root's state is `[s_t ; e(root)]`, [B, 1, H + E], or s_t for ungrounded heads."""
        batch, rows = features.shape[:2]
        positions = cache.open_rows(rows, features.device).expand(batch, -1)
        mask = cache.last_row_mask(rows, self.dtype)
        state = self.prefix_states(features, positions, mask, cache)
        cache.commit(rows)
        if self.config.grounded:
            state = self._with_tokens(state, token_ids[:, -1:])
        return state, self.position_logits(state, 0)

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. A node's state is its parent's state with the node's own embedding appended."""
        if not self.config.grounded:
            logits = self.position_logits(features[:, :1], position)
            return features, logits.expand(-1, token_ids.shape[1], -1)
        state = self._with_tokens(features, token_ids)
        return state, self.position_logits(state, position)

    def _with_tokens(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        embeddings = self.borrowed.embed_tokens(token_ids).to(states.device, states.dtype)
        return torch.cat([states, embeddings], dim=-1)

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i runs head i at every row, on tokens of the data, to predict what the target says i rows later.

        The output of the head before its projection is compared with the target's feature i rows later (the authors'
        reconstruction loss). Rows whose tokens would come from the next document do not enter any loss.
        """
        states = self.prefix_states(
            rows.features,
            rows.position_ids,
            num_queries=rows.features.shape[1],
            attention_function=StreamAttention(Documents(rows.documents), 1) if self.prefix is not None else None,
        )
        apart = rows.separate_backward and states.requires_grad
        inputs = read = states.detach().requires_grad_() if apart else states
        with torch.no_grad():
            embeddings = rows.embed(rows.next_token_ids).to(states.dtype) if self.config.grounded else None
        for position in range(num_passes):
            if embeddings is not None:
                inputs = torch.cat([inputs, later(embeddings, position)], dim=-1)
            hidden = self(inputs, position)
            logits = partial(self.row_logits, rows, position)
            yield DraftedPass(hidden=hidden, logits=logits, offset=position, features=hidden)
        if apart and read.grad is not None:
            states.backward(read.grad)
