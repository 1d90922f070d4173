"""Drafting pays, or generation goes on plainly: the decision, and that the text does not depend on it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import alone_texts, assert_rows, batch_of, greedy, oracle
from support.heads import random_heads
from support.stubs import StubHead, counted
from support.targets import own_target, plain, prompt, shared_target
from support.trees import TREES

from hf_specheads.generation import loop
from hf_specheads.generation.pace import PLAIN_STEPS_BEFORE_A_VERDICT, TRIAL_SHARE, Pace

NEW = 40


def simulate(pace: Pace, steps: int, plain_seconds, round_seconds, round_tokens) -> tuple[float, float, int]:
    """Tokens, seconds and drafted rounds of `steps` steps; costs and gains are functions of the tokens so far."""
    tokens = seconds = 0.0
    drafted = 0
    for _ in range(steps):
        if pace.drafts(100 + int(tokens)):
            spent, won = round_seconds(tokens), round_tokens(tokens)
            pace.record_round(spent, won)
            drafted += 1
        else:
            spent, won = plain_seconds(tokens), 1.0
            pace.record_plain(spent)
        tokens, seconds = tokens + won, seconds + spent
    return tokens, seconds, drafted


@settings(max_examples=60, deadline=None)
@given(cost=st.floats(1.2, 6.0), tau=st.floats(1.0, 3.0))
def test_drafts_that_do_not_pay_cost_no_more_than_the_trials(cost, tau):
    pace = Pace()
    tokens, seconds, drafted = simulate(pace, 1500, lambda t: 1.0, lambda t: cost, lambda t: tau)
    first_verdict = 5 * max(cost - tau, 0)
    assert seconds <= tokens * (1 + TRIAL_SHARE) + first_verdict + cost
    if tau > 1.05 * cost:
        timed = PLAIN_STEPS_BEFORE_A_VERDICT * (
            1 + math.log2((100 + tokens) / 100)
        )  # at every doubling of the context
        assert drafted >= 1500 - timed, "drafting pays: every other step drafts"
    if tau < 0.95 * cost:
        assert drafted <= 5 + 1500 * TRIAL_SHARE / (cost - tau) + 1


def test_drafting_comes_back_when_it_pays_again():
    """A text that is hard to draft for its first 300 tokens, and easy after."""
    pace = Pace()
    worth = lambda tokens: 1.2 if tokens < 300 else 4.0  # noqa: E731
    _, _, hard = simulate(pace, 300, lambda t: 1.0, lambda t: 2.0, worth)
    assert hard < 20
    _, _, easy = simulate(pace, 300, lambda t: 1.0, lambda t: 2.0, lambda t: 4.0)
    assert easy > 200


def test_plain_steps_are_timed_again_when_the_context_has_grown():
    pace = Pace()
    simulate(pace, 40, lambda t: 1.0, lambda t: 2.0, lambda t: 4.0)
    assert pace.rounds == 40 - 2 * PLAIN_STEPS_BEFORE_A_VERDICT  # timed at 100 tokens, and anew at 200
    assert not pace.drafts(100_000)
    pace.record_plain(9.0)
    assert not pace.drafts(100_001)
    pace.record_plain(90.0)  # a stall
    assert pace.plain_seconds == 9.0 and pace.drafts(100_002)
    pace.conditions_changed()
    assert not pace.drafts(100_003)


@pytest.mark.parametrize("stall", [100.0, 1e4])
def test_one_stall_decides_nothing(stall):
    pace = Pace()
    simulate(pace, 40, lambda t: 1.0, lambda t: 2.0, lambda t: 4.0)
    pace.record_round(stall, 1.0)
    assert pace.drafts(300) and pace.gain > 1
    pace = Pace()
    simulate(pace, 40, lambda t: 1.0, lambda t: 3.0, lambda t: 1.5)
    pace.record_plain(stall)
    assert pace.gain < 1


def test_debts_are_never_so_high_that_nothing_is_tried_again():
    pace = Pace()
    simulate(pace, PLAIN_STEPS_BEFORE_A_VERDICT + 4, lambda t: 1.0, lambda t: 1000.0, lambda t: 1.0)
    assert pace.debt <= 4 * 1000.0
    before = pace.debt
    pace.begin_call()
    assert pace.debt == before / 2


class Clock:
    """Time passes with every look at it, in steps of the test's choosing."""

    def __init__(self, *steps: float):
        self.now, self.steps, self.looks = 0.0, steps, 0

    def perf_counter(self) -> float:
        self.now += self.steps[self.looks % len(self.steps)]
        self.looks += 1
        return self.now


