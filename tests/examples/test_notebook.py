"""`examples/quickstart.ipynb`: its code runs with a tiny pair, and all of it in a kernel on the shipped one (slow)."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"
MISSING = [name for name in ("nbformat", "nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f'notebooks need {MISSING}: pip install -e ".[dev]"')


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m['content'] }} {% endfor %}"])
def test_its_code_runs(template: str | None, target, poss_heads, tokenizer, tmp_path: Path, monkeypatch) -> None:
    """The cells, one after the other, as written but for the names in the first."""
    import nbformat

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    for name, model in (("target", target), ("target", tokenizer), ("poss3", poss_heads)):
        model.save_pretrained(tmp_path / "model_cards" / name)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, NOTEBOOK.name, "exec"), names)
            if "PROMPT" in names:
                names |= {"PROMPT": "w5 w6 w7", "MAX_NEW_TOKENS": 8}
    assert names["stats"].new_tokens == 8 and len(names["texts"]) == 3


@pytest.mark.slow
def test_it_runs_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = next(cell for cell in notebook.cells if "MAX_NEW_TOKENS = " in cell.source)
    settings.source = settings.source.replace("MAX_NEW_TOKENS = 48", "MAX_NEW_TOKENS = 8")
    assert "MAX_NEW_TOKENS = 8" in settings.source
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(EXAMPLES))
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "8 tokens in" in said and "draft position 1" in said and "round 1:" in said


def test_it_is_committed_without_outputs() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)
