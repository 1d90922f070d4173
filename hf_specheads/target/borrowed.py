"""What heads borrow from their target, never own: its token embedding and its `lm_head`."""

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
    """An embedding lookup from a weight [V, E] or from the target's own module.

    Modules are called, not read, so that offloaded, adapted or scaled embeddings behave as in the target.
    """
    if isinstance(embedding, torch.Tensor):
        return lambda ids: F.embedding(ids, embedding)
    return embedding


def as_lm_head(
    lm_head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
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


def _execution_device(lm_head: nn.Module, target: PreTrainedModel) -> torch.device:
    """Where the target's `lm_head` computes: an offloaded weight is `meta`, and accelerate's hook knows the device."""
    weight, hook = getattr(lm_head, "weight", None), getattr(lm_head, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # accelerate chains several into one
    told = [getattr(one, "execution_device", None) for one in hooks]
    candidates = (getattr(weight, "device", None), *told, target.device)
    devices = [torch.device(device) for device in candidates if device is not None]
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


@dataclass(frozen=True)
class BorrowedModules:
    """The target's parts a head calls. Held outside the module tree, so they are never saved or trained.

    Attributes:
        embed_tokens: Token ids -> embeddings [..., E].
        lm_head: Features [..., H] -> the target's logits [..., V], its multipliers and final soft-cap included.
        device: Where `lm_head` computes.
        logit_function: What `lm_head` does after the target's module of that name.
        look_up: As `embed_tokens`, at the least cost: for what is called in every level of a draft tree.
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
    """What embeds tokens; of a module that looks them up and does no more, without a module's call, which costs more
    than the lookup."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or "forward" in embedding.__dict__:
        return embedding
    hooked = embedding._forward_hooks or embedding._forward_pre_hooks
    if hooked or type(embedding._parameters.get("weight")) is not nn.Parameter:
        return embedding
    parameters: Any = embedding._parameters
    return lambda token_ids: torch.embedding(parameters["weight"], token_ids)


class Binding:
    """The target that heads are bound to and what is made of it for them; it keeps no target alive.

    Shared by the copies that `with_tree` makes, until one of them is bound anew. Whoever copies heads deeply gets a
    binding to the same target, not a copy of it; a pickled one is bound to nothing.

    Args:
        target: The target, `None` for none.

    Attributes:
        copied: What was copied of the target's weights, which goes with the target.
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
        """The target, `None` if there is none or it is gone."""
        return None if self._target is None else self._target()

    @property
    def borrowed(self) -> BorrowedModules:
        """What is borrowed of the target.

        Raises:
            RuntimeError: if there is no target, or it is gone.
        """
        if self._borrowed is None:
            state = "not bound to a target yet" if self._target is None else "bound to a target that is gone"
            raise RuntimeError(f"these draft heads are {state}; call `heads.bind(target)` first.")
        return self._borrowed

    def look_again(self) -> None:
        """Borrows anew: the target's modules may have been replaced or moved since."""
        if (target := self.target) is not None:
            self._borrowed = BorrowedModules.of(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return Binding(self.target)

    def __reduce__(self) -> tuple[type[Binding], tuple[()]]:
        return Binding, ()
