"""n-alpha against chains drafted by generating."""

from __future__ import annotations

import pytest
import torch

from hf_specheads import AutoDraftHead
from hf_specheads.figures.n_alpha import agreement

INPUTS = ("feature+shifted_token", "feature+token", "token", "feature")


def right_in_a_row(target, heads, text, root, depth):
    """Draft positions of the chain after a root that agree with the text, all of them drafted on true tokens."""
    with torch.no_grad():
        features = target(text[:, :root], output_hidden_states=True).hidden_states[-1]
        cache, found = heads.new_draft_cache(), []
        state, logits = heads.start_draft(cache, text[:, : root + 1], features)
        for position in range(1, depth + 1):
            found.append(int(logits.argmax()) == int(text[0, root + position]))
            if position < depth:
                token = text[:, root + position : root + position + 1]
                visible = torch.ones(1, 1, position, dtype=torch.bool)
                state, logits = heads.extend_draft(cache, position, token, state, visible)
    return found


@pytest.mark.parametrize(
    ("method", "options"),
    [("eagle", {"inputs": inputs}) for inputs in INPUTS]
    + [("poss", {"num_specialists": 2, "positions_per_specialist": 1}), ("medusa", {"num_heads": 3})],
)
def test_agreement_is_that_of_drafted_chains(target, method, options):
    prompt_length, max_n = 4, 2
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():  # target and draft choose between two tokens, and agree every other time
        target.lm_head.weight.mul_(0.01)[10].mul_(1e3)
        target.lm_head.weight[11] = -target.lm_head.weight[10]
    heads = AutoDraftHead.from_target(target, method, **options).eval().bind(target)
    text = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    found = agreement(target, heads, text, prompt_length, max_n)
    first = prompt_length + max_n + 1  # of the tokens compared
    assert found.shape == (max_n + 1, text.shape[1] - first)
    assert 0 < found.sum() < found.numel()
    for n in range(max_n + 1):
        for column in range(found.shape[1]):
            chain = right_in_a_row(target, heads, text, first + column - n - 1, n + 1)
            assert bool(found[n, column]) == chain[n], (n, column)
