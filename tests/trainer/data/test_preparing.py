"""Data of any columns, mixed, streamed, packed and counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset

from hf_specheads.trainer import PackedCollator, prepare_dataset
from hf_specheads.trainer.building import mix
from hf_specheads.trainer.data.packing import best_fit, pack_dataset
from hf_specheads.trainer.data.preparing import DataReport, marked_example
from hf_specheads.trainer.data.sources import RecipeError

from ..conftest import make_examples
from .test_batches import CHAT, CHAT_IDS, CHAT_MASK, MARKED, UNMARKED

SHAREGPT = [{"from": "human", "value": "w0 w1"}, {"from": "gpt", "value": "w2 w3"},
            {"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]  # fmt: skip


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["markers", "no markers"])
def test_columns_of_chats(tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    expected = {"input_ids": [CHAT_IDS], "loss_mask": [CHAT_MASK]}
    for data in ({"messages": [CHAT]}, {"conversations": [SHAREGPT]}, {"conversations": [CHAT]}):
        assert prepare_dataset(Dataset.from_dict(data), tokenizer, 64)[:] == expected
    pair = {"prompt": [CHAT[:3]], "completion": [CHAT[3:]]}
    later = [0] * 14 + [1, 1]
    assert prepare_dataset(Dataset.from_dict(pair), tokenizer, 64)[:] == {
        "input_ids": [CHAT_IDS],
        "loss_mask": [later],
    }


def test_prompt_and_completion_as_texts(tokenizer) -> None:
    data = prepare_dataset(Dataset.from_dict({"prompt": ["w0 w1"], "completion": ["w2"]}), tokenizer, 64)
    assert data[:] == {"input_ids": [[8, 9, 10, 2]], "loss_mask": [[0, 0, 1, 1]]}


def test_exact_ids_count_before_the_chat_beside_them(tokenizer) -> None:
    row = {"id": "7", "input_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "conversations": SHAREGPT}
    assert prepare_dataset(Dataset.from_list([row]), None, 8)[:] == {
        "input_ids": [[5, 6, 7]],
        "loss_mask": [[0, 0, 1]],
    }


def test_template_arguments_of_all_and_of_a_row(tokenizer) -> None:
    tokenizer.chat_template = "{{ style or 'w9' }} " + MARKED
    rows = [{"messages": CHAT, "chat_template_kwargs": kwargs} for kwargs in ({"style": "w7"}, {"style": None})]
    data = prepare_dataset(Dataset.from_list(rows), tokenizer, 64, template_kwargs={"style": "w8"})
    assert [ids[0] for ids in data["input_ids"]] == [15, 16]


def test_bad_rows_are_skipped_and_counted(tokenizer) -> None:
    tokenizer.chat_template = UNMARKED
    bad = [{"from": "parrot", "value": "w0"}]
    report = DataReport()
    data = Dataset.from_dict({"conversations": [SHAREGPT, bad, SHAREGPT[:1], SHAREGPT * 3, []]})
    prepared = prepare_dataset(data, tokenizer, 20, report=report)
    assert len(prepared) == 2 and len(prepared[1]["input_ids"]) == 20
    assert (report.rows, report.examples, report.cut, report.unsupervised, report.bad) == (5, 2, 1, 1, 2)
    assert "'parrot'" in report.first_problem
    with pytest.raises(ValueError, match=r"none of the 1 rows .*'parrot'"):
        prepare_dataset(Dataset.from_dict({"conversations": [bad]}), tokenizer, 20)


def test_several_processes_and_the_cache(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"w{i} w{i + 1}"}) for i in range(20)))
    read = lambda: Dataset.from_json(str(path), cache_dir=str(tmp_path / "cache"))  # noqa: E731
    one = prepare_dataset(read(), tokenizer, 8)
    tokenizer("w1", truncation=True, max_length=2)  # leaves a mark on the tokenizer
    again = prepare_dataset(read(), tokenizer, 8)
    assert again._fingerprint == one._fingerprint and again.cache_files == one.cache_files != []
    assert prepare_dataset(read(), tokenizer, 9)._fingerprint != one._fingerprint
    assert prepare_dataset(read(), tokenizer, 7, num_proc=2)[:] == one[:]


def test_streams_are_read_as_they_are_needed(tokenizer) -> None:
    read = []

    def rows():
        for index in range(1000):
            read.append(index)
            yield {"text": f"w{index % 50} w1"} if index != 2 else {"text": "w1"}

    report = DataReport()
    stream = prepare_dataset(IterableDataset.from_generator(rows), tokenizer, 3, report=report)
    assert "counted as it is read" in str(report)
    first = next(iter(stream))
    assert first == {"input_ids": [8, 9, 2], "loss_mask": [1, 1, 1]} and len(read) < 200
    assert report.rows == report.examples == 64


def test_mixtures(tokenizer) -> None:
    parts = [Dataset.from_dict({"input_ids": [[i, i]] * 40, "loss_mask": [[1, 1]] * 40}) for i in (5, 6)]
    assert len(mix(parts, [None, None], 0)) == 80
    mixed = [ids[0] for ids in mix(parts, [3, 1], 0)["input_ids"]]
    assert mixed.count(6) >= 40 and 2 < mixed.count(5) / mixed.count(6) < 4.5
    with pytest.raises(RecipeError, match="every source of train_data a `weight`"):
        mix(parts, [1, None], 0)
    with pytest.raises(RecipeError, match="streams and data sets cannot be mixed"):
        mix([parts[0], parts[1].to_iterable_dataset()], [1, 1], 0)


def test_a_recipe_with_two_sources_trains(workspace, tmp_path: Path, capsys) -> None:
    (tmp_path / "pairs.jsonl").write_text("\n".join(['{"prompt": "w0 w1", "completion": "w2 w3"}'] * 6))
    sources = f"[{{path: {tmp_path / 'train.jsonl'}, weight: 1}}, {{path: {tmp_path / 'pairs.jsonl'}, weight: 2}}]"
    workspace.run(*workspace.options, f"output_dir={tmp_path / 'run'}", f"train_data={sources}", "packing=true")
    assert "22 rows, 22 examples" in capsys.readouterr().out


def test_a_streamed_recipe_trains_and_resumes(workspace, tmp_path: Path) -> None:
    from hf_specheads import AutoDraftHead

    stream = [*workspace.options, "train_data.streaming=true", "save_strategy=steps", "save_steps=2"]
    workspace.run(*stream, f"output_dir={tmp_path / 'whole'}", "max_steps=4")
    workspace.run(*stream, f"output_dir={tmp_path / 'parts'}", "max_steps=2", "lr_scheduler_type=constant")
    (tmp_path / "constant").mkdir()
    workspace.run(*stream, f"output_dir={tmp_path / 'constant'}", "max_steps=4", "lr_scheduler_type=constant")
    workspace.run(*stream, f"output_dir={tmp_path / 'parts'}", "max_steps=4", "lr_scheduler_type=constant")
    resumed, whole = (AutoDraftHead.from_pretrained(tmp_path / name) for name in ("parts", "constant"))
    assert all(bool((a == b).all()) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


# ---------------------------------------------------------------------- packing
def test_best_fit_wastes_little_and_loses_nothing() -> None:
    assert best_fit([3, 7, 5, 2, 9], 10) == [[0, 1], [2, 3], [4]]
    lengths = random.Random(0).choices(range(1, 60), k=500)
    rows = best_fit(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert len(rows) <= 1.05 * sum(lengths) / 64
    assert best_fit([100], 64) == [[0]]


def test_a_packed_data_set_gives_the_same_documents() -> None:
    examples = make_examples(40)
    data = pack_dataset(Dataset.from_list(examples), 64)
    assert len(data) < 20
    batch = PackedCollator(0, 64)([data[index] for index in range(len(data))])
    found = []
    for row in range(len(data)):
        for document in range(int(batch["document_ids"][row].max()) + 1):
            at = batch["document_ids"][row] == document
            assert batch["position_ids"][row][at].tolist() == list(range(int(at.sum())))
            found.append((batch["input_ids"][row][at].tolist(), batch["loss_mask"][row][at].tolist()))
    expected = [(example["input_ids"], [0, *example["loss_mask"][1:]]) for example in examples]
    assert sorted(found) == sorted(expected)


def test_marked_examples(tokenizer) -> None:
    assert marked_example({"input_ids": [8, 9, 2], "loss_mask": [0, 1, 1]}, tokenizer) == "w0[[w1 </s>]]"
    assert marked_example({"input_ids": [8, 9], "loss_mask": [0, 1]}, None) == "[8][[[9]]]"
