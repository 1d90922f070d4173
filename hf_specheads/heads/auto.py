"""[`AutoDraftHead`], which finds the class of draft heads for a method or a config, and the list of all methods."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..configuration import DraftHeadConfig
from ..target.borrowed import BorrowedModules
from ..tree.config import DraftTreeConfig
from .base import DraftHead
from .dflash import DFlashHead
from .dflash2 import DFlash2Head
from .domino import DominoHead
from .draft_lm import DraftLanguageModel
from .dspark import DSparkHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .hydra import HydraHead
from .lookup import LookupHead
from .medusa import MedusaHead
from .mtp import MtpHead
from .peagle import PEagleHead
from .placement import Placement
from .poss import PossHead
from .poss_eagle3 import PossEagle3Head
from .poss_lora import PossLoraHead

# The only list of methods. A new family adds a row here and a line in `heads/__init__.py`.
METHODS: dict[str, type[DraftHead]] = {
    "dflash": DFlashHead,
    "dflash2": DFlash2Head,
    "domino": DominoHead,
    "draft-lm": DraftLanguageModel,
    "dspark": DSparkHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "hass": EagleHead,
    "hydra": HydraHead,
    "jetspec": DFlashHead,
    "lookup": LookupHead,
    "medusa": MedusaHead,
    "mtp": MtpHead,
    "peagle": PEagleHead,
    "poss": PossHead,
    "poss-eagle3": PossEagle3Head,
    "poss-lora": PossLoraHead,
}
HEADS: dict[str, type[DraftHead]] = {head.config_class.model_type: head for head in METHODS.values()}


def register() -> None:
    """Registers all draft heads with `AutoConfig` and `AutoModel`; called on import, harmless when repeated."""
    for model_type, head_class in HEADS.items():
        AutoConfig.register(model_type, head_class.config_class, exist_ok=True)
        AutoModel.register(head_class.config_class, head_class, exist_ok=True)


def head_class_of(config: DraftHeadConfig) -> type[DraftHead]:
    """Class of the draft heads that a configuration describes.

    Raises:
        ValueError: if the configuration does not belong to draft heads.
    """
    if config.model_type not in HEADS:
        raise ValueError(
            f"model_type {config.model_type!r} does not belong to a draft head; known model types: {sorted(HEADS)}."
        )
    return HEADS[config.model_type]


def build_config(config_class: type[DraftHeadConfig], fields: dict[str, Any]) -> DraftHeadConfig:
    """Builds a configuration and validates it.

    Raises:
        ValueError: for impossible fields; the message gives the reason in one sentence.
    """
    try:
        return config_class(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"invalid {config_class.__name__}: {error.__cause__ or error}") from error


class AutoDraftHead:
    """Creates draft heads of the right class: from a folder or the Hub, from a config, or fresh ones for a target."""

    def __init__(self) -> None:
        raise OSError("use AutoDraftHead.from_pretrained(...), .from_config(...) or .from_target(...).")

    @staticmethod
    def from_pretrained(repo_or_path: str | os.PathLike, **kwargs: Any) -> DraftHead:
        """Loads heads stored in this package's own layout; takes the arguments of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if `model_type` is not one of draft heads ([`load_heads`] also reads the authors' layouts).
        """
        hub = {name: kwargs[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in kwargs}
        config = kwargs.pop("config", None) or AutoConfig.from_pretrained(repo_or_path, **hub)
        return head_class_of(config).from_pretrained(repo_or_path, config=config, **kwargs)

    @staticmethod
    def from_config(config: DraftHeadConfig) -> DraftHead:
        """Makes randomly initialised heads from a configuration."""
        return head_class_of(config)(config)

    @staticmethod
    def from_target(
        target: PreTrainedModel,
        method: str = "poss",
        *,
        from_heads: DraftHead | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **config: Any,
    ) -> DraftHead:
        """Makes freshly initialised heads of the right sizes for a loaded target, and records the target's identity in
        their config.

        Args:
            target: Any decoder-only language model.
            method: A key of [`METHODS`].
            from_heads: Heads of the same family and for the same target to start from. Their weights are copied, and
                so are the config fields that `config` leaves open. Specialists that `from_heads` lack start as copies
                of their last layer.
            dtype: Dtype of the weights; defaults to the target's.
            device: Device of the weights; defaults to that of the target's `lm_head`.
            **config: Fields of the heads' config, e.g. `num_specialists=2, positions_per_specialist=3`;
                `tree_config` may be a [`DraftTreeConfig`] or a dict with some of its fields. EAGLE-3 heads also take
                `draft_token_ids`, the tokens of their draft vocabulary.

        Raises:
            ValueError: for an unknown method or option, or a target that is not a language model.
            WarmStartError: if `from_heads` are of another family or have other sizes.
            WrongTargetError: if `from_heads` were made for another target.
        """
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {sorted(METHODS)}, got {method!r}.")
        head_class = METHODS[method]
        config_class = head_class.config_class
        config, kept_in_weights = head_class.split_options(config)
        _refuse_unknown_options(config_class, config)
        fields = config_class.fields_for_target(target, method)
        if from_heads is not None:
            fields |= head_class.fields_of_source(from_heads)
            from_heads.check_target(target)
            chosen = from_heads._chosen_tree
            fields["tree_config"] = from_heads.config.tree_config if chosen is None else chosen.to_dict()
        if "tree_config" in config:
            config["tree_config"] = _full_tree_config(config["tree_config"])
        heads = AutoDraftHead.from_config(build_config(config_class, {**fields, **config}))
        heads.placement = Placement(device=device is None, dtype=False)
        heads.remember_target(target)
        if from_heads is None:
            heads.start_from_target(target, **kept_in_weights)
        else:
            heads.start_from(from_heads, **kept_in_weights)
        return heads.to(device=device or BorrowedModules.of(target).device, dtype=dtype or target.dtype)


def _refuse_unknown_options(config_class: type[DraftHeadConfig], options: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(config_class)} | {"rope_theta"}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"unknown option(s) {unknown} for {config_class.__name__}; known options: {sorted(known)}.")


def _full_tree_config(tree: DraftTreeConfig | dict[str, Any]) -> dict[str, Any]:
    return (tree if isinstance(tree, DraftTreeConfig) else DraftTreeConfig().replace(**tree)).to_dict()
