"""The engine's benchmarks run end to end on tiny random models. Nothing here looks at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.targets import plain, prompt
from transformers import DynamicCache

from benchmarks import bench_batch, bench_cache, bench_compile, bench_context
from hf_specheads import load_heads


def result_of(folder: Path, name: str) -> dict:
    assert (folder / f"{name}.md").read_text().startswith("|")
    return json.loads((folder / f"{name}.json").read_text())


def test_batches(arguments):
    results = arguments("bench_batch", ["poss"], "--batch_sizes", "1", "2", "--chains", "2", "--repeats", "1")
    assert bench_batch.main() == 0
    sizes = result_of(results, "batch")["batch_sizes"]
    assert list(sizes) == ["1", "2"]
    for sides in sizes.values():
        assert list(sides) == ["plain generate", "poss", "poss, chain of 2"]
        assert all(side["identical"] for side in sides.values())


def test_contexts(arguments):
    results = arguments("bench_context", ["poss"], "--lengths", "2", "3", "--repeats", "1")
    assert bench_context.main() == 0
    result = result_of(results, "context")
    assert list(result["lengths"]) == ["2", "3"] and result["num_prompts"] == 2
    for sides in (*result["lengths"].values(), result["sampled"]["sides"]):
        assert list(sides) == ["plain generate", "poss", "poss, adaptive", "untrained, adaptive"]
        assert sides["poss"]["plain_share"] == 0.0
        assert sides["untrained, adaptive"]["plain_share"] > 0.0


@pytest.fixture
def eager_backend(monkeypatch):
    """Graphs run as they are: what is compiled, and when, stays the same."""
    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **options: compiled(*a, **{**options, "backend": "eager"}))


def test_compiled_rounds(arguments, eager_backend):
    results = arguments("bench_compile", ["poss"], "--repeats", "1")
    assert bench_compile.main() == 0
    result = result_of(results, "compile")
    (sides,) = result["tables"].values()
    assert list(sides) == [bench_compile.PLAIN, bench_compile.PLAIN_COMPILED, "poss", "poss, compiled"]
    assert all(side["identical"] for side in sides.values())
    assert set(result["compile_seconds"]) == {bench_compile.PLAIN_COMPILED, "poss, compiled"}


@pytest.mark.parametrize("tau", [1.0, 2.5, 4.0])
def test_acceptance_is_what_the_stub_says(pair, target, tau):
    heads = load_heads(pair / "poss", kind="chain", depth=4)
    target.generation_config.eos_token_id = None
    ids = prompt()
    expected = plain(target, ids, 81)
    with bench_compile.acceptance_of(tau, expected):
        assert torch.equal(plain(target, ids, 81, assistant_model=heads), expected)
    assert heads.last_stats.acceptance_length == pytest.approx(tau, abs=0.15)


def test_the_floor_counts_every_byte_once(tmp_path, monkeypatch):
    """Llama-3-8B in bf16: 8.03 B parameters, of which the token embedding is looked up."""
    command = ["bench_compile", "--shape", "llama-3-8b", "--dtype", "bfloat16", "--on_paper", "1e12", "--depth", "6"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    assert bench_compile.main() == 0
    heads = result_of(tmp_path, "compile_floor")["floor"]["heads"]
    assert set(heads) == {"poss", "eagle", "eagle3"}
    for floor in heads.values():
        assert floor["target_ms"] == pytest.approx(2 * (8.0303 - 0.5253), rel=1e-3)
        assert floor["tokens_per_second"]["4"] == pytest.approx(4000 / floor["round_ms"], rel=1e-3)
    # One layer (218 M), fc (34 M) and the target's lm_head (525 M) a step, in 16 bits.
    assert heads["eagle"]["draft_ms"] == pytest.approx(6 * 2 * (0.2181 + 0.0336 + 0.5253), rel=1e-2)
    assert heads["poss"]["draft_ms"] == pytest.approx(heads["eagle"]["draft_ms"], rel=1e-2)


def test_caches_of_both_kinds_end_alike(tmp_path, monkeypatch):
    command = ["bench_cache", "--lengths", "20", "--nodes", "1", "5", "--layers", "2", "--hidden_size", "64"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    monkeypatch.setattr(bench_cache, "ROUNDS", 4)
    bench_cache.main()
    assert list(result_of(tmp_path, "cache")["lengths"]["20"]) == ["1", "5"]


@torch.no_grad()
def test_both_caches_hold_the_same_rows(target):
    tree, path = bench_cache.comb(7)
    kept = []
    for side in (bench_cache.Slots, bench_cache.Dynamic):
        stock = DynamicCache(config=target.config)
        target(prompt(9), past_key_values=stock)
        one = side(target, stock, 9)
        for _ in range(3):
            one.round(tree, path)
        if side is bench_cache.Slots:
            one.cache.give_back(keep=True)
        kept.append(stock.layers[1].keys)
    torch.testing.assert_close(kept[0], kept[1], atol=1e-5, rtol=1e-5)
