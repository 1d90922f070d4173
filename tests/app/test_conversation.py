"""Replies on the page: the same text as plain decoding, rounds as they land, and input that cannot be served."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest

from hf_specheads.app.conversation import Conversation, round_picture, round_words
from hf_specheads.app.doctor import diagnosis_html, join_prompts, split_prompts
from hf_specheads.app.models import Models, Settings
from hf_specheads.app.replies import Reply, Stopped
from hf_specheads.app.transcript import Transcript
from hf_specheads.app.views import CSS, comparison, numbers_html, reply_html
from hf_specheads.diagnosis.doctor import diagnose
from hf_specheads.generation.observer import Round

PROMPT = "w5 w6 w7 w8"
SETTINGS = Settings("poss", tree="dynamic", depth=3, top_k=3, total_tokens=9, adaptive=False, max_new_tokens=16)
TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w90{% endif %}"


def asked(models: Models, settings: Settings = SETTINGS, prompt: str = PROMPT) -> Conversation:
    state = Conversation()
    for _ in state.ask(models, prompt, settings):
        pass
    return state


def test_both_columns_are_the_targets_text(models: Models) -> None:
    state = asked(models)
    inputs = models.tokenizer(PROMPT, return_tensors="pt")
    expected = models.target.generate(**inputs, max_new_tokens=16, do_sample=False)[0, 4:].tolist()
    assert state.last.token_ids == state.last_plain.token_ids == expected
    assert state.last.done and state.last_plain.done and state.last.rounds and not state.last_plain.rounds
    assert state.messages[-1] == {"role": "assistant", "content": models.decode(expected)}
    assert "The same text, token for token" in comparison(state.last, state.last_plain, state.lossy)
    assert models.heads("poss").on_round is None, "the page's own copy is watched, not the heads"


def test_a_seed_draws_the_same_text_with_and_without_heads(models: Models) -> None:
    state = asked(models, replace(SETTINGS, temperature=0.9, seed=4))
    other = asked(models, replace(SETTINGS, temperature=0.9, seed=5))
    assert state.last.token_ids == state.last_plain.token_ids != other.last.token_ids


def test_rounds_are_seen_while_the_reply_is_written(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it is written: after its first tokens it waits here until the page has looked."""
    add, seen = Transcript.add_round, threading.Event()

    def add_and_wait(transcript: Transcript, one: Round, seconds: float) -> None:
        add(transcript, one, seconds)
        seen.wait(60)

    monkeypatch.setattr(Transcript, "add_round", add_and_wait)
    state, lengths = Conversation(), []
    for _ in state.ask(models, PROMPT, replace(SETTINGS, max_new_tokens=64)):
        lengths.append((len(state.last.token_ids), len(state.last_plain.token_ids) if state.last_plain else 0))
        if lengths[-1][0]:
            seen.set()
    assert lengths[-1] == (64, 64)
    assert any(0 < ours < 64 for ours, _ in lengths)


def test_trees_of_all_rounds_can_be_drawn(models: Models) -> None:
    state = asked(models)
    for number, one in enumerate(state.last.rounds):
        picture = round_picture(state.last.rounds, number, models)
        assert ("<svg" in picture) == one.drafted
        assert (f"Round {number}:" in round_words(state.last.rounds, number)) == one.drafted
    assert "will be shown here" in round_picture(state.last.rounds, 999, models)


def test_html_tells_positions_and_escapes(models: Models) -> None:
    state = asked(models, prompt="w5 <script>alert(1)</script>")
    html = reply_html(state.ours, 1)
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert html.count("data-round") == sum(bool(piece) for piece in state.ours[-1].pieces.pieces)
    assert ' now"' in html and ".p1 {" in CSS
    assert 'data-number="tau"' in numbers_html("x", state.last, True)


def test_a_chat_goes_on_and_a_text_starts_anew(models: Models) -> None:
    state = asked(models)
    length = [models.inputs([*state.messages[:-2], {"role": "user", "content": PROMPT}], 8)["input_ids"].shape[1]]
    for _ in state.ask(models, PROMPT, SETTINGS):
        pass
    assert length == [4] and len(state.ours) == 2 and len(state.messages) == 2, "no template: texts stand alone"
    models.tokenizer = copy.deepcopy(models.tokenizer)
    models.tokenizer.chat_template = TEMPLATE
    state = asked(models)
    for _ in state.ask(models, PROMPT, SETTINGS):
        pass
    assert [message["role"] for message in state.messages] == ["user", "assistant"] * 2
    first = models.inputs(state.messages[:1], 8)["input_ids"][0].tolist()
    assert models.tokenizer.decode(first) == f"<s> {PROMPT} w90"


