"""`DraftHead`: what every draft head can do, whatever its method."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .configuration import DraftHeadConfig, DraftTreeConfig
from .errors import WrongTargetError, refuse_wrong_keys
from .features import BorrowedModules, fingerprints_match, target_fingerprint, target_identity, target_sizes

if TYPE_CHECKING:
    from .cache import DraftCache
    from .metrics import GenerationStats

VERIFICATIONS = ("lossless",)
LOOPS = ("own", "transformers")


class DraftHead(PreTrainedModel):
    """Base class of all draft heads; hand one to `generate(assistant_model=...)`.

    Attributes:
        tree_config: [`DraftTreeConfig`] in force; assign, or use [`with_tree`] for one call.
        verification: `"lossless"`: the output has exactly the target's distribution.
        exact_seed: When sampling, draw token by token as plain `generate` does, so that the same seed gives the same
            tokens (one host sync per token). `False` draws at all nodes at once: same distribution, one host sync per
            round.
        loop: `"own"`: our round loop; `"transformers"`: transformers' assisted loop, for chains.
        profile: Record wall seconds by stage in `last_stats.seconds`.
        trace: Keep every draft tree in `last_stats.trees`.
        last_stats: [`GenerationStats`] of the last `generate`, or `None`.
    """

    config_class = DraftHeadConfig
    config: DraftHeadConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["DraftDecoderLayer"]

    def __init__(self, config: DraftHeadConfig):
        super().__init__(config)
        self.tree_config = DraftTreeConfig().replace(**config.tree_config)
        self.verification = "lossless"
        self.exact_seed = True
        self.loop = "own"
        self.profile = False
        self.trace = False
        self.last_stats: GenerationStats | None = None
        # A tuple is invisible to nn.Module, so nothing of the target is registered, trained or saved.
        self._borrowed: tuple[BorrowedModules, ...] = ()
        self._bound_to: tuple[PreTrainedModel, ...] = ()

    # ------------------------------------------------------------------ the target
    def check_target(self, target: PreTrainedModel) -> None:
        """Refuses a target the heads were not made for, before any forward.

        Raises:
            WrongTargetError: if sizes, vocabulary or fingerprint differ; names both sides.
        """
        name = target.config.name_or_path or type(target).__name__
        for field, theirs in target_sizes(target).items():
            ours = getattr(self.config, field)
            if ours != theirs:
                raise WrongTargetError(
                    f"these {self.config.method} heads were made for a target with {field}={ours}, but {name!r} has "
                    f"{field}={theirs}; load heads trained for this target."
                )
        identity = self.config.target or {}
        if not identity.get("fingerprint"):
            return
        if not fingerprints_match(identity["fingerprint"], target_fingerprint(target)):
            raise WrongTargetError(
                f"these {self.config.method} heads were made for {identity.get('name') or 'another target'!r}, and "
                f"the weights of {name!r} are not the same (fingerprint of the token embedding differs); load heads "
                "trained for this target, or set `heads.config.target = None` to use them all the same."
            )

    def bind(self, target: PreTrainedModel) -> DraftHead:
        """Borrows the target's embedding and `lm_head`; checks the target first unless it is bound already.

        Raises:
            WrongTargetError: see [`check_target`].
        """
        if not (self._bound_to and self._bound_to[0] is target):
            self.check_target(target)
        self._borrowed = (BorrowedModules.of(target),)
        self._bound_to = (target,)
        return self

    def remember_target(self, target: PreTrainedModel) -> None:
        """Writes the target's identity and special tokens into the config, as training does."""
        self.config.target = target_identity(target)
        config = target.config.get_text_config(decoder=True)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self.config, name, getattr(config, name, None))

    @property
    def borrowed(self) -> BorrowedModules:
        """The target's parts.

        Raises:
            RuntimeError: if the heads are not bound to a target yet.
        """
        if not self._borrowed:
            raise RuntimeError("these draft heads are not bound to a target; call `heads.bind(target)` first.")
        return self._borrowed[0]

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Draft logits in fp32, [..., H] -> [..., V]."""
        return self.borrowed.lm_head(features).float()

    # ------------------------------------------------------------------ the drafting contract
    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in the newly committed rows and predicts the first draft position.

        Args:
            cache: Draft cache of this generation, holding the rows committed before.
            token_ids: [B, M], the tokens that follow each row's feature; the last one is the root.
            features: [B, M, H], target features of the M newly committed positions.

        Returns:
            Drafted feature of the root [B, 1, H] and draft logits after it [B, 1, V].
        """
        raise NotImplementedError

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts draft position `position` (0-based) from the K frontier nodes.

        Args:
            cache: Draft cache of this generation.
            position: Draft position being predicted, at least 1.
            token_ids: [B, K], tokens of the frontier nodes.
            features: [B, K, H], drafted features of their parents.
            visible: bool [B, K, position * K], which drafted rows (levels so far, this one last) each node may see.

        Returns:
            Drafted features [B, K, H] and draft logits [B, K, V].
        """
        raise NotImplementedError

    def new_draft_cache(self) -> DraftCache:
        """An empty draft cache for one generation."""
        raise NotImplementedError

    # ------------------------------------------------------------------ options, saving
    def with_tree(self, **overrides: Any) -> DraftHead:
        """The same heads (weights shared) with another draft tree, for one call:

            target.generate(**inputs, assistant_model=heads.with_tree(kind="chain", depth=4))

        Raises:
            ValueError: for unknown or impossible tree options.
        """
        other = copy.copy(self)
        other.tree_config = self.tree_config.replace(**overrides)
        other.last_stats = None
        return other

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but only from safetensors, and a missing or unknown tensor is an error, not a warning.

        Raises:
            CheckpointKeysError: naming the missing and the unknown tensors.
        """
        kwargs.setdefault("use_safetensors", True)
        heads, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        refuse_wrong_keys(missing=set(info["missing_keys"]), unknown=set(info["unexpected_keys"]))
        return (heads, info) if output_loading_info else heads

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """As in transformers; the tree in force is saved as the default tree. Target weights are never saved."""
        self.config.tree_config = self.tree_config.to_dict()
        return super().save_pretrained(save_directory, **kwargs)
