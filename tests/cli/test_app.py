"""`specheads app` before a page is there: which models it finds, and what is told in one line."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from hf_specheads.cli import main
from hf_specheads.cli.app import load_models
from hf_specheads.cli.pair import heads_of_pair, preferred_of, sources_of

PAIR = Path(__file__).parents[2] / "model_cards"


def arguments(pair: Path, **changes: object) -> argparse.Namespace:
    given = {"pair": pair, "target": "target", "heads": None, "dtype": "float32", "device": "cpu", "quiet": True}
    return argparse.Namespace(**{**given, **changes})


@pytest.fixture
def pair(target, poss_heads, eagle_heads, tokenizer, tmp_path: Path) -> Path:
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    eagle_heads.save_pretrained(tmp_path / "a-eagle")
    poss_heads.save_pretrained(tmp_path / "poss3")
    return tmp_path


def test_folders_that_share_a_name_are_both_there(pair: Path, tmp_path: Path) -> None:
    """One's own heads beside those of a pair, say."""
    mine = tmp_path / "runs" / "poss3"
    mine.mkdir(parents=True)
    names = [str(pair / "a-eagle"), str(pair / "poss3"), str(mine)]
    assert list(sources_of(pair, names)) == ["a-eagle", str(pair / "poss3"), str(mine)]
    assert list(sources_of(pair, ["poss3", "org/poss3"])) == ["poss3", "org/poss3"]


def test_heads_of_a_pair_are_loaded_when_they_are_asked_for(pair: Path) -> None:
    models, chosen = load_models(arguments(pair))
    assert list(models.loaders) == ["a-eagle", "poss3"] and chosen == "poss3"
    assert list(models._loaded) == ["poss3"]
    assert models.heads("a-eagle").config.method == "eagle"
    assert not models.chats


def test_heads_that_change_the_target_are_left_out() -> None:
    names = heads_of_pair(PAIR)
    assert "poss3" in names and "target" not in names
    for name in names:
        assert not json.loads((PAIR / name / "config.json").read_text(encoding="utf-8")).get("target_adapter")
    assert "medusa2" not in names


def test_one_line_for_what_is_missing(pair: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for given, words in ((["--pair", str(tmp_path / "nowhere")], "pass --pair FOLDER"),
                         (["--pair", str(tmp_path / "target")], "there are no draft heads"),
                         (["--pair", str(pair), "--heads", "nobody"], "does not exist")):  # fmt: skip
        assert main(["app", *given]) == 2
        said = capsys.readouterr().err.strip()
        assert words in said and len(said.splitlines()) == 1


def test_without_gradio_nothing_is_loaded(monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["app"]) == 2
    assert 'pip install "hf-specheads[app]"' in capsys.readouterr().err


def test_the_heads_that_are_shown_first() -> None:
    assert preferred_of(["eagle", "poss3", "poss3-longer"]) == "poss3-longer"
    assert preferred_of(["eagle", "poss3"]) == "poss3"
    assert preferred_of(["mine", "yours"]) == "mine"
