"""The documents as a site: every page and public name has its place, and warnings are errors."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import hf_specheads
import hf_specheads.trainer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
needs_builder = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("zensical", "mkdocstrings"))),
    reason='the site is built by zensical and mkdocstrings: pip install -e ".[docs]"',
)


def public_names() -> set[str]:
    packages = (hf_specheads, hf_specheads.trainer)
    return {f"{package.__name__}.{name}" for package in packages for name in package.__all__} - {
        "hf_specheads.__version__"
    }


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav: Any) -> list[str]:
    """Files of a `nav`, which nests lists and mappings."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)]


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert set(pages_of(nav)) == pages, "add the page to `nav` in docs/mkdocs.yml"


def test_every_public_name_has_an_entry() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    entries = Counter(re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE))
    assert entries == Counter(public_names()), "add `::: NAME` to a page of docs/api"


@needs_builder
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, str(DOCS / "build.py"), "--output", str(tmp_path / "site")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert built.returncode == 0, built.stdout + built.stderr
    html = "\n".join(page.read_text(encoding="utf-8") for page in (tmp_path / "site" / "api").glob("*.html"))
    assert not [name for name in public_names() if f'id="{name}"' not in html]
    assert "GenerationStats</code></a> of the last" in html and "[<code>" not in html  # references of docstrings
    assert (tmp_path / "site" / "images" / "concepts" / "tree.svg").is_file()


@needs_builder
@pytest.mark.parametrize(
    "broken",
    [
        "[a heading](#nowhere)",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in ("[a page](nowhere.md)", "::: hf_specheads.nothing")
        ),
    ],
)
def test_what_is_missing_fails_the_build(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, docs = module_at(DOCS / "build.py"), tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Page\n\n{broken}\n", encoding="utf-8")
    settings = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    (docs / "mkdocs.yml").write_text(yaml.safe_dump({**settings, "nav": ["index.md"]}), encoding="utf-8")
    monkeypatch.setattr(builder, "DOCS", docs)
    assert builder.build(tmp_path / "site") != 0
    assert not (tmp_path / "site").exists()


def test_links_out_of_the_documents_become_words() -> None:
    builder = module_at(DOCS / "build.py")
    text = "[out](../README.md) [gone](../gone.md) [in](engine.md#batches) ![picture](../x.png) [web](https://a.b/)"
    said = builder.without_links_out(text, DOCS / "index.md")
    assert said == text.replace("[out](../README.md)", "out")


def test_pictures_are_what_the_script_draws() -> None:
    draw = module_at(DOCS / "images" / "concepts" / "draw.py")
    for name, picture in draw.PICTURES.items():
        path = DOCS / "images" / "concepts" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == picture(), f"run `python {path.parent / 'draw.py'}`"


def test_the_code_of_using_runs(target, poss_heads, tokenizer, tmp_path: Path) -> None:
    """All blocks, one after the other, as written but for the folder of the heads and the lengths."""
    page = (DOCS / "using.md").read_text(encoding="utf-8")
    poss_heads.save_pretrained(tmp_path)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    inputs = tokenizer("w5 w6 w7", return_tensors="pt")
    names: dict[str, Any] = {"target": target, "tokenizer": tokenizer, "inputs": inputs}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        toy = block.replace("path/to/heads", str(tmp_path)).replace("max_new_tokens=64", "max_new_tokens=8")
        exec(compile(toy, "using.md", "exec"), names)
    assert names["stats"].target_forwards and names["heads"].tree_config.depth == 3
