"""A conversation with a target that is interrupted, and what must hold afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from support.faults import At, Fault, FaultyStreamer, assert_same_contents, hooks_of, warm_cache
from support.stubs import StubHead
from support.targets import own_target, plain, prompt

NEW = 12
RANKS = (0, 0, None, 1, 0, 0)
CHAINS = ("bloom", "llama4", "lfm2")  # transformers' own cache: rows only, windows, convolutions


class Scene:
    """A conversation with a target, to be interrupted; every attempt starts from the same cache.

    Args:
        family: Of the target.
        tokens: What the cache holds that is handed in; `None` for an internal one.
    """

    def __init__(self, family: str, tokens: int | None):
        self.target = own_target(family)
        self.cache, self.ids = warm_cache(self.target, tokens or 0)
        self.handed_in = tokens is not None
        self.plain_caches: dict[int, DynamicCache] = {}
        self.text = plain(self.target, self.ids, NEW, past_key_values=copy.deepcopy(self.cache))
        # transformers hangs hooks of its own on a model that is asked for hidden states, once and for good.
        self.target(prompt(3), output_hidden_states=True)
        tree = {"kind": "chain", "depth": 3} if family in CHAINS else {}
        # Heads know nothing of tokens that came in a cache: for them the text begins after those.
        self.heads = StubHead(self.target, self.text[:, self.cache.get_seq_length() :], RANKS, **tree)
        self.hooks = hooks_of(self.target)

    def call(self, **options) -> torch.Tensor:
        cache = {"past_key_values": self.attempt} if self.handed_in else {}
        return plain(self.target, self.ids, NEW, **cache, **options)

    def interrupted(self, at: At, error: type[BaseException] = Fault, **options) -> None:
        """A call that is interrupted; afterwards everything is as it must be."""
        self.attempt = copy.deepcopy(self.cache)
        with pytest.raises(error):
            self.call(assistant_model=self.heads, **options)
        if self.handed_in:
            self.check_cache(options.get("streamer"))

    def check_cache(self, streamer: FaultyStreamer | None) -> None:
        held, prompt_length = self.attempt.get_seq_length(), self.ids.shape[1]
        if held < prompt_length:  # the prompt's own forward was interrupted
            assert_same_contents(self.attempt, self.cache)
            return
        if streamer is not None:
            assert held == len(streamer.tokens) - 1
        assert_same_contents(self.attempt, self.plain_cache(held))

    def plain_cache(self, tokens: int) -> DynamicCache:
        """What plain decoding has in the cache when it holds so many tokens; only to look at."""
        if tokens not in self.plain_caches:
            cache = self.plain_caches[tokens] = copy.deepcopy(self.cache)
            plain(self.target, self.ids, tokens - self.ids.shape[1] + 1, past_key_values=cache)
        return self.plain_caches[tokens]

    def check_next_call(self) -> None:
        assert hooks_of(self.target) == self.hooks
        self.attempt = copy.deepcopy(self.cache)
        assert torch.equal(self.call(assistant_model=self.heads), self.text)
