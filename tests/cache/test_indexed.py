"""An indexer's keys lie in the slots of the other keys, whatever happens to these."""

import torch

from hf_specheads.heads.mtp_cache import MtpCache

WIDTH = 3


def rows_of(first: int, count: int, batch: int = 1) -> torch.Tensor:
    """Rows [B, R, WIDTH] that tell their number and sequence."""
    numbers = torch.arange(first, first + count, dtype=torch.float32)[None, :, None]
    return numbers.expand(batch, -1, WIDTH) + 1000 * torch.arange(batch)[:, None, None]


def commit(cache: MtpCache, rows: torch.Tensor) -> torch.Tensor:
    """Writes and commits rows; the indexer's keys that are shown then."""
    cache.open_rows(rows.shape[1], rows.device)
    layer = cache.layers[0]
    layer.update(rows[:, None], rows[:, None])
    shown = layer.update_indexer(rows)
    cache.commit(rows.shape[1])
    return shown


def test_rows_come_one_after_the_other_and_drafted_ones_go():
    cache = MtpCache(1)
    commit(cache, rows_of(0, 5))
    cache.place(0, 2)
    assert torch.equal(cache.layers[0].update_indexer(rows_of(70, 2))[:, 5:], rows_of(70, 2))
    shown = commit(cache, rows_of(5, 100))  # more than there was room for
    assert torch.equal(shown, rows_of(0, 105))
    assert torch.equal(shown, cache.layers[0].keys[:, 0, :105])


def test_sequences_go_and_come():
    cache, other = MtpCache(1), MtpCache(1)
    commit(cache, rows_of(0, 4, batch=3))
    cache.become_ragged(3, torch.device("cpu"))
    cache.select_sequences([0, 2])
    commit(other, rows_of(40, 6))
    cache.put_sequence(2, other, 2, torch.device("cpu"))
    keys = cache.layers[0].indexer_keys[:, 0]
    assert torch.equal(keys[:2, :4], rows_of(0, 4, batch=3)[[0, 2]]) and torch.equal(keys[2:, :6], rows_of(40, 6))
    assert torch.equal(keys, cache.layers[0].keys[:, 0])


def test_the_first_sequence_of_an_empty_cache():
    cache, other = MtpCache(1), MtpCache(1)
    commit(other, rows_of(0, 6))
    cache.put_sequence(0, other, 1, torch.device("cpu"))
    assert torch.equal(cache.layers[0].indexer_keys[:, 0, :6], rows_of(0, 6))


def test_layers_without_an_indexer_have_no_keys_of_one():
    cache = MtpCache(1)
    cache.open_rows(2, torch.device("cpu"))
    cache.layers[0].update(rows_of(0, 2)[:, None], rows_of(0, 2)[:, None])
    cache.commit(2)
    assert cache.layers[0].indexer_keys is None and cache.layers[0].names == ("keys", "values")
    cache.reserve(500)
    assert cache.layers[0].keys.shape[2] == cache.capacity
