"""Reading features from the target's forwards.

A *feature* is the target's last hidden state **after its final norm**, exactly what the target's `lm_head` reads.
(Some heads read other hidden states as well or instead; see `DraftHead.feature_layers`.)
Row j of a draft head pairs feature f_j with the embedding of token x_{j+1}:

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
    """Returns features from the `hidden_states` of a target's forward: the chosen states side by side, [B, N, F].

    Args:
        hidden_states: One entry per layer input, and the state after the final norm; `None` for states that were not
            requested.
        layers: Indices of the chosen states, see `DraftHead.feature_layers`.
    """
    if len(layers) == 1:
        return hidden_states[layers[0]]
    first = hidden_states[layers[0]]
    return torch.cat([hidden_states[layer].to(first.device) for layer in layers], dim=-1)


def asked_hidden_states(layers: tuple[int, ...]) -> Any:
    """Returns the value of `output_hidden_states` that makes a forward return only these hidden states."""
    if not layers:
        return False
    return layers[0] if len(layers) == 1 else list(layers)


def features_problem(hidden_states: Sequence[torch.Tensor], layers: tuple[int, ...], width: int) -> str | None:
    """Says why the hidden states that heads read cannot serve as features; `None` if they can.

    States between layers may have another shape than the last one: DeepSeek V4 passes several side by side. A config
    may also count more layers than there are hidden states (LongCat).

    Args:
        hidden_states: Hidden states of a forward.
        layers: Indices of the states that heads read, see `DraftHead.feature_layers`.
        width: Width of a single hidden state as the heads expect it.
    """
    for layer in layers:
        if layer >= len(hidden_states):
            return f"there is no hidden state {layer} of the {len(hidden_states)} it has"
        shape = list(hidden_states[layer].shape)
        if shape[2:] != [width]:
            return f"hidden state {layer} has shape {shape}, and heads read features [B, N, {width}]"
    return None


class FeatureReader:
    """Requests features from the target's forwards of one generation, and reads them.

    Args:
        layers: Hidden states that make up a feature, see `DraftHead.feature_layers`.
        all_layers: Whether the caller requested all hidden states anyway.

    Attributes:
        forward_kwargs: Arguments to add to every forward of the target.
        prefills: Number of prefills so far; more than one if prompts are read in groups.
        positions_dropped: Whether the prefill did not pass on the positions that the target's forward takes.
    """

    def __init__(self, layers: tuple[int, ...], all_layers: bool):
        self.layers = layers
        # Requesting single hidden states (`output_hidden_states=-1` or a list) works under `torch.compile`.
        self.forward_kwargs: dict[str, Any] = {
            "output_hidden_states": True if all_layers else asked_hidden_states(layers)
        }
        self.prefills, self.positions_dropped = 0, False

    def prefill(
        self, target: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """Runs transformers' own prefill, which may be chunked, and reads the features of all chunks.

        Args:
            target: The target.
            input_ids: int64 [B, T], the prompt.
            config, model_kwargs: Generation config and model kwargs as `generate` prepared them.

        Returns:
            Outputs of the last chunk, and the features [B, T, F] of all chunks; `None` for heads that read no
            features.
        """
        recorded = _Recorded(target, self.features)
        self.prefills += 1
        outputs = type(target)._prefill(recorded, input_ids, config, model_kwargs | self.forward_kwargs)
        self.positions_dropped = "position_ids" in forward_parameters(target) and not recorded.positions_given
        chunks = [chunk for chunk in recorded.kept if chunk is not None]
        return outputs, torch.cat(chunks, dim=1) if chunks else None

    def counted(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the kwargs from which the target's positions follow after the prefill.

        The result is empty if the positions in the kwargs do not reach the target's forward, because the model drops
        them (Exaone 4.5) or another function wraps its forward. Such a target counts the slots of its cache instead,
        padding included.
        """
        return {} if self.positions_dropped else model_kwargs

    def features(self, outputs: Any) -> torch.Tensor | None:
        """Returns the features of one forward over N nodes, [B, N, F]; `None` for heads that read no features."""
        return select_hidden_states(outputs.hidden_states, self.layers) if self.layers else None


class _Recorded:
    """Wraps a target and keeps something of the outputs of every forward.

    The target itself is not modified, because others may be using it.

    Args:
        target: The target, to which all other attribute accesses are forwarded.
        read: Returns what to keep of the outputs of a forward.

    Attributes:
        kept: What `read` returned, for every forward so far.
        positions_given: Whether any forward was given the positions of its tokens.
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
