"""Drawing from the tokens that top-k keeps: the same distribution as from the whole vocabulary, wherever this is
certain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_specheads.generation.sampling import NO_DISTRIBUTION, SPARE, TokenSampler

VOCAB = 64
AFTER = {
    "top-k alone": [],
    "top-p": [TopPLogitsWarper(0.8)],
    "min-p": [MinPLogitsWarper(0.2)],
    "typical": [TypicalLogitsWarper(0.6)],
    "epsilon": [EpsilonLogitsWarper(0.1)],
    "eta": [EtaLogitsWarper(0.1)],
    "normalized": [LogitNormalization()],
    "a second top-k": [TopKLogitsWarper(3)],
    "all": [TopPLogitsWarper(0.9), MinPLogitsWarper(0.05), TypicalLogitsWarper(0.9), LogitNormalization()],
}


class Others(TopKLogitsWarper):
    """A user's own processor."""


Others.__name__ = "TopKLogitsWarper"


def sampler_of(*processors) -> TokenSampler:
    return TokenSampler(LogitsProcessorList(processors), do_sample=True, in_order=False)


def text_before(logits: torch.Tensor) -> torch.Tensor:
    """Makes two tokens before every row."""
    return torch.tensor([[3, 5]]).expand(logits.shape[:-1].numel(), 2)


