"""Choosing tokens, at all nodes at once or at one node at a time, through transformers' processors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_of, greedy
from support.heads import random_heads
from support.targets import VOCAB, own_target, plain, prompt, shared_target
from support.trees import path_of, random_tree
from transformers import LogitsProcessorList
from transformers.generation import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specheads.generation.sampling import TokenSampler, favourite
from hf_specheads.generation.verification import rules

WARPERS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]


def test_logits_may_be_a_part_of_more():
    """The logits of a stream's rounds are such a part if chains end at different lengths."""
    sampler = TokenSampler(LogitsProcessorList(WARPERS), do_sample=True)
    whole = torch.randn(3, 5, 11, dtype=torch.float32)
    part = whole[:, :4]
    assert not part.is_contiguous()
    assert torch.equal(sampler.scores_at_all_nodes(part), sampler.scores_at_all_nodes(part.contiguous()))


class TopKLogitsWarperOfTheUser(TopKLogitsWarper):
    """A user's processor must not be taken for one of transformers' own."""


TopKLogitsWarperOfTheUser.__name__ = "TopKLogitsWarper"


@pytest.mark.parametrize(
    ("processors", "row_wise"),
    [
        ([], True),
        (WARPERS, True),
        ([SuppressTokensLogitsProcessor([3])], True),
        ([RepetitionPenaltyLogitsProcessor(1.2)], False),
        ([*WARPERS, NoRepeatNGramLogitsProcessor(2)], False),
        ([TopKLogitsWarperOfTheUser(4)], False),
    ],
    ids=["none", "warpers", "suppress", "repetition", "mixed", "user"],
)
def test_row_wise_is_an_allow_list(processors, row_wise):
    assert TokenSampler(LogitsProcessorList(processors), do_sample=False).row_wise is row_wise


@pytest.mark.parametrize("batch", [1, 3])
def test_all_nodes_at_once_equal_one_node_at_a_time(batch):
    sampler = TokenSampler(LogitsProcessorList(WARPERS), do_sample=False)
    ids, logits = torch.randint(0, 30, (batch, 6)), torch.randn(batch, 7, 30)
    before = logits.clone()
    tokens, scores = sampler.at_all_nodes(logits)
    for row in range(batch):
        for node in range(7):
            token, score = sampler.at_node(ids[row : row + 1], logits[row : row + 1, node])
            assert token.item() == tokens[row, node].item()
            assert torch.equal(score[0], scores[row, node])
    assert torch.equal(logits, before), "processors must not write into the target's logits"


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6), nodes=st.integers(1, 12), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3)
)
def test_penalties_at_all_nodes_equal_those_after_each_path(seed, nodes, lengths):
    tree, vocab = random_tree(seed, nodes, 4, len(lengths), vocab=11), 11
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lengths), nodes, vocab, generator=draw)
    texts = [torch.randint(0, vocab + 3, (1, length), generator=draw) for length in lengths]  # 3 are only embedded
    processors = [RepetitionPenaltyLogitsProcessor(1.7), *WARPERS, RepetitionPenaltyLogitsProcessor(0.6)]
    sampler = TokenSampler(LogitsProcessorList(processors), do_sample=False)
    at_once = sampler.at_nodes(tree, texts, [*range(len(texts))])
    assert at_once.row_wise and not sampler.row_wise
    scores = at_once.scores_at_all_nodes(logits)
    for row, text in enumerate(texts):
        for node in range(nodes):
            path = path_of(tree.parents[row].tolist(), node)[1:]
            ids = torch.cat([text, tree.token_ids[row : row + 1, path]], dim=1)
            assert torch.equal(scores[row, node], sampler.scores_at_node(ids, logits[row : row + 1, node])[0])


@pytest.mark.parametrize(
    "processors",
    [[NoRepeatNGramLogitsProcessor(2)], [RepetitionPenaltyLogitsProcessor(1.2), NoRepeatNGramLogitsProcessor(2)],
     [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)], WARPERS],
    ids=["other", "mixed", "part of the text", "row-wise"],
)  # fmt: skip
def test_samplers_that_need_other_texts_or_none_are_themselves_at_nodes(processors):
    sampler = TokenSampler(LogitsProcessorList(processors), do_sample=False)
    assert sampler.at_nodes(random_tree(0, 5, 2, vocab=11), [torch.ones(1, 4).long()], [0]) is sampler


@pytest.mark.parametrize("lengths", [(9,), (5, 11, 8)])
def test_repetition_penalties_need_no_token_by_token_verification(lengths, monkeypatch):
    """In a padded batch, the processor ignores the padding of each sequence."""
    target, (inputs, _) = shared_target("llama"), batch_of(lengths)
    options = {"repetition_penalty": 1.3, "eos_token_id": None}
    expected = greedy(target, inputs, **options)
    monkeypatch.setattr(rules, "verify_token_by_token", None)
    ours = greedy(target, inputs, assistant_model=random_heads(target, "eagle"), **options)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, greedy(target, inputs, **options | {"repetition_penalty": 1.0}))


