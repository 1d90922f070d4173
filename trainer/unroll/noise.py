"""Uniform noise on the inputs of draft heads in training: on the target's features and on token embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_specheads.unroll.streams import document_starts


def feature_noise(
    features: torch.Tensor,
    batch: dict[str, torch.Tensor],
    half_width: float,
    scaling: str,
    generator: torch.Generator,
) -> torch.Tensor | None:
    """Draws uniform noise U(-a, a) for input features (EAGLE, arXiv 2401.15077, section 4.1); `None` for a = 0.

    Args:
        features: [B, T, F], the features that get the noise.
        batch: Batch from a collator.
        half_width: Half width a of the noise.
        scaling: `"none"`; `"eagle"` multiplies by 512 / length of the document in tokens, as the authors' code does;
            `"neftune"` divides by sqrt(length * F).
        generator: Source of randomness, on the features' device.

    Returns:
        fp32 [B, T, F].
    """
    if half_width == 0:
        return None
    noise = (
        torch.rand(features.shape, dtype=torch.float32, device=features.device, generator=generator)
        .mul_(2)
        .sub_(1)
        .mul_(half_width)
    )
    if scaling == "eagle":
        noise *= (512.0 / document_lengths(batch))[..., None]
    elif scaling == "neftune":
        noise /= (document_lengths(batch) * features.shape[-1]).sqrt()[..., None]
    return noise


def noisy_embedding(
    embed_tokens: Callable[[torch.Tensor], torch.Tensor],
    batch: dict[str, torch.Tensor],
    alpha: float,
    generator: torch.Generator,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Wraps the target's embedding so that every call adds fresh noise U(-1, 1) * alpha / sqrt(length * E) (NEFTune,
    arXiv 2310.05914; Hydra, arXiv 2402.05109). Made for rows from [`unroll_inputs`].

    Args:
        embed_tokens: The target's token embedding, ids [B, T - 1] -> [B, T - 1, E].
        batch: Batch from a collator, of T tokens.
        alpha: Scale of the noise, above 0.
        generator: Source of randomness, on the batch's device.
    """
    lengths = document_lengths(batch)[:, :-1, None]

    def embed(ids: torch.Tensor) -> torch.Tensor:
        embeddings = embed_tokens(ids)
        noise = (
            torch.rand(embeddings.shape, dtype=torch.float32, device=lengths.device, generator=generator)
            .mul_(2)
            .sub_(1)
            .mul_(alpha)
        )
        noise /= (lengths * embeddings.shape[-1]).sqrt()
        return embeddings + noise.to(embeddings.device, embeddings.dtype)

    return embed


def document_lengths(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns fp32 [B, T], the number of tokens of the document that each token belongs to (at least 1)."""
    documents = batch.get("document_ids")
    if documents is None:
        documents = torch.zeros_like(batch["input_ids"])
    if batch.get("attention_mask") is not None:
        documents = documents.masked_fill(batch["attention_mask"] == 0, -1)
    run = document_starts(documents).long().cumsum(dim=1) - 1  # [B, T], index of the run of equal ids
    counts = torch.zeros_like(run).scatter_add_(1, run, torch.ones_like(run))
    return counts.gather(1, run).float()
