"""A trainer's pushes, over real HTTP: the card of draft heads, what users wrote, and nothing that is not meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from safetensors.torch import load
from support.hub.endpoint import HubEndpoint
from support.targets import training_target

from hf_specheads.publishing.figures import CURVES, FIGURES, POS_ACC
from hf_specheads.publishing.places import without_places
from hf_specheads.target.adapter import ADAPTER_FOLDER
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments
from hf_specheads.trainer.__main__ import main
from hf_specheads.trainer.publishing import MEASURED_IN_TRAINING

from .conftest import make_examples, make_heads


# ------------------------------------------------------------------ what runs in the client's process
def build(folder: Path, **arguments: Any) -> DraftHeadTrainer:
    target = training_target()
    defaults = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "max_length": 64,
                "eval_acceptance_prompts": 1, "eval_max_new_tokens": 8, "use_cpu": True, "disable_tqdm": True,
                "report_to": []}  # fmt: skip
    args = DraftHeadTrainingArguments(output_dir=str(folder), **{**defaults, **arguments})
    data = Dataset.from_list(make_examples())
    return DraftHeadTrainer(model=make_heads(target), target=target, args=args, train_dataset=data, eval_dataset=data)


def train_and_push(folder: Path, name: str, **options: Any) -> None:
    trainer = build(folder, hub_model_id=name, eval_strategy="steps", eval_steps=2, logging_steps=1)
    trainer.train()
    trainer.push_to_hub(**options)


def train_pushing(folder: Path, name: str, **arguments: Any) -> None:
    trainer = build(folder, hub_model_id=name, push_to_hub=True, **arguments)
    trainer.train()
    trainer.save_model()
    trainer._finish_current_push()


def card_of(hub: HubEndpoint, name: str, revision: str = "main") -> tuple[dict, str]:
    text = hub.files(name, revision)["README.md"].decode()
    return yaml.safe_load(text.split("---")[1]), text


# ------------------------------------------------------------------ tests
def test_push_to_hub(hub: HubEndpoint, tmp_path: Path) -> None:
    name = hub.new_name()
    hub.run(train_and_push, tmp_path / "run", name, license="mit", dataset="lab/texts", finetuned_from="lab/target")
    files = hub.files(name)
    assert {"config.json", "model.safetensors", "training_facts.json", FIGURES[POS_ACC], FIGURES[CURVES]} <= set(files)
    assert not [path for path in files if path.endswith((".bin", ".pkl"))], "no pickle, least of all of the token"
    assert load(files["model.safetensors"]).keys() == make_heads(training_target()).state_dict().keys()
    metadata, text = card_of(hub, name)
    assert metadata["license"] == "mit" and metadata["datasets"] == ["lab/texts"]
    assert metadata["base_model"] == "lab/target" and "poss" in metadata["tags"]
    assert f"]({FIGURES[CURVES]})" in text and "| held-out, by `generate` | 2 |" in text
    assert MEASURED_IN_TRAINING in text and "pos-acc at draft position" in text and "`steps` | 2" in text
    facts = json.loads(files["training_facts.json"])
    assert facts["hours"] is not None and facts["versions"]["hf-specheads"] and facts["num_passes"] == 4
    assert str(tmp_path) not in text and hub.repos[name].find("main").title == "End of training"


@pytest.mark.slow  # by default of heads that are pushed by themselves: publishing/test_push.py
def test_what_a_user_wrote_stays(hub: HubEndpoint, tmp_path: Path) -> None:
    name = hub.new_name()
    hub.run(train_and_push, tmp_path / "run", name)
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / "README.md").write_text(card_of(hub, name)[1] + "\n## My notes\n\nWorks with tea.\n")
    hub.publish(name, tmp_path / "edited")
    hub.run(train_and_push, tmp_path / "other_run", name)
    text = card_of(hub, name)[1]
    assert text.count("## My notes\n\nWorks with tea.") == text.count("## Training") == 1


def test_pushing_while_training(hub: HubEndpoint, tmp_path: Path) -> None:
    """Every saved checkpoint is pushed, with its card; its optimiser only where the strategy asks for it."""
    name = hub.new_name()
    arguments = {"save_strategy": "steps", "save_steps": 1, "hub_strategy": "checkpoint", "hub_always_push": True}
    hub.run(train_pushing, tmp_path / "run", name, **arguments)
    titles = [commit.title for commit in hub.repos[name].history("main")]
    assert titles[0] == "Model save" and "Training in progress, step 1" in titles
    first = next(c for c in hub.repos[name].history("main") if c.title == "Training in progress, step 1")
    assert "draft heads" in first.files["README.md"].data.decode() and "model.safetensors" in first.files
    files = hub.files(name)
    assert "last-checkpoint/optimizer.pt" in files and "optimizer.pt" not in files
    assert not [path for path in files if "partial" in path]


def test_the_command_pushes(hub: HubEndpoint, workspace, tmp_path: Path) -> None:
    name = hub.new_name()
    options = [f"output_dir={tmp_path / 'run'}", "push_to_hub=true", f"hub_model_id={name}", "hub_private_repo=true"]
    assert hub.run(main, [*workspace.options, *options]) == 0
    metadata, text = card_of(hub, name)
    assert hub.repos[name].private and "poss" in metadata["tags"] and "`recipe.method` | poss" in text
    assert "`metrics.eval_acceptance_length`" in text
    pushed = hub.files(name)["training_facts.json"]
    assert json.loads(pushed)["recipe"]["method"] == "poss"
    own = (tmp_path / "run" / "training_facts.json").read_text()
    assert json.loads(pushed) == without_places(json.loads(own))
    assert str(tmp_path) in own and str(tmp_path) not in pushed.decode() + text


@pytest.mark.slow  # by default heads with an adapter are pushed in publishing/test_push.py, and saved in test_joint.py
def test_the_adapter_of_a_target_trained_along(hub: HubEndpoint, workspace, tmp_path: Path) -> None:
    name = hub.new_name()
    options = [f"output_dir={tmp_path / 'run'}", "push_to_hub=true", f"hub_model_id={name}", "method=eagle",
               "heads={}", "target_lora_rank=2", "save_strategy=steps", "save_steps=1",
               "hub_always_push=true"]  # fmt: skip
    assert hub.run(main, [*workspace.options, *options]) == 0
    for commit in hub.repos[name].history("main")[:-1]:
        assert f"{ADAPTER_FOLDER}/adapter_model.safetensors" in commit.files, commit.title
    adapter = load(hub.files(name)[f"{ADAPTER_FOLDER}/adapter_model.safetensors"])
    assert all("lora_" in key for key in adapter)


def test_a_card_without_a_repository(make_trainer) -> None:
    trainer = make_trainer()
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="mine", limits=["Only poems."])
    folder = Path(trainer.args.output_dir)
    text = (folder / "README.md").read_text()
    assert f"]({FIGURES[CURVES]})" in text and (folder / FIGURES[CURVES]).read_bytes().startswith(b"\x89PNG")
    assert "| training, expected | 4 |" in text
    assert "# mine\n" in text and "- Only poems." in text and "`steps` | 4" in text


@pytest.mark.parametrize("field", ["licence", "finetuned"])
def test_unknown_facts_are_refused(make_trainer, field: str) -> None:
    trainer = make_trainer()
    trainer.save_model()
    with pytest.raises(TypeError, match=field):
        trainer.create_model_card(**{field: "x"})
