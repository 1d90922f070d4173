"""The naive step gives our gradients, and the measurement runs end to end."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.__main__ import make_parser
from benchmarks.training import memory, step, switches
from benchmarks.training.naive_step import dense_step
from hf_specheads import AutoDraftHead
from hf_specheads.trainer import Unroll

BATCH, ROWS, PASSES, VOCAB, WIDTH = 2, 23, 4, 99, 32
TWO = {"num_specialists": 2, "positions_per_specialist": 2}
FAMILIES = {
    "eagle": {},
    "hass": {},
    "poss": TWO,
    "poss-lora": {**TWO, "specialist_rank": 4},
    "eagle3": {"draft_vocab_size": 50, "draft_token_ids": range(0, VOCAB, 2)},
    "poss-eagle3": TWO,
}
TINY = {"hidden_size": 64, "vocab_size": VOCAB}
WEIGHTS = {"feature": 1.0, "token": 0.5, "top_k": 0.3}


@pytest.fixture(scope="module")
def wide_target():
    """Eight layers, enough for EAGLE-3's levels; output weights large enough that the distribution is not flat."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    target.lm_head.weight.mul_(20)
    return target


def gradients(heads, run):
    heads.zero_grad()
    run()
    return {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_dense_step(wide_target, family):
    heads = AutoDraftHead.from_target(wide_target, family, **FAMILIES[family]).bind(wide_target).train()
    with torch.no_grad():
        for parameter in heads.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)  # attention matters, adapters do something
        for name, parameter in heads.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.02)
    torch.manual_seed(1)
    batch = {
        "features": torch.randn(BATCH, ROWS, WIDTH * (1 if heads.passes_are_detached else 3)),
        "next_token_ids": torch.randint(0, VOCAB, (BATCH, ROWS)),
        "target_features": torch.randn(BATCH, ROWS, WIDTH),
        "embed_tokens": wide_target.get_input_embeddings(),
        "lm_head": wide_target.lm_head,
        "num_passes": PASSES,
    }

    def ours(together):
        unroll = Unroll(
            heads, **batch, loss_mask=torch.ones(BATCH, ROWS), attention_mask=None, losses=tuple(WEIGHTS),
            num_items=float(BATCH * ROWS), separate_backward=together < PASSES,
        )  # fmt: skip
        for _ in range(0, PASSES, together):
            unroll.run_passes(together, lambda losses, _: losses.weighted(**WEIGHTS), chunk_rows=7)
        unroll.finish_backward()

    wanted = gradients(heads, lambda: dense_step(heads, **batch, weights=WEIGHTS))
    assert wanted
    assert all(gradient.any() for gradient in wanted.values())
    for together in (PASSES, 1) if heads.passes_are_detached else (PASSES,):
        found = gradients(heads, lambda together=together: ours(together))
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * scale, msg=f"{name}, {together}")


@pytest.mark.slow
def test_end_to_end(measure, monkeypatch):
    monkeypatch.setattr(step, "SIZES", {"hidden_size": 32, "vocab_size": 64})
    result = measure("step", "--cells", "poss,40,3", "eagle3,40,3", "--repeats", "2")
    assert [(cell["family"], cell["passes"]) for cell in result["cells"]] == [("poss", 3), ("eagle3", 3)]
    for cell in result["cells"]:
        assert set(cell["sides"]) == {"dense", "ours"} | ({"per_pass"} if cell["family"] == "poss" else set())
        assert 0 < cell["gradient_difference"] < 1e-4
        assert cell["sides"]["ours"]["speed_up"]["low"] > 0
        assert cell["sides"]["dense"]["seconds"]["median"] > 0
    assert "| poss | 40 | 3 |" in step.table(result)


@pytest.mark.slow
def test_mixed_precision_and_another_vocabulary(measure):
    words = ["--cells", "poss,40,2", "--repeats", "1", "--vocab_size", "96", "--hidden_size", "32", "--bf16"]
    result = measure("step", *words)
    (cell,) = result["cells"]
    assert (cell["dtype"], cell["vocab_size"], cell["hidden_size"]) == ("bfloat16", 96, 32)
    assert 1e-4 < cell["gradient_difference"] < 0.1
    assert "bfloat16, hidden size 32, vocabulary 96" in step.table(result)


def test_a_step_that_does_not_fit(monkeypatch):
    """It is left out of the timing and of the ratios, and the table has dashes."""
    monkeypatch.setattr(step, "peak_apart", lambda cell, side: None if side == "dense" else 1000)
    cell = {"family": "poss", "rows": 16, "passes": 1, "hidden_size": 32, "vocab_size": 64, "dtype": "float32"}
    measured = step.measure_cell(cell, 1)
    assert measured["sides"]["dense"] == {"seconds": None, "peak_bytes": None}
    assert "speed_up" not in measured["sides"]["ours"]
    assert "gradient_difference" not in measured


def test_memory_measures_steps_that_can_be_made(monkeypatch):
    pairs = []
    monkeypatch.setattr(memory, "peak_apart", lambda cell, side: pairs.append(step.make_pair(cell | TINY)) or 1)
    found = memory.measure(make_parser().parse_args(["memory", "--lengths", "8", "--passes", "1", "2"]))
    assert len(pairs) == len(found["checks"]) == 2


def test_the_default_grid_and_others():
    assert {("poss", 4096, 1), ("eagle3", 2048, 6)} <= set(make_parser().parse_args(["step"]).cells)
    args = make_parser().parse_args(["step", "--cells", "hass,2048,8", "eagle,1024,1"])
    assert args.cells == [("hass", 2048, 8), ("eagle", 1024, 1)]


def test_switches_of_a_training(pair, measure, monkeypatch) -> None:
    """Every switch reaches the trainer; heads, data and seed are the same otherwise, and so is what they come to."""
    monkeypatch.setitem(switches.RECIPE, "max_grad_norm", 0.01)  # below the norms of this pair
    rows = [{"input_ids": torch.randint(3, 60, (12,)).tolist()} for _ in range(6)]
    (pair / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--target", str(pair / "target"), "--prompts", str(pair / "prompts.jsonl"), "--max_new_tokens", "6",
             "--data", str(pair / "data.jsonl"), "--warm_start", str(pair / "eagle"), "--specialists", "2", "1",
             "--steps", "3", "--examples", "2", "--max_length", "12", "--learning_rate", "0.01", "--seeds", "2",
             "--tree", "chain", "--switches"]  # fmt: skip
    chosen = ["clipped by value", "a backward per pass", "the authors' masks"]
    result = measure("switches", *words, *chosen)
    losses = {name: [one["loss"] for one in seeds] for name, seeds in result["switches"].items()}
    assert list(losses) == ["the recipe", *chosen] and all(len(set(each)) == 2 for each in losses.values())
    recipe = losses.pop("the recipe")
    assert losses.pop("a backward per pass") == pytest.approx(recipe, rel=1e-4)  # the same gradients
    assert all(each != recipe for each in losses.values())
