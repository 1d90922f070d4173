"""An ordinary language model as a draft head: the original speculative decoding (Leviathan et al., arXiv 2211.17192).

Any small model with the target's tokenizer can draft chains and trees. It reads tokens but no features of the target,
and has its own embedding, `lm_head` and vocabulary. Its draft cache holds one row per committed token before the root;
the root and the drafted tokens are appended during a round and dropped at its end.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..cache.draft import DraftCache
from ..cache.masks import additive_mask
from ..cache.names import CACHE_NAME
from ..configuration import DraftHeadConfig
from ..errors import WrongTargetError
from ..publishing.card.facts import Published
from ..target.structure import forward_parameters
from ..tree.config import DraftTreeConfig
from ..unroll.rows import DraftedPass, TrainingRows, row_positions
from ..unroll.streams import visible_rows
from .base import DraftHead
from .placement import Placement
from .stand_in import StandIn

__all__ = ["DraftLanguageModel", "DraftLanguageModelConfig"]

# Models that share a tokenizer pad their embeddings to different multiples (Qwen2.5: 151936 and 152064 rows).
VOCABULARY_PADDING = 0.01
DRAFT_LM_PAPERS = (
    "Fast Inference from Transformers via Speculative Decoding, [arXiv:2211.17192](https://arxiv.org/abs/2211.17192)",
)
MAX_LAYERS = 1024
MASKED_ATTENTION = ("eager", "sdpa")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
LLAMA_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters")  # fmt: skip


@strict
class DraftLanguageModelConfig(DraftHeadConfig):
    r"""Configuration of a language model that drafts.

    If `language_model` is given, the other fields follow from it. Otherwise they describe a Llama with tied
    embeddings, and fields left out get the usual proportions of small Llamas.

    Args:
        language_model: Config of the model, as in its `config.json`, `model_type` included.
        vocab_size: Vocabulary size of the **draft model**; may differ from the target's by padding.
        hidden_size: Width h of the draft model; defaults to the target's.
        num_hidden_layers: Number of layers of the draft model; defaults to 2.
        intermediate_size: Width of the MLP; defaults to 8/3 h.
        num_attention_heads, num_key_value_heads, head_dim: Attention shape; defaults to heads of width 64.
        max_position_embeddings: Context of the draft model in tokens; defaults to 2048.
        rope_parameters: As in transformers.
    """

    model_type = "specheads_draft_lm"
    required_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "language_model")

    method: str = "draft-lm"
    language_model: dict | None = None
    hidden_size: int | None = None  # type: ignore[assignment]  # follows from the language model when left out
    num_hidden_layers: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rope_parameters: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.language_model is None:
            self.language_model = _plain_dict(self._llama())
        known = self.language_model_config()
        for name in LLAMA_FIELDS:
            if getattr(self, name) is None:
                setattr(self, name, getattr(known, name, None))
        super().__post_init__(**kwargs)

    def _llama(self) -> PreTrainedConfig:
        """Config of a Llama with these fields; fields left out get the usual proportions of small Llamas."""
        width = self.hidden_size or self.feature_size
        heads = self.num_attention_heads or max(width // (self.head_dim or 64), 1)
        return AutoConfig.for_model(
            "llama",
            vocab_size=self.vocab_size,
            hidden_size=width,
            num_hidden_layers=self.num_hidden_layers or 2,
            intermediate_size=self.intermediate_size or -(-width * 8 // 3 // 16) * 16,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or heads,
            head_dim=self.head_dim or width // heads,
            max_position_embeddings=self.max_position_embeddings or 2048,
            rope_parameters=self.rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            initializer_range=self.initializer_range,
            tie_word_embeddings=True,
        )

    def language_model_config(self) -> PreTrainedConfig:
        """Config of the wrapped model.

        Raises:
            ValueError: if transformers does not know the config, or has no causal language model for it.
        """
        fields = dict(self.language_model or {})
        try:
            config = AutoConfig.for_model(fields.pop("model_type", None), **fields)
        except (KeyError, ValueError, AttributeError, TypeError, ArithmeticError) as error:
            raise ValueError(f"`language_model` is not a model config that transformers knows: {error}") from error
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"`language_model` has model_type={config.model_type!r}, for which transformers has no causal "
                "language model."
            )
        return config

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        fields = super().fields_for_target(target, method)
        config = target.config.get_text_config(decoder=True)
        special = {name: getattr(config, name, None) for name in SPECIAL_TOKENS}
        return {**fields, **special, "hidden_size": None}

    def validate_architecture(self) -> None:
        super().validate_architecture()
        known = self.language_model_config()
        if not 1 <= (self.num_hidden_layers or 0) <= MAX_LAYERS:
            raise ValueError(f"`num_hidden_layers` must be between 1 and {MAX_LAYERS}, got {self.num_hidden_layers}.")
        for name in LLAMA_FIELDS:
            theirs = getattr(known, name, None)
            if theirs is not None and name != "rope_parameters" and getattr(self, name) != theirs:
                raise ValueError(
                    f"`{name}` ({getattr(self, name)}) contradicts the one in `language_model` ({theirs}); leave "
                    "it out."
                )


def _plain_dict(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a config that JSON can hold, without those that belong to a file rather than to the model."""
    left_out = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache", "quantization_config")
    return {name: value for name, value in config.to_diff_dict().items() if name not in left_out} | {
        "model_type": config.model_type
    }


