"""Looking up a target's embeddings without its module's call: only where the module does no more than that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_specheads.target.borrowed import BorrowedModules

IDS = torch.tensor([[3, 0, 7]])


class Scaled(nn.Embedding):
    def forward(self, token_ids):
        return 2 * super().forward(token_ids)


def scaled():
    return Scaled(9, 4)


def hooked_before():
    embedding = nn.Embedding(9, 4)
    embedding.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return embedding


def hooked_after():
    embedding = nn.Embedding(9, 4)
    embedding.register_forward_hook(lambda module, args, output: output.flip(-1))
    return embedding


def another_forward():
    """As accelerate leaves a module that it moves weights for."""
    embedding = nn.Embedding(9, 4)
    embedding.forward = lambda token_ids: -embedding.weight[token_ids]
    return embedding


def bounded():
    return nn.Embedding(9, 4, max_norm=0.5)


def a_function():
    return lambda token_ids: token_ids[..., None].float()


def borrowed(embed_tokens):
    return BorrowedModules(embed_tokens, nn.Identity(), torch.device("cpu"))


@pytest.mark.parametrize("of", [scaled, hooked_before, hooked_after, another_forward, bounded, a_function])
@torch.no_grad()
def test_what_does_more_is_called(of):
    parts = borrowed(embed_tokens := of())
    assert parts.look_up is embed_tokens
    assert torch.equal(parts.look_up(IDS), embed_tokens(IDS))


@torch.no_grad()
def test_plain_embeddings_are_looked_up_without_a_call(monkeypatch):
    """In the weight that the module has by then."""
    parts = borrowed(embedding := nn.Embedding(9, 4, padding_idx=0))
    for weight in (embedding.weight, nn.Parameter(torch.randn(9, 4, dtype=torch.float32))):
        embedding.weight = weight
        expected = embedding(IDS)
        with monkeypatch.context() as patched:
            patched.setattr(embedding, "forward", None)
            assert torch.equal(parts.look_up(IDS), expected)
