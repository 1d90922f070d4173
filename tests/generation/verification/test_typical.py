"""Typical acceptance: the authors' decisions, a naive version of the rule, and the combinations that are refused."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.heads import random_heads
from support.stubs import CountForwards, StubHead
from support.targets import plain, prompt, shared_target
from support.trees import path_of, random_tree
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specheads.errors import UnsupportedGenerationError
from hf_specheads.generation.sampling import TokenSampler
from hf_specheads.generation.stopping import StopRule
from hf_specheads.generation.verification.rules import LOSSY
from hf_specheads.generation.verification.typical import (
    best_typical_node,
    scores_on_paths,
    typical_threshold,
    verify_typical,
)
from hf_specheads.tree.draft_tree import DraftTree

GOLDENS = Path(__file__).resolve().parents[2] / "recordings" / "goldens"
NEVER = StopRule(StoppingCriteriaList())
CASES = ["medusa_greedy", "hydra_prefix_mlp"]  # folders with a second recording, of sampling at temperature 0.7


# ---------------------------------------------------------------------- the authors' recordings


def recorded_case(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / name / "case_typical_t07.json").read_text())


def recorded_target(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(GOLDENS / name / "target", dtype=torch.float32).eval()


def recorded_rounds(name: str) -> list[tuple[int, dict[str, Any], torch.Tensor]]:
    """Returns number, recording and committed tokens [1, T] of each recorded round."""
    case = recorded_case(name)
    text, committed, rounds = case["prompt_ids"] + case["output_ids"], len(case["prompt_ids"]), []
    for number, recorded in enumerate(case["rounds"]):
        rounds.append((number, recorded, torch.tensor([text[:committed]])))
        committed += recorded["accept_length"] + 1
    return rounds


def tree_of(recorded: dict[str, Any]) -> DraftTree:
    tokens, parents, depths = (torch.tensor([recorded[name]]) for name in ("tokens", "parents", "depth"))
    return DraftTree(tokens, parents, depths, torch.zeros(tokens.shape), int(depths.max()))


@torch.no_grad()
def node_logits(target: Any, committed: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Returns the target's logits [1, N, V] at the nodes of a tree of one row, from one padded forward over all
    paths."""
    parents, tokens = tree.parents[0].tolist(), tree.token_ids[0].tolist()
    paths = [[tokens[n] for n in path_of(parents, node)] for node in range(tree.num_nodes)]
    longest = max(map(len, paths))
    ids = torch.tensor([committed[0].tolist() + path + [0] * (longest - len(path)) for path in paths])
    last = torch.tensor([committed.shape[1] + len(path) - 1 for path in paths])
    return target(ids).logits[torch.arange(len(paths)), last][None]


@pytest.mark.parametrize("name", CASES)
def test_decisions_equal_the_authors(name):
    """Medusa's code pads short paths with token 0 and may accept the padding. In these cases our path ends before the
    padding."""
    case = recorded_case(name)
    constants = (case["settings"]["posterior_threshold"], case["settings"]["posterior_alpha"])
    target = recorded_target(name)
    sampler = TokenSampler(LogitsProcessorList([TemperatureLogitsWarper(case["settings"]["temperature"])]), True)
    text = case["prompt_ids"] + case["output_ids"]
    for number, recorded, committed in recorded_rounds(name):
        tree = tree_of(recorded["tree"])
        assert tree.token_ids[0, 0] == recorded["root_token"]
        logits = node_logits(target, committed, tree)
        ids = torch.cat([committed, tree.token_ids[:, :1]], dim=1)
        (accepted,) = verify_typical(tree, ids, logits, sampler, NEVER, None, *constants)
        if number in case.get("accepted_padding_rounds", []):
            assert recorded["accepted_tokens"] == [int(ids[0, -1]), *accepted.token_ids[:-1], 0]
            continue
        assert accepted.num_accepted == recorded["accept_length"]
        assert accepted.token_ids[:-1] == recorded["accepted_tokens"][1:]
        next_root = text[ids.shape[1] + accepted.num_accepted]
        assert accepted.token_ids[-1] == next_root


