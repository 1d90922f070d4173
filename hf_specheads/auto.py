"""Which class belongs to which `model_type`, and freshly initialised heads for a loaded target."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, PreTrainedModel

from .configuration import DraftHeadConfig, DraftTreeConfig, EagleHeadConfig, PossHeadConfig
from .errors import WarmStartError
from .features import BorrowedModules, target_sizes
from .heads import EagleHead, PossHead
from .modeling import DraftHead

HEADS: dict[str, tuple[type[DraftHeadConfig], type[DraftHead]]] = {
    "specheads_eagle": (EagleHeadConfig, EagleHead),
    "specheads_poss": (PossHeadConfig, PossHead),
}
METHODS: dict[str, type[EagleHeadConfig]] = {"eagle": EagleHeadConfig, "hass": EagleHeadConfig, "poss": PossHeadConfig}
PLANNED_METHODS = ("eagle3", "medusa", "hydra", "draft-lm")
# What heads of a warm start hand on, besides their weights.
ARCHITECTURE_FIELDS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "rope_parameters", "max_position_embeddings", "fc_bias", "attention_bias", "attention_out_bias", "mlp_bias",
)  # fmt: skip


def register() -> None:
    """Makes `AutoConfig` and `AutoModel` know the heads; called on import, harmless when repeated."""
    for model_type, (config_class, head_class) in HEADS.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, head_class, exist_ok=True)


def head_class_of(config: DraftHeadConfig) -> type[DraftHead]:
    """Head class of a configuration.

    Raises:
        ValueError: if the configuration is none of a draft head's.
    """
    if config.model_type not in HEADS:
        raise ValueError(f"model_type {config.model_type!r} is none of a draft head; known are {sorted(HEADS)}.")
    return HEADS[config.model_type][1]


def build_config(config_class: type[DraftHeadConfig], fields: dict[str, Any]) -> DraftHeadConfig:
    """A validated configuration.

    Raises:
        ValueError: with the reason in one sentence, for impossible fields.
    """
    try:
        return config_class(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"impossible {config_class.__name__}: {error.__cause__ or error}") from error


class AutoDraftHead:
    """Draft heads of the right class: from a folder or the Hub, from a config, or fresh ones for a target."""

    def __init__(self) -> None:
        raise OSError("use AutoDraftHead.from_pretrained(...), .from_config(...) or .from_target(...).")

    @staticmethod
    def from_pretrained(repo_or_path: str | os.PathLike, **kwargs: Any) -> DraftHead:
        """Heads in this package's own layout; takes the arguments of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if `model_type` is none of a draft head ([`load_heads`] also reads the authors' layouts).
        """
        hub = {name: kwargs[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in kwargs}
        config = kwargs.pop("config", None) or AutoConfig.from_pretrained(repo_or_path, **hub)
        return head_class_of(config).from_pretrained(repo_or_path, config=config, **kwargs)

    @staticmethod
    def from_config(config: DraftHeadConfig) -> DraftHead:
        """Randomly initialised heads of a configuration."""
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
        """Freshly initialised heads of the right sizes for a loaded target, which they remember.

        Args:
            target: Any decoder-only language model.
            method: `"eagle"`, `"hass"` or `"poss"`.
            from_heads: Heads for the same target to start from: `fc` and the layers are copied, specialists they lack
                start as copies of their last layer, and what `config` leaves open is taken from them.
            dtype: Type of the weights, default the target's.
            device: Where they live, default the device of the target's `lm_head`.
            **config: Fields of the heads' config, e.g. `num_specialists=2, positions_per_specialist=3`;
                `tree_config` may be a [`DraftTreeConfig`] or a dict with some of its fields.

        Raises:
            ValueError: for an unknown method or option, or a target that is no language model.
            WarmStartError: if `from_heads` have other sizes.
            WrongTargetError: if `from_heads` were made for another target.
        """
        if method not in METHODS:
            later = " (planned)" if method in PLANNED_METHODS else ""
            raise ValueError(f"`method` must be one of {sorted(METHODS)}, got {method!r}{later}.")
        config_class = METHODS[method]
        _refuse_unknown_options(config_class, config)
        sizes = target_sizes(target)
        defaults = {**_architecture_of_target(target), **sizes, "hidden_size": sizes["feature_size"]}
        if from_heads is not None:
            _check_warm_start(from_heads, target)
            defaults |= {name: getattr(from_heads.config, name) for name in ARCHITECTURE_FIELDS}
            defaults["tree_config"] = from_heads.tree_config.to_dict()
        if "tree_config" in config:
            config["tree_config"] = _full_tree_config(config["tree_config"])
        heads = AutoDraftHead.from_config(build_config(config_class, {**defaults, "method": method, **config}))
        heads.remember_target(target)
        if from_heads is not None:
            _copy_weights(from_heads, heads)
        return heads.to(device=device or BorrowedModules.of(target).device, dtype=dtype or target.dtype)


def _refuse_unknown_options(config_class: type[DraftHeadConfig], options: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(config_class)} | {"rope_theta"}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"unknown option(s) {unknown} for {config_class.__name__}; known are {sorted(known)}.")


def _full_tree_config(tree: DraftTreeConfig | dict[str, Any]) -> dict[str, Any]:
    return (tree if isinstance(tree, DraftTreeConfig) else DraftTreeConfig().replace(**tree)).to_dict()


def _architecture_of_target(target: PreTrainedModel) -> dict[str, Any]:
    """One decoder layer of the target's own proportions, where its config tells them.

    Only the base of the target's rope is taken over, not its scaling: a head is trained at short positions.
    """
    config = target.config.get_text_config(decoder=True)
    width = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or max(width // 64, 1)
    head_dim = getattr(config, "head_dim", None) or width // heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    middle = getattr(config, "intermediate_size", None)
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    norm_eps = next((eps for name in names if (eps := getattr(config, name, None))), 1e-6)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if isinstance(kv_heads, int) and kv_heads and heads % kv_heads == 0 else heads,
        "head_dim": head_dim if head_dim % 2 == 0 else head_dim + 1,
        "intermediate_size": middle if isinstance(middle, int) else 4 * width,
        "rms_norm_eps": float(norm_eps),
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_base(config)},
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
    }


def _rope_base(config: Any) -> float:
    """Base of the target's rope; 10000 where it has none. Per-layer-type tables (Gemma 3) give full attention's."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or 10000.0)


def _check_warm_start(from_heads: DraftHead, target: PreTrainedModel) -> None:
    if not isinstance(from_heads, EagleHead):
        raise WarmStartError(
            f"`from_heads` must be loaded EAGLE, HASS or POSS heads, got {type(from_heads).__name__}; "
            "pass load_heads(...)."
        )
    from_heads.check_target(target)


@torch.no_grad()
def _copy_weights(source: EagleHead, heads: EagleHead) -> None:
    """Copies `fc` and the layers of `source`; specialists it lacks start from its last layer."""
    last = len(source.layers) - 1
    try:
        heads.fc.load_state_dict(source.fc.state_dict())
        for index, layer in enumerate(heads.layers):
            layer.load_state_dict(source.layers[min(index, last)].state_dict())
    except RuntimeError as error:
        raise WarmStartError(
            f"the heads to start from do not fit the new ones; leave sizes and biases out, they are taken from "
            f"`from_heads`, or drop `from_heads`. {error}"
        ) from error
