"""Features of the frozen target, computed in process, and the rows the unroll trains on.

Nothing is written to disk, and the target is never part of the optimizer or of a checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specheads.target.borrowed import BorrowedModules
from hf_specheads.target.features import asked_hidden_states, select_hidden_states

from ..devices.sharding import decoder_layers
from .unroll import RowInputs


class FrozenTarget:
    """A target that only computes features.

    Args:
        target: The target model. **It is frozen in place**: evaluation mode, no parameter requires a gradient.
        compiling: Arguments of `torch.compile` for its decoder layers, which share what is compiled; `None`: as they
            are. Only forwards of this object run what is compiled, `generate` does not.

    Raises:
        ValueError: for layers to compile that cannot be found.
    """

    def __init__(self, target: PreTrainedModel, compiling: dict[str, Any] | None = None):
        self.model = target.eval().requires_grad_(False)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = BorrowedModules.of(target).lm_head  # to logits, the target's multipliers and soft-cap included
        accepted = inspect.signature(target.forward).parameters
        self._takes_position_ids = "position_ids" in accepted
        # Only the features are wanted, so `lm_head` runs on a single row.
        self._fewer_logits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        # Not accelerate's `compile_regions`: its wrappers record every hidden state twice.
        self._compiled = {} if compiling is None else _compiled_calls(target, compiling)

    def features(
        self, batch: dict[str, torch.Tensor], layers: tuple[int, ...] = (-1,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of every token of a batch, in the target's dtype.

        Args:
            batch: As the collators of [`data`] make it. Several documents of a sequence are told apart by
                `position_ids`, which transformers turns into masks that keep them apart. A batch that brings its own
                `features` and `final_features` costs no forward.
            layers: Hidden states the heads read, see `DraftHead.feature_layers`.

        Returns:
            What the heads read, [B, T, F], and the final features, [B, T, H]; the same tensor for most heads.

        Raises:
            ValueError: for packed sequences and a target that takes no `position_ids`.
        """
        if "final_features" in batch:
            return batch["features"], batch["final_features"]
        with torch.no_grad():
            return self.compute_features(batch, layers)

    def compute_features(
        self, batch: dict[str, torch.Tensor], layers: tuple[int, ...] = (-1,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`features`], but always by a forward, and with a graph if gradients are enabled."""
        if "image_inputs" in batch:
            return self._one_by_one(batch, layers)
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
        return self._forward(inputs, layers)

    def _forward(
        self, inputs: dict[str, Any], layers: tuple[int, ...], asked: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked = asked or asked_hidden_states(layers if layers in ((), (-1,)) else (*layers, -1)) or -1
        with self._compiled_layers():
            outputs = self.model(**inputs, **self._fewer_logits, output_hidden_states=asked, use_cache=False)
        states = outputs.hidden_states
        return (select_hidden_states(states, layers) if layers else states[-1]), states[-1]

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        """Has the layers run what is compiled, where something is."""
        for layer, call in self._compiled.items():
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer in self._compiled:
                layer._compiled_call_impl = None

    def _one_by_one(self, batch: dict[str, Any], layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of sequences with images, each with a forward of its own: how images of several sequences go
        together is different for every family. Zeros on padding."""
        found = []
        for ids, mask, images in zip(batch["input_ids"], batch["attention_mask"], batch["image_inputs"], strict=True):
            length = int(mask.sum())
            own = {name: v.to(self.model.dtype) if v.is_floating_point() else v for name, v in images.items()}
            inputs = {"input_ids": ids[None, :length], "attention_mask": mask[None, :length], **own}
            missing = len(ids) - length
            # All hidden states: what is asked of a target reaches its vision tower too, of which Llava reads another.
            states = self._forward(inputs, layers, asked=True)
            found.append([torch.nn.functional.pad(state, (0, 0, 0, missing)) for state in states])
        features, final = (torch.cat(states) for states in zip(*found, strict=True))
        return features, final


def _compiled_calls(target: PreTrainedModel, compiling: dict[str, Any]) -> dict[nn.Module, Any]:
    """By decoder layer, what `nn.Module.compile` makes of its call; nothing is compiled before it runs."""
    calls = {}
    for layer in decoder_layers(target, "set torch_compile=False"):
        layer.compile(**compiling)
        calls[layer], layer._compiled_call_impl = layer._compiled_call_impl, None
    return calls


def unroll_inputs(
    batch: dict[str, torch.Tensor],
    features: torch.Tensor,
    final_features: torch.Tensor,
    noise: torch.Tensor | None = None,
) -> RowInputs:
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