@pytest.mark.parametrize(
    ("changes", "prompt", "words"),
    [
        ({}, "  \n", "the prompt is empty"),
        ({}, "w5 " * 250, "exceed the target's context of 256"),
        ({"max_new_tokens": 0}, PROMPT, "at least one new token"),
        ({"temperature": -1.0}, PROMPT, "at least 0"),
        ({"heads": "nobody"}, PROMPT, r"no heads named 'nobody'; choose one of \['poss', 'eagle'\]"),
        ({"tree": "bush"}, PROMPT, "must be one of"),
        ({"total_tokens": 1}, PROMPT, "at least 2"),
        ({"verification": "hopeful"}, PROMPT, "must be one of"),
    ],
)
def test_bad_input_is_told_before_anything_is_generated(models: Models, changes, prompt: str, words: str) -> None:
    state = Conversation()
    with pytest.raises(ValueError, match=words):
        next(state.ask(models, prompt, replace(SETTINGS, **changes)))
    assert not state.ours and not models.lock.locked()


def test_what_the_engine_refuses_is_told_and_leaves_no_turn(models: Models) -> None:
    state = Conversation()
    with pytest.raises(ValueError, match="posterior_threshold"):
        models.heads("poss").posterior_threshold = 7.0
        for _ in state.ask(models, PROMPT, replace(SETTINGS, temperature=1.0, verification="typical")):
            pass
    assert not state.ours and not state.messages and not models.lock.locked()


def test_one_reply_at_a_time(models: Models) -> None:
    first = Conversation().ask(models, PROMPT, SETTINGS)
    next(first)
    with pytest.raises(RuntimeError, match="another reply is being written"):
        next(Conversation().ask(models, PROMPT, SETTINGS))
    first.close()
    assert asked(models).last.done


def test_leaving_ends_the_generation(models: Models) -> None:
    before = threading.active_count()
    state = Conversation()
    talk = state.ask(models, PROMPT, replace(SETTINGS, max_new_tokens=200))
    next(talk)
    talk.close()
    assert state.last.done and len(state.last.token_ids) < 200
    assert threading.active_count() == before and not models.lock.locked()


def test_errors_in_the_thread_are_told() -> None:
    def fails(transcript, halt) -> None:
        raise KeyError("gone\nwrong")

    (last,) = list(Reply(fails).watch(0.01))[-1:]
    assert last.done and last.error == "KeyError: 'gone\\nwrong'"

    def stops(transcript, halt) -> None:
        raise Stopped

    (last,) = list(Reply(stops).watch(0.01))[-1:]
    assert last.stopped and last.error is None


def test_trees_of_the_settings(models: Models) -> None:
    heads = models.heads("poss")
    assert not Settings("poss").apply(heads).tree_is_assigned
    chain = Settings("poss", tree="chain", depth=3).apply(heads)
    assert chain.tree_is_assigned and chain.tree_config.kind == "chain" and chain.tree_config.depth == 3
    saved = Settings("poss", tree="as saved").apply(heads)
    assert saved.tree_is_assigned and saved.tree_config == heads.tree_config
    assert not heads.tree_is_assigned, "the heads themselves are as they were"


def test_the_doctors_page(models: Models) -> None:
    prompts = split_prompts(join_prompts([PROMPT, "w9 w8 w7"]))
    assert prompts == [PROMPT, "w9 w8 w7"]
    found = diagnose(models.target, models.unbound_heads("poss"), prompts, max_new_tokens=8, speed=False,
                     tokenizer=models.tokenizer)  # fmt: skip
    html = diagnosis_html(found)
    for words in (
        "Where acceptance is lost",
        "teacher-forced position 1",
        "current settings",
        "2 texts",
        "By group of tokens",
    ):
        assert words in html
    with pytest.raises(ValueError, match="at least one"):
        split_prompts("\n---\n  \n")
