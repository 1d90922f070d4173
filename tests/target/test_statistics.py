"""Scale and centre of features: another target shows, another text does not."""

from __future__ import annotations

import pytest
import torch

from hf_specheads.target.statistics import FeatureStatistics, statistics_problem


def statistics_of(features: torch.Tensor, levels: tuple[int, ...] = (2, 4)) -> dict:
    statistics = FeatureStatistics(levels)
    for part in features.split(2):
        statistics.add(part, torch.ones(part.shape[:2]))
    found = statistics.to_dict()
    assert found is not None
    return found


def test_values_are_those_of_the_features() -> None:
    features = torch.randn(4, 50, 2 * 32) * 3 + 1
    found = statistics_of(features)
    assert found["tokens"] == 200 and found["levels"] == [2, 4]
    first = features[..., :32]
    assert found["scale"][0] == pytest.approx(float(first.square().mean().sqrt()), rel=1e-3)
    assert found["mean"][0][0] == pytest.approx(float(first[..., 0].mean()), abs=1e-3)
    assert found["deviation"][0][-1] == pytest.approx(float(first[..., -1].std(correction=0)), rel=1e-2)


def test_rows_that_do_not_count() -> None:
    statistics = FeatureStatistics((-1,))
    assert statistics.to_dict() is None
    features, mask = torch.randn(1, 6, 8), torch.tensor([[1, 1, 0, 0, 1, 0]])
    statistics.add(features, mask)
    alone = FeatureStatistics((-1,))
    alone.add(features[mask.bool()][None], torch.ones(1, 3))
    assert statistics.to_dict() == alone.to_dict()


def test_another_text_is_no_problem_and_another_target_is() -> None:
    centre, width = torch.randn(64) * 4, torch.rand(64) + 0.5
    stored = statistics_of(torch.randn(4, 80, 64) * width + centre)
    same = torch.randn(4, 80, 64) * width + centre
    assert statistics_problem(stored, statistics_of(same)) is None
    rotation = torch.linalg.qr(torch.randn(32, 32)).Q
    rotated = (same.view(4, 80, 2, 32) @ rotation).flatten(2)
    assert "deviations from those in training" in statistics_problem(stored, statistics_of(rotated))
    assert "2.00 times as large" in statistics_problem(stored, statistics_of(2 * same))
    assert "trained on 2 hidden states" in statistics_problem(stored, statistics_of(same[..., :32], (2,)))


def test_a_rotation_that_leaves_means_and_deviations_shows_by_the_channels_that_go_together() -> None:
    mixing = torch.randn(4, 32)  # few causes behind many channels
    texts = [(torch.randn(4, 80, 4) @ mixing).repeat(1, 1, 2) for _ in range(2)]
    stored = statistics_of(texts[0])
    assert statistics_problem(stored, statistics_of(texts[1])) is None
    shuffled = texts[1].view(4, 80, 2, 32)[..., torch.randperm(32)]
    shuffled = shuffled / shuffled.std((0, 1)) * texts[1].view(4, 80, 2, 32).std((0, 1))
    assert "other channels going together" in statistics_problem(stored, statistics_of(shuffled.flatten(2)))
    before = {name: value for name, value in stored.items() if name != "correlation"}  # heads of an older trainer
    assert statistics_problem(before, statistics_of(shuffled.flatten(2))) is None
