"""What is measured for a tree search: exact counts with heads that know the answer, and times of real forwards."""

import pytest
import torch
from support.heads import random_heads
from support.stubs import StubHead
from support.targets import plain, prompt, shared_target

from hf_specheads import AutoDraftHead
from hf_specheads.tuning.measure import (
    FEWEST_TRIALS,
    MeasuredAcceptance,
    favourite_path,
    interpolate,
    measure_acceptance,
    measure_costs,
)
from hf_specheads.unroll.rows import TrainingRows, row_positions

NEW = 40


def expected_counts(ranks, prompt_length, depth, num_children):
    """The same bookkeeping on the stub's table of ranks, without any tree."""
    accepted, trials = [[0] * num_children for _ in range(depth)], [0] * depth
    place, end = prompt_length + 1, prompt_length + NEW  # of the next token
    while end - place > 1:  # the last token is not drafted for
        position, offered = 0, min(depth, end - place - 1)
        while position < offered:
            rank = ranks[(place + position) % len(ranks)]
            if rank is not None and rank < num_children:
                trials[position] += 1
                accepted[position][rank] += 1
                position += 1
                if rank > 0:
                    break
                continue
            trials[position] += 1
            break
        place += position + 1
    return accepted, trials


@pytest.mark.parametrize("ranks", [(0,), (None,), (1,), (0, 0, 1, 0, 2, None, 0, 3)], ids=str)
def test_counts_are_those_of_the_stub(ranks):
    target, ids = shared_target(), prompt()
    truth = plain(target, ids, NEW + 20)
    found = measure_acceptance(
        target, StubHead(target, truth, ranks), [ids, ids[0].tolist()], depth=3, num_children=3, max_new_tokens=NEW
    )
    accepted, trials = expected_counts(ranks, ids.shape[1], 3, 3)
    assert found.accepted == tuple(tuple(2 * count for count in row) for row in accepted)
    assert found.trials == tuple(2 * count for count in trials)
    assert found.seconds_per_round > 0
    assert found.tree.choices == favourite_path(3, 3)


def test_probabilities_are_pooled_where_positions_were_seldom_reached():
    trials = (2 * FEWEST_TRIALS, FEWEST_TRIALS, FEWEST_TRIALS - 1)
    accepted = ((FEWEST_TRIALS, 0), (10, 5), (1, 1))
    found = MeasuredAcceptance(accepted, trials, None, 1.0)
    pooled = [(FEWEST_TRIALS + 11) / sum(trials), 6 / sum(trials)]
    assert found.pooled == pytest.approx(pooled)
    assert found.by_position == [[0.5, 0.0], [10 / FEWEST_TRIALS, 5 / FEWEST_TRIALS], pytest.approx(pooled)]


def test_sampled_acceptance_is_that_of_the_rule():
    """The first child is accepted with probability sum min(p, q), whatever comes after."""
    target, ids = shared_target(), prompt(5)
    heads = random_heads(target, kind="chain", depth=1, children="sampled").bind(target)
    options = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 50}
    torch.manual_seed(0)
    found = measure_acceptance(target, heads, [ids] * 5, depth=1, num_children=1, **options)
    overlaps = []
    for _ in range(4):
        text = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        p, q = (logits[0, ids.shape[1] :].div(3.0).softmax(-1) for logits in both_logits(target, heads, text))
        overlaps.append(torch.minimum(p, q).sum(-1))
    assert found.trials[0] > 100
    assert found.pooled[0] == pytest.approx(float(torch.cat(overlaps).mean()), abs=0.08)
    assert 0.1 < found.pooled[0] < 0.9


@torch.no_grad()
def both_logits(target, heads, text):
    """Of target and heads at every row of a text, for the token two after the row; [1, T - 1, V] each."""
    outputs = target(text, output_hidden_states=True)
    documents = torch.zeros_like(text[:, 1:])
    rows = TrainingRows(
        features=outputs.hidden_states[-1][:, :-1],
        token_ids=text[:, :-1],
        next_token_ids=text[:, 1:],
        documents=documents,
        position_ids=row_positions(documents),
        embed=target.get_input_embeddings(),
        lm_head=target.lm_head,
    )
    drafted = next(heads.unroll(rows, 1))
    return outputs.logits[:, 1:], drafted.logits(drafted.hidden)


def test_nothing_drafted_is_said():
    target = shared_target()
    for prompts, new_tokens in (([], 9), ([prompt()], 1)):
        with pytest.raises(ValueError, match="nothing was drafted"):
            measure_acceptance(target, random_heads(target), prompts, max_new_tokens=new_tokens)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_costs_of_targets(family):
    """Sliding windows are shorter than the context; gpt2 has absolute positions."""
    target = shared_target(family)
    costs = measure_costs(target, random_heads(target), 30, nodes=(1, 5), rows=(1, 3), repeats=2)
    assert set(costs.target) == {1, 5} and set(costs.draft) == {1, 3}
    assert min(*costs.target.values(), *costs.draft.values(), costs.start) > 0
    assert costs.overhead == 0
    ids = prompt()
    assert torch.equal(plain(target, ids, 9, assistant_model=random_heads(target)), plain(target, ids, 9))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("poss", {"num_specialists": 2, "positions_per_specialist": 1}),
        ("medusa", {"num_heads": 1}),
        ("hydra", {}),
        ("draft-lm", {"hidden_size": 16, "num_attention_heads": 2}),
    ],
)
def test_costs_of_heads(method, options):
    target = shared_target()
    heads = AutoDraftHead.from_target(target, method, **options).eval()
    costs = measure_costs(target, heads, 12, nodes=(1,), rows=(2,), repeats=1)
    assert costs.start > 0
    assert (costs.draft[2] > 0) == (heads.max_draft_positions != 1)


def test_interpolation():
    points = {1: 1.0, 4: 4.0, 8: 6.0}
    assert [interpolate(points, at) for at in (1, 2, 4, 6, 8, 10)] == [1, 2, 4, 5, 6, 7]
    assert interpolate({3: 2.0}, 9) == 2
    assert interpolate({}, 9) == 0
    assert interpolate({2: 5.0, 4: 1.0}, 9) == 0  # noise, not time gained
