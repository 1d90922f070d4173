"""DFlash 2 heads: DFlash's block with convolutions along its rows, and a candidate selector (z-lab, August 2026).

    y_t = sum_tap (base_tap + delta_tap(t)) * x_{t - tap}         before and after attention and MLP, within the block

The deltas, one per group of channels, are computed from the normed input of the sublayer, for the convolutions before
and after it. For every slot the target's `lm_head` names K candidates. Draft logits after a token y are the scores

    score(c) = unary(c) + <A[y] * (P h_s), B[c]>

of the candidates c, and -inf for all other tokens. The logits of a node thus depend on its branch.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..cache.draft import DraftCache
from ..publishing.card.facts import Published
from ..unroll.rows import DraftedPass, TrainingRows, later
from .block import BlockDecoderLayer, BlockHead
from .block_config import BlockHeadConfig
from .dflash import DFLASH_PAPER

__all__ = ["DFlash2Head", "DFlash2HeadConfig"]

DFLASH2_BLOG = "DFlash 2, [inco.ai/blog/dflash2](https://inco.ai/blog/dflash2)"


@strict
class DFlash2HeadConfig(BlockHeadConfig):
    r"""Configuration of DFlash 2 heads; see [`BlockHeadConfig`] for the block.

    Args:
        conv_kernel_size: Number of taps of the convolutions, including the row itself.
        conv_group_size: Number of channels that share a delta.
        selector_rank: Rank r of the selector.
        selector_top_k: Number K of candidates per slot.
    """

    model_type = "specheads_dflash2"
    required_fields: ClassVar[tuple[str, ...]] = (
        *BlockHeadConfig.required_fields, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    )  # fmt: skip

    method: str = "dflash2"
    block_size: int = 8
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self._validate_sizes("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"`conv_group_size` must divide `hidden_size` ({self.hidden_size}), got {self.conv_group_size}."
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"`selector_top_k` ({self.selector_top_k}) must not exceed `vocab_size` ({self.vocab_size})."
            )


class BlockConvolution(nn.Module):
    """Depthwise convolutions along the rows of a block, before and after a sublayer; initialised as the identity.

    Shapes: [B, blocks * R, h], the rows of each block contiguous. No row reads from another block.
    """

    def __init__(self, config: DFlash2HeadConfig):
        super().__init__()
        self.rows, self.taps, self.group = config.block_size, config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        groups = config.hidden_size // self.group
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def deltas(self, normed: torch.Tensor) -> torch.Tensor:
        """Deltas of both sides and all taps, from a sublayer's normed input: [B, Q, h] -> [B, Q, 2, taps, h]."""
        deltas = self.kernel_projection(normed).view(*normed.shape[:-1], 2, self.taps, -1)
        return deltas.repeat_interleave(self.group, dim=-1)

    def forward(self, values: torch.Tensor, deltas: torch.Tensor, side: int) -> torch.Tensor:
        """Applies the convolution of one side (0: before the sublayer, 1: after it), [B, Q, h] -> [B, Q, h]."""
        blocks = values.unflatten(1, (-1, self.rows))
        kernels = (self.base_kernel[side] + deltas[:, :, side]).unflatten(1, (-1, self.rows))
        result = kernels[:, :, :, 0] * blocks
        for tap in range(1, self.taps):
            earlier = nn.functional.pad(blocks, (0, 0, tap, 0))[:, :, : self.rows]
            result = result + kernels[:, :, :, tap] * earlier
        return result.flatten(1, 2)


