"""`push_to_hub`, over real HTTP: what a repository holds, what its card says, and what is never lost or uploaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load, load_file
from support.heads import OPTIONS
from support.hub.client import error_of
from support.hub.endpoint import READER, HubEndpoint
from support.published import save_with_facts
from support.targets import own_target
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, PossHead, load_heads
from hf_specheads.checkpoints.fetch import HUB_ERRORS
from hf_specheads.cli import main
from hf_specheads.heads.auto import METHODS
from hf_specheads.publishing.card.render import BEGIN, END, write_card
from hf_specheads.publishing.figures import FIGURES
from hf_specheads.target.adapter import ADAPTER_FOLDER, add_adapter

RESULTS = [
    {"task": "greedy", "acceptance_length": 3.2, "pos_acc": [0.9, 0.75], "speed_up": 1.8, "identical": True},
    {"task": "temperature 1", "acceptance_length": 1.5, "pos_acc": [0.4, 0.3], "speed_up": 0.9, "identical": True},
]
TRAINING = {"command": "specheads train --config x", "hours": 1.5, "commit": "0123abc", "versions": {"torch": "2.99"},
            "recipe": {"train_data": "lab/texts"},
            "log_history": [{"step": 5, "loss": 3.0}, {"step": 10, "loss": 2.0}]}  # fmt: skip


# ------------------------------------------------------------------ what runs in the client's process
def push(folder: Path, name: str, **options: Any) -> str:
    """Address of the commit or pull request."""
    commit = load_heads(folder).push_to_hub(name, **options)
    return commit.pr_url or commit.commit_url


def save_and_push(folder: Path, copy: Path, name: str, **options: Any) -> None:
    load_heads(folder).save_pretrained(copy, push_to_hub=True, repo_id=name, **options)


@pytest.fixture
def folder(poss_heads: PossHead, tmp_path: Path) -> Path:
    return save_with_facts(poss_heads, tmp_path / "saved", TRAINING, RESULTS)


def card_of(hub: HubEndpoint, name: str, revision: str = "main") -> tuple[dict, str]:
    text = hub.files(name, revision)["README.md"].decode()
    return yaml.safe_load(text.split("---")[1]), text


# ------------------------------------------------------------------ what is pushed
def test_what_a_repository_holds(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    assert hub.run(push, folder, name) == f"{hub.url}/{name}/commit/{hub.repos[name].refs['refs/heads/main']}"
    files = hub.files(name)
    assert set(files) == {".gitattributes", "README.md", "config.json", "model.safetensors", "training_facts.json",
                          "eval_results.json", *FIGURES.values()}  # fmt: skip
    saved, pushed = load_file(folder / "model.safetensors"), load(files["model.safetensors"])
    assert saved.keys() == pushed.keys() and all(torch.equal(saved[key], pushed[key]) for key in saved)
    assert all(files[path].startswith(b"\x89PNG") for path in FIGURES.values())
    assert len(hub.repos[name].history("main")) == 2  # everything in one commit


def test_a_hub_that_does_not_answer_is_told_in_one_line(folder: Path, monkeypatch, capsys) -> None:
    def unanswered(*args: Any, **kwargs: Any) -> None:
        raise HUB_ERRORS[1]("[Errno -2] Name or service not known")  # of the HTTP client, and no OSError

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unanswered)
    assert main(["push", str(folder), "lab/heads"]) == 2
    said = capsys.readouterr().err
    assert "specheads: error: 'lab/heads' cannot be pushed because http" in said and "--to-folder DIR" in said
    assert "Traceback" not in said


def test_nobody_learns_where_it_was_trained_and_measured(poss_heads: PossHead, tmp_path: Path) -> None:
    recipe = {"target": str(tmp_path / "target"), "train_data": {"path": str(tmp_path / "data")}}
    training = {**TRAINING, "command": f"specheads train output_dir={tmp_path / 'saved'}", "recipe": recipe}
    folder = save_with_facts(
        poss_heads, tmp_path / "saved", training, [{**RESULTS[0], "heads": str(tmp_path / "saved")}]
    )
    assert main(["push", str(folder), "lab/heads", "--to-folder", str(tmp_path / "repository")]) == 0
    written = {path: path.read_bytes() for path in (tmp_path / "repository").rglob("*") if path.is_file()}
    assert [path.name for path, data in written.items() if str(tmp_path).encode() in data] == []
    facts = json.loads((tmp_path / "repository" / "training_facts.json").read_text())
    assert facts["command"] == "specheads train output_dir=saved" and facts["recipe"]["target"] == "target"
    assert str(tmp_path) in (folder / "training_facts.json").read_text()  # one's own stay as they are


def test_what_the_card_says(hub: HubEndpoint, folder: Path) -> None:
    hub.publish("lab/target", _with_readme(folder.parent / "target", "---\nlicense: llama3\n---\n"))
    name = hub.new_name()
    hub.run(push, folder, name, license="mit", datasets=["lab/texts"], tags=["tiny"])
    metadata, text = card_of(hub, name)
    assert metadata["base_model"] == "lab/target" and metadata["license"] == "mit"
    assert metadata["datasets"] == ["lab/texts"] and {"poss", "draft-head", "tiny"} <= set(metadata["tags"])
    by_task = {result["dataset"]["name"]: {m["type"]: m["value"] for m in result["metrics"]}
               for result in metadata["model-index"][0]["results"]}  # fmt: skip
    assert by_task["greedy"] == {"acceptance_length": 3.2, "speed_up": 1.8}
    assert by_task["temperature 1"] == {"acceptance_length": 1.5, "speed_up": 0.9}
    for words in (f"# {name.split('/')[1]}\n", f'load_heads("{name}")', "specheads train --config x", "lab/texts",
                  "commit 0123abc", "torch 2.99", "`hours` | 1.5", "| greedy | 0.90 | 0.75 |", "These weights: mit.",
                  "](https://huggingface.co/lab/target), is `llama3`",
                  *(f"]({path})" for path in FIGURES.values())):  # fmt: skip
        assert words in text


def _with_readme(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text(text)
    return folder


def test_facts_can_be_given(hub: HubEndpoint, poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.config.target["name"] = str(tmp_path / "my-target")
    poss_heads.save_pretrained(tmp_path / "saved")
    name = hub.new_name()
    hub.run(push, tmp_path / "saved", name, evaluations=RESULTS[:1], training={"hours": 2}, base_model="org/big")
    metadata, text = card_of(hub, name)
    assert metadata["base_model"] == "org/big" and "`hours` | 2" in text and "| greedy | 3.20" in text
    assert json.loads(hub.files(name)["eval_results.json"]) == RESULTS[:1]
    other = hub.new_name()
    hub.run(push, tmp_path / "saved", other)
    assert str(tmp_path).encode() not in b"".join(hub.files(other).values())
    assert "## Results" not in card_of(hub, other)[1] and FIGURES.keys() & hub.files(other).keys() == set()
    wrong = hub.run(error_of, push, tmp_path / "saved", name, licence="mit")
    assert "ValueError: unknown fact(s) ['licence']" in wrong


def heads_of(method: str, target: PreTrainedModel):
    return AutoDraftHead.from_target(target, method, **OPTIONS.get(method, {}))


@pytest.mark.parametrize("family", ["llama-tied", pytest.param("llama", marks=pytest.mark.slow)])
def test_no_weights_of_the_target(hub: HubEndpoint, family: str, tmp_path: Path) -> None:
    """Of no method: whatever of the target the heads use when drafting stays out of every file."""
    target = own_target(family)
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 100)  # no two norms alike
    theirs = list(target.state_dict().values())
    borrowed = {tensor.data_ptr() for tensor in theirs}
    for method in sorted(set(METHODS) - {"lookup"}):  # which has no weights
        heads = heads_of(method, target).bind(target)
        for parameter in heads.parameters():  # some start as copies of the target's; after training they differ
            if parameter.data_ptr() not in borrowed:
                parameter.data.add_(torch.randn_like(parameter) / 100)
        heads.save_pretrained(tmp_path / method)
        name = hub.new_name()
        hub.run(push, tmp_path / method, name)
        pushed = [load(data) for path, data in hub.files(name).items() if path.endswith(".safetensors")]
        assert pushed
        for key, tensor in (entry for tensors in pushed for entry in tensors.items()):
            same = any(tensor.shape == other.shape and torch.equal(tensor, other) for other in theirs)
            assert not same, f"{method}: {key} is a tensor of the target"


def test_the_adapter_goes_along(hub: HubEndpoint, tmp_path: Path) -> None:
    target = own_target("llama")
    add_adapter(target, rank=2, alpha=4, modules="q_proj")
    heads = AutoDraftHead.from_target(target, "medusa").bind(target)
    heads.save_pretrained(tmp_path / "saved")
    name = hub.new_name()
    hub.run(push, tmp_path / "saved", name)
    files = hub.files(name)
    adapter = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
    assert files[adapter] == (tmp_path / "saved" / adapter).read_bytes()
    assert all(".lora_" in key for key in load(files[adapter]))
    assert "**with** this adapter" in card_of(hub, name)[1]


# ------------------------------------------------------------------ what users wrote
def test_what_a_user_wrote_stays(hub: HubEndpoint, folder: Path, tmp_path: Path) -> None:
    name = hub.new_name()
    hub.run(push, folder, name)
    first = card_of(hub, name)[1]
    edited = first.replace(BEGIN, "Read this first.\n\n" + BEGIN).replace("- draft-head\n", "- draft-head\n- mine\n")
    edited += "\n## My notes\n\nWorks with tea.\n"
    hub.publish(name, _with_readme(tmp_path / "edited", edited))
    local = first + "\n## My notes\n\nAn older state.\n\n## Written locally\n\nStays too.\n"
    (folder / "README.md").write_text(local)
    (folder / "eval_results.json").write_text(json.dumps([RESULTS[0] | {"acceptance_length": 2.5}]))
    hub.run(push, folder, name)
    metadata, text = card_of(hub, name)
    assert text.index("Read this first.") < text.index(BEGIN) < text.index("2.50") < text.index(END)
    assert text.count("## My notes\n\nWorks with tea.") == text.count("## Written locally\n\nStays too.") == 1
    assert text.count("# My notes") == 1 and "An older state." not in text  # of one section, the published text
    assert "mine" in metadata["tags"] and "3.20" not in text
    hub.run(push, folder, name)
    assert card_of(hub, name)[1] == text


def test_pushing_the_same_again_changes_nothing(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.run(push, folder, name)
    before = len(hub.repos[name].commits)
    hub.run(push, folder, name)
    assert len(hub.repos[name].commits) == before and len(hub.requests("PUT /storage/")) == 1 + len(FIGURES)


def test_what_an_earlier_push_left_is_replaced(hub: HubEndpoint, folder: Path, tmp_path: Path) -> None:
    name = hub.new_name()
    hub.run(push, folder, name, max_shard_size="8KB", custom_generate=True)
    hub.repos[name].refs["refs/heads/shards"] = hub.repos[name].refs["refs/heads/main"]
    assert sum(path.endswith(".safetensors") for path in hub.files(name)) > 1
    hub.repos[name].commit("refs/heads/main", "theirs", {**hub.repos[name].find("main").files})
    (folder / "eval_results.json").unlink()
    hub.run(push, folder, name)
    assert set(hub.files(name)) == {".gitattributes", "README.md", "config.json", "model.safetensors",
                                    "training_facts.json", "eval_results.json", "figures/training.png"}  # fmt: skip


# ------------------------------------------------------------------ how it is committed
def test_private_branch_and_pull_request(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.run(push, folder, name, private=True, revision="next", commit_message="better heads")
    assert hub.repos[name].private and set(hub.files(name)) == {".gitattributes"}
    assert "model.safetensors" in hub.files(name, "next")
    assert hub.repos[name].find("next").title == "better heads"
    assert hub.run(push, folder, name, create_pr=True) == f"{hub.url}/{name}/discussions/1"
    assert "model.safetensors" in hub.files(name, "refs/pr/1") and set(hub.files(name)) == {".gitattributes"}
    text = card_of(hub, name, "next")[1]
    assert hub.run(error_of, push, folder, name, token=READER).startswith(
        ("HfHubHTTPError", "RepositoryNotFoundError")
    )
    assert card_of(hub, name, "next")[1] == text


def test_others_propose(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.run(push, folder, name)
    (folder / "eval_results.json").unlink()
    assert "403" in hub.run(error_of, push, folder, name, token=READER)
    assert "/discussions/1" in hub.run(push, folder, name, token=READER, create_pr=True)


def test_saving_can_push(hub: HubEndpoint, folder: Path, tmp_path: Path) -> None:
    name = hub.new_name()
    hub.run(save_and_push, folder, tmp_path / "copy", name, commit_message="saved")
    assert hub.repos[name].find("main").title == "saved" and "README.md" in hub.files(name)
    assert (tmp_path / "copy" / "model.safetensors").exists()


def test_an_interrupted_push_goes_on(hub: HubEndpoint, folder: Path) -> None:
    """The commit fails after the upload: pushing again sends no weights a second time."""
    name = hub.new_name()
    hub.fail("POST .*/commit/", status=500)
    assert "500" in hub.run(error_of, push, folder, name)
    assert set(hub.files(name)) == {".gitattributes"}
    sent = len(hub.requests("PUT /storage/"))
    hub.run(push, folder, name)
    assert "model.safetensors" in hub.files(name) and len(hub.requests("PUT /storage/")) == sent


def test_a_card_that_cannot_be_read_is_not_overwritten(hub: HubEndpoint, folder: Path) -> None:
    name = hub.new_name()
    hub.run(push, folder, name)
    state = dict(hub.repos[name].refs)
    hub.fail("HEAD .*/resolve/main/README.md", status=501, times=9)
    cache = hub.home / "hub" / f"models--{name.replace('/', '--')}"
    cache.rename(cache.with_suffix(".away"))
    assert hub.run(error_of, push, folder, name)
    assert hub.repos[name].refs == state


# ------------------------------------------------------------------ the command
def test_the_command(hub: HubEndpoint, folder: Path, tmp_path: Path) -> None:
    name = hub.new_name()
    (tmp_path / "chat.json").write_text(json.dumps({"acceptance_length": 2.2, "pos_acc": [0.7], "speed_up": 1.3}))
    command = ["push", str(folder), name, "--private", "--license", "mit", "--results", str(tmp_path / "chat.json")]
    assert hub.run(main, command) == 0
    assert hub.repos[name].private and "| chat | 2.20 | 1.30 |" in card_of(hub, name)[1]
    assert hub.run(main, ["push", str(tmp_path), name]) == 2
    assert hub.run(main, ["push", str(folder), name, "--token", "hf_wrong"]) == 2


# ------------------------------------------------------------------ into folders
def test_a_whole_repository_in_a_folder_without_a_network(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """What a push uploads, but for what only the Hub knows."""

    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", asked)
    out = tmp_path / "out"
    words = ["push", str(folder), "org/name", "--to-folder", str(out), "--custom-generate", "--license", "mit"]
    assert main([*words, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    code = ("custom_generate/generate.py", "custom_generate/requirements.txt")
    facts = ("training_facts.json", "eval_results.json")
    assert files == sorted(["README.md", "config.json", "model.safetensors", *facts, *code, *FIGURES.values()])
    card = (out / "README.md").read_text()
    assert 'load_heads("org/name")' in card and "These weights: mit." in card and "| greedy | 3.20" in card
    assert 'REPOSITORY = "org/name"' in (out / "custom_generate" / "generate.py").read_text()
    assert load_heads(out).config.method == "poss"
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    (out / "README.md").write_text(f"{card}\n## Mine\n\nkept\n")
    assert main([*words, "--overwrite"]) == 0
    assert "## Mine\n\nkept" in (out / "README.md").read_text()


def test_a_push_must_say_where_to(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["push", str(folder)]) == 2
    assert "say where to push" in capsys.readouterr().err
    (folder / "broken.json").write_text("[")
    assert main(["push", str(folder), "--to-folder", str(folder / "x"), "--results", str(folder / "broken.json")]) == 2
    assert "holds no results" in capsys.readouterr().err


# ------------------------------------------------------------------ save_pretrained
def test_saving_writes_the_card(poss_heads: PossHead, tmp_path: Path) -> None:
    poss_heads.save_pretrained(tmp_path / "heads")
    text = (tmp_path / "heads" / "README.md").read_text()
    assert (
        BEGIN in text
        and "# heads\n" in text
        and yaml.safe_load(text.split("---")[1])["library_name"] == "hf-specheads"
    )
    poss_heads.save_pretrained(tmp_path / "heads")
    assert (tmp_path / "heads" / "README.md").read_text() == text
    poss_heads.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "README.md").exists()


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model(poss_heads: PossHead, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "target").mkdir(parents=True)
    poss_heads.config.target["name"] = "models/target"
    poss_heads.save_pretrained(tmp_path / "heads")
    assert "base_model" not in (tmp_path / "heads" / "README.md").read_text()


@pytest.mark.parametrize("metadata", ["", "---\nlicense: mit\ntags: [mine]\n---\n"])
def test_saving_keeps_the_text_of_a_readme(poss_heads: PossHead, tmp_path: Path, metadata: str) -> None:
    """A README without the markers is the user's, all of it; metadata it lacks are added, as peft does."""
    _with_readme(tmp_path / "heads", f"{metadata}# My heads\n\nMy words.\n")
    poss_heads.save_pretrained(tmp_path / "heads")
    text = (tmp_path / "heads" / "README.md").read_text()
    assert text.endswith("# My heads\n\nMy words.\n") and BEGIN not in text
    found = yaml.safe_load(text.split("---")[1])
    assert found["library_name"] == "hf-specheads" and "draft-head" in found["tags"]
    assert not metadata or (found["license"] == "mit" and found["tags"][0] == "mine")


def test_saving_keeps_what_an_earlier_card_says(folder: Path) -> None:
    """Facts that only a push was given do not vanish with the next save."""
    write_card(folder, limits=["Knows no Greek."], license="mit")
    before = (folder / "README.md").read_text()
    load_heads(folder).save_pretrained(folder)
    assert (folder / "README.md").read_text() == before and "Knows no Greek." in before


def test_metadata_that_cannot_be_read_do_not_keep_heads_from_being_saved(poss_heads: PossHead, tmp_path: Path) -> None:
    _with_readme(tmp_path / "heads", "---\na: [\n---\nText\n")
    poss_heads.save_pretrained(tmp_path / "heads")
    assert (tmp_path / "heads" / "README.md").read_text() == "---\na: [\n---\nText\n"
    assert (tmp_path / "heads" / "model.safetensors").exists()
