"""EAGLE-1/2 and HASS heads: one decoder layer over `fc([embedding ; feature])`.

EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), HASS (arXiv 2408.15766). The three share one architecture:
they differ in training (HASS) and in the tree (EAGLE-2).
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..errors import WarmStartError
from ..modeling import DraftHead, Published
from ..streams import StreamAttention, document_starts, next_stream, visible_rows
from ..unroll import DraftedPass, TrainingRows
from .specialists import LAYER_FIELDS, SpecialistHead, SpecialistHeadConfig


@strict
class EagleHeadConfig(SpecialistHeadConfig):
    r"""Configuration of EAGLE-1/2 and HASS heads: one Llama decoder layer over `fc([embedding ; feature])`.

    Args:
        fc_bias: Whether `fc` has a bias (published files differ; the keys decide on import).
    """

    model_type = "specheads_eagle"

    fc_bias: bool = True

    def validate_architecture(self) -> None:
        super().validate_architecture()
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

    No norm before attention, no final norm; embedding and `lm_head` are the target's.
    """

    config_class = EagleHeadConfig
    config: EagleHeadConfig
    published: ClassVar[dict[str, Published]] = {
        "eagle": Published("EAGLE", EAGLE_PAPERS),
        "hass": Published("HASS", (HASS_PAPER, *EAGLE_PAPERS)),
    }

    def __init__(self, config: EagleHeadConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.embedding_size + config.feature_size, config.hidden_size, bias=config.fc_bias)
        self.layers = self.build_layers(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`fc([embedding ; feature])`: [B, R, E] and [B, R, H] -> [B, R, h]."""
        dtype = self.fc.weight.dtype
        return self.fc(torch.cat([embeddings.to(dtype), features.to(dtype)], dim=-1))

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Every pass reads the target's features and, nearer than its draft position, those that passes before it
        drafted, detached (HASS, section 3.2); EAGLE is the case of one pass. All rows keep their rope position."""
        starts, visible = document_starts(rows.documents), visible_rows(rows.documents)
        with torch.no_grad():
            embeddings = rows.embed(rows.next_token_ids)
        stream = rows.features
        fused: list[torch.Tensor] = []  # with graph, [B, T, h] per stream
        read: list[torch.Tensor] = []  # what the passes read: the same, or leaves with a gradient of their own
        for position in range(num_passes):
            fused.append(self.fuse(embeddings, stream))
            read.append(fused[-1].detach().requires_grad_() if rows.separate_backward else fused[-1])
            streams = position + 1
            drafted = self(
                torch.cat(read, dim=1),
                rows.position_ids.repeat(1, streams),
                specialist=self.specialist_of(position),
                num_queries=rows.features.shape[1],
                attention_function=StreamAttention(visible, streams, phantom_columns=rows.upstream_masking),
            )
            yield DraftedPass(hidden=drafted, logits=rows.lm_head, features=drafted)
            stream = next_stream(rows.features, drafted, starts)
        if rows.separate_backward:
            used = [(graph, leaf) for graph, leaf in zip(fused, read, strict=True) if leaf.grad is not None]
            torch.autograd.backward([graph for graph, _ in used], [leaf.grad for _, leaf in used])

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        if not isinstance(source, EagleHead):
            raise WarmStartError(
                f"`from_heads` must be loaded EAGLE, HASS or POSS heads, got {type(source).__name__}; "
                "pass load_heads(...)."
            )
        return {name: getattr(source.config, name) for name in ("fc_bias", *LAYER_FIELDS)}
