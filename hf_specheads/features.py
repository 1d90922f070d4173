"""What a head borrows from its target: embedding, `lm_head`, and the features of every forward.

A *feature* is the target's last hidden state **after its final norm**, exactly what the target's `lm_head` reads.
Row j of a head pairs feature f_j with the embedding of token x_{j+1}:

    token     x_0   x_1   x_2   x_3 (root, no feature yet)
    feature   f_0   f_1   f_2
    row       (x_1,f_0) (x_2,f_1) (x_3,f_2)      at positions 0, 1, 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

FINGERPRINT_ROWS = 8
FINGERPRINT_COLUMNS = 4
FINGERPRINT_TOLERANCE = 0.02  # of the entries' root mean square: above bf16/fp16 rounding, far below another model


def as_embedding(embedding: torch.Tensor | nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding lookup from a weight [V, E] or from the target's own module.

    Modules are called, not read, so that offloaded, adapted or scaled embeddings behave as in the target.
    """
    if isinstance(embedding, torch.Tensor):
        return lambda ids: F.embedding(ids, embedding)
    return embedding


def as_lm_head(
    lm_head: torch.Tensor | nn.Module, dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A map from features [..., H] to logits [..., V] from a weight [V, H] or from the target's own module.

    Args:
        lm_head: Either of them.
        dtype: Of the target, what a quantised module without a weight of floating point is given.
    """
    if isinstance(lm_head, torch.Tensor):
        return lambda features: F.linear(features.to(lm_head.dtype), lm_head)
    weight = getattr(lm_head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype
    return lm_head if dtype is None else lambda features: lm_head(features.to(dtype))


def target_sizes(target: PreTrainedModel) -> dict[str, int]:
    """Sizes a head must agree on: `vocab_size`, `feature_size` (H) and `embedding_size` of a loaded target.

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


def target_fingerprint(target: PreTrainedModel) -> list[float]:
    """A few entries of the target's token embedding, spread over vocabulary and width.

    Read through the module, so it is the same for offloaded targets; compared with a tolerance, so it is the same for
    fp32, bf16 and fp16 copies of one model.

    Returns:
        FINGERPRINT_ROWS * FINGERPRINT_COLUMNS floats.
    """
    embedding = target.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    device = weight.device if weight is not None and weight.device.type != "meta" else torch.device("cpu")
    return _fingerprint(embedding, target.config.get_text_config(decoder=True).vocab_size, device)


def weight_fingerprint(weight: torch.Tensor) -> list[float]:
    """The same as [`target_fingerprint`], from a copy [V, E] of the target's token embedding."""
    return _fingerprint(as_embedding(weight), weight.shape[0], weight.device)


@torch.no_grad()
def _fingerprint(
    embedding: Callable[[torch.Tensor], torch.Tensor], vocab_size: int, device: torch.device
) -> list[float]:
    ids = torch.linspace(0, vocab_size - 1, FINGERPRINT_ROWS, device=device).long()
    rows = embedding(ids).float()
    columns = torch.linspace(0, rows.shape[-1] - 1, FINGERPRINT_COLUMNS, device=rows.device).long()
    return [round(x, 6) for x in rows[:, columns].flatten().tolist()]


def fingerprints_match(ours: list[float], theirs: list[float]) -> bool:
    """Whether two fingerprints come from the same weights, up to rounding to 16 bits."""
    if len(ours) != len(theirs):
        return False
    a, b = torch.tensor(ours), torch.tensor(theirs)
    scale = a.square().mean().sqrt().clamp_min(1e-8)
    return bool(((a - b).abs().max() / scale) < FINGERPRINT_TOLERANCE)


def target_identity(target: PreTrainedModel) -> dict[str, Any]:
    """What heads remember of their target: name, revision, type, depth and fingerprint."""
    config = target.config.get_text_config(decoder=True)
    return {
        "name": target.config.name_or_path or None,
        "revision": getattr(target.config, "_commit_hash", None),
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "fingerprint": target_fingerprint(target),
    }


def _execution_device(lm_head: nn.Module, target: PreTrainedModel) -> torch.device:
    """Where the target's `lm_head` computes: an offloaded weight is `meta`, and accelerate's hook knows the device."""
    weight, hook = getattr(lm_head, "weight", None), getattr(lm_head, "_hf_hook", None)
    candidates = (getattr(weight, "device", None), getattr(hook, "execution_device", None), target.device)
    devices = [torch.device(device) for device in candidates if device is not None]
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


@dataclass(frozen=True)
class BorrowedModules:
    """The target's parts a head calls. Held outside the module tree, so they are never saved or trained."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device

    @classmethod
    def of(cls, target: PreTrainedModel) -> BorrowedModules:
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        return cls(embedding, as_lm_head(lm_head, target.dtype), _execution_device(lm_head, target))


def select_hidden_states(hidden_states: tuple, layers: tuple[int, ...]) -> torch.Tensor:
    """Features from the `hidden_states` of a target's forward: the chosen ones side by side, [B, N, F].

    Args:
        hidden_states: One entry per layer input and the state after the final norm; `None` where not asked for.
        layers: Indices, see `DraftHead.feature_layers`.
    """
    if len(layers) == 1:
        return hidden_states[layers[0]]
    first = hidden_states[layers[0]]
    return torch.cat([hidden_states[layer].to(first.device) for layer in layers], dim=-1)


def asked_hidden_states(layers: tuple[int, ...]) -> Any:
    """Value of `output_hidden_states` that makes a forward return only these hidden states."""
    if not layers:
        return False
    return layers[0] if len(layers) == 1 else list(layers)


class FeatureReader:
    """Collects the features of every target forward of one generation.

    Asking a forward for single hidden states (`output_hidden_states=-1` or a list) survives `torch.compile`; only a
    chunked prefill, which returns its last chunk alone, needs forward hooks on the decoder.

    Args:
        target: The target model.
        layers: Hidden states that make up a feature, see `DraftHead.feature_layers`.
        chunked_prefill: Whether `generation_config.prefill_chunk_size` is set.
        all_layers: Whether the caller asked for all hidden states anyway.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...], chunked_prefill: bool, all_layers: bool):
        self.layers = layers
        self.forward_kwargs: dict[str, Any] = {
            "output_hidden_states": True if all_layers else asked_hidden_states(layers)
        }
        self._chunks: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        self._hooks = [self._record(target, layer) for layer in layers] if chunked_prefill else []

    def _record(self, target: PreTrainedModel, layer: int) -> Any:
        """Hook that keeps one hidden state of every chunk: what enters a layer, or what the decoder returns."""
        decoder, chunks = target.get_decoder(), self._chunks[layer]
        layers = next(getattr(decoder, name) for name in ("layers", "h") if hasattr(decoder, name))
        entered = layer % (len(layers) + 1)  # one hidden state more than layers
        if entered == len(layers):
            return decoder.register_forward_hook(
                lambda module, args, output: chunks.append(
                    output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
                )
            )
        return layers[entered].register_forward_pre_hook(
            lambda module, args, kwargs: chunks.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )

    def prompt_features(self, outputs: Any) -> torch.Tensor | None:
        """Features of the prefill, [B, T, F]; removes the hooks, which only the prefill needs."""
        chunks = self._chunks
        self.close()
        if not any(chunks.values()):
            return self.features(outputs)
        return torch.cat([torch.cat(chunks[layer], dim=1) for layer in self.layers], dim=-1)

    def features(self, outputs: Any) -> torch.Tensor | None:
        """Features of one forward over N nodes, [B, N, F]; `None` for heads that read none."""
        return select_hidden_states(outputs.hidden_states, self.layers) if self.layers else None

    def close(self) -> None:
        """Removes the hooks, if any."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._chunks = [], {layer: [] for layer in self.layers}
