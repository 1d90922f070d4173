"""Measurements of speed run end to end on tiny random models. Nothing here looks at a time."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from support.graphs import ReplayedGraphs
from support.targets import own_target, plain, prompt
from support.tokenizers import byte_tokenizer
from transformers import DynamicCache, LogitsProcessorList, TopKLogitsWarper

from benchmarks import setup, sides
from benchmarks.__main__ import MEASUREMENTS
from benchmarks.results import same_text
from benchmarks.speed import (
    both_ways,
    cache,
    compiled,
    draws,
    few_rows,
    first_call,
    options,
    quantised,
    speedup,
    vocabulary,
)
from hf_specheads import load_heads
from hf_specheads.generation.ahead import DraftAhead
from hf_specheads.generation.kernels.few_rows import FewRows
from hf_specheads.generation.kernels.unrecorded import BELOW_AUTOGRAD, guard_for
from hf_specheads.generation.pace.costs import PLAIN, Costs
from hf_specheads.generation.sampling import TokenSampler

ROUND_STAGES = {"draft", "target", "accept", "commit", "loop", "whole round"}


def test_texts_that_differ_are_said_to_differ_at_ties_or_not(monkeypatch):
    target, ids = own_target("llama"), prompt()
    with torch.no_grad():
        target.get_output_embeddings().weight[7] = target.get_output_embeddings().weight[6]
    texts = {"plain": [5, 6], "same": [5, 6], "tie": [5, 7], "bug": [5, 9]}
    runs = {name: [[sides.Run([text], 1.0, 2)]] for name, text in texts.items()}
    monkeypatch.setattr(sides, "run_interleaved", lambda *_: runs)
    found = sides.compare(target, {name: {} for name in texts}, [{"input_ids": ids}], 2, 1)
    assert [same_text(found[name]) for name in texts] == ["yes", "yes", "up to ties", "no"]


def test_speedup_compares_all_sides_and_finds_the_texts_identical(measure_pair):
    (found,) = measure_pair("speedup", ["eagle", "poss"], "--repeats", "2", "--baselines")["prompt_sets"].values()
    assert list(found) == ["plain generate", "eagle", "poss", "prompt lookup, 5 tokens"]
    for name in ("eagle", "poss"):
        assert found[name]["identical"]
        # Random heads do not pay, so there may be plain steps alone: then there is no acceptance length.
        assert (found[name]["acceptance_length"] >= 1) == (found[name]["draft_forwards"] > 0)
        assert found[name]["draft_forwards"] or found[name]["plain_steps"]
        assert found[name]["speed_up_range"][0] <= found[name]["speed_up"] <= found[name]["speed_up_range"][1]
    assert found["plain generate"]["forwards_saved"] == 0
    assert "acceptance_length" not in found["plain generate"]


def test_speedup_tells_the_time_of_drafting(measure_pair):
    result = measure_pair("speedup", ["eagle"], "--repeats", "1", "--profile")
    (found,) = result["prompt_sets"].values()
    assert found["eagle"]["draft_milliseconds"] > 0 and "draft_milliseconds" not in found["plain generate"]
    assert "draft ms per round" in speedup.table(result)


def test_speedup_fails_when_a_text_differs(measure_pair, monkeypatch):
    generate = sides.timed_generation

    def wrong(target, inputs, **options):
        (ids,), seconds = generate(target, inputs, **options)
        return [[*ids[:-1], 5 if ids[-1] != 5 else 6] if "assistant_model" in options else ids], seconds

    monkeypatch.setattr(sides, "timed_generation", wrong)
    (found,) = measure_pair("speedup", ["eagle"], "--repeats", "1", status=1)["prompt_sets"].values()
    assert found["eagle"]["differing_prompts"] == [0, 1]


def test_batches(measure_pair):
    more = ("--batch_sizes", "1", "2", "--chains", "2", "--repeats", "1")
    sizes = measure_pair("batch", ["poss"], *more)["batch_sizes"]
    assert list(sizes) == ["1", "2"]
    for found in sizes.values():
        assert list(found) == ["plain generate", "poss", "poss, chain of 2"]
        assert all(side["identical"] and side["new_tokens"] == 20 for side in found.values())
        assert found["plain generate"]["forwards_saved"] == 0


def test_copies(measure_pair):
    counts = measure_pair("copies", ["poss"], "--copies", "1", "3", "--repeats", "1")["copies"]
    assert [list(found) for found in counts.values()] == [
        ["plain generate", "poss"],
        ["plain generate", "poss", "poss, prompt read for each"],
    ]
    for count, found in counts.items():
        assert all(side["new_tokens"] == int(count) * 2 * 10 for side in found.values())


def test_options(measure_pair, monkeypatch):
    load = options.load_target  # stop strings need a tokenizer that can spell
    monkeypatch.setattr(options, "load_target", lambda args: (load(args)[0], byte_tokenizer()))
    sizes = measure_pair("options", ["poss"], "--batch_sizes", "1", "2", "--repeats", "1")["sizes"]
    assert list(sizes) == ["1", "2"]
    for found in sizes.values():
        assert len(found) == 6
        assert all(
            side["identical"] and side["new_tokens"] == 20 for sides in found.values() for side in sides.values()
        )


def test_streams(measure_pair):
    sides = measure_pair("stream", ["eagle"], "--max_batch", "2", "--shortest", "3", "--repeats", "2")["sides"]
    mixed = "eagle, stream, every second request sampled in its own way"
    assert list(sides) == ["plain generate", "eagle, static batches", "eagle, stream", mixed]
    assert sides["plain generate"]["speed_up"] == 1
    assert all(side["identical"] and 2 * 3 <= side["new_tokens"] <= 2 * 10 for side in sides.values())


def test_contexts(measure_pair, monkeypatch):
    record = Costs.record

    def dear(costs: Costs, choice: int, seconds: float, *chain: int) -> None:
        record(costs, choice, 0.5 if choice == PLAIN else 9.0, *chain)

    monkeypatch.setattr(Costs, "record", dear)  # what is drafted costs far more than it can pay
    result = measure_pair("context", ["poss"], "--lengths", "2", "3", "--repeats", "1")
    assert list(result["lengths"]) == ["2", "3"] and result["num_prompts"] == 2
    measured = [*result["lengths"].values(), result["sampled"]["sides"]]
    for found in measured:
        assert list(found) == ["plain generate", "poss", "poss, adaptive", "untrained, adaptive"]
        assert found["poss"]["plain_share"] == 0.0
    assert all("identical" in side for found in measured[:-1] for side in found.values())
    assert not any("identical" in side for side in measured[-1].values())  # sampled texts are not compared
    assert any(found["untrained, adaptive"]["plain_share"] > 0.0 for found in measured)


@pytest.fixture
def eager_backend(monkeypatch):
    """Graphs run as they are: what is compiled, and when, stays the same."""
    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **options: compiled(*a, **{**options, "backend": "eager"}))


@pytest.mark.slow
def test_compiled_rounds(measure_pair, eager_backend):
    result = measure_pair("compiled", ["poss"], "--repeats", "1")
    (found,) = result["tables"].values()
    assert list(found) == [compiled.PLAIN, compiled.PLAIN_COMPILED, "poss", "poss, compiled"]
    assert all(side["identical"] for side in found.values())
    assert found[compiled.PLAIN]["over_plain_eager"] == found[compiled.PLAIN_COMPILED]["over_plain_compiled"] == 1
    assert set(result["compile_seconds"]) == {compiled.PLAIN_COMPILED, "poss, compiled"}


@pytest.mark.slow
def test_first_calls(measure_pair):
    """In processes of their own, by the real compiler: the second finds what the first has compiled."""
    result = measure_pair("first_call", ["poss"], "--repeats", "1")
    assert list(result["sides"]) == [first_call.ONE_LINE, compiled.PLAIN_COMPILED, "poss"]
    for side in result["sides"].values():
        assert side["identical"] and side["cold"] > side["warm"] > side["later"] > 0


def test_every_first_call_finds_its_own_caches_empty(monkeypatch):
    """The first process of a repeat meets an empty folder, the second that of the first; none is left behind."""
    seen = []

    def call(caches, *others):
        seen.append((caches, sorted(os.listdir(caches))))
        Path(caches, "compiled").touch()
        return {"first": float(len(seen)), "later": 0.5, "identical": True}

    monkeypatch.setattr(first_call, "in_its_own_process", call)
    found = first_call.measure_side(2, first_call.calls_of_one_line)
    assert [left for _, left in seen] == [[], ["compiled"], [], ["compiled"]]
    assert seen[0][0] == seen[1][0] != seen[2][0] == seen[3][0] and not any(
        Path(caches).exists() for caches, _ in seen
    )
    assert found == {"cold": 2.0, "warm": 3.0, "later": 0.5, "identical": True}


@pytest.mark.parametrize(
    "tau", [pytest.param(1.0, marks=pytest.mark.slow), 2.5, pytest.param(4.0, marks=pytest.mark.slow)]
)
def test_acceptance_is_what_the_stub_says(pair, target, tau):
    heads = load_heads(pair / "poss", kind="chain", depth=4)
    target.generation_config.eos_token_id = None
    ids = prompt()
    expected = plain(target, ids, 81)
    with compiled.acceptance_of(tau, expected):
        assert torch.equal(plain(target, ids, 81, assistant_model=heads), expected)
    assert heads.last_stats.acceptance_length == pytest.approx(tau, abs=0.15)


def test_the_stub_knows_the_text_by_its_root_where_drafts_begin_early(monkeypatch):
    target = setup.random_llama(**TINY, eos_token_id=None, pad_token_id=0)  # counts up
    heads, ids = setup.random_head(target, "eagle", 4), prompt()
    expected, begun, begin = plain(target, ids, 61), [], DraftAhead.begin
    ReplayedGraphs(target, heads, monkeypatch)
    monkeypatch.setattr(DraftAhead, "begin", lambda self, *call: begun.append(begin(self, *call)))
    with compiled.acceptance_of(3.0, expected):
        assert torch.equal(plain(target, ids, 61, assistant_model=heads), expected)
    assert heads.last_stats.acceptance_length == pytest.approx(3.0, abs=0.15) and len(begun) > 10


TINY = {
    "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 1200, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_shape_is_measured_at_every_acceptance_length(measure, monkeypatch):
    monkeypatch.setitem(setup.SHAPES, "tiny", TINY)
    monkeypatch.setattr(setup, "SHAPED_HEADS", {"eagle": {}})
    monkeypatch.setattr(compiled, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    words = ("--shape", "tiny", "--tau", "2", "3", "--depth", "3", "--limit", "1", "--repeats", "1")
    result = measure("compiled", *words, "--max_new_tokens", "12", written="compiled_shape")
    assert set(result["floor"]["heads"]) == {"eagle"}
    for tau, found in zip((2, 3), result["tables"].values(), strict=True):
        assert found["eagle"]["acceptance_length"] == pytest.approx(tau, abs=0.5)
        assert all(side["identical"] for side in found.values())


def test_a_round_of_a_shape(measure, monkeypatch):
    monkeypatch.setitem(setup.SHAPES, "tiny", TINY)
    monkeypatch.setattr(setup, "SHAPED_HEADS", {"eagle": {}})
    words = ("--shape", "tiny", "--limit", "1", "--repeats", "1", "--max_new_tokens", "8")
    result = measure("round", *words, written="round_shape")
    assert result["target"] == "tiny" and result["nodes"] == 5 and set(result["stages"]) == ROUND_STAGES


def test_the_floor_counts_every_byte_once(measure):
    """Llama-3-8B in bf16: 8.03 B parameters, of which the token embedding is looked up."""
    words = ("--shape", "llama-3-8b", "--dtype", "bfloat16", "--on_paper", "1e12", "--depth", "6")
    heads = measure("compiled", *words, written="compiled_floor")["floor"]["heads"]
    assert set(heads) == {"poss", "eagle", "eagle3", "dflash"}
    for floor in heads.values():
        assert floor["target_ms"] == pytest.approx(2 * (8.0303 - 0.5253), rel=1e-3)
        assert floor["tokens_per_second"]["4"] == pytest.approx(4000 / floor["round_ms"], rel=1e-3)
    # One layer (218 M), fc (34 M) and the target's lm_head (525 M) a step, in 16 bits.
    assert heads["eagle"]["draft_ms"] == pytest.approx(6 * 2 * (0.2181 + 0.0336 + 0.5253), rel=1e-2)
    assert heads["poss"]["draft_ms"] == pytest.approx(heads["eagle"]["draft_ms"], rel=1e-2)
    # Five layers, a projection of as many features and the target's lm_head, once for all positions.
    assert heads["dflash"]["draft_ms"] == pytest.approx(2 * (5 * 0.2181 + 0.0839 + 0.5253), rel=1e-2)


def test_caches_of_both_kinds(measure, monkeypatch):
    monkeypatch.setattr(cache, "ROUNDS", 4)
    monkeypatch.setitem(cache.SIZES, "num_hidden_layers", 2)
    assert list(measure("cache", "--lengths", "20", "--nodes", "1", "5")["lengths"]["20"]) == ["1", "5"]


@torch.no_grad()
def test_both_caches_hold_the_same_rows(target):
    tree, path = cache.comb(7)
    kept = []
    for side in (cache.Slots, cache.Dynamic):
        stock = DynamicCache(config=target.config)
        target(prompt(9), past_key_values=stock)
        one = side(target, stock, 9)
        for _ in range(3):
            one.round(tree, path)
        if side is cache.Slots:
            one.cache.give_back(one.cache.longest)
        kept.append(stock.layers[1].keys)
    torch.testing.assert_close(kept[0], kept[1], atol=1e-5, rtol=1e-5)


def test_round_splits_the_whole_round_into_stages(measure_pair):
    result = measure_pair("round", ["poss"], "--repeats", "1")
    assert set(result["stages"]) == ROUND_STAGES
    parts = sum(stage["milliseconds"] for name, stage in result["stages"].items() if name != "whole round")
    assert parts == pytest.approx(result["round_milliseconds"], rel=1e-3)
    assert 0 < result["outside_share"] < 1
    assert result["rounds"] > 0


def test_timed_calls_leave_the_object_as_it_was(target):
    before = target.forward
    with sides.timed_calls(target, "forward") as seconds:
        target(input_ids=torch.tensor([[5]]))
    assert len(seconds) == 1
    assert target.forward == before
    assert "forward" not in vars(target)


def test_vocabulary_measures_every_size(measure_pair, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(vocabulary, "RANDOM_SIZES", (500, 1200))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("w5 w6 w6 w7 w9 w9 w9 w11 " + " ".join(f"w{i}" for i in range(40, 80)))
    more = ("--sizes", "5", "30", "--repeats", "1", "--corpus", str(corpus))
    result = measure_pair("vocabulary", ["poss"], *more)
    (sizes,) = result["heads"].values()
    assert list(sizes) == ["5", "30", "99"]
    assert sizes["5"]["coverage"] < sizes["30"]["coverage"] <= sizes["99"]["coverage"] == 1
    assert all(row["draft_milliseconds"] > 0 and row["identical"] for row in sizes.values())
    assert list(result["random"]["draft_milliseconds"]) == ["500", "1200"]


def test_quantised_compares_every_format_with_its_own_plain_text(measure_pair):
    formats = ["none", *(["int8"] if importlib.util.find_spec("torchao") else [])]
    found = measure_pair("quantised", ["eagle"], "--repeats", "1", "--formats", *formats)["formats"]
    assert list(found) == formats
    assert all(row["identical"] and row.get("gaps", []) == [] for rows in found.values() for row in rows.values())


def test_the_gap_where_texts_part(target):
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    with torch.no_grad():
        logits = target(torch.tensor([[5, 6, 7, 9]])).logits[0, -1]
    gap = quantised.gap_where_texts_part(target, inputs, [9, 4, 4], [9, 8, 4])
    assert gap == pytest.approx(float(logits[8] - logits[4]))


@pytest.mark.parametrize("part", ["unrecorded", "few_rows"])
def test_generation_with_and_without_a_part(part, measure_pair, monkeypatch):
    seen, generate = {"unrecorded": [], "few_rows": []}, both_ways.generate_once

    def watched(target, options, *args):
        seen["unrecorded"].append(guard_for(target) is BELOW_AUTOGRAD)
        seen["few_rows"].append(bool(FewRows(target).layers))
        return generate(target, options, *args)

    monkeypatch.setattr(both_ways, "generate_once", watched)
    rows = ["--rows", "2", "5", "--forwards", "2"] if part == "few_rows" else []
    result = measure_pair(part, ["eagle"], "--repeats", "2", *rows)
    sides = result["sides"]
    assert list(sides) == ["plain generate", "eagle", "eagle, without"]
    assert {name: set(values) for name, values in seen.items()} == {
        name: {True, False} if name == part else {True} for name in seen
    }
    assert all(side["identical"] for side in sides.values())
    assert sides["eagle"]["gain"]["low"] <= sides["eagle"]["gain"]["mean"] <= sides["eagle"]["gain"]["high"]
    assert [name for name, side in sides.items() if "gain" in side] == ["eagle"]
    assert "speed with / without" in MEASUREMENTS[part].table(result)
    if part == "few_rows":
        assert list(result["forwards"]) == ["2", "5"] and "plain steps" in few_rows.table(result)
        assert all(one["gain"]["low"] > 0 and one["plain step"] > 0 for one in result["forwards"].values())


def test_draws_compares_rounds_that_draw_from_few_with_those_that_draw_from_all(measure_pair, monkeypatch):
    few, generate = [], draws.generate_once

    def watched(target, options, *args):
        few.append(TokenSampler(LogitsProcessorList([TopKLogitsWarper(3)]), True).last_few is not None)
        return generate(target, options, *args)

    monkeypatch.setattr(draws, "generate_once", watched)
    result = measure_pair("draws", ["eagle"], "--repeats", "2", "--batch_size", "2", "--top_k", "3")
    sides = result["sides"]
    assert list(sides) == ["plain generate", "eagle", "eagle, from the whole vocabulary"]
    assert set(few) == {True, False}
    assert all(0 < side["accept_share"] < 1 for name, side in sides.items() if name != "plain generate")
    assert "accepting, ms per round" in draws.table(result)
