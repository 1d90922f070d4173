"""Tables from results, and the README kept in sync with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.render_readme import documents, render
from benchmarks.tables import RENDERERS, markdown_table, pos_acc_text, tree_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = {
    "command": "python -m benchmarks.choose_tree", "commit": "0123456789abcdef", "uncommitted_changes": True,
    "date": "2026-01-02", "processor": "a processor", "threads": 2,
    "versions": {"torch": "2", "transformers": "5", "python": "3", "hf-specheads": "0"},
}  # fmt: skip
CHAIN = {"kind": "chain", "depth": 3, "top_k": 1, "total_tokens": 4}
RESULT = {
    "provenance": PROVENANCE, "heads": "poss3", "candidates": 9, "prompts": ["tuning"],
    "ranking": [{"tree": CHAIN, "tokens_per_second": 123.4, "speed_up": 1.55, "acceptance_length": 2.34}],
}  # fmt: skip


def test_markdown_table():
    assert markdown_table(("a", "b"), [("x", "1")]) == "| a | b |\n|---|---:|\n| x | 1 |\n"


def test_pos_acc_text():
    assert pos_acc_text([1.0, 0.998, 0.05, 0.714]) == "1. 1. .05 .71"
    assert pos_acc_text([]) == pos_acc_text(None) == "-"


def test_tree_text():
    assert tree_text(CHAIN) == "chain of 3"
    assert tree_text({**CHAIN, "kind": "dynamic", "top_k": 2}) == "depth 3, top-k 2, 4 nodes"


def test_a_table_says_where_it_comes_from():
    text = RENDERERS["choose_tree"](RESULT)
    assert "| chain of 3 | 123 | 1.55x | 2.34 |" in text
    assert "commit 0123456789+, 2026-01-02" in text
    assert "`python -m benchmarks.choose_tree`" in text


def test_render_replaces_marked_blocks_only(tmp_path):
    (tmp_path / "choose_tree.json").write_text(json.dumps(RESULT))
    text = "before\n<!-- results:choose_tree -->\nold\n<!-- /results:choose_tree -->\nafter\n"
    text += "<!-- results:speedup -->\nkept\n<!-- /results:speedup -->\n"
    rendered = render(text, tmp_path)
    assert rendered.startswith("before\n<!-- results:choose_tree -->\n| draft tree |")
    assert "old" not in rendered
    assert "kept" in rendered  # there is no such result
    assert render(rendered, tmp_path) == rendered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- results:speedup -->\n", "needs a following"),
        ("<!-- results:nonsense -->\n<!-- /results:nonsense -->\n", "unknown results"),
    ],
)
def test_render_refuses_broken_marks(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        render(text, tmp_path)


@pytest.mark.parametrize("document", documents(), ids=lambda document: document.name)
def test_documents_show_the_committed_results(document):
    text = document.read_text(encoding="utf-8")
    assert render(text, RESULTS) == text, "run `python -m benchmarks.render_readme`"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_tables_match_their_results(path):
    table = RENDERERS[path.stem](json.loads(path.read_text(encoding="utf-8")))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == table
