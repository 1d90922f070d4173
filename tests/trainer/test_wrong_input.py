"""Whatever is wrong with the input of `specheads train` is one line on stderr and exit code 2, and a traceback only
with `--debug`; before a target is loaded wherever it can be told before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import transformers

from hf_specheads.trainer import DraftHeadTrainer, building
from hf_specheads.trainer.__main__ import main
from hf_specheads.trainer.data.sources import DataSource, is_path
from hf_specheads.trainer.recipe import RecipeError, read_recipe

CHAT = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}
# Changes to the recipe, with {folder} for the workspace's, and words of the error.
EARLY = {
    "missing data": ("train_data={folder}/nowhere.jsonl", "there is no file or folder"),
    "missing data folder": ("train_data={folder}/nowhere", "there is no file or folder"),
    "missing held-out data": ("eval_data={folder}/nowhere.jsonl", "there is no file or folder"),
    "empty data": ("train_data={folder}/empty.jsonl", "is empty"),
    "blank data": ("train_data={folder}/blank.jsonl", "blank.jsonl"),
    "broken data": ("train_data={folder}/broken.jsonl", "line 2 is not valid JSON"),
    "data of numbers": ("train_data={folder}/numbers.jsonl", "line 1 is no JSON object but int"),
    "data that is no JSON": ("train_data={folder}/broken.json", "cannot be read"),
    "data without a column": (
        "train_data={folder}/column.jsonl",
        "one of ['messages', 'conversations', 'prompt and completion', 'text', 'input_ids'] is needed",
    ),
    "data in another encoding": ("train_data={folder}/latin.jsonl", "text that is no UTF-8"),
    "data in another encoding, and broken": ("train_data={folder}/cut.jsonl", "line 1 is text that is no UTF-8"),
    "unknown split": ("train_data.split=test", "cannot be read"),
    "data as a number": ("train_data=3", "data must be a path or a mapping"),
    "too few data": ("eval_examples=99", "eval_examples=99"),
    "missing target": ("target={folder}/nowhere", "there is no such folder"),
    "target with a tilde": ("target=~/nowhere", "there is no such folder"),
    "target without a config": ("target={folder}/bare", "holds no config.json"),
    "target with a broken config": ("target={folder}/damaged", "is not the configuration of a model"),
    "heads as target": ("target={folder}/heads", "a folder of draft heads (specheads_poss)"),
    "missing heads": ("from_heads={folder}/nowhere", "there is no such folder"),
    "heads that are none": ("from_heads=no", "`from_heads` must be a text, got False; YAML reads yes, no"),
    "chats without a template": ("train_data={folder}/chats.jsonl", "has no chat template"),
    "unknown method": ("method=eagel", "`method` must be one of"),
    "unknown type": ("target_dtype=float17", "`target_dtype` must be the name of a torch dtype"),
    "unknown heads' type": ("heads_dtype=relu", "`heads_dtype` must be the name of a torch dtype"),
    "unknown key": ("nonsense=1", "neither a recipe key"),
    "unknown training argument": ("training.nonsense=1", "unknown training argument"),
    "no equals sign": ("learning_rate", "written key=value"),
    "broken value": ("output_dir=[", "is not valid YAML"),
    "half a step": ("max_steps=1.5", "`max_steps` must be a whole number, got 1.5"),
    "a word for a number": ("learning_rate=fast", "`learning_rate` must be a number, got 'fast'"),
    "a number for a switch": ("packing=3", "`packing` must be true or false, got 3"),
    "a value out of range": ("num_passes=0", "`num_passes` must be at least 1"),
    "unknown strategy": ("save_strategy=sometimes", "sometimes"),
    "unknown optimizer": ("optim=sdg", "sdg"),
    "nowhere to write": ("output_dir=null", "output_dir"),
}
LATE = {
    "no Hub": ("target=somebody/something", "the target 'somebody/something' cannot be loaded: We couldn't connect"),
    "no Hub to push to": ("push_to_hub=true", "but the Hub did not provide the repository"),
    "unknown field of heads": ("heads.num_specialist=2", "num_specialist"),
    "impossible heads": ("heads.num_specialists=0", "num_specialists"),
    "text that is none": ("train_data={folder}/numbers_as_text.jsonl", "every `text` of the data must be a string"),
    "ids that are none": ("train_data={folder}/halves.jsonl", "`input_ids` must be whole numbers, got 1.5"),
    "words for ids": ("train_data={folder}/words.jsonl", "`input_ids` must be whole numbers, got 'w1'"),
    "a target as heads": ("from_heads={folder}/target", "target"),
}


@pytest.fixture
def folder(workspace, heads, tmp_path: Path) -> Path:
    heads.save_pretrained(tmp_path / "heads")
    for name in ("bare", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    row = json.dumps({"text": "w1 w2 w3"})
    for name, text in {
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "broken.jsonl": f"{row}\n{row[:-4]}\n{row}\n",
        "numbers.jsonl": "1\n2\n",
        "broken.json": "[{",
        "column.jsonl": json.dumps({"question": "w1"}),
        "chats.jsonl": "\n".join([json.dumps(CHAT)] * 20),
        "numbers_as_text.jsonl": "\n".join([json.dumps({"text": 5})] * 20),
        "halves.jsonl": "\n".join([json.dumps({"input_ids": [1.5, 2]})] * 20),
        "words.jsonl": "\n".join([json.dumps({"input_ids": ["w1", "w2"]})] * 20),
    }.items():
        (tmp_path / name).write_text(text)
    latin = (json.dumps({"text": "caf?"}) + "\n").encode().replace(b"?", b"\xe9")
    (tmp_path / "latin.jsonl").write_bytes(latin * 20)
    (tmp_path / "cut.jsonl").write_bytes(latin + latin[:-3])
    return tmp_path


def error_of(workspace, folder: Path, change: str, capsys: pytest.CaptureFixture) -> str:
    """The line that `specheads train` leaves with."""
    words = [*workspace.options, f"output_dir={folder / 'run'}", change.replace("{folder}", str(folder))]
    capsys.readouterr()
    assert main(words) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("specheads train: error: ")]
    assert len(lines) == 1 and "Traceback" not in printed.err
    assert not (folder / "run").exists()
    with pytest.raises(Exception, match=r"(?s).+"):
        main([*words, "--debug"])
    return lines[0]


@pytest.mark.parametrize("case", EARLY)
def test_wrong_before_anything_is_loaded(workspace, folder, capsys, monkeypatch, case: str) -> None:
    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("a target was loaded first")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    change, words = EARLY[case]
    assert words in error_of(workspace, folder, change, capsys)


@pytest.mark.parametrize("case", LATE)
def test_wrong_for_this_target(workspace, folder, capsys, monkeypatch, case: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    change, words = LATE[case]
    assert words in error_of(workspace, folder, change, capsys)


def test_what_only_the_first_step_tells(workspace, folder, capsys) -> None:
    """Optimizers look at their arguments when training begins."""
    words = [*workspace.options, f"output_dir={folder / 'run'}", "learning_rate=-1"]
    assert main(words) == 2
    assert "specheads train: error: Invalid learning rate: -1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="Invalid learning rate"):
        main([*words, "--debug"])


def test_an_error_after_the_first_step_shows_where(workspace, folder, monkeypatch) -> None:
    """Which is no fault of the input, and nobody should have to train again to see it."""
    step, steps = DraftHeadTrainer.training_step, []

    def third_fails(self, *args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise ValueError("a defect")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(DraftHeadTrainer, "training_step", third_fails)
    with pytest.raises(ValueError, match="a defect"):
        main([*workspace.options, f"output_dir={folder / 'run'}", "gradient_accumulation_steps=1"])


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ("save_strategy=no", "save_strategy", "no"),
        ("eval_strategy=off", "eval_strategy", "no"),
        ("max_steps=1e1", "max_steps", 10),
        ("save_steps=5e2", "save_steps", 500.0),
        ("learning_rate=1", "learning_rate", 1),
        ("save_total_limit=null", "save_total_limit", None),
    ],
)
def test_values_yaml_reads_otherwise(change: str, name: str, value: object) -> None:
    recipe = read_recipe("poss3", ["target=t", "output_dir=o", "use_cpu=true", "eval_examples=0", change])
    assert recipe.training[name] == value and type(recipe.training[name]) is type(value)
    assert getattr(building.training_arguments(recipe), name) == value


def test_a_strategy_that_yaml_reads_as_false_in_a_file(workspace, folder: Path) -> None:
    (folder / "more.yaml").write_text(Path(workspace.options[1]).read_text() + "\n  save_strategy: no\n")
    assert read_recipe(folder / "more.yaml").training["save_strategy"] == "no"


@pytest.mark.parametrize(("has_bf16", "words"), [(False, "training runs in fp32"), (True, None)])
def test_recipes_run_where_there_is_no_bf16(tmp_path, monkeypatch, caplog, has_bf16: bool, words: str | None) -> None:
    """`bf16: true` of every shipped recipe is kept where the hardware has it, and said and left elsewhere."""
    monkeypatch.setattr(building, "is_torch_bf16_gpu_available", lambda: has_bf16)
    recipe = read_recipe("poss3", ["target=org/model", f"output_dir={tmp_path}", *(["use_cpu=true"] * has_bf16)])
    assert building.training_arguments(recipe).bf16 is has_bf16
    said = [record.message for record in caplog.records if record.name == building.__name__]
    assert (len(said) == 1 and words in said[0]) if words else not said


def test_hub_ids_are_no_paths_and_urls_are_left_alone(tmp_path: Path) -> None:
    assert not is_path("org/model") and not is_path("gpt2")
    assert is_path("./model") and is_path("runs/a/b") and is_path(str(tmp_path))
    DataSource("https://example.org/data.jsonl").refuse_wrong_path()
    (tmp_path / "part-1.jsonl").write_text("{}")
    DataSource(f"{tmp_path}/part-*.jsonl").refuse_wrong_path()
    with pytest.raises(RecipeError, match="no file or folder"):
        DataSource(f"{tmp_path}/other-*.jsonl").refuse_wrong_path()


def test_a_wrong_recipe_is_told_without_loading_torch(tmp_path: Path) -> None:
    code = "import sys; from hf_specheads.trainer.__main__ import main; main(['--config', 'nowhere.yaml']); "
    code += "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]" and "no recipe file 'nowhere.yaml'" in done.stderr


def test_a_cache_that_cannot_be_written_is_not_taken_for_the_data(tmp_path: Path, monkeypatch) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    for place, told in (("/nobody/.cache/huggingface", True), (str(data), False)):

        def fails(self: DataSource, place: str = place) -> None:
            raise PermissionError(13, "Permission denied", place)

        monkeypatch.setattr(DataSource, "_load", fails)
        with pytest.raises(RecipeError, match="Permission denied") as refused:
            DataSource(str(data), None, "train").load_raw()
        assert ("HF_HOME" in str(refused.value)) is told
