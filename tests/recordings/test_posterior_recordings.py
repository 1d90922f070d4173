"""EAGLE's own sampled verification, recorded with its random numbers: the same distribution, decision by decision.

EAGLE tests the children of a node one after the other, each with a uniform number against what is left of the target's
distribution. We draw one token and look whether it is a child. The recordings say what EAGLE decided; here our draw is
scripted to be the token it ended up with, and what we drew from must be the distribution it ended up with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.distributions import script_draws
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specheads.generation.sampling import TokenSampler
from hf_specheads.generation.stopping import StopRule
from hf_specheads.generation.verification.top_k import verify_all_nodes, verify_token_by_token
from hf_specheads.tree.draft_tree import DraftTree

FOLDER = Path(__file__).resolve().parents[1] / "recordings" / "goldens" / "posterior_sampling_eagle"
CASES = json.loads((FOLDER / "case.json").read_text())["cases"]
NEVER = StopRule(StoppingCriteriaList())


def recorded_tree(candidates: torch.Tensor, paths: torch.Tensor) -> DraftTree:
    """The tree of one call, from tokens and node numbers of its leaf paths (-1: padding)."""
    nodes = int(paths.max()) + 1
    tokens, parents, depths = [0] * nodes, [-1] * nodes, [0] * nodes
    for words, path in zip(candidates.tolist(), paths.tolist(), strict=True):
        for depth, (word, node) in enumerate(zip(words, path, strict=True)):
            if node >= 0:
                tokens[node], parents[node], depths[node] = word, path[depth - 1] if depth else -1, depth
    values = [torch.tensor([part]) for part in (tokens, parents, depths)]
    return DraftTree(*values, torch.zeros(1, nodes), max(depths))


def sampler_of(case: dict[str, Any]) -> TokenSampler:
    warpers = [TemperatureLogitsWarper(case["temperature"])]
    warpers += [TopPLogitsWarper(case["top_p"])] if case["top_p"] else []
    warpers += [TopKLogitsWarper(case["top_k"])] if case["top_k"] else []
    return TokenSampler(LogitsProcessorList(warpers), do_sample=True)


def decided(tree: DraftTree, probs: torch.Tensor, uniforms: list[float]) -> tuple[list[int], torch.Tensor]:
    """Nodes accepted by testing child after child with the recorded numbers, and what the last node's token comes
    from: the rule in words."""
    parents, tokens, numbers = tree.parents[0].tolist(), tree.token_ids[0].tolist(), iter(uniforms)
    path = [0]
    while True:
        left = probs[path[-1]].clone()
        for child in [node for node in range(tree.num_nodes) if parents[node] == path[-1]]:
            if next(numbers) <= left[tokens[child]]:
                path.append(child)
                break
            left[tokens[child]] = 0.0
            left /= left.sum()
        else:
            return path, left


@pytest.mark.parametrize("verify", [verify_all_nodes, verify_token_by_token])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_decisions_and_bonus_distributions(case, verify, monkeypatch, recordings):
    part = {
        name: recordings[f"{case['id']}.{name}"]
        for name in ("candidates", "retrieve_indices", "node_logits", "sample_p")
    }
    tree = recorded_tree(part["candidates"], part["retrieve_indices"])
    sampler, logits, ids = sampler_of(case), part["node_logits"][None], torch.zeros(1, 3).long()
    path, left = decided(tree, sampler.scores_at_all_nodes(logits)[0].softmax(-1), case["uniforms"])
    tokens = tree.token_ids[0, path].tolist()
    assert tokens[1:] == case["accepted_tokens"]
    torch.testing.assert_close(left, part["sample_p"], atol=1e-6, rtol=1e-4)

    drawn_from: list[torch.Tensor] = []
    wanted = {
        node: torch.tensor([[token]]) for node, token in zip(path, [*tokens[1:], int(left.argmax())], strict=False)
    }

    def draw(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        drawn_from.extend(probs)
        if len(probs) == 1:  # token by token
            return wanted[path[len(drawn_from) - 1]]
        return torch.cat([wanted.get(node, torch.zeros(1, 1).long()) for node in range(tree.num_nodes)])

    script_draws(monkeypatch, draw)
    if verify is verify_all_nodes:  # with scores, draws are from the whole vocabulary
        (accepted,) = verify_all_nodes(tree, logits, sampler, keep_scores=True)
    else:
        (accepted,) = verify_token_by_token(tree, ids, logits, sampler, NEVER, None)
    assert accepted.nodes == path
    assert accepted.token_ids == [*tokens[1:], int(left.argmax())]
    ours = drawn_from[path[-1] if verify is verify_all_nodes else -1].clone()
    ours[tree.token_ids[0, tree.parents[0] == path[-1]]] = 0.0  # given that none of the children was drawn
    torch.testing.assert_close(ours / ours.sum(), part["sample_p"], atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def recordings() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "tensors.safetensors")