def language_model_problem(model: PreTrainedModel) -> str | None:
    """Says why a model cannot draft trees; `None` if it can. This is an allow-list, because a model that ignores a
    mask would draft nonsense without an error."""
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or model.get_output_embeddings() is None:
        return "it is not a text-only causal language model; load one with AutoModelForCausalLM"
    if getattr(model, "_is_stateful", False):
        return "its state cannot be rolled back"
    parameters = forward_parameters(model)
    if getattr(config, "alibi", False):
        return "positions enter it as attention biases (alibi)"
    if missing := [name for name in ("position_ids", CACHE_NAME, "attention_mask") if name not in parameters]:
        return f"its forward takes no {missing[0]}"
    other = {type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) is not DynamicLayer}
    if other or getattr(config, "attention_chunk_size", None):
        return f"some of its layers do not attend to the whole text (cache layers {sorted(other)})"
    if config._attn_implementation not in MASKED_ATTENTION:
        return f"its attention implementation {config._attn_implementation!r} takes no 4D mask; load it with 'sdpa'"
    return None


class DraftLanguageModel(DraftHead):
    """A causal language model as a draft head; created by [`from_model`] or `AutoDraftHead.from_target`.

    Attributes:
        language_model: The wrapped model.
    """

    config_class = DraftLanguageModelConfig
    config: DraftLanguageModelConfig
    published: ClassVar[dict[str, Published]] = {"draft-lm": Published("Language model", DRAFT_LM_PAPERS)}
    _no_split_modules = []

    def __init__(self, config: DraftLanguageModelConfig):
        super().__init__(config)
        known = config.language_model_config()
        if config._attn_implementation in MASKED_ATTENTION:
            known._attn_implementation = config._attn_implementation
        try:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(known)]
            self.language_model = model_class(known)
        except (KeyError, AssertionError, IndexError) as error:  # e.g. an unknown activation
            raise ValueError(f"`language_model` describes a model that cannot be built: {error}") from error
        if problem := language_model_problem(self.language_model):
            raise ValueError(f"{type(self.language_model).__name__} cannot draft trees: {problem}.")
        self.post_init()

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        target: PreTrainedModel | None = None,
        tree_config: DraftTreeConfig | dict[str, Any] | None = None,
    ) -> "DraftLanguageModel":
        """Wraps a loaded language model without copying it.

        Args:
            model: A causal language model with full attention in all layers and the target's tokenizer. Only the size
                of the vocabulary is checked, not the tokens: a wrong tokenizer costs speed but not exactness.
            target: The target. If given, its identity is stored in the config, and other targets are refused.
            tree_config: Default tree, or some of its fields.

        Raises:
            ValueError: for a model that cannot draft trees.
            WrongTargetError: if the vocabularies differ.
        """
        if problem := language_model_problem(model):
            raise ValueError(f"{type(model).__name__} cannot draft trees: {problem}.")
        tree = tree_config.to_dict() if isinstance(tree_config, DraftTreeConfig) else tree_config or {}
        special: dict[str, Any] = {name: getattr(model.config, name, None) for name in SPECIAL_TOKENS}
        config = DraftLanguageModelConfig(
            language_model=_plain_dict(model.config),
            vocab_size=model.config.vocab_size,
            feature_size=model.config.hidden_size,
            embedding_size=model.config.hidden_size,
            tree_config=DraftTreeConfig().replace(**tree).to_dict(),
            **special,
        )
        with torch.device("meta"):
            heads = cls(config)
        heads.language_model = model
        heads.placement = Placement(device=False, dtype=False)  # the model may serve others, so it stays where it is
        if target is not None:
            heads.check_target(target)
            heads.remember_target(target)
        heads.training = model.training  # wrapping must not switch the shared model's mode
        return heads

    # ------------------------------------------------------------------ the target
    def check_sizes(self, target: PreTrainedModel) -> None:
        """Refuses a target with another vocabulary. A draft model does not depend on the target's other sizes."""
        ours, theirs = self.config.vocab_size, target.config.get_text_config(decoder=True).vocab_size
        if abs(ours - theirs) > VOCABULARY_PADDING * max(ours, theirs):
            name = target.config.name_or_path or type(target).__name__
            raise WrongTargetError(
                f"this draft model has a vocabulary of {ours} tokens, but {name!r} has {theirs}, and padding does not "
                "explain the difference; use a draft model with the target's tokenizer."
            )

    @property
    def shared_vocabulary(self) -> int:
        """Number of tokens both models know. Draft logits past it are dropped, tokens past it read as the last one."""
        return min(self.config.vocab_size, self.target_vocab_size)

    @property
    def trained_vocabulary(self) -> torch.Tensor | None:
        """The tokens that both models know, if their vocabularies differ by padding; else `None`."""
        if self._binding.target is None or self.target_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(self.shared_vocabulary, device=self.device)

    @property
    def target_vocab_size(self) -> int:
        target = self._binding.target
        return self.config.vocab_size if target is None else target.config.get_text_config(decoder=True).vocab_size

    def own_projections(self) -> Sequence[nn.Module]:
        return (self.language_model.get_output_embeddings(),)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    # ------------------------------------------------------------------ drafting
    def new_draft_cache(self) -> DraftCache:
        return DraftCache(cast(int, self.config.num_hidden_layers))

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows = token_ids.shape[0], token_ids.shape[1] - 1
        first_round = cache.taken_in is None and cache.longest == 0
        positions = cache.open_rows(rows, token_ids.device, and_root=True).expand(batch, -1)
        mask = None
        # A whole prompt goes without a mask: the model's own causal attention may then use a faster kernel.
        if not first_round:
            slots = torch.arange(cache.shown()[1], device=token_ids.device)
            mask = additive_mask((slots <= positions[..., None])[:, None], self.dtype)
        drafted, logits = self._forward(cache, token_ids, positions, mask, last_only=True)
        cache.commit(rows)
        return drafted, logits

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nodes, rows = token_ids.shape[1], position if visible is None else visible.shape[2]
        # The root's row is the first of the round's rows, and every node sees it.
        cache.place(1 + rows - nodes, nodes)
        seen = None if visible is None else torch.nn.functional.pad(visible, (1, 0), value=True)
        mask = cache.tree_mask(seen, self.dtype)
        root = cache.known_lengths()
        root = root[:, None] if isinstance(root, torch.Tensor) else root
        return self._forward(cache, token_ids, torch.full_like(token_ids, position) + root, mask)

    def _forward(
        self,
        cache: DraftCache,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        last_only: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns empty states [B, Q, 0], because a language model passes none on, and draft logits [B, Q, V]."""
        logits = self._logits(
            self._pruned_model(),
            token_ids,
            attention_mask=mask,
            position_ids=self._within_context(positions),
            **{CACHE_NAME: cache},
            use_cache=True,
            **({"logits_to_keep": 1} if last_only and self._keeps_logits else {}),
        )
        logits = logits[:, -1:] if last_only else logits
        return logits.new_zeros(*logits.shape[:2], 0), logits.float()

    def _pruned_model(self) -> nn.Module:
        """The wrapped model, or a stand-in that computes the logits of the draft vocabulary alone.

        The stand-in runs the model's own code, which may scale or cap logits. It leaves the model itself unchanged,
        because others may share it.
        """
        if self.pruned_token_ids is None:
            return self.language_model
        rows = self._projection(0)
        known = self._binding.copied.get("model")
        if known is None or known.project is not rows:
            lm_head = self.language_model.get_output_embeddings()
            known = self._binding.copied["model"] = StandIn(self.language_model, lm_head, rows)
        return known.model

    def _logits(self, model: nn.Module, token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        token_ids = token_ids.clamp_max(self.config.vocab_size - 1)
        return model(token_ids, **inputs, return_dict=True).logits[..., : self.shared_vocabulary]

    @property
    def _keeps_logits(self) -> bool:
        return "logits_to_keep" in forward_parameters(self.language_model)

    def _within_context(self, positions: torch.Tensor) -> torch.Tensor:
        """Clamps positions to the model's context: past it, drafts are bad, and learned positions do not exist."""
        limit = self.config.max_position_embeddings
        return positions if limit is None else positions.clamp_max(limit - 1)

    # ------------------------------------------------------------------ training
    def passes_problem(self, num_passes: int) -> str | None:
        if num_passes == 1:
            return None
        return "but a language model predicts every draft position as it does the next token; set num_passes to 1."

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Yields a single pass: the model's logits after the tokens up to t + 1 of the document of row t.

        Raises:
            ValueError: if the rows come without their own tokens (`token_ids`).
        """
        if rows.token_ids is None:
            raise ValueError("a draft language model reads the token of every row; pass `token_ids`.")
        token_ids = torch.cat([rows.token_ids, rows.next_token_ids[:, -1:]], dim=1)  # [B, T + 1]
        documents = torch.cat([rows.documents, rows.documents[:, -1:]], dim=1)
        # The last token before padding has no row of its own: it is only the next token of the row before it.
        padding = documents[:, 1:-1] == -1
        documents[:, 1:-1] = torch.where(padding, rows.documents[:, :-1], documents[:, 1:-1])
        mask = additive_mask(visible_rows(documents)[:, None], self.dtype)
        positions = self._within_context(row_positions(documents))
        inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        logits = self._logits(self.language_model, token_ids, **inputs)
        yield DraftedPass(hidden=logits[:, 1:], logits=lambda rows: rows)

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        fields = super().fields_of_source(source)
        return {name: fields[name] for name in (*LLAMA_FIELDS, "language_model") if name in fields}

    # ------------------------------------------------------------------ saving
    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """As in [`DraftHead`]; tensors keep this class's names, not those of the wrapped family's original files."""
        super().save_pretrained(save_directory, **{"save_original_format": False, **kwargs})
