"""What a head borrows from its target: embedding, `lm_head`, and the features of every forward.

A *feature* is the target's last hidden state **after its final norm**, exactly what the target's `lm_head` reads.
Row j of a head pairs feature f_j with the embedding of token x_{j+1}:

    token     x_0   x_1   x_2   x_3 (root, no feature yet)
    feature   f_0   f_1   f_2
    row       (x_1,f_0) (x_2,f_1) (x_3,f_2)      at positions 0, 1, 2
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


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
