"""EAGLE-1/2 and HASS heads: one decoder layer over `fc([embedding ; feature])`.

EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), HASS (arXiv 2408.15766). The three share one architecture:
they differ in training (HASS) and in the tree (EAGLE-2).
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..cache.draft import DraftCache
from ..errors import WarmStartError
from ..publishing.card.facts import Published
from ..unroll.attention import Documents, StreamAttention, StreamCache
from ..unroll.rows import DraftedPass, TrainingRows
from ..unroll.streams import document_starts, next_stream
from .base import DraftHead
from .layers import DraftDecoderLayer, NormedDecoderLayer, rotary_embedding
from .specialists import LAYER_FIELDS, SpecialistHead, SpecialistHeadConfig

__all__ = ["EagleHead", "EagleHeadConfig"]

# Values of `inputs` in [`EagleHeadConfig`], which explains them; the first one is EAGLE itself.
INPUTS = ("feature+shifted_token", "feature+token", "token", "feature")


@strict
class EagleHeadConfig(SpecialistHeadConfig):
    r"""Configuration of EAGLE-1/2 and HASS heads: one Llama decoder layer over `fc([embedding ; feature])`.

    Args:
        fc_bias: Whether `fc` has a bias (published files differ; on import, their tensor names decide).
        inputs: What the row at position j is made of, as in the ablation of EAGLE's section 4.3.2.
            `"feature+shifted_token"`: f_j and the token x_{j+1}, which the feature does not know yet (EAGLE itself);
            `"feature+token"`: f_j and its own token x_j; `"token"`: x_{j+1} alone, a small language model;
            `"feature"`: f_j alone. (The paper drops `fc` for a single input; here `fc` is always present, as wide as
            its inputs.)
        extra_norms: Whether there are three additional norms, as in a variant of HASS: on the embedding before `fc`,
            before attention, and on the drafted feature before the target's `lm_head` (the feature is fed back
            without this norm).
    """

    model_type = "specheads_eagle"

    fc_bias: bool = True
    inputs: str = INPUTS[0]
    extra_norms: bool = False

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.inputs not in INPUTS:
            raise ValueError(f"`inputs` must be one of {list(INPUTS)}, got {self.inputs!r}.")
        if self.extra_norms and (self.model_type != EagleHeadConfig.model_type or "token" not in self.inputs):
            raise ValueError("`extra_norms` is only for EAGLE and HASS heads that read a token's embedding; drop it.")
        if self.hidden_size != self.feature_size:
            raise ValueError(
                f"the drafted feature goes through the target's `lm_head`, so `hidden_size` ({self.hidden_size}) must "
                f"equal `feature_size` ({self.feature_size})."
            )

    def validate_specialists(self) -> None:
        """EAGLE and HASS: one layer serves every draft position."""
        if self.num_specialists != 1:
            raise ValueError(
                f"EAGLE heads have one layer, got num_specialists={self.num_specialists}; use PossHeadConfig."
            )


EAGLE_PAPERS = (
    "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, "
    "[arXiv:2401.15077](https://arxiv.org/abs/2401.15077)",
    "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, "
    "[arXiv:2406.16858](https://arxiv.org/abs/2406.16858)",
)
HASS_PAPER = (
    "Learning Harmonized Representations for Speculative Sampling (HASS), "
    "[arXiv:2408.15766](https://arxiv.org/abs/2408.15766)"
)


class EagleHead(SpecialistHead):
    """One-layer draft head: `g = layer(fc([e(x_{j+1}) ; f_j]))`, logits = target `lm_head(g)`, g is fed back.

    There is no norm before attention and no final norm; embedding and `lm_head` are the target's. `config.inputs` can
    change what a row is made of.
    """

    config_class = EagleHeadConfig
    config: EagleHeadConfig
    published: ClassVar[dict[str, Published]] = {
        "eagle": Published("EAGLE", EAGLE_PAPERS),
        "hass": Published("HASS", (HASS_PAPER, *EAGLE_PAPERS)),
    }

    def __init__(self, config: EagleHeadConfig):
        super().__init__(config)
        width = config.embedding_size * ("token" in config.inputs) + config.feature_size * ("feature" in config.inputs)
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        self.layers = self.build_layers(config)
        self.rotary_emb = rotary_embedding(config)
        self.embed_layernorm = self.lm_head_layernorm = None
        if config.extra_norms:
            self.embed_layernorm = LlamaRMSNorm(config.embedding_size, eps=config.rms_norm_eps)
            self.lm_head_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def build_layers(self, config: SpecialistHeadConfig) -> nn.ModuleList:
        layer = NormedDecoderLayer if config.extra_norms else DraftDecoderLayer
        return nn.ModuleList(layer(config, index) for index in range(config.num_specialists))

    def fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`fc([embedding ; feature])`, or `fc` of one of the two: [B, R, E] and [B, R, H] -> [B, R, h]."""
        fc, inputs = self.fc, self.config.inputs
        dtype = fc.weight.dtype
        if self.embed_layernorm is not None:
            embeddings = self.embed_layernorm(embeddings.to(dtype))
        if inputs == "token":
            return fc(embeddings.to(dtype))
        if inputs == "feature":
            return fc(features.to(dtype))
        return fc(torch.cat([embeddings.to(dtype), features.to(dtype)], dim=-1))

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        return super().draft_logits(features if self.lm_head_layernorm is None else self.lm_head_layernorm(features))

    # ------------------------------------------------------------------ drafting
    @property
    def reads_own_token(self) -> bool:
        """Whether a row is made of a feature and that feature's own token. The row of a node is then made of its
        parent's token and feature, so the state of a node holds both: [embedding of its token ; drafted feature]."""
        return self.config.inputs == "feature+token"

    def fuse_drafted(self, embeddings: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        if not self.reads_own_token:
            return self.fuse(embeddings, drafted)
        return self.fc(drafted.to(self.fc.weight.dtype))

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. If rows are made of their own tokens and the prompt was given as embeddings, token 0
        stands in for the unknown first token. This costs acceptance but not exactness."""
        if not self.reads_own_token:
            return super().start_draft(cache, token_ids, features)
        drafted, logits = super().start_draft(cache, token_ids.roll(1, dims=1), features)
        return self._with_token(token_ids[:, -1:], drafted), logits

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafted, logits = super().extend_draft(cache, position, token_ids, features, visible)
        return (self._with_token(token_ids, drafted) if self.reads_own_token else drafted), logits

    def _with_token(self, token_ids: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.embed(token_ids, drafted.device).to(drafted.dtype), drafted], dim=-1)

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """A row reads the target's features up to the root of its round, and after the root the features that earlier
        passes drafted, detached (HASS, section 3.2). EAGLE is the case of one pass. All rows keep their rope position.

        Keys and values are kept from pass to pass, unless activation checkpointing would append them a second time.
        """
        starts, documents = document_starts(rows.documents), Documents(rows.documents)
        token_ids = rows.token_ids if self.reads_own_token else rows.next_token_ids
        if token_ids is None:
            raise ValueError(f"heads with inputs={self.config.inputs!r} need the rows' own `token_ids`; pass them.")
        with torch.no_grad():
            embeddings = rows.embed(token_ids)
        stream, length = rows.features, rows.features.shape[1]
        plain = self.training and self.is_activation_checkpointing
        cache = None if plain else StreamCache(length, apart=rows.separate_backward)
        fused: list[torch.Tensor] = []  # [B, T, h] per stream, part of the autograd graph
        read: list[torch.Tensor] = []  # what the passes read: the same tensors, or leaves that gather gradients
        for position in range(num_passes):
            fused.append(self.fuse(embeddings, stream))
            read.append(fused[-1].detach().requires_grad_() if rows.separate_backward else fused[-1])
            streams, specialist = position + 1, self.specialist_of(position)
            known = 0 if cache is None else cache.num_streams(specialist)
            drafted = self(
                torch.cat(read[known:], dim=1),
                rows.position_ids.repeat(1, streams - known),
                past_key_values=cache,
                specialist=specialist,
                num_queries=length,
                attention_function=StreamAttention(documents, streams, phantom_columns=rows.upstream_masking),
            )
            yield DraftedPass(hidden=drafted, logits=partial(self._row_logits, rows), features=drafted)
            stream = next_stream(rows.features, drafted, starts)
        if rows.separate_backward:
            if cache is not None:
                cache.finish_backward()
            used = [(graph, leaf) for graph, leaf in zip(fused, read, strict=True) if leaf.grad is not None]
            torch.autograd.backward([graph for graph, _ in used], [leaf.grad for _, leaf in used])

    def _row_logits(self, rows: TrainingRows, drafted: torch.Tensor) -> torch.Tensor:
        return rows.lm_head(drafted if self.lm_head_layernorm is None else self.lm_head_layernorm(drafted))

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        if not isinstance(source, EagleHead):
            raise WarmStartError(
                f"`from_heads` must be loaded EAGLE, HASS or POSS heads, got {type(source).__name__}; "
                "pass load_heads(...)."
            )
        return {name: getattr(source.config, name) for name in ("fc_bias", "inputs", "extra_norms", *LAYER_FIELDS)}

    def start_from(self, source: DraftHead) -> None:
        if source.config.inputs != self.config.inputs:
            raise WarmStartError(
                f"`from_heads` have inputs={source.config.inputs!r}, but the new heads have {self.config.inputs!r}; "
                "leave `inputs` out, or drop `from_heads`."
            )
        super().start_from(source)
