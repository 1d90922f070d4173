"""Which class of transformers a target is loaded with."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

HUB = ("revision", "trust_remote_code", "local_files_only", "token")


def load_target(source: str, *, images: bool = False, **options: Any) -> PreTrainedModel:
    """A target: a causal language model, or one of images and text where the checkpoint is of no other kind.

    Args:
        source: Folder or Hub id.
        images: Whether the model is wanted that reads images too, also where the text model in it can be loaded alone.
        **options: Of `from_pretrained`.
    """
    hub = {name: options[name] for name in HUB if name in options}
    config = AutoConfig.from_pretrained(source, **hub)
    return target_class(config, images).from_pretrained(source, **options)


def target_class(config: Any, images: bool = False) -> Any:
    """`AutoModelForCausalLM`, or `AutoModelForImageTextToText` for a config that only the latter knows or if `images`
    are wanted."""
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    text_alone = remote or type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if reads_images and (images or not text_alone) else AutoModelForCausalLM
