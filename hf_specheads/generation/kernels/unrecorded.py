"""Forwards of rounds without autograd's layers of the dispatcher.

Under `torch.no_grad()` autograd records nothing, but every operator still passes through its two layers of the
dispatcher, which of a small model's forward, or of one that a device waits for, is a part worth having.
`torch.inference_mode()` leaves them out too, but what is made in it can never again be changed in place or trained on,
and a call hands its caller caches, logits and hidden states. Here they are left out by the guard that torch's own
operators run under: what is made are ordinary tensors, by the same kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

Guard = Callable[[], AbstractContextManager[Any]]

BELOW_AUTOGRAD: Guard = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", nullcontext)

PLAIN = (nn.Parameter, torch.Tensor, type(None))

# Whose hooks are known to ask nothing of autograd.
KNOWN_HOOKS = ("transformers.", "accelerate.")


def guard_for(*models: nn.Module) -> Guard:
    """What the forwards of these models run under: nothing, where somebody may count on autograd's layers.

    That is a hook, which may differentiate what it sees; whatever else is compiled, which would be so once more for
    a state it was not compiled in; weights of types of their own (quantised, sharded), whose operators may be made of
    what those layers take apart.
    """
    if of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks:
        return nullcontext
    modules = itertools.chain.from_iterable(model.modules() for model in models)
    return BELOW_AUTOGRAD if all(_is_plain(module) for module in modules) else nullcontext


def _is_plain(module: nn.Module) -> bool:
    # Asked of every module in every call, most of which have few tensors and no hooks.
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if type(tensor) not in PLAIN:
            return False
    if module._forward_hooks or module._forward_pre_hooks:
        hooks = itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
        if not all((getattr(hook, "__module__", None) or "").startswith(KNOWN_HOOKS) for hook in hooks):
            return False
    return not is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether somebody compiles what a module does."""
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or ("config" in module.__dict__ and getattr(module.config, "_attn_implementation", None) == "flex_attention")
    )
