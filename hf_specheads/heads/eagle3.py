"""EAGLE-3 heads: one decoder layer over three levels of the target, with a vocabulary of its own (arXiv 2503.01840).

    u   = fc([r_low ; r_mid ; r_high])            of target features; a drafted row has its parent's g as u
    a   = u + attention([norm(e(x_{j+1})) ; norm(u)])
    g   = a + mlp(norm(a))
    logits over the draft vocabulary = lm_head(norm(g))

A level is the *input* of a layer of the target, without any norm. The state that is fed back is g before its norm.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..draft_vocabulary import TokenIds, mapping_of, mapping_problem
from ..errors import CheckpointValueError, WarmStartError, WrongTargetError
from ..publishing.card.facts import Published
from ..target.projection import output_weight
from ..unroll.attention import Documents, StreamAttention, StreamCache
from ..unroll.rows import DraftedPass, TrainingRows, later
from .base import DraftHead
from .layers import Eagle3DecoderLayer, rotary_embedding
from .specialists import LAYER_FIELDS, SpecialistHead, SpecialistHeadConfig

__all__ = ["Eagle3Head", "Eagle3HeadConfig"]

# Config fields that a warm start copies, besides those of the decoder layer.
EAGLE3_FIELDS = (
    "hidden_size", "draft_vocab_size", "feature_layers", "own_embedding", "norm_before_residual", "norm_output",
    "norm_before_fc", "fc_norm", "qk_norm",
)  # fmt: skip
TEST_TIME_PASSES = 7


def _levels_of(target: PreTrainedModel) -> tuple[int, ...] | None:
    return default_feature_layers(target.config.get_text_config(decoder=True).num_hidden_layers)


def default_feature_layers(num_layers: int) -> tuple[int, ...] | None:
    """Low, middle and high level of a target: 2, N // 2, N - 3; `None` if these three do not ascend."""
    levels = (2, num_layers // 2, num_layers - 3)
    return levels if levels[0] < levels[1] < levels[2] else None


@strict
class Eagle3HeadConfig(SpecialistHeadConfig):
    r"""Configuration of EAGLE-3 heads.

    Args:
        feature_layers: Hidden states of the target that make up a feature, as indices of transformers'
            `hidden_states` (i is the input of layer i, -1 is after the final norm). `None` stands for 2, N // 2 and
            N - 3 of the target that the heads are bound to, which needs N >= 7 layers (authors' files say no more).
        draft_vocab_size: Number Vd of tokens that can be drafted; defaults to V.
        own_embedding: Whether the heads have their own token embedding [V, h]; by default only if h differs from the
            width of the target's embedding.
        norm_before_residual: Whether the residual around attention starts from the normed feature.
        norm_output: Whether the state that is fed back is the normed one (EAGLE-3.1).
        norm_before_fc: Whether the concatenated levels are normed before `fc`.
        fc_norm: Whether each level is normed before `fc`.
        qk_norm: Whether queries and keys are normed over the width of an attention head, before rotation (Qwen 3).
    """

    model_type = "specheads_eagle3"
    required_fields: ClassVar[tuple[str, ...]] = (
        *SpecialistHeadConfig.required_fields, "draft_vocab_size",
    )  # fmt: skip

    method: str = "eagle3"
    feature_layers: list[int] | tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    qk_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.own_embedding is None:
            self.own_embedding = self.hidden_size != self.embedding_size
        if self.feature_layers is not None:
            self.feature_layers = tuple(self.feature_layers)
        super().__post_init__(**kwargs)

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        return {**super().fields_for_target(target, method), "feature_layers": _levels_of(target)}

    def validate_architecture(self) -> None:
        super().validate_architecture()
        levels = self.feature_layers
        if levels is not None and (not levels or len(set(levels)) != len(levels) or min(levels) < -1):
            raise ValueError(
                f"`feature_layers` must be different indices of hidden states, 0 or more, or -1 for the last; got "
                f"{list(levels)}."
            )
        if not 1 <= self.num_draft_tokens <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must be between 1 and `vocab_size` ({self.vocab_size}), got "
                f"{self.draft_vocab_size}."
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("`norm_before_fc` and `fc_norm` are alternatives; set only one of them.")

    def validate_specialists(self) -> None:
        """EAGLE-3: one layer serves every draft position."""
        if self.num_specialists != 1:
            raise ValueError(
                f"EAGLE-3 heads have one layer, got num_specialists={self.num_specialists}; use method 'poss-eagle3'."
            )

    @property
    def num_levels(self) -> int:
        """Number of hidden states that make up a feature."""
        return 3 if self.feature_layers is None else len(self.feature_layers)

    @property
    def num_draft_tokens(self) -> int:
        """Number Vd of tokens that can be drafted."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def row_embedding_size(self) -> int:
        """Width of the token embedding in a row."""
        return self.hidden_size if self.own_embedding else self.embedding_size


EAGLE3_PAPER = (
    "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, "
    "[arXiv:2503.01840](https://arxiv.org/abs/2503.01840)"
)


class Eagle3Head(SpecialistHead):
    """One-layer draft head over several levels of the target, with its own final norm, `lm_head` and draft vocabulary.

    The embedding is the target's unless the config says otherwise. In fresh heads for a target of the same width,
    `lm_head` starts with the target's rows for the draft vocabulary.
    """

    config_class = Eagle3HeadConfig
    config: Eagle3HeadConfig
    d2t: torch.Tensor
    t2d: torch.Tensor
    published: ClassVar[dict[str, Published]] = {"eagle3": Published("EAGLE-3", (EAGLE3_PAPER,))}
    _no_split_modules = ["Eagle3DecoderLayer"]
    integer_tensors: ClassVar[dict[str, torch.dtype]] = {
        **SpecialistHead.integer_tensors, "d2t": torch.long, "t2d": torch.bool,
    }  # fmt: skip
    passes_are_detached = False

    def __init__(self, config: Eagle3HeadConfig):
        super().__init__(config)
        width, inputs = config.hidden_size, config.num_levels * config.feature_size
        self.fc = nn.Linear(inputs, width, bias=False)
        self.layers = self.build_layers(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.num_draft_tokens, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.input_norm = LlamaRMSNorm(inputs, eps=config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            norms = (LlamaRMSNorm(config.feature_size, eps=config.rms_norm_eps) for _ in range(config.num_levels))
            self.fc_norm = nn.ModuleList(norms)
        self.rotary_emb = rotary_embedding(config)
        if config.num_draft_tokens < config.vocab_size:
            # Until a draft vocabulary is chosen, it consists of the first tokens.
            self.register_buffer("d2t", torch.zeros(config.num_draft_tokens, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.num_draft_tokens)
        self.post_init()

    def build_layers(self, config: SpecialistHeadConfig) -> nn.ModuleList:
        return nn.ModuleList(Eagle3DecoderLayer(config, index) for index in range(config.num_specialists))

    # ------------------------------------------------------------------ the draft vocabulary
    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The levels in the config; if it names none, the usual levels of the target that the heads are bound to.

        Raises:
            RuntimeError: if the config names none and the heads are not bound to a target yet.
        """
        levels = self.config.feature_layers
        if levels is None and (target := self._binding.target) is not None:
            levels = _levels_of(target)
        if levels is None:
            raise RuntimeError(
                "the hidden states that these draft heads read depend on the number of layers of their target; call "
                "`heads.bind(target)` first."
            )
        return tuple(levels)

    @property
    def trained_vocabulary(self) -> torch.Tensor | None:
        if self.config.num_draft_tokens == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, token_ids: TokenIds) -> None:
        """Sets the tokens of the draft vocabulary; the rows of `lm_head` are not moved.

        Args:
            token_ids: Vd token ids of the target, in any order.

        Raises:
            ValueError: for ids that repeat or that the target does not have, or if their number is not Vd.
        """
        d2t, t2d = mapping_of(token_ids, self.config.vocab_size)
        if len(d2t) != self.config.num_draft_tokens:
            raise ValueError(
                f"these heads draft over {self.config.num_draft_tokens} tokens, got {len(d2t)} token ids; make heads "
                "whose `draft_vocab_size` is the number of token ids."
            )
        if self.trained_vocabulary is not None:
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As for all heads; also checks that `d2t` and `t2d` match.

        Raises:
            CheckpointKeysError: if tensors are missing or unknown; the message names them.
            CheckpointValueError: if the saved draft vocabulary is invalid.
        """
        heads, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if heads.trained_vocabulary is not None and (problem := mapping_problem(heads.d2t, heads.t2d)):
            raise CheckpointValueError(f"{problem}; the file is damaged, download it again.")
        return (heads, info) if output_loading_info else heads

    def check_sizes(self, target: PreTrainedModel) -> None:
        super().check_sizes(target)
        config = target.config.get_text_config(decoder=True)
        levels = self.config.feature_layers or _levels_of(target)
        if levels is None or max(levels) > config.num_hidden_layers:
            wanted = "2, N // 2 and N - 3 (ascending)" if levels is None else f"{list(levels)}"
            raise WrongTargetError(
                f"these {self.config.method} heads read the hidden states {wanted} of their target, but this one has "
                f"{config.num_hidden_layers} layers; load heads trained for this target, or set "
                "`heads.config.feature_layers` if these heads were trained for it."
            )
        if config.hidden_size != self.config.feature_size:
            raise WrongTargetError(
                f"these {self.config.method} heads read hidden states of width {self.config.feature_size}, but those "
                f"of this target have width {config.hidden_size}; use EAGLE heads, which read the input of its "
                "`lm_head` instead."
            )

    # ------------------------------------------------------------------ rows, states, logits
    def embed(self, token_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        return super().embed(token_ids, device) if self.embed_tokens is None else self.embed_tokens(token_ids)

    def fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`[embedding ; fc(levels)]`: [B, R, E] and [B, R, F] -> [B, R, E + h]."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            levels = features.split(self.config.feature_size, dim=-1)
            features = torch.cat([norm(level) for norm, level in zip(self.fc_norm, levels, strict=True)], dim=-1)
        return self.fuse_drafted(embeddings, self.fc(features))

    def fuse_drafted(self, embeddings: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """`[embedding ; state]`: [B, R, E] and [B, R, h] -> [B, R, E + h]."""
        return torch.cat([embeddings.to(drafted.dtype), drafted], dim=-1)

    def drafted_state(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.norm(outputs) if self.config.norm_output else outputs

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Draft logits of drafted states in fp32, [..., h] -> [..., Vd]."""
        return self.project(features if self.config.norm_output else self.norm(features))

    def own_projections(self) -> Sequence[nn.Module]:
        return (self.lm_head,)

    @property
    def borrows(self) -> bool:
        return self.embed_tokens is None

    # ------------------------------------------------------------------ training
    @property
    def default_passes(self) -> int:
        return self.config.trained_positions or TEST_TIME_PASSES

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Training-time test (EAGLE-3, section 3.2): row t is the root in every pass. Pass i reads token t + 1 + i and
        the state of pass i - 1 at row t, with its gradient, at rope position t + i. As in drafting, it attends to the
        target's rows up to t and to row t of earlier passes.

        Keys and values are kept from pass to pass, unless activation checkpointing would append them a second time.
        """
        documents, length = Documents(rows.documents), rows.features.shape[1]
        if self.embed_tokens is None:
            with torch.no_grad():
                embeddings = rows.embed(rows.next_token_ids)
        else:
            embeddings = self.embed_tokens(rows.next_token_ids)
        read = [self.fuse(embeddings, rows.features)]
        positions = [rows.position_ids]
        cache = None if self.training and self.is_activation_checkpointing else StreamCache(length)
        for position in range(num_passes):
            specialist = self.specialist_of(position)
            known = 0 if cache is None else cache.num_streams(specialist)
            states = self(
                torch.cat(read[known:], dim=1),
                torch.cat(positions[known:], dim=1),
                past_key_values=cache,
                specialist=specialist,
                num_queries=length,
                attention_function=StreamAttention(documents, position + 1, own_rows=True),
            )
            yield DraftedPass(hidden=states, logits=self.draft_logits, offset=position)
            read.append(self.fuse_drafted(later(embeddings, position + 1), states))
            positions.append(rows.position_ids + position + 1)

    # ------------------------------------------------------------------ from targets and other heads
    @classmethod
    def split_options(cls, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`draft_token_ids` is stored in the weights, as `d2t` and `t2d`; its length becomes `draft_vocab_size`."""
        fields, kept = dict(options), {}
        if (token_ids := fields.pop("draft_token_ids", None)) is not None:
            kept["draft_token_ids"] = token_ids
            fields.setdefault("draft_vocab_size", len(token_ids))
        return fields, kept

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel, draft_token_ids: TokenIds | None = None) -> None:
        """Sets the draft vocabulary, and copies rows of the target's embedding and `lm_head` where widths agree.

        Args:
            target: The target.
            draft_token_ids: Tokens of the draft vocabulary.

        Raises:
            ValueError: if `draft_token_ids` is missing although the heads draft over less than all of V, or if the
                target is too shallow for the usual levels and `feature_layers` is missing.
        """
        if self.config.feature_layers is None:
            raise ValueError(
                "the default hidden states 2, N // 2 and N - 3 need a target of at least 7 layers, but this one has "
                f"{target.config.get_text_config(decoder=True).num_hidden_layers}; choose others, e.g. "
                "feature_layers=(0, 1, -1)."
            )
        if draft_token_ids is not None:
            self.set_draft_vocabulary(draft_token_ids)
        elif self.trained_vocabulary is not None:
            raise ValueError(
                f"draft_vocab_size={self.config.draft_vocab_size} says how many of the target's "
                f"{self.config.vocab_size} tokens are drafted, but not which; pass `draft_token_ids`, e.g. "
                "`hf_specheads.trainer.frequent_tokens(...)`."
            )
        if self.config.hidden_size == self.config.feature_size:
            weight, chosen = output_weight(target), self.trained_vocabulary
            self.lm_head.weight.copy_(weight if chosen is None else weight[chosen.to(weight.device)])
        if self.embed_tokens is not None and self.config.hidden_size == self.config.embedding_size:
            embedding, device = target.get_input_embeddings(), target.device
            self.embed_tokens.weight.copy_(embedding(torch.arange(self.config.vocab_size, device=device)))

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        if not isinstance(source, Eagle3Head):
            raise WarmStartError(
                f"`from_heads` must be loaded EAGLE-3 heads, or POSS heads built on them, got "
                f"{type(source).__name__}; pass load_heads(...)."
            )
        names = (*EAGLE3_FIELDS, *LAYER_FIELDS)
        return {name: value for name in names if (value := getattr(source.config, name)) is not None}

    def start_from(self, source: DraftHead, draft_token_ids: TokenIds | None = None) -> None:
        """Copies the shared weights, the draft vocabulary and the layers of `source`."""
        super().start_from(source)
        if draft_token_ids is not None and self.trained_vocabulary is not None:
            d2t, _ = mapping_of(draft_token_ids, self.config.vocab_size)
            if not torch.equal(d2t, self.d2t.cpu()):
                raise WarmStartError(
                    "`draft_token_ids` differ from the draft vocabulary of `from_heads`; leave them out, so that they "
                    "are taken from `from_heads`."
                )
