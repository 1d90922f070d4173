"""Heads with decoder layers: what the levels of a round share."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.heads import random_heads
from support.targets import plain, prompt, shared_target

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.cache import draft
from hf_specheads.heads import specialists

TREES = [
    {"kind": "chain", "depth": 5},
    {"kind": "dynamic", "depth": 4, "top_k": 3, "total_tokens": 12},
    {"kind": "static", "choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["kind"])
@pytest.mark.parametrize("method", ["eagle", "poss", "eagle3"])
def test_positions_are_rotated_once_a_round(method, tree, monkeypatch):
    """And drafts are those of levels that are each rotated for themselves, as ropes want it that move."""
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, method).with_tree(**tree)
    heads.adaptive, heads.trace = False, True
    rotate, calls = heads.rotary_emb.forward, []

    def counted(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(positions)
        return rotate(rows, positions)

    monkeypatch.setattr(heads.rotary_emb, "forward", counted)
    drafted = []
    for moving in ((), ("default",)):
        monkeypatch.setattr(specialists, "MOVING_ROPES", moving)
        calls.clear()
        plain(target, ids, 12, assistant_model=heads)
        drafted.append([tree.token_ids for tree in heads.last_stats.trees])
        rounds = heads.last_stats.rounds
        assert (len(calls) > 2 * rounds) if moving else (len(calls) <= 2 * rounds)
    assert all(torch.equal(once, each) for once, each in zip(*drafted, strict=True))


def _three_specialists() -> DraftHead:
    target = shared_target("llama")
    heads = AutoDraftHead.from_target(target, "poss", num_specialists=3, positions_per_specialist=2).eval()
    heads.bind(target)
    return heads


def _same_rounds(heads, rounds, most_owed, monkeypatch):
    """States drafted in rounds that commit `valid` rows each and then draft so many levels, of sequences that leave
    and join."""
    monkeypatch.setattr(draft, "MOST_OWED", most_owed)
    if not most_owed:  # every specialist takes rows in where the first one does, whatever is made of places later
        monkeypatch.setattr(draft.DraftCache, "_place_owed", lambda *_: None)
    cache, drafted, generator = heads.new_draft_cache(), [], torch.Generator().manual_seed(3)
    cache.deepest = 6
    random = partial(torch.randn, generator=generator)
    for valid, levels, kept, joins in rounds:
        (batch, rows), hidden = valid.shape, heads.config.hidden_size
        ragged = bool((~valid).any()) or cache.lengths is not None
        cache.begin_round(*((valid, valid.sum(1).tolist()) if ragged else ()))
        tokens = torch.randint(0, 50, (batch, rows + 1), generator=generator)
        state, _ = heads.start_draft(cache, tokens, random(batch, rows, hidden))
        drafted.append(state)
        for position in range(1, levels):
            state, _ = heads.extend_draft(cache, position, tokens[:, :1], state, None)
            drafted.append(state)
        cache.drop_drafted()
        if kept is not None:
            cache.select_sequences(kept)
        if joins:
            newcomer = heads.new_draft_cache()
            newcomer.deepest = 6
            heads.start_draft(newcomer, tokens[:1], random(1, rows, hidden))
            newcomer.drop_drafted()
            cache.put_sequence(batch if kept is None else len(kept), newcomer, batch if kept is None else len(kept),
                               tokens.device)  # fmt: skip
    return drafted


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_taken_in_later_are_those_taken_in_at_once(data):
    batch, rounds = data.draw(st.integers(1, 3)), []
    for _ in range(data.draw(st.integers(2, 7))):
        rows = data.draw(st.integers(1, 6))
        lists = st.lists(st.booleans(), min_size=rows, max_size=rows)
        valid = torch.tensor(data.draw(st.lists(lists, min_size=batch, max_size=batch)))
        if data.draw(st.booleans()):
            valid[:] = True
        valid[:, -1] = True
        kept = data.draw(st.sampled_from([None, list(range(batch))[::-1], [0]]))
        joins = data.draw(st.booleans())
        rounds.append((valid, data.draw(st.integers(1, 6)), kept, joins))
        batch = (batch if kept is None else len(kept)) + joins
    heads = _three_specialists()
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        later, at_once = (_same_rounds(heads, rounds, most, monkeypatch) for most in (32, 0))
    torch.testing.assert_close(later, at_once, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [0, 32])
def test_specialists_that_do_not_draft_compute_nothing(most, monkeypatch):
    heads, forwards = _three_specialists(), []
    for index, layer in enumerate(heads.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: forwards.append(index))
    short = [(torch.ones(1, 2, dtype=torch.bool), 1, None, False)] * 5
    with torch.no_grad():
        _same_rounds(heads, short, most, monkeypatch)
    assert [forwards.count(index) for index in range(3)] == ([5, 0, 0] if most else [5, 5, 5])
    forwards.clear()
    with torch.no_grad():  # 2 rows a round: at 34 they are too many to be owed, a second time at 68
        _same_rounds(heads, short * 7, most, monkeypatch)
    assert [forwards.count(index) for index in range(3)] == ([35, 2, 2] if most else [35] * 3)
