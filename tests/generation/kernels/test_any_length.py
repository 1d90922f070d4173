"""Rounds never plan attention with cuDNN, and leave torch's switch as they found it."""

from __future__ import annotations

import pytest
import torch
from support.heads import random_heads
from support.targets import own_target, plain, prompt
from support.trees import TREES
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_specheads import generate_stream
from hf_specheads.generation.kernels.any_length import KernelsOfAnyLength, any_length
from hf_specheads.tuning.measure import measure_costs


@pytest.fixture(autouse=True)
def cudnn_is_on():
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    yield
    assert cuda.cudnn_sdp_enabled(), "the switch is as it was"
    cuda.enable_cudnn_sdp(before)


@pytest.fixture
def attended(monkeypatch):
    """Records for every attention its number of queries, whether it had a mask, and whether cuDNN was allowed."""
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query, *args, **kwargs):
        seen.append((query.shape[2], kwargs.get("attn_mask") is not None, cuda.cudnn_sdp_enabled()))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("method", ["poss", "dflash"])
def test_the_prompt_is_read_as_ever_and_rounds_are_not(method, attended):
    target = own_target()
    heads = random_heads(target, method, TREES["dynamic" if method == "poss" else "chain"])
    plain(target, prompt(20), 8, assistant_model=heads)
    layers = target.config.num_hidden_layers
    assert all(enabled for _, _, enabled in attended[:layers]), "the prompt's forward is plain generation's"
    assert not any(enabled for _, _, enabled in attended[layers:])
    assert any(masked for _, masked, _ in attended[layers:])


def test_streams_and_costs(attended):
    target = own_target()
    heads = random_heads(target)
    list(generate_stream(target, heads, [prompt(9), prompt(5)], 2, max_new_tokens=6, do_sample=False))
    trees = [enabled for queries, masked, enabled in attended if masked and queries > 1]
    assert trees and not any(trees)
    attended.clear()
    measure_costs(target, heads, 20, nodes=(1, 4), rows=(1, 2), repeats=1)
    assert attended and not any(enabled for _, _, enabled in attended)


def test_after_errors():
    target = own_target()
    heads = random_heads(target)
    heads.on_round = lambda one: 1 / 0 if one.seconds and not cuda.cudnn_sdp_enabled() else None
    with pytest.raises(ZeroDivisionError):
        plain(target, prompt(), 8, assistant_model=heads)


def test_calls_at_the_same_time():
    """The last call to leave restores the switch, in whatever order the calls leave."""
    kernels = KernelsOfAnyLength()
    kernels.__enter__()
    kernels.__enter__()
    kernels.__exit__()
    assert not cuda.cudnn_sdp_enabled()
    kernels.__exit__()
    assert cuda.cudnn_sdp_enabled()


def test_what_the_user_chose_stays():
    cuda.enable_cudnn_sdp(False)
    with any_length:
        pass
    assert not cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), any_length:
        assert cuda.cudnn_sdp_enabled(), "the only kernel that is allowed"
