"""[`DraftHeadConfig`], the base class of every family's configuration."""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel

from .target.identity import target_sizes
from .tree.config import DraftTreeConfig

MAX_SIZE = 2**24


@strict
class DraftHeadConfig(PreTrainedConfig):
    r"""Base configuration of all draft heads.

    Args:
        vocab_size: Vocabulary size V of the **target** (also the width of its `lm_head`).
        hidden_size: Width h of the draft head's residual stream.
        feature_size: Width H of one hidden state of the target (the target's hidden size).
        embedding_size: Width E of the target's token embedding (differs from H in a few model families).
        tree_config: Fields of [`DraftTreeConfig`] that make up the default tree of these heads; `None` for the default
            of the device.
        tuned: Trees that `heads.tune` found, one entry per `machine`, `dtype` and `threads`. Where an entry applies,
            it takes precedence over `tree_config`.
        target: Identity of the target that the heads were made for: `name`, `revision`, `model_type`,
            `num_hidden_layers` and `fingerprint` (see [`target.identity.target_fingerprint`]); `None` if unknown.
        target_adapter: For heads trained together with a LoRA adapter of their target, which is stored in
            `target_adapter/` beside them: a dict with the adapter's `fingerprint` (`None` during training). `None` if
            the heads were trained for the unadapted target.
        feature_statistics: Scale and centre of the target's features in training (see [`target.statistics`]); `None`
            if unknown.
        method: Published method that the heads follow, for model cards and messages.
        train_max_length: Length of the longest training sequence in tokens; `None` if unknown.
        pruned_vocab_size: Number of tokens that drafts are restricted to (`heads.prune_draft_vocabulary`); `None` if
            there is no restriction. The token ids are stored with the weights.
    """

    model_type = "specheads"
    # Fields that a saved config must have, because their defaults are the sizes of some other model.
    required_fields: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "feature_size", "embedding_size")
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32000
    hidden_size: int = 4096
    feature_size: int = 4096
    embedding_size: int = 4096
    tree_config: dict | None = None
    tuned: list | None = None
    target: dict | None = None
    target_adapter: dict | None = None
    feature_statistics: dict | None = None
    method: str = "eagle"
    train_max_length: int | None = None
    pruned_vocab_size: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    initializer_range: float = 0.02
    is_decoder: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.tree_config is not None and self.tree_config.get("choices") is not None:
            self.tree_config = {**self.tree_config, "choices": tuple(tuple(c) for c in self.tree_config["choices"])}
        super().__post_init__(**kwargs)

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        """Config fields of heads made for a loaded target, which the caller's options override; see
        `AutoDraftHead.from_target`. Families add the fields of their architecture here.
        """
        sizes = target_sizes(target)
        return {**sizes, "hidden_size": sizes["feature_size"], "method": method}

    def validate_architecture(self) -> None:
        """Validates the fields; `@strict` calls this at construction."""
        trees = [] if self.tree_config is None else [self.tree_config]
        for tree in (*trees, *(entry.get("tree_config") for entry in self.tuned or ())):
            DraftTreeConfig().replace(**tree)
        self._validate_sizes("vocab_size", "hidden_size", "feature_size", "embedding_size")
        if self.pruned_vocab_size is not None and not 1 <= self.pruned_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`pruned_vocab_size` must be between 1 and `vocab_size` ({self.vocab_size}), got "
                f"{self.pruned_vocab_size}."
            )

    def _validate_sizes(self, *names: str) -> None:
        for name in names:
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"`{name}` must be between 1 and {MAX_SIZE}, got {getattr(self, name)}.")
