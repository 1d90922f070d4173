"""`generate(custom_generate=...)`: from a folder and over HTTP, with transformers alone importing anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub.client import error_of
from support.hub.endpoint import HubEndpoint
from support.targets import own_target, plain, prompt
from support.tokenizers import byte_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_specheads import PossHead, custom_generate, load_heads
from hf_specheads.publishing.push import write_custom_generate

NEW = 20


class Collected:
    """Remembers what is streamed."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def folder(target, poss_heads: PossHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Heads with the generated code, as a clone of a repository is; transformers copies the code elsewhere."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    poss_heads.save_pretrained(tmp_path / "heads")
    write_custom_generate(tmp_path / "heads", "lab/heads")
    return tmp_path / "heads"


def custom(target, folder: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
    return target.generate(ids, custom_generate=str(folder), trust_remote_code=True, **options)


# ------------------------------------------------------------------ from a folder
def test_the_text_is_the_targets(target, folder: Path) -> None:
    ids, widths = prompt(), []
    expected = plain(target, ids, NEW)
    target.model.layers[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    assert torch.equal(custom(target, folder, ids), expected)
    assert widths[0] == ids.shape[1] and max(widths[1:]) == 9  # draft trees of nine nodes, as saved with the heads


def test_the_heads_of_the_folder_draft(target, folder: Path) -> None:
    """And are loaded once."""
    custom_generate._load.cache_clear()
    streamed = [Collected(), Collected()]
    ids = prompt()
    expected = plain(target, ids, NEW)
    for streamer in streamed:
        custom(target, folder, ids, streamer=streamer)
        assert torch.equal(torch.tensor([streamer.ids]), expected) and streamer.ended
    assert (custom_generate._load.cache_info().hits, custom_generate._load.cache_info().misses) == (1, 1)
    load_heads(folder, depth=2, total_tokens=4).save_pretrained(folder)  # other heads in the same place
    widths = []
    target.model.layers[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    assert torch.equal(custom(target, folder, ids), expected) and max(widths[1:]) == 4


def test_stop_strings(target, folder: Path) -> None:
    ids, tokenizer = prompt(), byte_tokenizer()
    stop = tokenizer.decode(plain(target, ids, NEW)[0, 25:27])
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = plain(target, ids, NEW, **options)
    assert expected.shape[1] < ids.shape[1] + NEW
    assert torch.equal(custom(target, folder, ids, **options), expected)


def test_sampling_and_dicts(target, folder: Path) -> None:
    ids = prompt()
    torch.manual_seed(5)
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=True)
    torch.manual_seed(5)
    found = custom(target, folder, ids, do_sample=True, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(found.sequences, expected) and len(found.scores) == NEW


def test_what_is_refused(target, folder: Path, poss_heads: PossHead) -> None:
    ids = prompt()
    with pytest.raises(ValueError, match="leave one of the two out"):
        custom(target, folder, ids, assistant_model=poss_heads)
    with pytest.raises(ValueError, match="fingerprint"):
        custom(own_target("llama", seed=1), folder, ids)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(ids, custom_generate=str(folder), trust_remote_code=False)
    (folder / "custom_generate" / "requirements.txt").write_text("hf-specheads>=99\n")
    with pytest.raises(ImportError, match="hf-specheads>=99"):
        custom(target, folder, ids)


# ------------------------------------------------------------------ with transformers alone
ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(5, 25)[None]
plain = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
assert not any(name.startswith("hf_specheads") for name in sys.modules)
found = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                        custom_generate=sys.argv[2], trust_remote_code=True)
assert torch.equal(found, plain), (found, plain)
from hf_specheads import custom_generate
assert custom_generate._load.cache_info().misses == 1
print("equal")
"""


def test_without_an_import(target, folder: Path, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "target")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "target"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr


# ------------------------------------------------------------------ over HTTP; what runs in the client's process
def push(folder: Path, name: str, **options: Any) -> None:
    load_heads(folder).push_to_hub(name, custom_generate=True, **options)


def generate(target_folder: Path, name: str, **options: Any) -> tuple[list[int], list[int], str]:
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    ids, streamer = prompt(), TextStreamer(tokenizer)
    found = custom(target, name, ids, streamer=streamer, **options)
    return plain(target, ids, NEW)[0].tolist(), found[0].tolist(), found.device.type


def test_over_http(hub: HubEndpoint, target, folder: Path, tokenizer, tmp_path: Path) -> None:
    for model in (target, tokenizer):
        model.save_pretrained(tmp_path / "target")
    name = hub.new_name()
    hub.run(push, folder, name)
    files = hub.files(name)
    assert files["custom_generate/requirements.txt"].startswith(b"hf-specheads>=")
    card = files["README.md"].decode()
    assert f'custom_generate="{name}", trust_remote_code=True' in card and "- custom_generate\n" in card
    expected, found, _ = hub.run(generate, tmp_path / "target", name)
    assert found == expected
    assert hub.requests("GET /storage/") and hub.requests(f"HEAD /{name}/resolve/[0-9a-f]{{40}}/model.safetensors")


def test_a_revision_gives_code_and_heads(hub: HubEndpoint, target, folder: Path, tokenizer, tmp_path: Path) -> None:
    for model in (target, tokenizer):
        model.save_pretrained(tmp_path / "target")
    name = hub.new_name()
    hub.run(push, folder, name, revision="next")
    expected, found, _ = hub.run(generate, tmp_path / "target", name, revision="next")
    assert found == expected
    assert "custom_generate" in hub.run(error_of, generate, tmp_path / "target", name)
