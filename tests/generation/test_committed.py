"""Rows that a draft head takes in next, and what plain steps add to them."""

from __future__ import annotations

import torch

from hf_specheads.generation.committed import NewRows, PackedPaths
from hf_specheads.generation.verification.accepted import Accepted


def step_rows(outputs: torch.Tensor, token: int = 7) -> NewRows:
    """Makes the rows of a plain step of one sequence, from its features [1, 1, F]."""
    return PackedPaths.of([Accepted([token], [0])], [3], torch.device("cpu")).rows(outputs)


def test_rows_of_plain_steps_outlive_the_outputs_they_come_from():
    """The next replay of a CUDA graph overwrites these outputs."""
    outputs = torch.ones(1, 1, 4)
    rows = NewRows(torch.tensor([[1, 2, 3]]), torch.zeros(1, 2, 4))
    for number in (1.0, 2.0):
        rows = rows.followed_by(step_rows(outputs.fill_(number)))
    outputs.fill_(-1.0)
    assert rows.joined().features[0, :, 0].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_joining_is_done_once_and_by_whoever_needs_it():
    rows = NewRows(torch.tensor([[1, 2, 3]]), torch.zeros(1, 2, 4)).followed_by(step_rows(torch.ones(1, 1, 4)))
    assert rows.token_ids.tolist() == [[1, 2, 3, 7]] and rows.features.shape[1] == 2
    whole = rows.joined()
    assert whole.joined() is whole and whole.features.shape[1] == whole.token_ids.shape[1] - 1 == 3
    assert torch.equal(rows.select_sequences([0]).features, whole.features)
