"""`python -m hf_specheads.trainer`: recipes, what it writes, and two processes against one."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import yaml

from hf_specheads import AutoDraftHead, load_heads
from hf_specheads.trainer import JointTrainingArguments
from hf_specheads.trainer.__main__ import main
from hf_specheads.trainer.building import training_arguments
from hf_specheads.trainer.recipe import RecipeError, read_recipe, shipped_recipes


def test_run_from_a_recipe(workspace, tmp_path, capsys):
    folder = tmp_path / "heads"
    workspace.run(*workspace.options, f"output_dir={folder}", "eval_strategy=steps", "eval_steps=2")
    printed = capsys.readouterr().out
    for line in ("poss, 2 specialist(s)", "passes: 4, summed backward", "16 examples to train on, 4 examples to"):
        assert line in printed
    heads = load_heads(str(folder))
    assert heads.config.num_specialists == 2 and heads.config.trained_positions == 4
    facts = json.loads((folder / "training_facts.json").read_text())
    assert facts["steps"] == 3 and facts["train_examples"] == 16 and facts["num_passes"] == 4
    assert facts["recipe"]["train_data"]["path"].endswith("train.jsonl")
    assert facts["versions"]["torch"] == torch.__version__
    assert {"eval_loss", "eval_acceptance_length", "eval_pos_acc_1"} <= facts["metrics"].keys()
    assert facts["arguments"]["learning_rate"] == 0.05
    assert any("eval_acceptance_length" in entry for entry in facts["log_history"])


@pytest.mark.parametrize(
    ("changes", "steps"),
    [(["eval_strategy=epoch"], [3]), (["eval_strategy=no"], [3]), (["eval_strategy=steps", "eval_steps=2"], [2, 3])],
)
def test_the_last_step_is_evaluated_once(workspace, tmp_path, changes, steps):
    folder = tmp_path / "heads"
    workspace.run(*workspace.options, *changes, f"output_dir={folder}", "eval_acceptance_prompts=0")
    facts = json.loads((folder / "training_facts.json").read_text())
    evaluated = [entry for entry in facts["log_history"] if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == steps
    assert facts["metrics"]["eval_loss"] == evaluated[-1]["eval_loss"]


def test_rows_of_several_examples_are_not_counted_as_examples(workspace, tmp_path, capsys):
    workspace.run(
        *workspace.options, f"output_dir={tmp_path / 'heads'}", "packing=true", "max_steps=1", "max_length=48"
    )
    printed = capsys.readouterr().out
    (rows,) = re.findall(r"(\d+) packed rows to train on, 4 examples to evaluate on", printed)
    assert 0 < int(rows) < 16 and "16 rows, 16 examples" in printed and "4 packed rows on 1 process" in printed


def test_warm_start_from_a_folder(workspace, tmp_path):
    eagle, poss = tmp_path / "eagle", tmp_path / "poss"
    once = ["max_steps=1", "eval_examples=0"]
    workspace.run(*workspace.options, "method=eagle", "heads={}", "num_passes=1", *once, f"output_dir={eagle}")
    workspace.run(*workspace.options, f"from_heads={eagle}", *once, "learning_rate=0.0", f"output_dir={poss}")
    eagle_heads, poss_heads = load_heads(str(eagle)), load_heads(str(poss))
    for layer in poss_heads.layers:
        for name, value in layer.state_dict().items():
            assert torch.equal(value, eagle_heads.layers[0].state_dict()[name]), name


@pytest.mark.slow
def test_two_processes_equal_one(workspace, tmp_path):
    """Gloo, two processes of two examples against one of four; two batches per step; sgd without clipping. Five
    examples to evaluate on do not divide evenly."""
    common = [*workspace.options, "gradient_accumulation_steps=2", "max_grad_norm=0.0", "eval_examples=5",
              "per_device_eval_batch_size=2", "max_steps=1"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", str(port), "-m", "hf_specheads.trainer"]  # fmt: skip
    result = subprocess.run(
        [*launch, *common, "per_device_train_batch_size=2", "ddp_backend=gloo", f"output_dir={two}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    workspace.run(*common, "per_device_train_batch_size=4", f"output_dir={one}")
    ours, theirs = (AutoDraftHead.from_pretrained(folder).state_dict() for folder in (one, two))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    facts = [json.loads((folder / "training_facts.json").read_text()) for folder in (one, two)]
    assert [f["hardware"]["processes"] for f in facts] == [1, 2]
    for name in ("loss", "grad_norm", "feature_loss_1", "token_loss_4"):
        logged = [[entry[name] for entry in f["log_history"] if name in entry] for f in facts]
        assert logged[0] == pytest.approx(logged[1], rel=1e-4), name
    for name in ("eval_loss", "eval_acceptance_length", "eval_pos_acc_1"):
        assert facts[0]["metrics"][name] == pytest.approx(facts[1]["metrics"][name], rel=1e-4), name


# ---------------------------------------------------------------------- recipes
def test_shipped_recipes_are_complete(tmp_path):
    passes = {"eagle": 1, "hass": 3, "poss1": 6, "poss2": 6, "poss3": 6, "medusa": 4, "medusa2": 4}
    assert passes.keys() <= shipped_recipes().keys()
    for name in shipped_recipes():
        recipe = read_recipe(name, ["target=org/model", f"output_dir={tmp_path}", "use_cpu=true"])
        args = training_arguments(recipe)
        assert args.num_passes == passes.get(name, args.num_passes)
        if args.num_passes is None:  # as the heads say: the length of their blocks
            continue
        assert recipe.trains_target == isinstance(args, JointTrainingArguments) == (name == "medusa2")
        specialists = recipe.heads.get("num_specialists", 1)
        assert specialists * recipe.heads.get("positions_per_specialist", args.num_passes) == args.num_passes
        if name in ("eagle", "hass", "poss1", "poss2", "poss3"):
            assert args.learning_rate == 3e-5


def test_changes_reach_their_place():
    changes = ["target=t", "learning_rate=1e-4", "heads.num_specialists=4", "training.seed=7"]
    changes += ["train_data=a.jsonl", "train_data.split=train[:5%]", "eval_data={path: b.jsonl}"]
    recipe = read_recipe("poss3", changes)
    assert recipe.training["learning_rate"] == 1e-4 and recipe.training["seed"] == 7
    assert recipe.heads == {"num_specialists": 4, "positions_per_specialist": 3}
    assert (recipe.train_data.path, recipe.train_data.split) == ("a.jsonl", "train[:5%]")
    assert recipe.eval_data.path == "b.jsonl"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["learning_rate"], "written key=value"),
        (["nonsense=1"], "neither a recipe key"),
        (["training.nonsense=1"], "unknown training argument"),
        (["target=null"], "the recipe has no `target`"),
        (["train_data={file: x}"], "data must be a path or a mapping"),
        (["method.x=1"], "not a mapping"),
    ],
)
def test_bad_changes_are_named(changes, message):
    with pytest.raises(RecipeError, match=message):
        read_recipe("poss3", ["target=t", *changes])


def test_bad_recipe_files_are_named(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "unknown.yaml").write_text(yaml.safe_dump({"target": "t", "train_data": "x", "tagret": 1}))
    for name, message in [
        ("missing.yaml", "no recipe file"),
        ("list.yaml", "must hold a mapping"),
        ("broken.yaml", "not valid YAML"),
        ("unknown.yaml", "tagret"),
    ]:
        with pytest.raises(RecipeError, match=message):
            read_recipe(tmp_path / name)


def test_errors_leave_with_status_2(workspace, capsys):
    assert main(["--config", "poss3"]) == 2
    assert "target" in capsys.readouterr().err
    assert main([*workspace.options]) == 2
    assert "output_dir" in capsys.readouterr().err
    assert main([*workspace.options, "output_dir=x", "eval_examples=99"]) == 2
    assert "eval_examples=99" in capsys.readouterr().err


def test_an_interrupted_training_says_how_to_go_on(workspace, tmp_path, capsys, monkeypatch):
    from hf_specheads.trainer.trainer import DraftHeadTrainer

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(DraftHeadTrainer, "train", interrupted)
    assert main([*workspace.options, f"output_dir={tmp_path / 'heads'}"]) == 130
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("stopped; ")]
    assert "the same command resumes" in line


@pytest.mark.parametrize(
    ("length", "said"),
    [(["max_steps=1", "warmup_steps=1"], "1 steps (about 1 steps, all of them warm-up: warmup_steps=1"),
     (["max_steps=2", "warmup_steps=1"], "2 steps\n"), (["max_steps=1", "warmup_steps=0"], "1 steps\n")],
)  # fmt: skip
def test_a_warm_up_that_never_ends_is_told(length, said, workspace, tmp_path, capsys):
    workspace.run(*workspace.options, *length, "eval_examples=0", f"output_dir={tmp_path / 'heads'}")
    assert f"length: {said}" in capsys.readouterr().out


def test_memory_is_pinned_for_an_accelerator_alone(tmp_path, monkeypatch):
    """Elsewhere torch warns at every data loader."""
    for available, given, pinned in ((False, [], False), (True, [], True), (True, ["use_cpu=true"], False),
                                     (False, ["dataloader_pin_memory=true"], True)):  # fmt: skip
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        changes = ["target=org/model", f"output_dir={tmp_path}", "bf16=false", *given]
        assert training_arguments(read_recipe("eagle", changes)).dataloader_pin_memory is pinned
