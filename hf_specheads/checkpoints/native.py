"""Reads draft heads that were published inside a target's own checkpoint: MTP layers."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from ..errors import HeadConfigError, UnknownFormatError
from ..heads.auto import build_config
from ..heads.mtp import native_tensors
from ..heads.mtp_config import MOST_LAYERS, MtpHeadConfig, layer_config_of, layers_of, refuse_layers_of
from .fetch import HubOptions
from .layouts.detect import NATIVE
from .read import StoredHeads, check_against_config

METHODS = ("mtp",)


def read_native(source: str | os.PathLike[str], method: str, hub: HubOptions) -> StoredHeads:
    """Reads the draft heads in a target's checkpoint.

    Args:
        source: Folder or Hub id of the target.
        method: Method of the heads to read; one of [`METHODS`].
        hub: Revision, token and offline mode for a repository on the Hub.

    Raises:
        ValueError: If `method` is not one of [`METHODS`].
        HeadLoadError: One of its subclasses, if the target has no such heads or they cannot be read.
    """
    if method not in METHODS:
        raise ValueError(
            f"`method` of load_heads must be one of {list(METHODS)}, got {method!r}; it is only for heads inside a "
            "target's checkpoint, all others are recognised without it."
        )
    try:
        target = AutoConfig.from_pretrained(str(source), **hub)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise UnknownFormatError(
            f"its config.json is not the config of a target that transformers knows: {error}"
        ) from error
    text, fields = target.get_text_config(decoder=True), layer_config_of(target)
    width, count = text.hidden_size, layers_of(target)
    identity = {
        "name": str(source),
        "revision": getattr(target, "_commit_hash", None),
        "model_type": text.model_type,
        "num_hidden_layers": text.num_hidden_layers,
    }
    sizes = {"hidden_size": width, "feature_size": width, "embedding_size": width, "vocab_size": text.vocab_size}
    special = {name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    layers = {"layer_config": fields, "num_mtp_layers": min(count, MOST_LAYERS)}
    try:
        config = build_config(MtpHeadConfig, {**sizes, **special, **layers, "target": identity})
    except ValueError as error:
        raise HeadConfigError(f"config.json does not describe layers that can draft: {error}") from error
    assert isinstance(config, MtpHeadConfig)
    refuse_layers_of(target)
    tensors = native_tensors(config, str(source), **hub)
    check_against_config(tensors, config)
    notes = (f"the first {MOST_LAYERS} of {count} MTP layers are used",) if count > MOST_LAYERS else ()
    return StoredHeads(NATIVE, config, tensors, (Path(source),), notes)
