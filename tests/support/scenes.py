"""A conversation with a target that is interrupted, and checks of the state afterwards."""

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
# families on transformers' own cache, which draft chains: rows only, windows, convolutions
CHAINS = ("bloom", "llama4", "lfm2")


class Scene:
    """A conversation with a target, to be interrupted. Every attempt starts from the same cache.

    Args:
        family: Family of the target.
        tokens: Number of tokens in the cache that the caller passes in; `None` for an internal cache.
    """

    def __init__(self, family: str, tokens: int | None):
        self.target = own_target(family)
        self.cache, self.ids = warm_cache(self.target, tokens or 0)
        self.handed_in = tokens is not None
        self.plain_caches: dict[int, DynamicCache] = {}
        self.text = plain(self.target, self.ids, NEW, past_key_values=copy.deepcopy(self.cache))
        # transformers permanently adds hooks to a model when hidden states are first requested; have that happen now.
        self.target(prompt(3), output_hidden_states=True)
        tree = {"kind": "chain", "depth": 3} if family in CHAINS else {}
        # The heads do not see tokens that came in a cache, so their text begins after those.
        self.heads = StubHead(self.target, self.text[:, self.cache.get_seq_length() :], RANKS, **tree)
        self.hooks = hooks_of(self.target)

    def call(self, **options) -> torch.Tensor:
        cache = {"past_key_values": self.attempt} if self.handed_in else {}
        return plain(self.target, self.ids, NEW, **cache, **options)

    def interrupted(self, at: At, error: type[BaseException] = Fault, **options) -> None:
        """Makes a call that is interrupted, and checks the state of the cache afterwards."""
        self.attempt = copy.deepcopy(self.cache)
        with pytest.raises(error):
            self.call(assistant_model=self.heads, **options)
        if self.handed_in:
            self.check_cache(options.get("streamer"))

    def check_cache(self, streamer: FaultyStreamer | None) -> None:
        held, prompt_length = self.attempt.get_seq_length(), self.ids.shape[1]
        if held < prompt_length:  # the forward of the prompt was interrupted
            assert_same_contents(self.attempt, self.cache)
            return
        if streamer is not None:
            assert held == len(streamer.tokens) - 1
        assert_same_contents(self.attempt, self.plain_cache(held))

    def plain_cache(self, tokens: int) -> DynamicCache:
        """Returns the cache of plain decoding when it holds this many tokens. It must not be changed."""
        if tokens not in self.plain_caches:
            cache = self.plain_caches[tokens] = copy.deepcopy(self.cache)
            plain(self.target, self.ids, tokens - self.ids.shape[1] + 1, past_key_values=cache)
        return self.plain_caches[tokens]

    def check_next_call(self) -> None:
        assert hooks_of(self.target) == self.hooks
        self.attempt = copy.deepcopy(self.cache)
        assert torch.equal(self.call(assistant_model=self.heads), self.text)
