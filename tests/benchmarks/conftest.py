"""A tiny target, three kinds of tiny heads and two prompts on disk, as the benchmarks expect them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specheads import AutoDraftHead

TREE = {"depth": 3, "top_k": 2, "total_tokens": 6}


@pytest.fixture
def pair(tmp_path: Path, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with `target`, `eagle`, `poss` and `prompts.jsonl`."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    AutoDraftHead.from_target(target, "eagle", tree_config=TREE).save_pretrained(tmp_path / "eagle")
    poss = AutoDraftHead.from_target(target, "poss", num_specialists=2, positions_per_specialist=2, tree_config=TREE)
    poss.save_pretrained(tmp_path / "poss")
    prompts = [{"name": "a", "prompt": "w5 w6 w7"}, {"name": "b", "prompt": "w8 w9 w10 w11"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return tmp_path


@pytest.fixture
def arguments(pair: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets the command line of a benchmark: common arguments for the tiny pair, and more."""

    def set_arguments(name: str, heads: list[str], *more: str) -> Path:
        common = ["--target", str(pair / "target"), "--prompts", str(pair / "prompts.jsonl")]
        common += ["--max_new_tokens", "10", "--output", str(pair / "results")]
        command = [f"/somewhere/{name}.py", *common, "--heads", *(str(pair / head) for head in heads), *more]
        monkeypatch.setattr("sys.argv", command)
        return pair / "results"

    return set_arguments
