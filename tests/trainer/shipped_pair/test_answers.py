"""From a target to heads trained on what it says: answers, features, heads, at toy size."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specheads import load_heads
from hf_specheads.trainer.facts import FACTS
from hf_specheads.trainer.shipped_pair import heads as shipped_heads
from hf_specheads.trainer.shipped_pair.answers import (
    Answer,
    AnswerBlocks,
    answer,
    asked_examples,
    read_answers,
    write_answers,
)
from hf_specheads.trainer.shipped_pair.chat import prompt_tokens
from hf_specheads.trainer.shipped_pair.costs import read_costs
from hf_specheads.trainer.shipped_pair.feature_cache import CachedBlocks, stack_blocks, write_features
from hf_specheads.trainer.shipped_pair.heads import HeadTraining, chosen_runs
from hf_specheads.trainer.shipped_pair.runs import RELEASED, RUNS, STUDIES
from hf_specheads.trainer.shipped_pair.target import build_target
from hf_specheads.trainer.unroll.target_features import FrozenTarget

BLOCK = 512


@pytest.fixture(scope="module")
def chat_target(chat_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return build_target(chat_tokenizer, num_hidden_layers=7).eval()


@pytest.fixture(scope="module")
def answers(chat_tokenizer: PreTrainedTokenizerFast) -> list[Answer]:
    """Chats whose answers are a few tokens of the prompt again."""
    prompts = [prompt_tokens(example, chat_tokenizer) for example in asked_examples(26)]
    end = [chat_tokenizer.eos_token_id]
    return [Answer("any", index % 2, ids + ids[5:25] + end, len(ids)) for index, ids in enumerate(prompts)]


def test_answers_are_the_targets_own(chat_target, chat_tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("hf_specheads.trainer.shipped_pair.right_answers.MAX_NEW_TOKENS", 48)
    asked = list(asked_examples(2))
    chat_target.generation_config.max_length = None
    with torch.no_grad():
        # The end of turn is likely after anything, so that answers end.
        weights = chat_target.get_input_embeddings().weight
        kept, weights[chat_tokenizer.eos_token_id] = weights[chat_tokenizer.eos_token_id].clone(), 0.02
    found = [answer(chat_target, chat_tokenizer, [example], 0.0)[0] for example in asked]
    for example, one in zip(asked, found, strict=True):
        prompt = prompt_tokens(example, chat_tokenizer)
        plain = chat_target.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0].tolist()
        if one is None:
            assert plain[-1] != chat_tokenizer.eos_token_id
            continue
        assert one.input_ids == plain and one.input_ids[: one.prompt_length] == prompt
        assert sum(one.loss_mask) == len(plain) - len(prompt)
    with torch.no_grad():
        weights[chat_tokenizer.eos_token_id] = kept


def test_a_stopped_call_goes_on(chat_target, chat_tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("hf_specheads.trainer.shipped_pair.right_answers.MAX_NEW_TOKENS", 3)
    ended = chat_tokenizer.eos_token_id
    monkeypatch.setattr(
        "hf_specheads.trainer.shipped_pair.answers.generate_ids",
        lambda target, tokenizer, prompts, temperature, seed: [[seed % 97, int(temperature), ended] for _ in prompts],
    )
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert write_answers(chat_target, chat_tokenizer, whole, 12, batch_size=4) == {"asked": 12, "answered": 12}
    for count in (4, 8, 12):
        write_answers(chat_target, chat_tokenizer, parts, count, batch_size=4)
    assert whole.read_text() == parts.read_text()
    weights = sum(p.numel() for p in chat_target.parameters()) - chat_target.model.norm.weight.numel()
    tokens = sum(len(one.input_ids) for one in read_answers(whole))
    spent = [read_costs(path) for path in (whole, parts)]
    assert spent[0] is not None and spent[1] is not None
    assert spent[0]["flops"] == spent[1]["flops"] == 2 * weights * tokens and spent[0]["hours"] >= 0
    assert {one.temperature for one in read_answers(whole)} == {0.0, 1.0}


def test_chats_without_an_end_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("null\n" + json.dumps(vars(Answer("lists", 0.0, [1, 2, 3], 2))) + "\n")
    assert [one.input_ids for one in read_answers(path)] == [[1, 2, 3]]


def test_sequences_hold_whole_answers(answers, chat_tokenizer) -> None:
    pad = chat_tokenizer.pad_token_id
    blocks = AnswerBlocks(answers, BLOCK, pad)
    found = []
    for index in range(len(blocks)):
        item = blocks[index]
        assert {value.shape for value in item.values()} == {(BLOCK,)}
        for document in range(int(item["document_ids"].max()) + 1):
            rows = item["document_ids"] == document
            found.append((item["input_ids"][rows].tolist(), int(item["loss_mask"][rows].sum())))
            assert item["position_ids"][rows].tolist() == list(range(int(rows.sum())))
        assert bool((item["input_ids"][item["document_ids"] < 0] == pad).all())
    assert found == [(one.input_ids, sum(one.loss_mask)) for one in answers]


def test_cached_features_are_those_of_every_chat_alone(chat_target, chat_tokenizer, answers, tmp_path: Path) -> None:
    blocks = AnswerBlocks(answers, BLOCK, chat_tokenizer.pad_token_id)
    write_features(chat_target, blocks, tmp_path, batch=2)
    written = (tmp_path / "features.bin").read_bytes()
    with (tmp_path / "features.bin").open("r+b") as file:
        file.truncate(len(written) // 2)  # as an interrupted call leaves it
    write_features(chat_target, blocks, tmp_path, batch=2)
    assert (tmp_path / "features.bin").read_bytes() == written
    assert read_costs(tmp_path) is not None and read_costs(tmp_path / "elsewhere") is None
    item = CachedBlocks(blocks, tmp_path, (2, -1))[1]
    for document in range(int(item["document_ids"].max()) + 1):
        rows = item["document_ids"] == document
        alone = {"input_ids": item["input_ids"][None, rows]}
        features, final = FrozenTarget(chat_target).features(alone, (2, -1))
        torch.testing.assert_close(item["features"][rows], features[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(item["final_features"][rows], final[0], atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="not \\[1\\]"):
        CachedBlocks(blocks, tmp_path, (1,))
    with pytest.raises(ValueError, match="write it again from these answers"):
        CachedBlocks(AnswerBlocks(answers[:5], BLOCK, 0), tmp_path)
    assert stack_blocks([item, item])["input_ids"].shape == (2, BLOCK)


@pytest.fixture
def training(chat_target, chat_tokenizer, answers, tmp_path: Path, monkeypatch) -> HeadTraining:
    """At toy size; the corpus's answers are the target's own."""
    path, features = tmp_path / "answers.jsonl", tmp_path / "features"
    path.write_text("\n".join(json.dumps(vars(one)) for one in answers[:8]) + "\n")
    write_features(chat_target, AnswerBlocks(answers[:8], BLOCK, chat_tokenizer.pad_token_id), features)
    monkeypatch.setattr(shipped_heads, "HELD_OUT_PER_FAMILY", 1)
    args = argparse.Namespace(
        target_name="toy", answers=path, features=features, corpus_answers=path, corpus_features=features,
        output_dir=tmp_path, eagle_steps=4, matrix_lr=0.02, learning_rate=3e-3, eval_prompts=0, top_k=2,
        total_tokens=8, seed=1,
    )  # fmt: skip
    return HeadTraining(chat_target, chat_tokenizer, args)


@pytest.mark.slow
def test_runs_of_equal_compute(training, tmp_path: Path) -> None:
    """A warm-started run after the run it starts from."""
    for name in ("eagle-base", "poss3"):
        training.run(name)
    base, poss = (json.loads((tmp_path / f"{name}-seed1" / FACTS).read_text()) for name in ("eagle-base", "poss3"))
    assert (base["steps"], base["tokens"]) == (4, 4 * 2 * BLOCK)
    assert base["answers_fingerprint"] == poss["answers_fingerprint"]
    per_step = [one["training_flops"] / one["steps"] for one in (base, poss)]
    assert per_step[1] > 1.5 * per_step[0] and training.budget == base["training_flops"]
    heads = load_heads(tmp_path / "poss3-seed1", dtype=torch.float32)
    assert heads.config.target["name"] == "toy" and heads.config.num_specialists == 2


def test_every_run_starts_from_one_that_comes_before() -> None:
    """A long list must not end at a run that cannot start."""
    names = list(RUNS)
    assert set(RELEASED) | set(STUDIES) == set(RUNS) and set(RELEASED).isdisjoint(STUDIES)
    for place, run in enumerate(RUNS.values()):
        assert run.starts_from is None or run.starts_from in names[:place]
    assert chosen_runs(["poss3", "studies", "hass-cold"]) == ["poss3", *STUDIES]
    with pytest.raises(SystemExit, match="there is no run 'poss4'; choose from released, studies, eagle-base"):
        chosen_runs(["poss4"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_run_takes_a_step(name: str, training, tmp_path: Path) -> None:
    """Nor at a misspelt option; from random weights."""
    run = RUNS[name]
    if run.starts_from is not None:
        run = replace(run, options={**RUNS[run.starts_from].options, **run.options}, starts_from=None)
    heads = training.new_heads(run)
    trainer, blocks = training.trainer(run, heads, tmp_path / "run", 1), training.blocks(run, heads)
    loss = trainer.training_step(trainer.model, stack_blocks([blocks[0], blocks[1]]))
    gradients = [p.grad for p in heads.parameters() if p.requires_grad and p.grad is not None]
    assert loss.item() > 0 and gradients and all(bool(torch.isfinite(one).all()) for one in gradients)
