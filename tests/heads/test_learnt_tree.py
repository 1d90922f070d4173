"""What the engine learns about trees while it generates may be saved, as the tree tuned on this machine."""

from __future__ import annotations

import pytest
from support.heads import random_heads
from support.targets import own_target, plain, prompt

from hf_specheads import load_heads
from hf_specheads.generation.pace.lessons import ROUNDS_OF_A_LESSON
from hf_specheads.generation.pace.pace import PLAIN, Pace
from hf_specheads.tree.default import machine_key


def taught(monkeypatch, best: int | None, rounds: int = ROUNDS_OF_A_LESSON):
    """Heads that have generated, and whose rounds are taken to have shown what is wanted: a place of the menu as the
    best of so many rounds."""
    target = own_target("llama")
    heads = random_heads(target, "eagle")
    heads.forget_tree()
    heads.adaptive = True
    plain(target, prompt(), 8, assistant_model=heads)
    [pace] = [value for value in heads.memory[target].values() if isinstance(value, Pace)]
    pace.rounds = rounds
    monkeypatch.setattr(Pace, "best", PLAIN if best is None else best)
    return target, heads, pace.menu


def test_it_is_saved_if_asked_for(monkeypatch, tmp_path):
    target, heads, menu = taught(monkeypatch, best=3)
    assert heads.learnt_tree == menu[3] != heads.tree_config
    heads.save_pretrained(tmp_path / "as_ever")
    assert load_heads(tmp_path / "as_ever").config.tuned is None
    heads.save_pretrained(tmp_path / "learnt", learnt_tree=True)
    again = load_heads(tmp_path / "learnt").bind(target)
    assert again.tree_config == menu[3] and not again.tree_is_assigned, "where rounds begin, no more"
    [entry] = again.config.tuned
    assert machine_key(heads.device, heads.dtype).items() <= entry.items()
    assert entry["tokens_per_second"] > 0 and entry["plain_tokens_per_second"] > 0


@pytest.mark.parametrize(("best", "rounds"), [(None, ROUNDS_OF_A_LESSON), (3, ROUNDS_OF_A_LESSON - 1)])
def test_nothing_was_learnt(best, rounds, monkeypatch, tmp_path):
    _, heads, _ = taught(monkeypatch, best, rounds)
    assert heads.learnt_tree is None
    heads.save_pretrained(tmp_path, learnt_tree=True)
    assert load_heads(tmp_path).config.tuned is None


def test_an_assigned_tree_comes_first(monkeypatch, tmp_path):
    target, heads, menu = taught(monkeypatch, best=3)
    heads.tree_config = menu[1]
    assert heads.learnt_tree is None
    heads.save_pretrained(tmp_path, learnt_tree=True)
    assert load_heads(tmp_path).config.tuned is None and load_heads(tmp_path).bind(target).tree_config == menu[1]


def test_calls_without_a_choice_teach_nothing():
    target = own_target("llama")
    heads = random_heads(target, "eagle", kind="chain", depth=2)
    heads.adaptive = True
    plain(target, prompt(), 8, assistant_model=heads)
    assert heads.learnt_tree is None
