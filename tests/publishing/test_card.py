"""Cards say what the files say, nothing else, and leave alone what a user wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from support.published import save_with_facts

from hf_specheads import PossHead
from hf_specheads.publishing.card.facts import CardFacts, collect_facts
from hf_specheads.publishing.card.render import BEGIN, END, render_card, write_card
from hf_specheads.trainer.unroll.losses import LOSSES

RESULTS = {
    "task": "held-out functions", "acceptance_length": 3.214, "pos_acc": [0.9, 0.75], "speed_up": 1.834, "prompts": 24,
    "tokens_per_second": 183.4, "plain_tokens_per_second": 100.0, "identical": True,
    "tree_config": {"kind": "dynamic", "depth": 6, "top_k": 4, "total_tokens": 16},
}  # fmt: skip
TRAINING = {
    "hours": 1.25, "tokens": 3_000_000,
    "arguments": {"learning_rate": 3e-5, "output_dir": "/home/me/runs", "fsdp": []},
    "versions": {"torch": "2.99"}, "log_history": [{"loss": 1.0}] * 50, "data": None,
}  # fmt: skip


@pytest.fixture
def folder(poss_heads: PossHead, tmp_path: Path) -> Path:
    return save_with_facts(poss_heads, tmp_path / "poss-heads", TRAINING, RESULTS)


def metadata_of(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


def test_metadata(folder: Path) -> None:
    text = write_card(folder, license="apache-2.0", language=["code"]).read_text()
    metadata = metadata_of(text)
    assert metadata["base_model"] == "lab/target" and metadata["library_name"] == "hf-specheads"
    assert {"speculative-decoding", "draft-head", "poss"} <= set(metadata["tags"])
    assert metadata["license"] == "apache-2.0" and metadata["language"] == ["code"]
    results = {result.metric_type: result for result in ModelCard.load(folder / "README.md").data.eval_results}
    assert results["acceptance_length"].metric_value == 3.214 and results["speed_up"].metric_value == 1.834
    assert results["speed_up"].dataset_name == "held-out functions"


def test_the_last_values_of_a_training_are_a_table(folder: Path) -> None:
    history = [
        {"step": 10, "loss": 2.5, "acceptance_1": 0.5, "acceptance_2": 0.25, "expected_acceptance_length": 1.625},
        {"step": 20, "loss": 2.0, "acceptance_1": 0.75, "acceptance_2": 0.5, "expected_acceptance_length": 2.125},
        {"step": 20, "eval_loss": 2.25, "eval_acceptance_length": 1.9, "eval_pos_acc_1": 0.6},
        {"step": 20, "train_runtime": 3.0},
    ]
    text = write_card(folder, training={"log_history": history}).read_text()
    assert "| last logged | step | loss | tau | 1 | 2 |\n" in text
    assert "| training, expected | 20 | 2 | 2.12 | 0.75 | 0.5 |\n" in text
    assert "| held-out, expected | 20 | 2.25 |  |  |  |\n" in text
    assert "| held-out, by `generate` | 20 |  | 1.9 | 0.6 |  |\n" in text
    assert "last logged" not in write_card(folder, training={"log_history": []}).read_text()


def test_the_weights_of_all_losses_are_shown(folder: Path) -> None:
    weights = {f"{loss}_loss_weight": 0.5 + index for index, loss in enumerate(LOSSES)}
    arguments = {"output_dir": "runs", "pass_decay": 0.9, **weights, "learning_rate": 3e-5}
    text = write_card(folder, training={"arguments": arguments}).read_text()
    shown = re.findall(r"^\| `arguments\.(\w+)` \| (\S+) \|$", text, flags=re.MULTILINE)
    assert [name for name, _ in shown] == ["learning_rate", *weights, "pass_decay"]
    assert {name: float(value) for name, value in shown}.items() >= weights.items()


def test_body(folder: Path, poss_heads: PossHead) -> None:
    text = write_card(folder, commit="0123abc").read_text()
    parameters = sum(parameter.numel() for parameter in poss_heads.parameters())
    assert collect_facts(folder).num_parameters == parameters
    for words in ("# poss-heads", "POSS draft heads (2 specialists of 2 draft positions each",
                  'load_heads("path/to/poss-heads")',
                  'from_pretrained("lab/target"', "| held-out functions | 3.21 | 1.83 | 100.0 | 183.4 |",
                  "| held-out functions | 0.90 | 0.75 |", "dynamic, depth 6, 16 nodes", "arXiv:2506.03566",
                  "`arguments.learning_rate` | 3e-05", "`hours` | 1.25", "commit 0123abc", "torch 2.99"):  # fmt: skip
        assert words in text
    for words in ("/home/me", "log_history", "fsdp", "None"):
        assert words not in text


def test_what_was_not_measured_is_left_out(poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.save_pretrained(tmp_path)
    text = write_card(tmp_path).read_text()
    assert "## Results" not in text and "## Training" not in text and "model-index" not in text
    partial = CardFacts("x", {"model_type": "specheads_eagle", "method": "eagle"}, evaluations=[{"speed_up": 1.5}])
    text = render_card(partial)
    assert "| task | speed-up |" in text and "acceptance length" not in text and "pos-acc" not in text
    assert "base_model" not in text and "No licence of these weights was stated." in text


def test_a_folder_on_some_machine_is_no_base_model(poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.config.target["name"] = "/home/me/runs/my-target"
    poss_heads.save_pretrained(tmp_path)
    text = write_card(tmp_path).read_text()
    assert "base_model" not in text and "/home/me" not in text and "`my-target`" in text


def test_what_a_user_wrote_stays(folder: Path) -> None:
    first = write_card(folder, license="apache-2.0").read_text()
    edited = first.replace("library_name:", "co2_eq_emissions: 3\nlibrary_name:").replace(
        "- poss\n", "- poss\n- mine\n"
    )
    edited = edited.replace(BEGIN, "Read this first.\n\n" + BEGIN) + "\n## My notes\n\nWorks with tea.\n"
    (folder / "README.md").write_text(edited)
    again = write_card(folder).read_text()
    assert (
        again.index("Read this first.") < again.index(BEGIN) < again.index(END) < again.index("## My notes\n\nWorks")
    )
    assert metadata_of(again)["co2_eq_emissions"] == 3 and "mine" in metadata_of(again)["tags"]
    assert metadata_of(again)["license"] == "apache-2.0"  # not known this time, so the earlier value stays
    assert again.count(BEGIN) == again.count(END) == again.count("# poss-heads") == 1
    assert write_card(folder).read_text() == again


def test_several_readmes(folder: Path) -> None:
    """Sections of both are kept; of one heading, or one value, the first README's."""
    facts = collect_facts(folder)
    plain = render_card(facts)
    hub = plain.replace("library_name:", "language: de\nlibrary_name:") + "\n## Notes\n\nNew.\n\nMore.\n"
    local = plain.replace("library_name:", "language: en\nco2: 3\nlibrary_name:")
    local += "\n## Notes\n\nOld.\n\n## Thanks\n\nTo all.\n"
    text = render_card(facts, hub, None, local)
    assert "## Notes\n\nNew.\n\nMore.\n\n## Thanks\n\nTo all." in text and "Old." not in text
    assert metadata_of(text)["language"] == "de" and metadata_of(text)["co2"] == 3
    assert render_card(facts, text, hub, local) == text


