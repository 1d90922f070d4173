"""Hydra and Hydra++ heads against recordings of the authors' code: text, rounds, trees, states and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.recorded import GOLDENS, generate, recorded_pair, recording, token_paths

RECORDED = ["hydra_mlp_grounded", "hydra_prefix_mlp"]


def assert_same_rounds(stats: Any, case: dict[str, Any]) -> None:
    lengths = case["accept_lengths"]
    assert stats.num_accepted[0][: len(lengths) - 1] == lengths[:-1]  # the authors overshoot the length in the last
    assert len(set(lengths)) >= 4 and len(case["rounds"]) == 8
    for tree, recorded in zip(stats.trees, case["rounds"], strict=False):
        ours = token_paths(tree.token_ids[0].tolist(), tree.parents[0].tolist())
        assert ours == token_paths(recorded["tree"]["tokens"], recorded["tree"]["parents"])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_greedy_generation(name: str) -> None:
    case = recording(name)
    target, heads = recorded_pair(name, case)
    assert (heads.config.num_heads, heads.config.head_arch) == (4, case["settings"]["hydra_head_arch"])
    wanted = case["target_greedy_ids"]
    assert generate(target, heads, case["prompt_ids"], len(wanted), do_sample=False) == wanted
    assert_same_rounds(heads.last_stats, case)


def test_recorded_typical_acceptance() -> None:
    case = recording("hydra_prefix_mlp", "case_typical_t07.json")
    target, heads = recorded_pair("hydra_prefix_mlp", case)
    heads.verification = "typical"
    settings = case["settings"]
    heads.posterior_threshold, heads.posterior_alpha = settings["posterior_threshold"], settings["posterior_alpha"]
    sampling = {"do_sample": True, "temperature": settings["temperature"], "top_k": 0}
    ids = generate(target, heads, case["prompt_ids"], case["n_new"], **sampling)
    assert ids == case["output_ids"][: case["n_new"]] != case["target_greedy_ids"][: case["n_new"]]
    assert_same_rounds(heads.last_stats, case)


@torch.no_grad()
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_states_and_logits(name: str) -> None:
    """Prefix states, and the logits of the first two levels, round after round on one draft cache."""
    case, tensors = recording(name), load_file(GOLDENS / name / "tensors.safetensors")
    target, heads = recorded_pair(name, case)
    heads.bind(target)
    cache, text = heads.new_draft_cache(), case["prompt_ids"] + case["output_ids"]
    for index in range(3):
        features = tensors[f"r{index}.base_hidden_states"]
        end = cache.committed + features.shape[1]
        tokens = torch.tensor([text[cache.committed : end + 1]])
        assert tokens[0, -1] == case["rounds"][index]["root_token"]
        state, logits = heads.start_draft(cache, tokens, features)
        if heads.prefix is not None:
            recorded = tensors[f"r{index}.prefix_embedding"][:, -1]
            torch.testing.assert_close(state[:, 0, : recorded.shape[-1]], recorded, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, tensors[f"r{index}.head0.logits"], rtol=1e-4, atol=1e-4)
        children = logits[:, 0].topk(10, dim=-1).indices
        visible = torch.eye(10, dtype=torch.bool)[None]
        _, logits = heads.extend_draft(cache, 1, children, state.expand(-1, 10, -1), visible)
        torch.testing.assert_close(logits, tensors[f"r{index}.head1.logits"], rtol=1e-4, atol=1e-4)