def test_thresholds_equal_the_authors():
    """The recordings hold, per leaf path and depth, the probability of the drafted token and the threshold it had to
    exceed."""
    name = "medusa_greedy"
    target = recorded_target(name)
    tensors = load_file(GOLDENS / name / "tensors_typical_t07.safetensors")
    for number, recorded, committed in recorded_rounds(name)[:3]:
        tree = tree_of(recorded["tree"])
        probs = (node_logits(target, committed, tree) / 0.7).softmax(-1)[0]
        needed = typical_threshold(probs, 0.09, 0.3)
        for path, theirs, threshold in zip(
            recorded["tree"]["retrieve_indices"],
            tensors[f"r{number}.cand_prob"],
            tensors[f"r{number}.threshold"],
            strict=True,
        ):
            nodes = [node for node in path if node >= 0]
            for depth, (parent, child) in enumerate(pairwise(nodes)):
                torch.testing.assert_close(
                    probs[parent, tree.token_ids[0, child]], theirs[depth], atol=1e-5, rtol=1e-4
                )
                torch.testing.assert_close(needed[parent], threshold[depth], atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- the rule, written out


def naive_best(tree: DraftTree, row: int, probs: torch.Tensor, threshold: float, alpha: float) -> int:
    """Returns the node in which the rule ends: longest accepted path, then the most probable path, then the first."""
    tokens, parents = tree.token_ids[row].tolist(), tree.parents[row].tolist()
    best, best_key = 0, (0, 0.0)
    for node in range(1, tree.num_nodes):
        path, log_prob, accepted = path_of(parents, node), 0.0, True
        for parent, child in pairwise(path):
            p = probs[row, parent].tolist()
            entropy = -sum(x * math.log(x + 1e-5) for x in p)
            accepted &= p[tokens[child]] > min(threshold, alpha * math.exp(-entropy))
            log_prob += math.log(p[tokens[child]])
        if accepted and (len(path) - 1, log_prob) > best_key:
            best, best_key = node, (len(path) - 1, log_prob)
    return best


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), nodes=st.integers(1, 12), batch=st.integers(1, 3), threshold=st.floats(0.01, 0.3),
    alpha=st.floats(0.05, 1.0),
)  # fmt: skip
def test_the_best_node_equals_the_naive_rule(seed, nodes, batch, threshold, alpha):
    tree = random_tree(seed, nodes, 4, batch, vocab=16)
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(batch, nodes, 16, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    best = best_typical_node(tree, probs, threshold, alpha).tolist()
    assert best == [naive_best(tree, row, probs, threshold, alpha) for row in range(batch)]


def test_a_leaf_is_never_extended_by_padding():
    """Medusa's own code accepts a token 0 after a leaf, because it pads short paths with 0."""
    tree = DraftTree(
        torch.tensor([[5, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[0, 1, 1, 2]]), torch.zeros(1, 4), 2
    )
    logits = torch.full((1, 4, 12), -20.0)
    # only the leaf 7 is accepted, then token 0 follows
    logits[0, 0, 7] = logits[0, 1, 0] = logits[0, 2, 3] = logits[0, 3, 0] = 20.0
    (accepted,) = verify_typical(
        tree, torch.tensor([[1, 5]]), logits, TokenSampler(LogitsProcessorList(), True), NEVER, (), 0.09, 0.3
    )
    assert (accepted.token_ids, accepted.nodes) == ([7, 0], [0, 1])
    assert [int(scores.argmax()) for scores in accepted.scores] == [7, 0]


def test_a_token_the_warpers_removed_is_never_accepted():
    tree = DraftTree(torch.tensor([[5, 7]]), torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]), torch.zeros(1, 2), 1)
    logits = torch.zeros(1, 2, 12)
    logits[..., 3] = 1.0
    for processors, count in (([], 1), ([TopKLogitsWarper(1)], 0)):
        sampler = TokenSampler(LogitsProcessorList(processors), True)
        (accepted,) = verify_typical(tree, torch.tensor([[1, 5]]), logits, sampler, NEVER, None, 0.05, 0.5)
        assert accepted.num_accepted == count


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 14), batch=st.integers(1, 3))
def test_processors_see_the_text_of_every_path(seed, nodes, batch):
    tree = random_tree(seed, nodes, 4, batch, vocab=20)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, nodes, 20, generator=generator)
    committed = torch.randint(0, 20, (batch, 5), generator=generator)
    processors = [RepetitionPenaltyLogitsProcessor(1.8), NoRepeatNGramLogitsProcessor(2)]
    sampler = TokenSampler(LogitsProcessorList(processors), True)
    scores = scores_on_paths(tree, committed, logits, sampler)
    for row in range(batch):
        for node in range(nodes):
            path = tree.token_ids[row, path_of(tree.parents[row].tolist(), node)[1:]]
            expected = sampler.scores_at_node(torch.cat([committed[row], path])[None], logits[row, node][None])
            assert torch.equal(scores[row, node], expected[0])


# ---------------------------------------------------------------------- whole generations


def typical_heads(target, truth=None, **tree: Any):
    heads = random_heads(target, **tree) if truth is None else StubHead(target, truth, (0, 1, None, 2), **tree)
    heads.verification = "typical"
    return heads


