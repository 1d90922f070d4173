"""The fused kernel's block mask against the dense one.

On a processor flex attention runs uncompiled, and has no backward unless its check of devices is taken away.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from hf_specheads.unroll import flex
from hf_specheads.unroll.attention import Documents, StreamAttention, flex_serves

from .test_attention import LAYOUTS, ROWS, SCALING, assert_equal, dense, dense_mask, random_states


@pytest.fixture(autouse=True)
def with_a_backward(monkeypatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    flex_serves.cache_clear()
    yield
    flex_serves.cache_clear()


def attend(plan: StreamAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    keys, values = key.split(ROWS, 2), value.split(ROWS, 2)
    band = [streams[number] for streams in (keys, values) for number, _ in plan.band]
    return plan.fused(query, keys[0], values[0], *band, scaling=SCALING).transpose(1, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("streams", [1, 2, 4, 12])
@pytest.mark.parametrize("own_rows", [False, True])
def test_equals_the_dense_mask(layout: str, streams: int, own_rows: bool) -> None:
    documents, states = torch.tensor(LAYOUTS[layout]), random_states(streams)
    ours = attend(StreamAttention(Documents(documents), streams, own_rows=own_rows), *states)
    assert_equal(ours, dense(*states, dense_mask(documents, streams, own_rows)), states, documents)


def test_a_mask_without_documents_is_another_one() -> None:
    """What the comparison above would see."""
    documents, states = torch.tensor(LAYOUTS["packed"]), random_states(3)
    whole = attend(StreamAttention(Documents(torch.zeros_like(documents)), 3), *states)
    with pytest.raises(AssertionError):
        assert_equal(whole, dense(*states, dense_mask(documents, 3, False)), states, documents)


def test_blocks_that_nobody_sees_are_left_out() -> None:
    """Four blocks of rows, three streams: a triangle, and the diagonals of the band with the blocks beside them."""
    mask = flex.block_mask(torch.zeros(1, 512, dtype=torch.long), 2, [0, 1])
    assert mask.to_dense().shape == (1, 1, 4, 12)
    assert int(mask.to_dense().sum()) == 10 + 4 + 7


def test_it_is_tried_before_it_is_used(monkeypatch) -> None:
    sizes = (torch.device("cpu"), torch.float32, 4, 2, 16)
    assert flex_serves(*sizes)
    flex_serves.cache_clear()
    kept = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda ids, lag, lags: kept(ids * 0, lag, lags))
    with pytest.warns(UserWarning, match="flex attention is not used on cpu, in torch.float32 .*: it is off by"):
        assert not flex_serves(*sizes)


def test_where_it_fails_blocks_are_used(monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(flex, "kernel", lambda device: broken)
    with pytest.warns(UserWarning, match="heads of 16: RuntimeError: no kernel for this"):
        assert not flex_serves(torch.device("cpu"), torch.float32, 4, 2, 16)
