"""The identity of a target: the sizes that heads must agree with, and a fingerprint of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from .borrowed import as_embedding

FINGERPRINT_ROWS = 8

FINGERPRINT_COLUMNS = 4

FINGERPRINT_TOLERANCE = 0.02  # relative to the entries' RMS: above bf16/fp16 rounding, far below other models


def target_sizes(target: PreTrainedModel) -> dict[str, int]:
    """Returns the sizes a draft head must agree with: `vocab_size`, `feature_size` (H) and `embedding_size`.

    Raises:
        ValueError: if the target has no output embedding, i.e. is not a language model.
    """
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{type(target).__name__} has no `lm_head`; draft heads need a decoder-only language model "
            "(AutoModelForCausalLM)."
        )
    config = target.config.get_text_config(decoder=True)
    embedding = target.get_input_embeddings()
    return {
        "vocab_size": config.vocab_size,
        "feature_size": getattr(target.get_output_embeddings(), "in_features", config.hidden_size),
        "embedding_size": getattr(embedding, "embedding_dim", config.hidden_size),
    }


def spread_over(size: int, count: int) -> list[int]:
    """Returns `count` evenly spaced integers from 0 to `size - 1`.

    They are computed with Python integers, so they depend neither on torch's default dtype nor on a device, however
    large `size` is.
    """
    return [index * (size - 1) // max(count - 1, 1) for index in range(count)]


def target_fingerprint(target: PreTrainedModel) -> list[float]:
    """Returns a few entries of the target's token embedding, spread over vocabulary and width.

    The entries are read by calling the module, so offloading does not change them. Fingerprints are compared with a
    tolerance, so fp32, bf16 and fp16 copies of a model match. A LoRA adapter on the embedding is ignored, as are
    adapters on all other modules: an adapter only changes how many drafts are accepted.

    Returns:
        FINGERPRINT_ROWS * FINGERPRINT_COLUMNS floats.

    Raises:
        ValueError: if the target is on the `meta` device, without weights.
    """
    embedding = target.get_input_embeddings()
    if callable(base := getattr(embedding, "get_base_layer", None)):  # peft wraps the embedding it adapts
        embedding = base()
    weight = getattr(embedding, "weight", None)
    if weight is not None and weight.device.type == "meta" and not hasattr(embedding, "_hf_hook"):
        name = target.config.name_or_path or type(target).__name__
        raise ValueError(f"{name!r} is on the meta device, where tensors hold no numbers; load it with its weights.")
    device = weight.device if weight is not None and weight.device.type != "meta" else torch.device("cpu")
    return _fingerprint(embedding, target.config.get_text_config(decoder=True).vocab_size, device)


def weight_fingerprint(weight: torch.Tensor) -> list[float]:
    """Returns the same as [`target_fingerprint`], computed from a copy [V, E] of the target's token embedding."""
    return _fingerprint(as_embedding(weight), weight.shape[0], weight.device)


@torch.no_grad()
def _fingerprint(
    embedding: Callable[[torch.Tensor], torch.Tensor], vocab_size: int, device: torch.device
) -> list[float]:
    rows = embedding(torch.tensor(spread_over(vocab_size, FINGERPRINT_ROWS), device=device)).float()
    columns = spread_over(rows.shape[-1], FINGERPRINT_COLUMNS)
    return [round(x, 6) for x in rows[:, columns].flatten().tolist()]


def fingerprints_match(ours: list[float], theirs: list[float]) -> bool:
    """Whether two fingerprints come from the same weights, up to rounding to 16 bits."""
    if len(ours) != len(theirs):
        return False
    a, b = torch.tensor(ours, dtype=torch.float32), torch.tensor(theirs, dtype=torch.float32)
    scale = a.square().mean().sqrt().clamp_min(1e-8)
    return bool(((a - b).abs().max() / scale) < FINGERPRINT_TOLERANCE)


def target_identity(target: PreTrainedModel) -> dict[str, Any]:
    """Returns what the heads' config records of their target: name, revision, type, depth and fingerprint."""
    config = target.config.get_text_config(decoder=True)
    return {
        "name": target.config.name_or_path or None,
        "revision": getattr(target.config, "_commit_hash", None),
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "fingerprint": target_fingerprint(target),
    }