def naive_generation(target, ids: torch.Tensor, new_tokens: int, temperature: float, trees: list) -> list[int]:
    """Applies typical acceptance to the drafted trees, with forwards without cache."""
    text = ids[0].tolist()
    text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    for tree in trees:
        logits = node_logits(target, torch.tensor([text[:-1]]), tree)
        node = naive_best(tree, 0, (logits / temperature).double().softmax(-1), 0.09, 0.3)
        path = path_of(tree.parents[0].tolist(), node)[1:]
        text += [*tree.token_ids[0, path].tolist(), int(logits[0, node].argmax())]
    return text[ids.shape[1] :][:new_tokens]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_generation_follows_the_rule(seed):
    target, ids = shared_target(), prompt(seed=seed)
    heads = typical_heads(target, plain(target, ids))
    heads.trace = True
    out = target.generate(ids, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=24, assistant_model=heads)
    assert out[0, ids.shape[1] :].tolist() == naive_generation(target, ids, 24, 1.5, heads.last_stats.trees)
    assert heads.last_stats.lossy
    assert heads.last_stats.acceptance_length > 1.2
    assert heads.last_stats.host_syncs == heads.last_stats.rounds + 1


def test_host_syncs_of_processors_that_read_the_text_are_counted():
    tree = random_tree(3, 9, 3, vocab=20)
    sampler = TokenSampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8)]), True)
    ids, logits = torch.zeros(1, 3).long(), torch.randn(1, 9, 20)
    (accepted,) = verify_typical(tree, ids, logits, sampler, NEVER, None, 0.09, 0.3)
    assert accepted.host_syncs == 1 + 4  # one per level, the root's level included


@pytest.mark.parametrize("tree", [{}, {"kind": "chain", "depth": 3}], ids=["tree", "chain"])
def test_greedy_decoding_stays_exact(tree):
    target, ids = shared_target(), prompt()
    heads = typical_heads(target, plain(target, ids), **tree)
    assert torch.equal(plain(target, ids, assistant_model=heads), plain(target, ids))
    assert not heads.last_stats.lossy


def test_criteria_that_see_every_token_cut_at_the_exact_token():
    target, ids = shared_target(), prompt()
    heads = typical_heads(target, plain(target, ids))
    options = {"do_sample": True, "temperature": 0.5, "top_k": 0, "max_new_tokens": 24, "assistant_model": heads}
    whole = target.generate(ids, **options)
    for length in range(ids.shape[1] + 1, ids.shape[1] + 12):
        seen: list[int] = []

        def reached(input_ids, scores, length=length, seen=seen, **kwargs):
            seen.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] >= length])

        out = target.generate(ids, **options, stopping_criteria=[reached])
        assert torch.equal(out, whole[:, :length])
        assert seen == list(range(ids.shape[1] + 1, length + 1))


def test_it_is_said_once_that_text_is_lossy(monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr("hf_specheads.generation.loop.logger.warning_once", warnings.append)
    target, ids = shared_target(), prompt()
    heads = typical_heads(target)
    plain(target, ids, 4, assistant_model=heads)
    assert warnings == []
    target.generate(ids, do_sample=True, max_new_tokens=4, assistant_model=heads)
    assert warnings == [LOSSY]


class Stateful(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


REFUSED = {
    "users' processors": ({"logits_processor": LogitsProcessorList([Stateful()])}, {}, {}, "Stateful"),
    "constraints": (
        {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4]}, {}, {}, "PrefixConstrainedLogitsProcessor",
    ),
    "transformers' loop": ({}, {"loop": "transformers"}, {"kind": "chain"}, "heads.loop = 'own'"),
    "sampled children": ({}, {}, {"kind": "chain", "children": "sampled"}, "children='top_k'"),
    "threshold": ({}, {"posterior_threshold": 1.5}, {}, "from 0 to 1, got 1.5"),
    "alpha": ({}, {"posterior_alpha": -1.0}, {}, "at least 0, got -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_be_combined_with_is_refused(case):
    options, attributes, tree, words = REFUSED[case]
    target, ids = shared_target(), prompt()
    heads = typical_heads(target, **tree)
    for name, value in attributes.items():
        setattr(heads, name, value)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError) as refused:
        target.generate(ids, do_sample=True, max_new_tokens=4, assistant_model=heads, **options)
    assert forwards.count == 0
    assert words in str(refused.value)
    assert "heads.verification = 'lossless'" in str(refused.value)
    if case != "transformers' loop":
        assert plain(target, ids, 4, assistant_model=heads, **options).shape[1] == ids.shape[1] + 4
