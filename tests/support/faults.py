"""Faults at a chosen moment of a generation, and comparison of caches with those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from support.targets import plain, prompt


class Fault(Exception):
    """The error that injected faults raise."""


class At:
    """Raises at its k-th call; with `None` it only counts its calls."""

    def __init__(self, k: int | None = None, error: type[BaseException] = Fault):
        self.k, self.error, self.calls = k, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.k:
            raise self.error("injected")


class FaultyCriterion(StoppingCriteria):
    def __init__(self, at: At):
        self.at = at

    def __call__(self, input_ids, scores, **kwargs):
        self.at()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FaultyProcessor(LogitsProcessor):
    def __init__(self, at: At):
        self.at = at

    def __call__(self, input_ids, scores):
        self.at()
        return scores


class FaultyStreamer:
    def __init__(self, at: At):
        self.at, self.tokens = at, []

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if value.dim() == 1:  # the prompt has two dimensions
            self.at()

    def end(self):
        pass


@contextmanager
def forward_fault(module: torch.nn.Module, at: At) -> Iterator[None]:
    """Calls `at` at the beginning of every forward of a module."""
    hook = module.register_forward_pre_hook(at)
    try:
        yield
    finally:
        hook.remove()


def warm_cache(target: Any, tokens: int) -> tuple[DynamicCache, torch.Tensor]:
    """Returns a cache with the first tokens of a conversation, and all tokens of the conversation so far, int64 [1,
    T]."""
    cache = DynamicCache(config=target.config)
    if not tokens:
        return cache, prompt(11)
    first = plain(target, prompt(tokens - 3), 4, past_key_values=cache)
    return cache, torch.cat([first, prompt(6, seed=1)], dim=1)


def contents(cache: Any) -> list[dict[str, Any]]:
    """Returns everything that the layers of a cache hold, as one dictionary per layer."""
    return [
        {name: value for name, value in vars(layer).items() if name not in ("_sliding_window_tensor", "device")}
        for layer in cache.layers
    ]


def assert_same_contents(ours: Any, theirs: Any) -> None:
    """Checks that two caches are equal, layer by layer: tensors, lengths and switches."""
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(contents(ours), contents(theirs), strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            _assert_same(value, other[name], name)


def _assert_same(mine: Any, other: Any, name: str) -> None:
    if isinstance(mine, torch.Tensor):
        assert mine.shape == other.shape, name
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys(), name
        for key, value in mine.items():
            _assert_same(value, other[key], f"{name}[{key}]")
    else:
        assert mine == other, name


def count_of(run: Callable[[At], Any]) -> int:
    """Returns how often the faulty moment occurs in an undisturbed call."""
    at = At()
    run(at)
    return at.calls


def hooks_of(module: torch.nn.Module) -> int:
    """Counts hooks and patched forwards on a module and all its parts."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m)) for m in module.modules())
