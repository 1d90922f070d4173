"""What a head borrows from its target: embedding, `lm_head`, and the features of every forward.

A *feature* is the target's last hidden state **after its final norm**, exactly what the target's `lm_head` reads.
Row j of a head pairs feature f_j with the embedding of token x_{j+1}:

    token     x_0   x_1   x_2   x_3 (root, no feature yet)
    feature   f_0   f_1   f_2
    row       (x_1,f_0) (x_2,f_1) (x_3,f_2)      at positions 0, 1, 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .structure import forward_parameters


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


def features_problem(hidden_states: Sequence[torch.Tensor], layers: tuple[int, ...], width: int) -> str | None:
    """Why some of a target's hidden states are no features, `None` if all are.

    Between layers they need not be what they are after the last one: DeepSeek V4 hands several on side by side. And a
    config may count more layers than there are states (LongCat).

    Args:
        hidden_states: Of a forward.
        layers: Those that heads read, see `DraftHead.feature_layers`.
        width: Of a feature.
    """
    for layer in layers:
        if layer >= len(hidden_states):
            return f"there is no hidden state {layer} of the {len(hidden_states)} it has"
        shape = list(hidden_states[layer].shape)
        if shape[2:] != [width]:
            return f"hidden state {layer} has shape {shape}, and heads read features [B, N, {width}]"
    return None


class FeatureReader:
    """Asks the target's forwards of one generation for features, and reads them.

    Args:
        layers: Hidden states that make up a feature, see `DraftHead.feature_layers`.
        all_layers: Whether the caller asked for all hidden states anyway.

    Attributes:
        forward_kwargs: Arguments of every forward of the target.
    """

    def __init__(self, layers: tuple[int, ...], all_layers: bool):
        self.layers = layers
        # Single hidden states (`output_hidden_states=-1` or a list) survive `torch.compile`.
        self.forward_kwargs: dict[str, Any] = {
            "output_hidden_states": True if all_layers else asked_hidden_states(layers)
        }
        self.positions_dropped = False

    def prefill(
        self, target: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """transformers' own prefill, which may be chunked.

        Args:
            target: The target.
            input_ids: int64 [B, T], the prompt.
            config, model_kwargs: As `generate` prepared them.

        Returns:
            Outputs of the last chunk, and the features [B, T, F] of all of them; `None` for heads that read none.
        """
        recorded = _Recorded(target, self.features)
        outputs = type(target)._prefill(recorded, input_ids, config, model_kwargs | self.forward_kwargs)
        self.positions_dropped = "position_ids" in forward_parameters(target) and not recorded.positions_given
        chunks = [chunk for chunk in recorded.kept if chunk is not None]
        return outputs, torch.cat(chunks, dim=1) if chunks else None

    def counted(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Of the kwargs of a call, after its prefill, those by which the target knows positions: none where they are
        thrown away (by Exaone 4.5, or as another function stands before its forward) and it counts the slots of its
        cache, padding included."""
        return {} if self.positions_dropped else model_kwargs

    def features(self, outputs: Any) -> torch.Tensor | None:
        """Features of one forward over N nodes, [B, N, F]; `None` for heads that read none."""
        return select_hidden_states(outputs.hidden_states, self.layers) if self.layers else None


class _Recorded:
    """A target of whose every forward something is kept; the target itself, which others may be using, is not touched.

    Args:
        target: The target; whatever else is asked of this object, it answers.
        read: What to keep of the outputs.

    Attributes:
        kept: Of every forward so far.
        positions_given: Whether a forward was given the positions of its tokens.
    """

    def __init__(self, target: PreTrainedModel, read: Callable[[ModelOutput], torch.Tensor | None]):
        self._target, self._read = target, read
        self.kept: list[torch.Tensor | None] = []
        self.positions_given = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
        self.positions_given |= kwargs.get("position_ids") is not None
        outputs = self._target(*args, **kwargs)
        self.kept.append(self._read(outputs))
        return outputs