@pytest.mark.parametrize("pattern", [(1.0,), (1.0, 3.0, 0.1, 7.0, 2.0), (0.5, 0.5, 9.0)], ids=str)
@pytest.mark.parametrize("method", ["poss", "eagle3", "medusa", "hydra", "draft-lm", "stub"])
def test_the_text_does_not_depend_on_when_drafts_are_made(method, pattern, monkeypatch):
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW)
    heads = StubHead(target, expected, (0, None, 1, 0, None)) if method == "stub" else None
    heads = heads or random_heads(target, method, TREES["dynamic"])
    heads.adaptive = True
    monkeypatch.setattr(loop, "time", Clock(*pattern))
    plain_steps = rounds = 0
    for _ in range(3):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
        stats = heads.last_stats
        assert sum(n + 1 for row in stats.num_accepted for n in row) + stats.plain_steps == NEW - 1
        plain_steps, rounds = plain_steps + stats.plain_steps, rounds + stats.rounds
    assert plain_steps > 1 and rounds > 1


@pytest.mark.parametrize("family", ["mistral", "bloom"])
def test_other_caches(family, monkeypatch):
    target, ids = shared_target(family), prompt()
    expected = plain(target, ids, NEW)
    heads = StubHead(target, expected, (0, 0, None), kind="chain", depth=3)
    heads.adaptive = True
    monkeypatch.setattr(loop, "time", Clock(1.0, 3.0, 0.1, 7.0, 2.0))
    for _ in range(2):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)


def test_batches(monkeypatch):
    target = shared_target("llama")
    inputs, alone = batch_of()
    texts = alone_texts(target, alone)
    eos = {"eos_token_id": [texts[0][9], texts[1][4]], "pad_token_id": 0}
    shorter = alone_texts(target, alone, **eos)
    for heads in (oracle(target, alone, texts), random_heads(target, "poss")):
        heads.adaptive = True
        monkeypatch.setattr(loop, "time", Clock(1.0, 3.0, 0.1, 7.0, 2.0))
        assert_rows(greedy(target, inputs, assistant_model=heads), 19, texts)
        assert_rows(greedy(target, inputs, assistant_model=heads, **eos), 19, shorter)
        assert heads.last_stats.plain_steps > 0


def test_compiled_rounds_have_one_graph_more(monkeypatch):
    target, ids = own_target("llama"), prompt()
    heads = random_heads(target, "poss")
    heads.adaptive = True
    graphs = counted(target, heads)
    monkeypatch.setattr(loop, "time", Clock(1.0, 3.0, 0.1, 7.0, 2.0))
    expected = plain(target, ids, NEW)
    for _ in range(2):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
    assert len(graphs) == 3


def test_sampling_with_a_seed(monkeypatch):
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, "poss")
    heads.adaptive = True
    monkeypatch.setattr(loop, "time", Clock(1.0, 3.0, 0.1, 7.0, 2.0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    torch.manual_seed(4)
    expected = target.generate(ids, **options)
    torch.manual_seed(4)
    assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)


def test_traced_and_lossy_calls_draft_every_round():
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target)
    heads.adaptive = heads.trace = True
    plain(target, ids, NEW, assistant_model=heads)
    assert heads.last_stats.plain_steps == 0 and len(heads.last_stats.trees) == heads.last_stats.rounds
    heads.trace, heads.verification = False, "typical"
    target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=8, assistant_model=heads)
    assert heads.last_stats.plain_steps == 0
