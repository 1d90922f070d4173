"""Verification: following the chosen tokens through a tree equals a naive walk, for every row of a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import path_of, random_tree, row
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specheads import DraftTreeConfig
from hf_specheads.generation.sampling import TokenSampler
from hf_specheads.generation.stopping import StopRule
from hf_specheads.generation.verification.accepted import cut_where_it_stops
from hf_specheads.generation.verification.top_k import verify_all_nodes, verify_token_by_token
from hf_specheads.tree.draft_tree import DraftTree
from hf_specheads.tree.shape import fixed_shape

VOCAB, CPU = 40, torch.device("cpu")
GREEDY = TokenSampler(LogitsProcessorList(), do_sample=False)
NEVER = StopRule(StoppingCriteriaList())


def agreeing_choices(tree: DraftTree, seed: int) -> torch.Tensor:
    """Chooses tokens at the nodes, [B, N], often one of the node's children, so that paths are accepted."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, VOCAB, tree.token_ids.shape, generator=generator)
    for index, parents in enumerate(tree.parents.tolist()):
        for node in range(1, tree.num_nodes):
            if torch.rand((), generator=generator) < 0.5:
                choices[index, parents[node]] = tree.token_ids[index, node]
    return choices


def naive_walk(tree: DraftTree, index: int, choices: list[int]) -> tuple[list[int], list[int]]:
    """Returns nodes and emitted tokens of one row, by walking from the root."""
    tokens, parents = tree.token_ids[index].tolist(), tree.parents[index].tolist()
    nodes, emitted = [0], [choices[0]]
    while True:
        below = [n for n in range(1, tree.num_nodes) if parents[n] == nodes[-1] and tokens[n] == emitted[-1]]
        if not below:
            return nodes, emitted
        nodes.append(below[0])
        emitted.append(choices[below[0]])


def logits_for(choices: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(choices, VOCAB).float()


seeds = st.integers(0, 10**6)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, nodes=st.integers(1, 25), depth=st.integers(1, 7), batch=st.integers(1, 3))
def test_both_walks_equal_the_naive_walk(seed, nodes, depth, batch):
    tree = random_tree(seed, nodes, depth, batch, vocab=VOCAB)
    choices = agreeing_choices(tree, seed)
    prefix = torch.zeros(batch, 5, dtype=torch.long)
    at_once = verify_all_nodes(tree, logits_for(choices), GREEDY, keep_scores=False)
    for index in range(batch):
        expected_nodes, expected_tokens = naive_walk(tree, index, choices[index].tolist())
        assert at_once[index].nodes == expected_nodes == path_of(tree.parents[index].tolist(), expected_nodes[-1])
        assert at_once[index].token_ids == expected_tokens
        assert not at_once[index].stopped
        part = slice(index, index + 1)
        (walked,) = verify_token_by_token(
            row(tree, index), prefix[part], logits_for(choices)[part], GREEDY, NEVER, None
        )
        assert (walked.nodes, walked.token_ids) == (expected_nodes, expected_tokens)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, depth=st.integers(1, 7), batch=st.integers(1, 3))
def test_chains_are_followed_without_their_parents(seed, depth, batch):
    shape = fixed_shape(DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1).paths, depth, CPU)
    tokens = torch.randint(0, VOCAB, (batch, depth + 1), generator=torch.Generator().manual_seed(seed))
    parents, depths = shape.parents.expand(batch, -1), shape.depths.expand(batch, -1)
    tree = DraftTree(tokens, parents, depths, tokens.float(), depth, shape=shape)
    choices = agreeing_choices(tree, seed)
    accepted = verify_all_nodes(tree, logits_for(choices), GREEDY, keep_scores=False)
    for index, result in enumerate(accepted):
        assert (result.nodes, result.token_ids) == naive_walk(tree, index, choices[index].tolist())


@settings(max_examples=60, deadline=None)
@given(seed=seeds, room=st.integers(1, 6), eos=st.integers(0, VOCAB - 1))
def test_stopping_cuts_both_walks_at_the_same_token(seed, room, eos):
    tree = random_tree(seed, 20, 6, vocab=VOCAB)
    choices = agreeing_choices(tree, seed)
    prefix = torch.zeros(1, 5, dtype=torch.long)
    rule = StopRule(StoppingCriteriaList([MaxLengthCriteria(5 + room), EosTokenCriteria(torch.tensor([eos]))]))
    nodes, tokens = naive_walk(tree, 0, choices[0].tolist())
    last = min([room, len(tokens)] + [i + 1 for i, token in enumerate(tokens) if token == eos])
    whole = verify_all_nodes(tree, logits_for(choices), GREEDY, keep_scores=True)
    (at_once,) = cut_where_it_stops(whole, [prefix], [rule], lambda row: ())
    (walked,) = verify_token_by_token(tree, prefix, logits_for(choices), GREEDY, rule, ())
    for accepted in (at_once, walked):
        assert accepted.token_ids == tokens[:last]
        assert accepted.nodes == nodes[:last]
        assert accepted.num_accepted == len(accepted.token_ids) - 1
        assert accepted.stopped == (last == room or tokens[last - 1] == eos)
        assert accepted.cut == (last < len(tokens))
        assert len(accepted.scores) == len(accepted.token_ids)


def test_scores_that_nobody_asks_for_are_not_kept():
    tree = random_tree(3, 12, 4, vocab=VOCAB)
    logits, prefix = logits_for(agreeing_choices(tree, 3)), torch.zeros(1, 5, dtype=torch.long)
    asked, unasked = (verify_token_by_token(tree, prefix, logits, GREEDY, NEVER, scores)[0] for scores in ((), None))
    assert unasked.token_ids == asked.token_ids
    assert (len(asked.scores), unasked.scores) == (len(asked.token_ids), [])


def test_scores_belong_to_the_nodes_of_the_path():
    tree = random_tree(3, 12, 4, vocab=VOCAB)
    choices = agreeing_choices(tree, 3)
    logits = torch.rand(1, 12, VOCAB) + 5 * logits_for(choices)
    (accepted,) = verify_all_nodes(tree, logits, GREEDY, keep_scores=True)
    assert accepted.num_accepted > 0
    for node, scores in zip(accepted.nodes, accepted.scores, strict=True):
        assert torch.equal(scores, logits[:, node])


def test_host_syncs_are_counted():
    tree = random_tree(3, 12, 4, vocab=VOCAB)
    choices = agreeing_choices(tree, 3)
    prefix = torch.zeros(1, 5, dtype=torch.long)
    (at_once,) = verify_all_nodes(tree, logits_for(choices), GREEDY, keep_scores=False)
    (walked,) = verify_token_by_token(tree, prefix, logits_for(choices), GREEDY, NEVER, None)
    assert at_once.host_syncs == 1
    assert walked.host_syncs == 1 + len(walked.token_ids)


def test_token_by_token_takes_one_row():
    tree = random_tree(1, 5, 2, batch=2, vocab=VOCAB)
    with pytest.raises(ValueError, match="one sequence at a time, got a batch of 2"):
        verify_token_by_token(tree, torch.zeros(2, 3).long(), torch.zeros(2, 5, VOCAB), GREEDY, NEVER, None)
