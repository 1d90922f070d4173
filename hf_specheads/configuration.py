"""Configurations: how drafts grow (`DraftTreeConfig`) and what a draft head is made of (`DraftHeadConfig`)."""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

import dataclasses
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TREE_KINDS = ("chain", "dynamic", "static", "optimal")
AVAILABLE_TREE_KINDS = ("chain", "dynamic")
MAX_SIZE = 2**24


@dataclasses.dataclass(frozen=True)
class DraftTreeConfig:
    """How a draft tree grows in every round.

    Args:
        kind: `"dynamic"` grows the tree by cumulative draft probability (EAGLE-2, section 4); `"chain"` drafts one
            path. `"static"` and `"optimal"` are reserved.
        depth: Number of draft positions, i.e. levels below the root.
        top_k: Children considered per node, and nodes expanded per level.
        total_tokens: Nodes verified per round **including the root** (`total_token` in EAGLE's and PosS's code).
        choices: Paths of a static tree, each a list of child ranks.

    Raises:
        ValueError: if a size is below its minimum or `kind` is unknown or not available.
    """

    kind: str = "dynamic"
    depth: int = 6
    top_k: int = 10
    total_tokens: int = 60
    choices: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in TREE_KINDS:
            raise ValueError(f"`kind` of a draft tree must be one of {list(TREE_KINDS)}, got {self.kind!r}.")
        if self.kind not in AVAILABLE_TREE_KINDS:
            raise ValueError(
                f"draft trees of kind {self.kind!r} are not available yet; use {list(AVAILABLE_TREE_KINDS)}."
            )
        for name, minimum in (("depth", 1), ("top_k", 1), ("total_tokens", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(f"`{name}` of a draft tree must be an integer of at least {minimum}, got {value!r}.")
        if self.choices is not None and self.kind != "static":
            raise ValueError(f"`choices` belong to a static tree, got kind={self.kind!r}; drop `choices`.")

    @property
    def nodes_per_level(self) -> int:
        """Nodes expanded per level: `top_k`, or 1 for a chain."""
        return 1 if self.kind == "chain" else self.top_k

    @property
    def num_nodes(self) -> int:
        """Upper bound N of nodes verified per round, including the root."""
        return self.depth + 1 if self.kind == "chain" else self.total_tokens

    def replace(self, **changes: Any) -> "DraftTreeConfig":
        """A copy with some fields changed.

        Raises:
            ValueError: for a field that does not exist or a value out of range.
        """
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(changes) - known):
            raise ValueError(f"unknown draft tree option(s) {unknown}; known are {sorted(known)}.")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the saved config."""
        return dataclasses.asdict(self)


@strict
class DraftHeadConfig(PreTrainedConfig):
    r"""Base configuration of all draft heads.

    Args:
        vocab_size: Vocabulary of the **target**, V (also the width of its `lm_head`).
        hidden_size: Width h of the draft head's residual stream.
        feature_size: Width H of one target feature (the target's hidden size).
        embedding_size: Width of the target's token embedding (differs from H in a few families).
        tree_config: Fields of [`DraftTreeConfig`], the default tree of these heads.
        target: Identity of the target the heads were made for: `name`, `revision`, `model_type`, `num_hidden_layers`
            and `fingerprint` (see [`features.target_fingerprint`]); `None` in files that do not say.
        method: Published method the heads follow, for cards and messages.
        train_max_length: Longest training sequence in tokens, `None` if unknown.
    """

    model_type = "specheads"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32000
    hidden_size: int = 4096
    feature_size: int = 4096
    embedding_size: int = 4096
    tree_config: dict | None = None
    target: dict | None = None
    method: str = "eagle"
    train_max_length: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    initializer_range: float = 0.02
    is_decoder: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.tree_config is None:
            self.tree_config = DraftTreeConfig().to_dict()
        if self.tree_config.get("choices") is not None:
            self.tree_config = {**self.tree_config, "choices": tuple(tuple(c) for c in self.tree_config["choices"])}
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Part of `@strict`'s validation at construction."""
        DraftTreeConfig().replace(**self.tree_config)
        self._validate_sizes("vocab_size", "hidden_size", "feature_size", "embedding_size")

    def _validate_sizes(self, *names: str) -> None:
        for name in names:
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"`{name}` must be between 1 and {MAX_SIZE}, got {getattr(self, name)}.")


@strict
class EagleHeadConfig(DraftHeadConfig):
    r"""Configuration of EAGLE-1/2 and HASS heads: one Llama decoder layer over `fc([embedding ; feature])`.

    Args:
        intermediate_size: Width of the SwiGLU MLP.
        num_attention_heads, num_key_value_heads, head_dim: Attention shape; `head_dim` defaults to h / heads.
        hidden_act: Activation of the MLP.
        rms_norm_eps: Epsilon of the norm before the MLP, the layer's only norm.
        rope_parameters: As in transformers; a missing base means 10000, as in the authors' code, never the target's.
        fc_bias: Whether `fc` has a bias (published files differ; the keys decide on import).
        attention_bias: Bias of the q, k and v projections (heads for Qwen2 targets).
        attention_out_bias: Bias of the output projection.
        mlp_bias: Bias of the MLP projections.
        num_specialists: Decoder layers L; EAGLE and HASS have one.
        positions_per_specialist: Draft positions per specialist (`position_per_layer` in PosS's code).
        trained_positions: Draft positions the training unrolled, `None` if unknown.
    """

    model_type = "specheads_eagle"

    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    fc_bias: bool = True
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    num_specialists: int = 1
    positions_per_specialist: int = 1
    trained_positions: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self._validate_sizes("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        if self.hidden_size != self.feature_size:
            raise ValueError(
                f"the drafted feature goes through the target's `lm_head`, so `hidden_size` ({self.hidden_size}) must "
                f"equal `feature_size` ({self.feature_size})."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary positions, got {self.head_dim}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation transformers knows, got {self.hidden_act!r}.")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"`rope_type` must be 'default' or one of {sorted(ROPE_INIT_FUNCTIONS)}, got {rope_type!r}."
            )
        self.validate_specialists()

    def validate_specialists(self) -> None:
        """EAGLE and HASS: one layer serves every draft position."""
        if self.num_specialists != 1:
            raise ValueError(
                f"EAGLE heads have one layer, got num_specialists={self.num_specialists}; use PossHeadConfig."
            )


@strict
class PossHeadConfig(EagleHeadConfig):
    r"""Configuration of POSS heads: L position specialists that share `fc` (arXiv 2506.03566).

    Draft position p (0-based) belongs to specialist `min(p // positions_per_specialist, num_specialists - 1)`.
    """

    model_type = "specheads_poss"

    method: str = "poss"
    num_specialists: int = 2
    positions_per_specialist: int = 3

    def validate_specialists(self) -> None:
        """POSS: any number of specialists and positions, both at least 1."""
        for name in ("num_specialists", "positions_per_specialist"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


__all__ = ["DraftHeadConfig", "DraftTreeConfig", "EagleHeadConfig", "PossHeadConfig"]
