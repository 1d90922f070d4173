"""What a draft head is made of: [`DraftHeadConfig`], the base of every family's configuration."""

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
        vocab_size: Vocabulary of the **target**, V (also the width of its `lm_head`).
        hidden_size: Width h of the draft head's residual stream.
        feature_size: Width H of one target feature (the target's hidden size).
        embedding_size: Width of the target's token embedding (differs from H in a few families).
        tree_config: Fields of [`DraftTreeConfig`], the default tree of these heads; `None` for that of the device.
        tuned: Trees that `heads.tune` found, one entry per `machine`, `dtype` and `threads`; there they come before
            `tree_config`.
        target: Identity of the target the heads were made for: `name`, `revision`, `model_type`, `num_hidden_layers`
            and `fingerprint` (see [`target.identity.target_fingerprint`]); `None` in files that do not say.
        target_adapter: Of heads trained together with a LoRA adapter of their target, which lies in `target_adapter/`
            beside them: its `fingerprint`, `None` while it is being trained. `None` for a target as it is.
        feature_statistics: Scale and centre of the target's features in training, see [`target.statistics`]; `None`
            in files that do not say.
        method: Published method the heads follow, for cards and messages.
        train_max_length: Longest training sequence in tokens, `None` if unknown.
        pruned_vocab_size: Tokens the heads are pruned to (`heads.prune_draft_vocabulary`), `None` if they are not; the
            ids lie with the weights.
    """

    model_type = "specheads"
    # Fields a saved config must have: their defaults are another model's.
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
        """Fields of heads made for a loaded target, before the caller's own options; see `AutoDraftHead.from_target`.

        Families add their architecture here.
        """
        sizes = target_sizes(target)
        return {**sizes, "hidden_size": sizes["feature_size"], "method": method}

    def validate_architecture(self) -> None:
        """Part of `@strict`'s validation at construction."""
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
