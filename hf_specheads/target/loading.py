"""Loading targets with the right auto class of transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

HUB = ("revision", "trust_remote_code", "local_files_only", "token")


def load_target(source: str, *, images: bool = False, **options: Any) -> PreTrainedModel:
    """Loads a target as a causal language model, or as an image-text model if the checkpoint is of no other kind.

    Args:
        source: Folder or Hub id.
        images: Load the model that also reads images even if its text model could be loaded alone.
        **options: Options of `from_pretrained`.
    """
    hub = {name: options[name] for name in HUB if name in options}
    config = AutoConfig.from_pretrained(source, **hub)
    return target_class(config, images).from_pretrained(source, **options)


def target_class(config: Any, images: bool = False) -> Any:
    """Returns the auto class to load a config with.

    That is `AutoModelForImageTextToText` if only this class knows the config, or if it does and `images` is set, and
    `AutoModelForCausalLM` otherwise.
    """
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    text_alone = remote or type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if reads_images and (images or not text_alone) else AutoModelForCausalLM
