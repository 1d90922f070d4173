"""Benchmarks of tuning, draft vocabularies and quantised targets on tiny random models; nothing looks at a time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import bench_quantised, bench_tune, bench_vocabulary


def result_of(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def test_tune_compares_with_the_best_of_the_grid(arguments, monkeypatch):
    monkeypatch.setattr("hf_specheads.tuning.rounds.TIMED_CHAINS", (1, 2))
    monkeypatch.setattr("hf_specheads.tuning.rounds.TIMED_TREES", ((2, 2, 3), (3, 2, 6), (2, 4, 8)))
    results = arguments("bench_tune", ["eagle"], "--tuning_limit", "1", "--repeats", "1", "--depths", "1", "2",
                        "--top_k", "2", "--total_tokens", "4", "--tuning", str(prompts_of(arguments)))  # fmt: skip
    assert bench_tune.main() == 0
    (found,) = result_of(results, "bench_tune")["heads"].values()
    assert set(found["trees"]) == {"tuned", "best of the grid", "saved", "default of the device", "published"}
    assert found["grid_size"] == 4  # chains of 1 and 2, one dynamic tree, EAGLE-1's
    assert found["tuned_over_grid"] > 0 and all(row["identical"] for row in found["trees"].values())
    assert "best of 4" in (results / "bench_tune.md").read_text()


def prompts_of(arguments) -> Path:
    return arguments("any", []).parent / "prompts.jsonl"


def test_vocabulary_measures_every_size(arguments):
    more = ("--sizes", "5", "30", "--repeats", "1", "--random_vocabulary", "0")
    corpus = prompts_of(arguments).parent / "corpus.txt"
    corpus.write_text("w5 w6 w6 w7 w9 w9 w9 w11 " + " ".join(f"w{i}" for i in range(40, 80)))
    results = arguments("bench_vocabulary", ["poss"], *more, "--corpus", str(corpus))
    assert bench_vocabulary.main() == 0
    (sizes,) = result_of(results, "bench_vocabulary")["heads"].values()
    assert list(sizes) == ["5", "30", "99"]
    assert sizes["5"]["coverage"] < sizes["30"]["coverage"] <= sizes["99"]["coverage"] == 1
    assert all(row["draft_milliseconds"] > 0 and row["identical"] for row in sizes.values())


def test_quantised_compares_every_format_with_its_own_plain_text(arguments):
    formats = ["none", *(["int8"] if importlib.util.find_spec("torchao") else [])]
    results = arguments("bench_quantised", ["eagle"], "--repeats", "1", "--formats", *formats)
    assert bench_quantised.main() == 0
    found = result_of(results, "bench_quantised")["formats"]
    assert list(found) == formats
    assert all(row["identical"] and row.get("gaps", []) == [] for sides in found.values() for row in sides.values())


def test_the_gap_where_texts_part(target):
    import torch

    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    logits = target(torch.tensor([[5, 6, 7, 9]])).logits[0, -1]
    gap = bench_quantised.gap_where_texts_part(target, inputs, [9, 4, 4], [9, 8, 4])
    assert gap == pytest.approx(float(logits[8] - logits[4]))
