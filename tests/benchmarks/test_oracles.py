"""The tables in the documents are those of the result files, and the results say what the text claims of them."""

from __future__ import annotations

from benchmarks.oracles import render
from benchmarks.results import ROOT


def results(name: str) -> list[dict]:
    return render.read(name)["entries"]


def test_the_document_has_the_tables_of_the_result_files() -> None:
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    for name, table in render.tables().items():
        assert f"<!-- results:{name} -->\n{table}<!-- /results:{name} -->\n" in text


def served(name: str) -> list[dict]:
    return [entry for entry in results(name) if "error" not in entry]


def test_what_vllm_showed() -> None:
    """In float32: every text the target's own, and the counts are those of `specheads bench`."""
    assert {entry["heads"] for entry in served("vllm")} >= {"eagle", "hass", "poss3", "eagle3", "dflash", "peagle"}
    assert "mtp" in {entry["heads"] for entry in served("vllm_blocks")}
    for entry in [*served("vllm"), *served("vllm_blocks")]:
        assert entry["same_as_plain_vllm"] == entry["same_as_transformers"] == entry["texts"]
        same = ("rounds", "accepted", "accepted_by_position")
        if entry["heads"] != "dflash":  # whose context's keys vLLM 0.32 norms otherwise (docs/export.md)
            assert [entry["vllm"][name] for name in same] == [entry["ours"][name] for name in same]


def test_in_bfloat16_vllm_writes_the_target_s_texts() -> None:
    for entry in results("vllm_bfloat16"):
        assert entry["same_as_plain_vllm"] == entry["texts"]


def test_speculators_loads_all_tensors() -> None:
    for entry in results("speculators_blocks"):
        assert entry["equal_tensors"] == entry["tensors"] > 10 and entry["missing"] == []


def test_what_speculators_showed() -> None:
    for entry in [*results("speculators"), *results("speculators_eagle"), *results("speculators_blocks")]:
        if entry.get("dtype", "float32") == "float32":
            assert entry["max_error"] < 1e-5 * max(1.0, entry["largest_logit"]) and entry["same_favourite"] == 1.0
        converter = entry.get("converter", entry)
        assert converter.get("equal_tensors") == converter.get("tensors")
