"""Runs forwards of rounds without autograd's layers of the dispatcher.

Under `torch.no_grad()` autograd records nothing, but every operator still passes through its two layers of the
dispatcher. In forwards of small models, and where a device waits for the host, that is a noticeable part of the time.
`torch.inference_mode()` skips these layers too, but tensors made in it can never be changed in place or trained on
afterwards, and a call returns caches, logits and hidden states to its caller. Here the layers are skipped by the guard
that torch's own operators run under: the same kernels run, and their results are ordinary tensors.
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

# Packages whose hooks are known not to use autograd.
KNOWN_HOOKS = ("transformers.", "accelerate.")


def guard_for(*models: nn.Module) -> Guard:
    """The guard that the forwards of these models run under; `nullcontext` if something may rely on autograd's layers.

    Hooks may differentiate what they see. Compiled modules would be compiled once more for a dispatcher state that
    they were not compiled in. Weights of special tensor types (quantised, sharded) may have operators that these
    layers decompose.
    """
    if of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks:
        return nullcontext
    modules = itertools.chain.from_iterable(model.modules() for model in models)
    return BELOW_AUTOGRAD if all(_is_plain(module) for module in modules) else nullcontext


def _is_plain(module: nn.Module) -> bool:
    # This runs for every module in every call. Most modules have few tensors and no hooks, so these checks come first.
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if type(tensor) not in PLAIN:
            return False
    if module._forward_hooks or module._forward_pre_hooks:
        hooks = itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
        if not all((getattr(hook, "__module__", None) or "").startswith(KNOWN_HOOKS) for hook in hooks):
            return False
    return not is_compiled(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by its user or by its attention implementation."""
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or ("config" in module.__dict__ and getattr(module.config, "_attn_implementation", None) == "flex_attention")
    )
