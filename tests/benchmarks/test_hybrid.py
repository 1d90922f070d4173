"""The measurement of hybrid targets, on tiny ones."""

from __future__ import annotations

import pytest

from benchmarks.speed.hybrid import SHAPES

SMALL = {
    "qwen3-next": {"num_hidden_layers": 4, "hidden_size": 64},
    "mamba-2": {"num_hidden_layers": 4, "hidden_size": 64, "num_heads": 2},
}


@pytest.mark.parametrize("shape", [pytest.param("qwen3-next", marks=pytest.mark.slow), "mamba-2"])
def test_hybrid_targets_are_measured(measure, shape, monkeypatch):
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | SMALL[shape])
    words = ["--rates", "0.5", "1.0", "--repeats", "1", "--batches", "1", "2", "--prompt_length", "8"]
    result = measure("hybrid", "--shapes", shape, *words, "--max_new_tokens", "14")
    alone, together = (result["shapes"][shape]["batches"][batch] for batch in "12")
    for cells in (alone, together):
        assert all(cell["identical"] for cell in cells.values())
        assert cells["1.0"]["acceptance_length"] > cells["0.5"]["acceptance_length"]
        assert cells["1.0"]["target_forwards"] < cells["0.5"]["target_forwards"]
    assert 0 < alone["0.5"]["states_share"] < 1 and alone["1.0"]["replay_share"] == 0
    assert "states_share" not in together["0.5"]
    assert set(result["shapes"][shape]["paths"]) == {"2", "4", "8"}
