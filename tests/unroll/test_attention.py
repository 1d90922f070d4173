"""Attention over feature streams against the softmax under one dense mask."""

from __future__ import annotations

import pytest
import torch
from support.tensors import Largest
from torch import nn

from hf_specheads.unroll import attention as stream_attention
from hf_specheads.unroll.attention import Documents, StreamAttention, StreamCache
from hf_specheads.unroll.streams import additive, stream_mask, visible_rows

ROWS, SCALING = 9, 0.3
LAYOUTS = {
    "plain": [[0] * ROWS] * 2,
    "packed": [[0, 0, 0, 0, 1, 1, 1, -1, -1], [3] * 8 + [4]],
    "left": [[-1, -1, 0, 0, 0, 0, 0, 0, 0], [0] * ROWS],
    "right": [[0] * ROWS, [0, 0, 0, -1, -1, -1, -1, -1, -1]],
}


def dense_mask(documents, streams, own_rows):
    visible = visible_rows(documents)
    if not own_rows:
        return stream_mask(visible, streams, torch.double)
    own = torch.eye(ROWS, dtype=torch.bool).expand_as(visible)
    return additive(torch.cat([visible] + [own] * (streams - 1), dim=-1)[:, None], torch.double)


def random_states(streams, heads=4):
    torch.manual_seed(0)
    query = torch.randn(2, heads, ROWS, 8, dtype=torch.double, requires_grad=True)
    keys = (torch.randn(2, 2, ROWS * streams, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    return query, *keys


def dense(query, key, value, mask, phantoms=False):
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(2, 3) * SCALING + mask
    if phantoms:
        future = (ROWS - 1 - torch.arange(ROWS)).double().log()[:, None]
        scores = torch.cat([scores, future.expand(*query.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : value.shape[2]] @ value).transpose(1, 2)


def attend(plan, query, key, value, in_blocks=False, dropout=0.0):
    if not in_blocks:
        module = nn.Module()
        return plan(module, query, key, value, None, scaling=SCALING, dropout=dropout)[0]
    keys, values = key.split(ROWS, 2), value.split(ROWS, 2)
    band = [streams[number] for streams in (keys, values) for number, _ in plan.band]
    return plan.in_blocks(query, keys[0], values[0], *band, scaling=SCALING, dropout=dropout).transpose(1, 2)


def assert_equal(ours, wanted, states, documents):
    """Outputs and gradients at all rows but padding, which nobody reads."""
    real = (documents >= 0)[..., None, None]
    torch.testing.assert_close(ours * real, wanted * real, rtol=1e-6, atol=1e-6)
    grad = torch.randn(ours.shape, dtype=torch.double, generator=torch.Generator().manual_seed(1)) * real
    for mine, theirs in zip(*(torch.autograd.grad(x, states, grad) for x in (ours, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("streams", [1, 2, 4, 12])
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_equals_the_dense_mask(layout, streams, own_rows, in_blocks, monkeypatch):
    """Twelve streams are more than there are rows."""
    monkeypatch.setattr(stream_attention, "BLOCK_ROWS", 4)
    documents = torch.tensor(LAYOUTS[layout])
    states = random_states(streams)
    ours = attend(StreamAttention(Documents(documents), streams, own_rows=own_rows), *states, in_blocks=in_blocks)
    assert_equal(ours, dense(*states, dense_mask(documents, streams, own_rows)), states, documents)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_phantom_columns_add_to_the_denominator(layout, streams, in_blocks):
    documents, states = torch.tensor(LAYOUTS[layout]), random_states(streams)
    plan = StreamAttention(Documents(documents), streams, phantom_columns=True)
    ours = attend(plan, *states, in_blocks=in_blocks)
    assert_equal(ours, dense(*states, dense_mask(documents, streams, False), phantoms=True), states, documents)


def test_dropout_of_attention_weights_is_unbiased():
    """Values of one: without dropout every output is 1, with it the mean of many is."""
    states = random_states(2)
    plan = StreamAttention(Documents(torch.zeros(2, ROWS, dtype=torch.long)), 2)
    with torch.no_grad():
        states[2].fill_(1.0)
        outputs = torch.stack([attend(plan, *states, dropout=0.5) for _ in range(300)])
    assert bool((outputs[0] - 1).abs().max() > 0.1)
    torch.testing.assert_close(outputs.mean(0), torch.ones_like(outputs[0]), rtol=0, atol=0.25)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_no_tensor_of_rows_by_rows(in_blocks, monkeypatch):
    """Forward and backward of 512 rows, the largest tensor any operation makes."""
    monkeypatch.setattr(stream_attention, "BLOCK_ROWS", 32)
    rows, streams = 512, 4
    query = torch.randn(1, 2, rows, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, rows * streams, 8, requires_grad=True) for _ in range(2))
    plan = StreamAttention(Documents(torch.zeros(1, rows, dtype=torch.long)), streams)
    monkeypatch.setitem(globals(), "ROWS", rows)
    with Largest() as largest:
        attend(plan, query, key, value, in_blocks=in_blocks).sum().backward()
    assert 0 < largest.elements < rows * rows // 4


def test_documents_are_spans():
    spans = {name: Documents(torch.tensor(layout)).spans for name, layout in LAYOUTS.items()}
    one, two = slice(0, 1), slice(1, 2)
    assert spans["plain"] == spans["right"] == [(slice(None), 0, ROWS)]
    assert spans["packed"] == [(one, 0, 4), (one, 4, 7), (two, 0, 8), (two, 8, 9)]
    assert spans["left"] == [(one, 2, ROWS), (two, 0, ROWS)]


def test_a_stream_cache_sends_on_the_gradients_of_its_leaves():
    source = torch.randn(1, 2, 6, 4, requires_grad=True)
    cache = StreamCache(rows=3, apart=True)
    keys, values = cache.update(2 * source, 3 * source, layer_idx=1)
    assert [len(keys), len(values), cache.num_streams(1), cache.num_streams(0)] == [2, 2, 2, 0]
    (keys[0].sum() + values[1].sum()).backward()
    assert source.grad is None
    cache.finish_backward()
    assert source.grad[:, :, :3].eq(2).all()
    assert source.grad[:, :, 3:].eq(3).all()