def drawn_from(
    sampler: TokenSampler, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch, ranked: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Returns the probabilities [R, V] of tokens that were drawn from few, the highest of `ranked`; `None` if they
    were drawn from all."""
    seen: list[torch.Tensor] = []

    def race(probs: torch.Tensor) -> torch.Tensor:
        seen.append(probs)
        return torch.zeros(probs.shape[:-1], dtype=torch.long)

    with monkeypatch.context() as patch:
        patch.setattr(TokenSampler, "race", staticmethod(race))
        rows = logits.flatten(0, 1)
        first = sampler.tokens_at_all_nodes(logits) if sampler.row_wise else sampler.token_at_node(
            text_before(logits), rows
        )  # fmt: skip
    if seen[0].shape[-1] == logits.shape[-1]:
        return None
    token_ids = (rows if ranked is None else ranked).topk(seen[0].shape[-1]).indices
    assert torch.equal(first.flatten(), token_ids[:, 0]), "places are not yet tokens"
    return torch.zeros(rows.shape).scatter(-1, token_ids, seen[0].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.6, 1.7])
@pytest.mark.parametrize("after", AFTER)
def test_the_distribution_is_that_of_the_whole_vocabulary(after, temperature, dtype, monkeypatch):
    torch.manual_seed(len(after))
    warm = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    sampler, logits = sampler_of(*warm, TopKLogitsWarper(9), *AFTER[after]), (4 * torch.randn(3, 5, VOCAB)).to(dtype)
    before = logits.clone()
    few = drawn_from(sampler, logits, monkeypatch)
    expected = sampler.scores_at_all_nodes(logits).softmax(-1).flatten(0, 1)
    assert few is not None
    torch.testing.assert_close(few, expected)
    assert torch.equal(few > 0, expected > 0)
    assert torch.equal(logits, before)


BEFORE = {
    "repetition": [RepetitionPenaltyLogitsProcessor(1.4)],
    "suppressed": [SuppressTokensLogitsProcessor([7, 8])],
    "repaired": [InfNanRemoveLogitsProcessor()],
    "top-p": [TopPLogitsWarper(0.95)],
    "normalized": [LogitNormalization()],
    "two": [RepetitionPenaltyLogitsProcessor(0.7), SuppressTokensLogitsProcessor([3])],
}


@pytest.mark.parametrize("before", BEFORE)
def test_processors_before_see_all_tokens(before, monkeypatch):
    torch.manual_seed(1)
    last = [TemperatureLogitsWarper(1.3), TopKLogitsWarper(4), MinPLogitsWarper(0.1)]
    sampler, logits = sampler_of(*BEFORE[before], *last), torch.randn(1, 3, VOCAB)
    text, rows = text_before(logits), logits[0]
    ranked = LogitsProcessorList(BEFORE[before])(text, rows.clone())
    few = drawn_from(sampler, logits, monkeypatch, ranked)
    assert few is not None
    torch.testing.assert_close(few, sampler.scores_at_node(text, rows).softmax(-1))


def test_a_processor_with_a_memory_is_asked_once_also_where_ties_are_found():
    asked: list[int] = []

    def remember(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(len(scores))
        return scores

    sampler = sampler_of(remember, TopKLogitsWarper(4))
    for logits in (torch.randn(1, VOCAB), torch.zeros(1, VOCAB)):
        sampler.token_at_node(text_before(logits), logits)
    assert asked == [1, 1]


def test_draws_in_order_are_plain_generations():
    """A seeded text takes one draw from the whole vocabulary per token."""
    sampler, logits = TokenSampler(LogitsProcessorList([TopKLogitsWarper(4)]), True), torch.randn(1, VOCAB)
    torch.manual_seed(3)
    tokens = [sampler.token_at_node(text_before(logits), logits).item() for _ in range(5)]
    torch.manual_seed(3)
    probs = sampler.scores_at_node(text_before(logits), logits).softmax(-1)
    assert tokens == [torch.multinomial(probs, 1).item() for _ in range(5)]


@pytest.mark.parametrize(("batch", "exact_seed", "in_order"), [(1, True, True), (1, False, False), (2, True, False)])
def test_draws_are_in_order_for_one_seeded_text_alone(batch, exact_seed, in_order):
    sampler = TokenSampler(LogitsProcessorList(), True, batch, exact_seed)
    assert sampler.in_order is in_order
    assert sampler.for_sequence(0).in_order is in_order


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(-3, 3), min_size=24, max_size=24), k=st.integers(1, 11), temperature=st.floats(0.2, 3)
)
def test_with_ties_nothing_that_top_k_leaves_is_lost(values, k, temperature):
    sampler = sampler_of(TemperatureLogitsWarper(temperature), TopKLogitsWarper(k))
    logits = torch.tensor(values, dtype=torch.float32).view(1, 1, -1)
    with pytest.MonkeyPatch.context() as patch:
        few = drawn_from(sampler, logits, patch)
    left = int((logits >= logits.flatten().topk(k).values[-1]).sum())
    assert (few is None) == (left >= SPARE * k)
    if few is not None:
        torch.testing.assert_close(few, sampler.scores_at_all_nodes(logits).softmax(-1)[0])


def test_what_is_drawn_is_as_often_as_it_is_probable():
    torch.manual_seed(0)
    sampler = sampler_of(TopKLogitsWarper(4), TopPLogitsWarper(0.9))
    logits = torch.randn(1, 1, VOCAB).expand(1, 20_000, VOCAB)
    shares = torch.bincount(sampler.tokens_at_all_nodes(logits).flatten(), minlength=VOCAB) / 20_000
    expected = sampler.scores_at_all_nodes(logits[:, :1]).softmax(-1)[0, 0]
    assert (expected > 0).sum() >= 3
    torch.testing.assert_close(shares, expected, atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [TopPLogitsWarper(0.8)],
        # the second processor gives tokens that were ruled out a score again
        [TopKLogitsWarper(5), InfNanRemoveLogitsProcessor()],
        # the second processor identifies tokens by their ids
        [TopKLogitsWarper(5), SuppressTokensLogitsProcessor([3])],
        [TopKLogitsWarper(5), RepetitionPenaltyLogitsProcessor(1.2)],
        [TopKLogitsWarper(5, filter_value=-1.0)],
        [TopKLogitsWarper(5), TopPLogitsWarper(0.8, filter_value=-1.0)],
        [Others(5)],
        [TopKLogitsWarper(VOCAB // SPARE)],
    ],
    ids=lambda processors: "-".join(type(p).__name__ for p in processors) or "none",
)
def test_all_tokens_are_drawn_from_where_others_may_be_left(processors, monkeypatch):
    assert drawn_from(sampler_of(*processors), torch.randn(1, 3, VOCAB), monkeypatch) is None


def test_greedy_tokens_are_not_drawn():
    logits = torch.randn(2, 3, VOCAB)
    sampler = TokenSampler(LogitsProcessorList([TopKLogitsWarper(5)]), do_sample=False)
    assert torch.equal(sampler.tokens_at_all_nodes(logits), logits.argmax(-1))


@pytest.mark.parametrize("where", ["the best", "all", "ruled out"])
def test_numbers_that_are_none_are_no_distribution(where):
    logits = torch.randn(1, 4, VOCAB)
    ranked = logits[0, 2].argsort(descending=True)
    logits[0, 2, {"the best": ranked[:1], "all": ranked, "ruled out": ranked[-1:]}[where]] = torch.nan
    tokens = TokenSampler(LogitsProcessorList([TopKLogitsWarper(5)]), True).tokens_at_all_nodes(logits)[0]
    assert tokens[2] == NO_DISTRIBUTION
    assert (tokens[[0, 1, 3]] >= 0).all()
