"""LoRA adapters of targets, which come with heads that were trained together with their target (Medusa-2).

The adapter is saved next to the heads in `target_adapter/`, in peft's format. The heads' config records a fingerprint
of the adapter, and [`check_adapter`] refuses a target without it, because the heads were trained for the adapted
target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from ..errors import HeadLoadError
from .identity import spread_over

ADAPTER_NAME = "specheads"

ADAPTER_FOLDER = "target_adapter"

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

PREFIX = "base_model.model."  # peft's files have this prefix; adapters injected into a model do not

FINGERPRINT_LAYERS, FINGERPRINT_ENTRIES = 8, 4


def _lora_layers(target: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in target.modules() if isinstance(module, LoraLayer)]


def has_adapters(target: nn.Module) -> bool:
    """Whether a model has LoRA adapters, ours or others, enabled or disabled."""
    return bool(_lora_layers(target))


# ------------------------------------------------------------------ recognising an adapter
def active_fingerprints(target: nn.Module) -> list[list[float]]:
    """Returns a few entries of every active LoRA adapter, one list per adapter; empty if there is none."""
    layers = [layer for layer in _lora_layers(target) if not layer.disable_adapters]
    names = dict.fromkeys(name for layer in layers for name in layer.active_adapters)
    return [_fingerprint(layers, name) for name in names]


@torch.no_grad()
def _fingerprint(layers: list[Any], name: str) -> list[float]:
    # lora_B starts at zero, so unlike lora_A it differs between trainings that share a seed.
    weights = [layer.lora_B[name].weight for layer in layers if name in layer.lora_B]
    chosen = spread_over(len(weights), FINGERPRINT_LAYERS) if weights else []
    entries: list[float] = []
    for index in chosen:
        flat = weights[index].flatten()
        places = spread_over(flat.numel(), FINGERPRINT_ENTRIES)
        entries += [float(f"{value:.5g}") for value in flat[places].float().tolist()]
    return entries


def adapter_identity(target: nn.Module) -> dict[str, Any] | None:
    """Returns what the heads' config records of our adapter on a target; `None` without one."""
    if ADAPTER_NAME not in (getattr(target, "peft_config", None) or {}):
        return None
    return {"fingerprint": _fingerprint(_lora_layers(target), ADAPTER_NAME)}


# ------------------------------------------------------------------ an adapter of our own on a target
def add_adapter(target: PreTrainedModel, rank: int, alpha: float, modules: str) -> None:
    """Adds a new adapter to a target. It does not change the target until it is trained.

    Args:
        target: The target, modified in place.
        rank: Rank r of LoRA.
        alpha: LoRA's alpha: the product of the adapter's factors is scaled by alpha / r.
        modules: Names of the adapted modules, separated by commas; `"all-linear"` for all but the `lm_head`.

    Raises:
        ValueError: if the target already has adapters.
    """
    from peft import LoraConfig

    _refuse_adapters(target)
    names = modules if modules == "all-linear" else [name.strip() for name in modules.split(",")]
    _put_adapter(target, LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM"))


def load_adapter(target: PreTrainedModel, folder: Path) -> None:
    """Adds a saved adapter to a target, in place.

    Raises:
        ValueError: if the target already has adapters.
        HeadLoadError: if the folder lacks the weights, or if they are for layers that the target does not have. The
            target is unchanged then.
    """
    from peft import LoraConfig

    _refuse_adapters(target)
    if strange := [key for key, size in _saved(folder).items() if not _fits(target, key, size.shape)]:
        raise HeadLoadError(
            f"the adapter in {folder} belongs to another target: {type(target).__name__} has no layer that fits "
            f"{strange[0]!r}; load the target it was trained on."
        )
    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    _put_adapter(target, config)
    restore_adapter(target, folder)


def _put_adapter(target: PreTrainedModel, config: Any) -> None:
    """Injects an adapter through peft, as transformers' `add_adapter` would.

    `add_adapter` itself is not used because in transformers 5.24 it requires an unreleased version of peft.
    """
    from peft import inject_adapter_in_model

    config.base_model_name_or_path = target.name_or_path
    inject_adapter_in_model(config, target, ADAPTER_NAME)
    target._hf_peft_config_loaded = True  # transformers recognises models with adapters by this attribute


def _state_dict(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(target, adapter_name=ADAPTER_NAME)


def _refuse_adapters(target: PreTrainedModel) -> None:
    if has_adapters(target):
        raise ValueError(
            "the target has LoRA adapters already; merge them into its weights first, or load the target without them."
        )


def adapter_parameters(target: nn.Module) -> list[nn.Parameter]:
    """Returns the weights of our adapter on a target, in a fixed order."""
    return [p for name, p in target.named_parameters() if "lora_" in name and f".{ADAPTER_NAME}." in name]


def save_adapter(target: PreTrainedModel, folder: Path) -> None:
    """Saves our adapter on a target to a folder, in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    target.peft_config[ADAPTER_NAME].save_pretrained(str(folder))
    weights = _state_dict(target)
    save_file({PREFIX + key: value.detach().cpu().contiguous() for key, value in weights.items()}, folder / WEIGHTS)


def restore_adapter(target: PreTrainedModel, folder: Path) -> None:
    """Loads saved weights into our adapter on a target.

    Raises:
        HeadLoadError: if the folder lacks the weights, or if they do not fit the adapter.
    """
    from peft import set_peft_model_state_dict

    weights = _saved(folder)
    expected = _state_dict(target)
    if {key: value.shape for key, value in weights.items()} != {key: value.shape for key, value in expected.items()}:
        raise HeadLoadError(
            f"the adapter in {folder} differs in size from the target's adapter; train with the rank of the saved one."
        )
    set_peft_model_state_dict(target, weights, adapter_name=ADAPTER_NAME)


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the saved weights of an adapter, under the names that peft uses for them on a target.

    Raises:
        HeadLoadError: if the folder holds no weights.
    """
    if not (folder / WEIGHTS).exists():
        raise HeadLoadError(f"{folder} holds no {WEIGHTS}; the heads beside it were not trained with an adapter.")
    return {key.removeprefix(PREFIX): value for key, value in load_file(folder / WEIGHTS).items()}


def _fits(target: nn.Module, key: str, size: torch.Size) -> bool:
    """Whether a target has a layer that fits an adapter's factor, `lora_A` [rank, in] or `lora_B` [out, rank].

    Also true if `key` names no such factor, since nothing can be checked then.
    """
    name, _, factor = key.rpartition(".lora_")
    if factor not in ("A.weight", "B.weight"):
        return True
    try:
        layer = target.get_submodule(name)
    except AttributeError:
        return False
    own = getattr(layer, "in_features" if factor[0] == "A" else "out_features", None)
    return own is None or own == size[1 if factor[0] == "A" else 0]


@contextmanager
def without_adapter(target: nn.Module) -> Iterator[None]:
    """Disables all adapters of a model inside the context, which gives the model without them."""
    layers = [layer for layer in _lora_layers(target) if not layer.disable_adapters]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
