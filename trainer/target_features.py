"""Features of the frozen target, computed in process, and the rows the unroll trains on.

Nothing is written to disk, and the target is never part of the optimizer or of a checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads.target.features import asked_hidden_states, select_hidden_states
from hf_specheads.unroll.streams import document_starts


class FrozenTarget:
    """A target that only computes features.

    Args:
        target: The target model. **It is frozen in place**: evaluation mode, no parameter requires a gradient.
    """

    def __init__(self, target: PreTrainedModel):
        self.model = target.eval().requires_grad_(False)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        accepted = inspect.signature(target.forward).parameters
        self._takes_position_ids = "position_ids" in accepted
        # Only the features are wanted, so `lm_head` runs on a single row.
        self._fewer_logits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def features(
        self, batch: dict[str, torch.Tensor], layers: tuple[int, ...] = (-1,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of every token of a batch, in the target's dtype.

        Args:
            batch: As the collators of [`data`] make it. Rows of several documents are told apart by `position_ids`,
                which transformers turns into masks that keep the documents apart. A batch that brings its own
                `features` and `final_features` costs no forward.
            layers: Hidden states the heads read, see `DraftHead.feature_layers`.

        Returns:
            What the heads read, [B, T, F], and the final features, [B, T, H]; the same tensor for most heads.

        Raises:
            ValueError: for packed rows and a target that takes no `position_ids`.
        """
        if "final_features" in batch:
            return batch["features"], batch["final_features"]
        with torch.no_grad():
            return self.compute_features(batch, layers)

    def compute_features(
        self, batch: dict[str, torch.Tensor], layers: tuple[int, ...] = (-1,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`features`], but always by a forward, and with a graph if gradients are enabled."""
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
        if "document_ids" in batch:
            if not self._takes_position_ids:
                raise ValueError(
                    f"{type(self.model).__name__} takes no `position_ids`, so packed documents could not be kept "
                    "apart; set packing=False."
                )
            inputs["position_ids"] = batch["position_ids"]
        else:
            inputs["attention_mask"] = batch.get("attention_mask")
        asked = asked_hidden_states(layers if layers in ((), (-1,)) else (*layers, -1)) or -1
        states = self.model(**inputs, **self._fewer_logits, output_hidden_states=asked, use_cache=False).hidden_states
        return (select_hidden_states(states, layers) if layers else states[-1]), states[-1]


def unroll_inputs(
    batch: dict[str, torch.Tensor],
    features: torch.Tensor,
    final_features: torch.Tensor,
    noise: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """The T - 1 rows of T tokens, as keyword arguments of [`Unroll`].

    Row t pairs the feature of token t with token t + 1, and is supervised if token t + 1 is, i.e. where drafting may
    start in use. The last token of a document has no row, because nothing follows it.

    Args:
        batch: As the collators make it; `loss_mask` [B, T] is nonzero at supervised tokens.
        features: [B, T, F], target features that the heads read.
        final_features: [B, T, H], target features after the final norm.
        noise: [B, T, F], added to the input features only.
    """
    ids, loss_mask = batch["input_ids"], batch["loss_mask"]
    inputs = features if noise is None else features + noise.to(features.dtype)
    attention_mask = batch.get("attention_mask")
    documents, positions = batch.get("document_ids"), batch.get("position_ids")
    complete = None if attention_mask is None else attention_mask[:, :-1] * attention_mask[:, 1:]
    if documents is not None:
        same = documents[:, :-1] == documents[:, 1:]
        complete = same.long() if complete is None else complete * same
    return {
        "features": inputs[:, :-1],
        "token_ids": ids[:, :-1],
        "next_token_ids": ids[:, 1:],
        "target_features": final_features[:, 1:],
        "loss_mask": loss_mask[:, 1:],
        "attention_mask": complete,
        "document_ids": None if documents is None else documents[:, :-1],
        "position_ids": None if positions is None or documents is None else positions[:, :-1],
    }


def feature_noise(
    features: torch.Tensor,
    batch: dict[str, torch.Tensor],
    half_width: float,
    scaling: str,
    generator: torch.Generator,
) -> torch.Tensor | None:
    """Uniform noise U(-a, a) for input features (EAGLE, arXiv 2401.15077, section 4.1), or `None` for a = 0.

    Args:
        features: [B, T, H].
        batch: As the collators make it.
        half_width: a.
        scaling: `"none"`; `"eagle"`: times 512 / length of the document in tokens, as the authors' code does; or
            `"neftune"`: divided by sqrt(length * F).
        generator: Source of randomness, on the features' device.

    Returns:
        fp32 [B, T, H].
    """
    if half_width == 0:
        return None
    noise = torch.rand(features.shape, device=features.device, generator=generator).mul_(2).sub_(1).mul_(half_width)
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
    """The target's embedding with fresh noise U(-1, 1) * alpha / sqrt(length * E) at every call (NEFTune, arXiv
    2310.05914; Hydra, arXiv 2402.05109), for rows made by [`unroll_inputs`].

    Args:
        embed_tokens: Ids [B, T - 1] -> [B, T - 1, E].
        batch: As the collators make it, of T tokens.
        alpha: Above 0.
        generator: Source of randomness, on the batch's device.
    """
    lengths = document_lengths(batch)[:, :-1, None]

    def embed(ids: torch.Tensor) -> torch.Tensor:
        embeddings = embed_tokens(ids)
        noise = torch.rand(embeddings.shape, device=lengths.device, generator=generator).mul_(2).sub_(1).mul_(alpha)
        noise /= (lengths * embeddings.shape[-1]).sqrt()
        return embeddings + noise.to(embeddings.device, embeddings.dtype)

    return embed


def document_lengths(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """fp32 [B, T], the number of real tokens of the document each token belongs to (at least 1)."""
    documents = batch.get("document_ids")
    if documents is None:
        documents = torch.zeros_like(batch["input_ids"])
    if batch.get("attention_mask") is not None:
        documents = documents.masked_fill(batch["attention_mask"] == 0, -1)
    run = document_starts(documents).long().cumsum(dim=1) - 1  # [B, T], index of the run of equal ids
    counts = torch.zeros_like(run).scatter_add_(1, run, torch.ones_like(run))
    return counts.gather(1, run).float()