class ConvolvedDecoderLayer(BlockDecoderLayer):
    """A block drafter's layer with convolutions around attention and MLP; context rows are not convolved.

    Shapes: as [`DraftDecoderLayer`].
    """

    def __init__(self, config: DFlash2HeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        num_queries: int,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        deltas = self.attention_conv.deltas(normed)
        read = self.attention_conv(normed, deltas, 0)
        attention = self.self_attn(
            read, position_embeddings, attention_mask, past_key_values, num_queries, attention_function
        )
        hidden_states = hidden_states + self.attention_conv(attention, deltas, 1)
        normed = self.post_attention_layernorm(hidden_states)
        deltas = self.mlp_conv.deltas(normed)
        return hidden_states + self.mlp_conv(self.mlp(self.mlp_conv(normed, deltas, 0)), deltas, 1)


class CandidateSelector(nn.Module):
    """Scores candidates for a slot, given the token before it."""

    def __init__(self, config: DFlash2HeadConfig):
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: torch.Tensor, predecessors: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Computes what is added to the candidates' unary logits.

        Args:
            hidden: [..., h], states of slots.
            predecessors: [..., r], rows of the first codebook, of the tokens before the slots.
            candidates: int64 [..., K], token ids.

        Returns:
            Summands of the scores, [..., K].
        """
        query = predecessors * self.hidden_projection(hidden)
        return (self.successor_codebook[candidates] * query[..., None, :]).sum(-1)


class DFlash2Head(BlockHead):
    """Block drafter with convolutions and a candidate selector."""

    config_class = DFlash2HeadConfig
    config: DFlash2HeadConfig
    published: ClassVar[dict[str, Published]] = {"dflash2": Published("DFlash 2", (DFLASH2_BLOG, DFLASH_PAPER))}
    _no_split_modules = ["ConvolvedDecoderLayer"]

    def __init__(self, config: DFlash2HeadConfig):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def build_layer(self, config: BlockHeadConfig, index: int) -> BlockDecoderLayer:
        assert isinstance(config, DFlash2HeadConfig)
        return ConvolvedDecoderLayer(config, index)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):
            init.zeros_(module.base_kernel)
            init.ones_(module.base_kernel[:, 0])
            init.zeros_(module.kernel_projection.weight)
        if isinstance(module, CandidateSelector):
            for codebook in (module.predecessor_codebook, module.successor_codebook):
                init.normal_(codebook, std=self.config.initializer_range)

    @property
    def independent_positions(self) -> bool:
        return False

    # ------------------------------------------------------------------ drafting
    def node_logits(
        self, cache: DraftCache, position: int, token_ids: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        unary = self.slot_logits(cache, position)  # [B, 1, Vd]
        best = unary.topk(min(self.config.selector_top_k, unary.shape[-1]), dim=-1)
        vocabulary = self.draft_vocabulary
        candidates = best.indices if vocabulary is None else vocabulary[best.indices]
        predecessors = self.candidate_selector.predecessor_codebook[token_ids]  # [B, K, r]
        added = self.candidate_selector(self.slot_states(cache, position), predecessors, candidates)
        scores = best.values + added.float()
        logits = torch.full_like(unary, -torch.inf).expand(-1, token_ids.shape[1], -1)
        return states, logits.scatter(-1, best.indices.expand(-1, token_ids.shape[1], -1), scores)

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i yields the slots of draft position i as rows [h_s ; A[y]]; y is the true token before the slot."""
        slots, anchors = self.drafted_slots(rows), rows.anchor_rows().clamp_min(0)
        for position in range(num_passes):
            hidden = slots[:, :, position + self.config.first_slot]
            before = later(rows.next_token_ids, position).gather(1, anchors)
            predecessors = self.candidate_selector.predecessor_codebook[before]
            yield DraftedPass(
                hidden=torch.cat([hidden, predecessors], dim=-1),
                logits=partial(self._unary_logits, rows),
                offset=position,
                selected=self._selected,
            )

    def _unary_logits(self, rows: TrainingRows, held: torch.Tensor) -> torch.Tensor:
        return self.row_logits(rows, held[..., : self.config.hidden_size])

    def _selected(self, held: torch.Tensor, unary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates int64 [R, K] and their scores [R, K], from rows `held` and their unary logits [R, V]."""
        hidden, predecessors = held.split([self.config.hidden_size, self.config.selector_rank], dim=-1)
        best = unary.float().topk(self.config.selector_top_k, dim=-1)
        return best.indices, best.values + self.candidate_selector(hidden, predecessors, best.indices).float()
