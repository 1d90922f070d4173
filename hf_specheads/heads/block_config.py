"""Configuration of block drafters, and the defaults that it takes from a target."""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel

from .layers import LayerHeadConfig, validate_layer

ANCHOR_SLOTS = ("idle", "drafts")
WINDOW_STARTS = ("query", "anchor")
LARGEST_BLOCK = 256


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Hidden states that the authors' code reads by default: the outputs of layers `round(1 + i (N - 4) /
    (count - 1))`, or of layer N // 2 for `count=1`. They are indices of transformers' `hidden_states`, fewer than
    `count` for shallow targets."""
    if count == 1:
        outputs = [num_target_layers // 2]
    else:
        outputs = [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
    most = max(num_target_layers - 1, 0)  # hidden state N is taken after the final norm
    return tuple(sorted({min(max(output + 1, min(1, most)), most) for output in outputs}))


@strict
class BlockHeadConfig(LayerHeadConfig):
    r"""Configuration of block drafters; see [`LayerHeadConfig`] for the layers.

    Args:
        num_hidden_layers: Decoder layers L.
        block_size: Rows of a block, the root's included.
        mask_token_id: Token that stands in the block for tokens not known yet.
        feature_layers: Hidden states of the target that make up a feature, as indices of transformers'
            `hidden_states` (i is the input of layer i, -1 is after the final norm).
        anchor_slot: `"idle"`: slot s predicts its own token, so a block drafts `block_size - 1` positions; `"drafts"`:
            slot s predicts the token after it, so a block drafts `block_size` positions.
        causal: Whether a block row sees only the rows of the block up to itself (JetSpec).
        qk_norm: Whether queries and keys are normed over the width of an attention head, before rotation (Qwen 3).
        sliding_layers: Layers (0-based) with a sliding window.
        sliding_window: Width W of the window in those layers.
        sliding_causal: Whether, in the sliding layers, a block row sees only the rows of the block up to itself.
        window_from: Where the window is counted from. `"query"`: a row sees rows less than W positions away;
            `"anchor"`: every row of the block sees the context from W positions before the root on.
        embedding_scale: Factor on the rows of the target's embedding matrix.
        logit_multiplier: Factor on the output of the target's `lm_head`; 1 leaves scaling to the target.
        logit_softcap: c of `c tanh(logits / c)`, applied after the factor; `None` leaves capping to the target.
        trained_positions: Number of draft positions that were trained; `None` if unknown.
    """

    required_fields: ClassVar[tuple[str, ...]] = (
        *LayerHeadConfig.required_fields, "intermediate_size", "num_attention_heads", "num_hidden_layers",
        "block_size", "mask_token_id", "feature_layers", "anchor_slot",
    )  # fmt: skip

    num_hidden_layers: int = 5
    block_size: int = 16
    mask_token_id: int = 0
    feature_layers: list[int] | tuple[int, ...] = (-1,)
    anchor_slot: str = "idle"
    causal: bool = False
    qk_norm: bool = True
    sliding_layers: list[int] | tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_causal: bool = False
    window_from: str = "query"
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    trained_positions: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.feature_layers, self.sliding_layers = tuple(self.feature_layers), tuple(self.sliding_layers)
        super().__post_init__(**kwargs)

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        config = target.config.get_text_config(decoder=True)
        return {
            **super().fields_for_target(target, method),
            "feature_layers": spread_layers(config.num_hidden_layers, cls.num_hidden_layers),
            # In most vocabularies, the last row of the embedding is a token that does not occur in texts.
            "mask_token_id": config.vocab_size - 1,
            "embedding_scale": embedding_scale_of(target.get_input_embeddings()),
        }

    def validate_architecture(self) -> None:
        super().validate_architecture()
        validate_layer(self)
        self._validate_sizes("num_hidden_layers")
        if self.hidden_size != self.feature_size:
            raise ValueError(
                f"the state of a slot goes through the target's `lm_head`, so `hidden_size` ({self.hidden_size}) must "
                f"equal `feature_size` ({self.feature_size})."
            )
        if self.embedding_size != self.hidden_size:
            raise ValueError(
                f"block rows are the target's embeddings, so `embedding_size` ({self.embedding_size}) must equal "
                f"`hidden_size` ({self.hidden_size})."
            )
        if not 2 <= self.block_size <= LARGEST_BLOCK:
            raise ValueError(f"`block_size` must be between 2 and {LARGEST_BLOCK}, got {self.block_size}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be a token of the target, from 0 to {self.vocab_size - 1}, got "
                f"{self.mask_token_id}."
            )
        for name, known in (("anchor_slot", ANCHOR_SLOTS), ("window_from", WINDOW_STARTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` must be one of {list(known)}, got {getattr(self, name)!r}.")
        self._validate_layers()

    def _validate_layers(self) -> None:
        levels = tuple(self.feature_layers)
        if not levels or len(set(levels)) != len(levels) or min(levels) < -1:
            raise ValueError(
                f"`feature_layers` must be different indices of hidden states, 0 or more, or -1 for the last; got "
                f"{list(levels)}."
            )
        if unknown := [layer for layer in self.sliding_layers if not 0 <= layer < self.num_hidden_layers]:
            raise ValueError(
                f"`sliding_layers` must be layers from 0 to {self.num_hidden_layers - 1}, got {unknown[0]}."
            )
        if self.sliding_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"`sliding_layers` needs a `sliding_window` of at least 1, got {self.sliding_window}.")

    @property
    def first_slot(self) -> int:
        """Index of the slot that predicts the first draft position."""
        return int(self.anchor_slot == "idle")


def embedding_scale_of(embedding: nn.Module) -> float:
    """Factor that a target's embedding module applies to the rows of its matrix."""
    scale: Any = getattr(embedding, "scalar_embed_scale", None)
    return float(getattr(embedding, "embed_scale", 1.0) if scale is None else scale)
