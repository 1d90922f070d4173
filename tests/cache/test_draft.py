"""The draft cache keeps committed rows of every batch row, and forgets drafted ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specheads.cache.draft import DraftCache


def write(cache: DraftCache, rows: torch.Tensor, layer: int = 0) -> torch.Tensor:
    """Keys the next rows see; values are twice the keys."""
    keys, values = cache.update(rows, 2 * rows, layer)
    assert torch.equal(values, 2 * keys)
    return keys


def test_drafted_rows_end_with_their_round():
    cache, rows = DraftCache(2), torch.randn(1, 2, 200, 4)
    for layer in (0, 1):
        assert cache.open_rows(3, rows.device).tolist() == [[0, 1, 2]]
        write(cache, rows[:, :, :3], layer)
    cache.commit(3)
    cache.place(0, 4)
    write(cache, rows[:, :, 3:7])
    cache.drafted_inputs.append(rows)
    cache.take_level(0)
    # The buffer grows without losing what is committed.
    assert cache.open_rows(197, rows.device).shape == (1, 197)
    assert cache.drafted_inputs == [] and cache.committed == 3
    assert torch.equal(write(cache, rows[:, :, 3:]), rows)
    assert cache.last_row_mask(197, rows.dtype) is None


def test_a_specialist_takes_the_levels_it_lacks():
    cache, level = DraftCache(2), torch.zeros(1, 2, 4)
    cache.drafted_inputs += [level]
    assert cache.take_level(0) == 0
    cache.drafted_inputs += [level, level]
    assert cache.take_level(0) == 1
    assert cache.take_level(1) == 0
    cache.drop_drafted()
    assert cache.take_level(1) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_of_a_batch_equal_caches_of_their_own(data):
    """Rounds in which every batch row commits another number of rows, padding anywhere among them, rows that leave."""
    batch = data.draw(st.integers(1, 4))
    static = data.draw(st.booleans())
    cache, alone = DraftCache(1), [torch.zeros(2, 0, 3) for _ in range(batch)]
    if static:
        cache.fix_capacity(256)
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.integers(1, 6))
        valid = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=rows, max_size=rows),
                                                min_size=batch, max_size=batch)))  # fmt: skip
        valid[:, -1] = True
        states = torch.randn(batch, 2, rows, 3)
        cache.begin_round(valid, valid.sum(1).tolist())
        cache.open_rows(rows, states.device)
        keys = write(cache, states)
        alone = [torch.cat([own, states[row][:, valid[row]]], dim=1) for row, own in enumerate(alone)]
        mask = cache.last_row_mask(rows, states.dtype)
        cache.commit(rows)
        assert cache.counts == [own.shape[1] for own in alone] == cache.lengths.tolist()
        for row, own in enumerate(alone):
            assert torch.equal(keys[row, :, : own.shape[1]], own)
            assert (mask[row, 0, 0] == 0).tolist() == [slot < own.shape[1] for slot in range(keys.shape[2])]
        drafted = torch.randn(batch, 2, 4, 3)
        visible = torch.rand(batch, 4, 4) < 0.5
        cache.place(0, 4)
        keys, mask = write(cache, drafted), cache.tree_mask(visible, states.dtype)
        for row, own in enumerate(alone):
            seen = torch.cat([own, drafted[row]], dim=1)
            assert torch.equal(keys[row, :, : seen.shape[1]], seen)
            allowed = torch.cat([torch.ones(4, own.shape[1], dtype=torch.bool), visible[row]], dim=1)
            assert torch.equal(mask[row, 0, :, : seen.shape[1]] == 0, allowed)
            assert (mask[row, 0, :, seen.shape[1] :] < 0).all()
        if batch > 1 and data.draw(st.booleans()):
            kept = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
            cache.select_sequences(kept)
            alone, batch = [alone[row] for row in kept], len(kept)


def test_a_fixed_capacity_is_not_exceeded():
    cache = DraftCache(1)
    cache.fix_capacity(8)
    with pytest.raises(RuntimeError, match="8 slots"):
        cache.begin_round(torch.ones(1, 8, dtype=torch.bool), [8])