def test_results_of_every_task_stand_under_its_name(folder: Path) -> None:
    results = [RESULTS, RESULTS | {"task": "other", "acceptance_length": 1.5}]
    (folder / "eval_results.json").write_text(json.dumps(results))
    found = metadata_of(write_card(folder).read_text())["model-index"][0]["results"]
    assert [(r["dataset"]["name"], r["metrics"][0]["value"]) for r in found] == [
        ("held-out functions", 3.214),
        ("other", 1.5),
    ]


def test_a_readme_of_other_origin_is_kept_below(folder: Path) -> None:
    (folder / "README.md").write_text("# Hand-written\n\nAll of it.\n")
    text = write_card(folder).read_text()
    assert text.index(END) < text.index("# Hand-written\n\nAll of it.")


def test_rendering_again_gives_the_same(folder: Path) -> None:
    first = write_card(folder).read_text()
    assert write_card(folder).read_text() == first


def test_numbers_follow_the_results(folder: Path) -> None:
    write_card(folder)
    (folder / "eval_results.json").write_text(json.dumps([RESULTS | {"acceptance_length": 2.5}]))
    text = write_card(folder).read_text()
    assert "2.50" in text and "3.21" not in text
    assert metadata_of(text)["model-index"][0]["results"][0]["metrics"][0]["value"] == 2.5


def test_targets_have_cards_too(target, tmp_path: Path) -> None:
    target.to(torch.bfloat16).save_pretrained(tmp_path / "small-target")
    text = write_card(tmp_path / "small-target", limits=["Only Python."]).read_text()
    assert "A `llama` language model" in text and "- Only Python." in text and "draft-head" not in text
    assert metadata_of(text)["library_name"] == "transformers"


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        write_card(tmp_path)


def test_a_targets_right_answers_are_its_results() -> None:
    shares = {"temperature 0": {"all": 0.9, "lists": 0.85}, "temperature 1": {"all": 0.7, "lists": 0.5}}
    facts = CardFacts("lab/target", {"model_type": "llama"}, training={"hours": 2.0, "right_answers": shares})
    text = render_card(facts)
    assert "| right answers, held-out prompts | temperature 0 | temperature 1 |" in text
    assert "| lists | 85 % | 50 % |" in text and "`right_answers" not in text and "| `hours` | 2 |" in text
