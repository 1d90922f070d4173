"""Suites: our own, those of the Hub from a mirror with files of the same shape, and the formats of prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.hub.endpoint import HubEndpoint

from hf_specheads.evaluation.suites import SUITES, SuitePrompt, load_suite, prompts_for

ROWS: dict[str, list[dict[str, Any]]] = {
    "HuggingFaceH4/mt_bench_prompts/train": [
        {"category": "writing", "prompt": ["Compose a letter.", "Shorten it."], "prompt_id": 1}
    ],
    "openai/openai_humaneval/test": [{"task_id": "x/0", "prompt": "def add(a, b):\n", "test": "assert 1"}],
    "openai/gsm8k/main/test": [{"question": "How many?", "answer": "#### 3"}, {"question": "Why?", "answer": "1"}],
    "HuggingFaceH4/MATH-500/test": [{"problem": "Solve it.", "answer": "2", "level": 1}],
    "google-research-datasets/mbpp/full/test": [{"task_id": 11, "text": "Write a function.", "code": "pass"}],
    "tatsu-lab/alpaca/train": [
        {"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3"},
        {"instruction": "Sing.", "input": "", "output": "la"},
    ],
    "question": [{"question_id": 1, "category": "rag", "turns": ["Read this.", "And this."]}],
}
EXPECTED = {
    "mt_bench": ("writing", "Compose a letter."),
    "humaneval": ("humaneval", "```python\ndef add(a, b):\n\n```"),
    "gsm8k": ("gsm8k", "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."),
    "math500": ("math500", "Solve it.\nPlease reason step by step"),
    "mbpp": ("mbpp", "Write a function."),
    "alpaca": ("alpaca", "Sort.\n\nInput:\n3 1 2"),
    "spec_bench": ("rag", "Read this."),
}


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data sets under their Hub ids, in files of the published shape."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, rows in ROWS.items():
        path = tmp_path / "mirror" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "mirror"


def test_every_suite_of_the_hub(mirror: Path) -> None:
    assert set(EXPECTED) == set(SUITES)
    for name, (category, beginning) in EXPECTED.items():
        first, *_ = load_suite(name, mirror=mirror)
        assert (first.suite, first.category) == (name, category) and beginning in first.text, name
    assert load_suite("alpaca", mirror=mirror)[1].text == "Sing."  # without an empty input


# Where files of these data sets lie in their repositories, by configuration.
ON_THE_HUB = {
    "openai/gsm8k": ("main", "main/test-00000-of-00001.parquet", "test"),
    "openai/openai_humaneval": ("openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet", "test"),
    "google-research-datasets/mbpp": ("full", "full/test-00000-of-00001.parquet", "test"),
    "tatsu-lab/alpaca": ("default", "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet", "train"),
    "HuggingFaceH4/MATH-500": ("default", "test.jsonl", "test"),
}


def publish(hub: HubEndpoint, folder: Path, name: str) -> None:
    """A data set as it is published: a card that names its files, and rows as Parquet or lines of JSON."""
    config, file, split = ON_THE_HUB[name]
    rows = next(rows for key, rows in ROWS.items() if key.startswith(name))
    path = folder / name / file
    path.parent.mkdir(parents=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = f"  data_files:\n  - split: {split}\n    path: {file}\n"
    (folder / name / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n{files}---\n")
    hub.publish(name, folder / name)


def test_suites_come_from_a_hub_by_their_ids(hub: HubEndpoint, tmp_path: Path) -> None:
    for name in ON_THE_HUB:
        publish(hub, tmp_path, name)
    for name in ("gsm8k", "humaneval", "mbpp", "alpaca", "math500"):
        first, *_ = hub.run(load_suite, name)
        category, beginning = EXPECTED[name]
        assert first.category == category and beginning in first.text
    assert hub.requests(r"GET /datasets/openai/gsm8k/resolve/\w+/main/test-00000-of-00001.parquet 200")


def test_the_hub_is_asked_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def answer(*args: Any, **kwargs: Any) -> list[dict[str, str]]:
        asked.append((args, kwargs))
        return ROWS["openai/gsm8k/main/test"]

    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert len(load_suite("gsm8k")) == 2
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_our_own_suite_has_its_categories() -> None:
    ours = load_suite("ours")
    counts = Counter(one.category for one in ours)
    assert len(counts) == 11 and set(counts.values()) == {4} and len({one.text for one in ours}) == len(ours)


def test_a_limit_draws_the_same_prompts_in_their_order() -> None:
    ours, some = load_suite("ours"), load_suite("ours", limit=7)
    assert len(some) == 7 and some == load_suite("ours", limit=7)
    places = [ours.index(one) for one in some]
    assert places == sorted(places) and load_suite("ours", limit=999) == ours


def test_files_and_wrong_input(tmp_path: Path, mirror: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"turns": ["one", "two"]}\n{"prompt": "three", "category": "x"}\n')
    assert load_suite(str(own)) == [SuitePrompt("own", "own", "one"), SuitePrompt("own", "x", "three")]
    own.write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match=r"entry 0 .* it has \['text'\]"):
        load_suite(str(own))
    with pytest.raises(ValueError, match=r"unknown suite 'gsm9k'; expected some of \['ours', 'mt_bench'"):
        load_suite("gsm9k")
    with pytest.raises(ValueError, match="a mirror holds data sets under their Hub ids"):
        load_suite("gsm8k", mirror=tmp_path)


def test_templates_and_thinking(tokenizer) -> None:
    prompts = [SuitePrompt("ours", "x", "w5 w6")]
    assert prompts_for(prompts, tokenizer) == ["w5 w6"]
    with pytest.raises(ValueError, match="no `enable_thinking`"):
        prompts_for(prompts, tokenizer, thinking=False)

    def template(messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert messages == [{"role": "user", "content": "w5 w6"}] and options["add_generation_prompt"]
        return {"input_ids": [5, 6, {None: 7, True: 8}[options.get("enable_thinking")]]}

    chat = SimpleNamespace(chat_template="... enable_thinking ...", apply_chat_template=template)
    assert prompts_for(prompts, chat) == [[5, 6, 7]]
    assert prompts_for(prompts, chat, thinking=True) == [[5, 6, 8]]
