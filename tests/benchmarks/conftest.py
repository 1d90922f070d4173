"""A tiny target, three kinds of tiny heads and two prompts on disk, and the runner on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.__main__ import main, table_of
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
def measure(tmp_path: Path) -> Callable[..., dict]:
    """Runs `python -m benchmarks NAME ...` and returns the result written, after its table was found to be its own."""

    def run(name: str, *words: str, status: int = 0, written: str | None = None) -> dict:
        folder, written = tmp_path / "results", written or name
        assert main([name, *words, "--output", str(folder)]) == status
        assert [path.name for path in sorted(folder.glob("*.json"))] == [f"{written}.json"]
        result = json.loads((folder / f"{written}.json").read_text())
        table = (folder / f"{written}.md").read_text()
        assert table.startswith("| ") and table == table_of(written, result)
        assert f"`python -m benchmarks {name} " in table and "earlier engine" not in table
        return result

    return run


@pytest.fixture
def measure_pair(pair: Path, measure: Callable[..., dict]) -> Callable[..., dict]:
    """The same with the tiny pair: names of heads, then further words."""

    def run(name: str, heads: list[str], *words: str, status: int = 0) -> dict:
        common = ["--target", str(pair / "target"), "--prompts", str(pair / "prompts.jsonl")]
        common += ["--max_new_tokens", "10", "--heads", *(str(pair / head) for head in heads)]
        return measure(name, *common, *words, status=status)

    return run
