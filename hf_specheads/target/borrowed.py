"""Modules that draft heads borrow from their target without owning them: the token embedding and the `lm_head`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from .logits import IDENTITY, LogitFunction


def as_embedding(
    embedding: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns an embedding lookup, from a weight [V, E] or from the target's own module.

    A module is called, and its weight not read, so that offloaded, adapted or scaled embeddings behave as in the
    target.
    """
    if isinstance(embedding, torch.Tensor):
        return lambda ids: F.embedding(ids, embedding)
    return embedding


def as_lm_head(
    lm_head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a map from features [..., H] to logits [..., V].

    Args:
        lm_head: A weight [V, H], or the target's own module.
        dtype: Dtype of the target. Features are converted to it for a quantised module, whose weight is not of a
            floating point dtype.
    """
    if isinstance(lm_head, torch.Tensor):
        return lambda features: F.linear(features.to(lm_head.dtype), lm_head)
    weight = getattr(lm_head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype
    return lm_head if dtype is None else lambda features: lm_head(features.to(dtype))


def _execution_device(lm_head: nn.Module, target: PreTrainedModel) -> torch.device:
    """Returns the device on which the target's `lm_head` computes.

    The weight of an offloaded module is on `meta`, and only accelerate's hook knows the device.
    """
    weight, hook = getattr(lm_head, "weight", None), getattr(lm_head, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # accelerate wraps several hooks into one
    told = [getattr(one, "execution_device", None) for one in hooks]
    candidates = (getattr(weight, "device", None), *told, target.device)
    devices = [torch.device(device) for device in candidates if device is not None]
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


@dataclass(frozen=True)
class BorrowedModules:
    """The parts of the target that a draft head calls. They are held outside the module tree: never saved or trained.

    Attributes:
        embed_tokens: Token ids -> embeddings [..., E].
        lm_head: Features [..., H] -> the target's logits [..., V], including its multipliers and final soft-cap.
        device: Device on which `lm_head` computes.
        logit_function: What this `lm_head` applies to the output of the target's module of that name.
        look_up: Same result as `embed_tokens` at the lowest cost, for calls in every level of a draft tree.
    """

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    logit_function: LogitFunction = IDENTITY
    look_up: Callable[[torch.Tensor], torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "look_up", _lookup(self.embed_tokens))

    @classmethod
    def of(cls, target: PreTrainedModel) -> BorrowedModules:
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        function, projection = LogitFunction.of(target), as_lm_head(lm_head, target.dtype)
        logits = projection if function.is_identity else lambda features: function(projection(features))
        return cls(embedding, logits, _execution_device(lm_head, target), function)


def _lookup(embedding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that embeds tokens, bypassing the module call if the module only looks tokens up.

    The call of a module costs more than the lookup itself.
    """
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or "forward" in embedding.__dict__:
        return embedding
    hooked = embedding._forward_hooks or embedding._forward_pre_hooks
    if hooked or type(embedding._parameters.get("weight")) is not nn.Parameter:
        return embedding
    parameters: Any = embedding._parameters
    return lambda token_ids: torch.embedding(parameters["weight"], token_ids)


class Binding:
    """The target that heads are bound to, and what is derived from it. A binding does not keep its target alive.

    The copies that `with_tree` makes share one binding until one of them is bound again. A deep copy is bound to the
    same target, which is not copied. An unpickled binding is bound to no target.

    Args:
        target: The target; `None` for an unbound binding.

    Attributes:
        copied: Copies made of the target's weights; they are dropped together with the target.
    """

    def __init__(self, target: PreTrainedModel | None = None):
        self.copied: dict[str, Any] = {}
        self._borrowed: BorrowedModules | None = None
        self._target: weakref.ref[PreTrainedModel] | None = None
        if target is not None:
            self._borrowed = BorrowedModules.of(target)
            ours = weakref.ref(self)

            def forget(_: weakref.ref[PreTrainedModel]) -> None:
                if (binding := ours()) is not None:
                    binding._borrowed = None
                    binding.copied.clear()

            self._target = weakref.ref(target, forget)

    @property
    def target(self) -> PreTrainedModel | None:
        """The target; `None` if there is none or it has been freed."""
        return None if self._target is None else self._target()

    @property
    def borrowed(self) -> BorrowedModules:
        """The modules borrowed from the target.

        Raises:
            RuntimeError: if there is no target or it has been freed.
        """
        if self._borrowed is None:
            state = "not bound to a target yet" if self._target is None else "bound to a target that is gone"
            raise RuntimeError(f"these draft heads are {state}; call `heads.bind(target)` first.")
        return self._borrowed

    def look_again(self) -> None:
        """Borrows the target's modules again, in case they have been replaced or moved."""
        if (target := self.target) is not None:
            self._borrowed = BorrowedModules.of(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return Binding(self.target)

    def __reduce__(self) -> tuple[type[Binding], tuple[()]]:
        return Binding, ()
