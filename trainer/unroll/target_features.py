"""Computes features of the frozen target in process, and forms the rows that the unroll trains on.

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
    """A frozen target that only computes features.

    Args:
        target: The target model. **Frozen in place**: evaluation mode, and no parameter requires a gradient.
        compiling: Arguments of `torch.compile` for the decoder layers, which share the compiled code; `None` leaves
            the layers uncompiled. Only the forwards of this object run compiled layers; `generate` does not.

    Raises:
        ValueError: if layers should be compiled and cannot be found.
    """

    def __init__(self, target: PreTrainedModel, compiling: dict[str, Any] | None = None):
        self.model = target.eval().requires_grad_(False)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = BorrowedModules.of(target).lm_head  # applies the target's logit multipliers and soft-cap too
        accepted = inspect.signature(target.forward).parameters
        self._takes_position_ids = "position_ids" in accepted
        # Only the features are wanted, so `lm_head` runs on a single row.
        self._fewer_logits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        # accelerate's `compile_regions` is not an option, because its wrappers record every hidden state twice.
        self._compiled = {} if compiling is None else _compiled_calls(target, compiling)

    def features(
        self, batch: dict[str, torch.Tensor], layers: tuple[int, ...] = (-1,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the features of every token of a batch, in the target's dtype.

        Args:
            batch: Batch from a collator of [`data`]. Packed documents are separated by `position_ids`, from which
                transformers builds masks. A batch that already contains `features` and `final_features` needs no
                forward.
            layers: Hidden states that the draft heads read, see `DraftHead.feature_layers`.

        Returns:
            Features that the draft heads read, [B, T, F], and final features, [B, T, H]; the same tensor for most
            draft heads.

        Raises:
            ValueError: for packed sequences if the target takes no `position_ids`.
        """
        if "final_features" in batch:
            return batch["features"], batch["final_features"]
        with torch.no_grad():
            return self.compute_features(batch, layers)

    def compute_features(
        self, batch: dict[str, torch.Tensor], layers: tuple[int, ...] = (-1,)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes what [`features`] returns, but always runs a forward, with a graph if gradients are enabled."""
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
        """Makes the layers run their compiled calls inside the context, if they were compiled."""
        for layer, call in self._compiled.items():
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer in self._compiled:
                layer._compiled_call_impl = None

    def _one_by_one(self, batch: dict[str, Any], layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes features of sequences with images in one forward per sequence, because every model family batches
        images differently. Features are 0 on padding."""
        found = []
        for ids, mask, images in zip(batch["input_ids"], batch["attention_mask"], batch["image_inputs"], strict=True):
            length = int(mask.sum())
            own = {name: v.to(self.model.dtype) if v.is_floating_point() else v for name, v in images.items()}
            inputs = {"input_ids": ids[None, :length], "attention_mask": mask[None, :length], **own}
            missing = len(ids) - length
            # All hidden states are requested, because the request also reaches the vision tower, and Llava reads
            # another of the tower's states.
            states = self._forward(inputs, layers, asked=True)
            found.append([torch.nn.functional.pad(state, (0, 0, 0, missing)) for state in states])
        features, final = (torch.cat(states) for states in zip(*found, strict=True))
        return features, final


def _compiled_calls(target: PreTrainedModel, compiling: dict[str, Any]) -> dict[nn.Module, Any]:
    """Maps each decoder layer to its call compiled by `nn.Module.compile`; compilation happens at the first call."""
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
    """Turns T tokens into T - 1 rows, returned as keyword arguments of [`Unroll`].

    Row t pairs the feature of token t with token t + 1, and is supervised if token t + 1 is, that is, where a round
    may start during generation. The last token of a document has no row, because nothing follows it.

    Args:
        batch: Batch from a collator; `loss_mask` [B, T] is nonzero at supervised tokens.
        features: [B, T, F], target features that the draft heads read.
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