def test_greedy_without_processors_is_the_argmax_of_the_raw_logits():
    logits = torch.randn(2, 4, 30).to(torch.bfloat16)
    tokens, scores = TokenSampler(LogitsProcessorList(), do_sample=False).at_all_nodes(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    assert scores is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [3, 17, 64, 4096, 32_001])
def test_the_favourite_is_plain_decodings(vocab, dtype):
    """Ties, and values that are not numbers, must be resolved as `argmax` does."""
    scores = torch.randint(0, 50, (2, 7, vocab)).to(dtype)
    scores[0, 0] = 1.0
    scores[0, 1, vocab // 2] = scores[0, 1, -1] = torch.nan
    scores[1, 0] = -torch.inf
    for some in (scores, scores.transpose(0, 1), scores[:, ::2]):
        assert torch.equal(favourite(some), some.argmax(-1))


def test_one_draw_per_token_as_in_plain_generation():
    logits = torch.randn(1, 30)
    torch.manual_seed(5)
    tokens = [TokenSampler(LogitsProcessorList(), True).at_node(torch.zeros(1, 3).long(), logits)[0] for _ in range(4)]
    torch.manual_seed(5)
    expected = [torch.multinomial(logits.softmax(-1), 1)[0] for _ in range(4)]
    assert [t.item() for t in tokens] == [t.item() for t in expected]


def test_processors_work_in_fp32():
    """In bf16, dividing by the temperature rounds. Plain generation converts to fp32 first."""
    logits = torch.randn(1, 3, 30).to(torch.bfloat16)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.37)])
    _, scores = TokenSampler(processors, do_sample=True).at_all_nodes(logits)
    torch.testing.assert_close(scores, logits.float() / 0.37)


# ---------------------------------------------------------------------- processors that ask for lengths alone
# in force below length 10, and below length 8
SHORT = [MinNewTokensLengthLogitsProcessor(4, 6, [3, 5]), MinLengthLogitsProcessor(8, 7)]


@pytest.mark.parametrize(
    ("shortest", "longest", "row_wise", "ruled_out"),
    [(4, 7, True, {3, 5, 7}), (4, 8, False, None), (8, 9, True, {3, 5}), (8, 10, False, None), (10, 99, True, set())],
)
def test_where_all_texts_are_short_or_none_is_lengths_do_not_matter(shortest, longest, row_wise, ruled_out):
    torch.manual_seed(0)
    sampler = TokenSampler(LogitsProcessorList([SHORT[0], *WARPERS[:1], SHORT[1]]), do_sample=False)
    assert not sampler.row_wise
    settled = sampler.at_lengths(shortest, longest)
    assert settled.row_wise == row_wise
    logits = torch.randn(2, 3, 11)
    for length in range(shortest, min(longest, 12) + 1):
        text = torch.zeros(6, length, dtype=torch.long)
        expected = sampler.scores_at_node(text, logits.flatten(0, 1))
        assert torch.equal(settled.scores_at_node(text, logits.flatten(0, 1)), expected)
        if row_wise:
            assert torch.equal(settled.scores_at_all_nodes(logits).flatten(0, 1), expected)
            assert set((expected[0] == -torch.inf).nonzero()[:, 0].tolist()) == ruled_out


def test_samplers_without_such_processors_are_themselves():
    class MinLengthLogitsProcessorOfTheUser(MinLengthLogitsProcessor):
        pass

    own = MinLengthLogitsProcessorOfTheUser(8, 7)
    MinLengthLogitsProcessorOfTheUser.__name__ = "MinLengthLogitsProcessor"
    for processors in ([], WARPERS, [own]):
        sampler = TokenSampler(LogitsProcessorList(processors), do_sample=True, in_order=False)
        assert sampler.at_lengths(1, 5) is sampler
    settled = TokenSampler(LogitsProcessorList(SHORT), True, batch=3, in_order=False).at_lengths(1, 5)
    assert (settled.do_sample, settled.batch, settled.in_order) == (True, 3, False)


def test_rounds_of_texts_that_may_not_end_yet_are_chosen_at_once(monkeypatch):
    """Only the round in which a text reaches the minimum length is chosen node by node."""
    target, ids = own_target(), prompt(5)
    options = {"min_new_tokens": 20, "eos_token_id": list(range(0, VOCAB, 2)), "pad_token_id": 0}
    heads, asked, nodes = random_heads(target), [], []
    at_node, at_all = TokenSampler.token_at_node, TokenSampler.tokens_at_all_nodes
    monkeypatch.setattr(TokenSampler, "token_at_node", lambda *args: asked.append(1) or at_node(*args))
    monkeypatch.setattr(TokenSampler, "tokens_at_all_nodes", lambda *args: nodes.append(1) or at_all(*args))
    assert torch.equal(plain(target, ids, 30, assistant_model=heads, **options), plain(target, ids, 30, **options))
    assert len(asked) <= heads.tree_config.depth + 1 < len(nodes)
