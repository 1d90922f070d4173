"""Block drafters against recordings of the authors' code: text, accepted counts, drafts, trees and slot states."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specheads import DraftHead, load_heads

GOLDENS = Path(__file__).resolve().parent / "goldens"
CASES = ("dflash_zlab_b8", "dflash_deepspec_b7", "dflash_swa_b6", "jetspec_chain_b7", "dflash2_b8_swa")
WITH_SPECULATORS = ("dflash_zlab_b8", "dspark_vanilla_b7")


def case_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / name / "case.json").read_text())


@cache
def target_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(name: str, folder: str = "draft", **tree: Any) -> tuple[dict[str, Any], DraftHead]:
    """A recorded case, and heads that have generated its text."""
    case = case_of(name)
    target = target_of((GOLDENS / name / case["target"]).resolve())
    heads = load_heads(GOLDENS / name / (case["draft"] if folder == "draft" else folder), **tree)
    heads.trace, heads.adaptive, ids = True, False, torch.tensor([case["prompt_ids"]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    text = target.generate(ids, assistant_model=heads, max_new_tokens=len(case["output_ids"]), **options)
    assert text[0, ids.shape[1] :].tolist() == case["output_ids"]
    accepted = case["accept_lengths"]
    if tree.get("stop_below"):  # rounds without drafts are plain steps
        accepted = [count for count, drafted in zip(accepted, case["proposal_lengths"], strict=True) if drafted]
        assert heads.last_stats.plain_steps >= case["proposal_lengths"][:-2].count(0) > 0
    rounds = len(accepted) - 2  # the last ones run past the text there
    assert heads.last_stats.num_accepted[0][:rounds] == accepted[:rounds]
    return case, heads


FOLDERS = [(name, "draft") for name in (*CASES, "dspark_vanilla_b7", "domino_b7_shift")]
FOLDERS += [(name, "draft_speculators") for name in WITH_SPECULATORS]


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_chains(name: str, folder: str) -> None:
    case, heads = generate(name, folder, kind="chain", depth=len(case_of(name)["rounds"][0]["drafted"]))
    assert heads.published_tree.depth == heads.tree_config.depth
    assert heads.last_stats.draft_forwards == sum(tree.num_nodes > 1 for tree in heads.last_stats.trees)
    for recorded, tree in zip(case["rounds"], heads.last_stats.trees, strict=False):
        assert tree.token_ids[0, 1:].tolist() == recorded["drafted"]


@pytest.mark.parametrize("name", ["dspark_gated_b7", "dspark_rnn_b4"])
def test_cut_by_confidence(name: str) -> None:
    """Before the first slot whose predicted acceptance is below the threshold, the first slot included."""
    settings = case_of(name)["settings"]
    tree = {"kind": "chain", "depth": settings["block_size"], "stop_below": settings["confidence_threshold"]}
    case, heads = generate(name, **tree)
    recorded = [one["drafted"] for one in case["rounds"] if one["drafted"]]
    assert [tree.token_ids[0, 1:].tolist() for tree in heads.last_stats.trees][: len(recorded)] == recorded


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found)


def test_best_first_trees() -> None:
    """DDTree's budget does not count the root."""
    budget = case_of("ddtree_b8")["settings"]["budget_excluding_root"]
    case, heads = generate("ddtree_b8", kind="dynamic", depth=7, top_k=64, total_tokens=budget + 1)
    for recorded, tree in zip(case["rounds"], heads.last_stats.trees, strict=False):
        theirs = recorded["tree"]
        assert paths(tree.token_ids[0].tolist(), tree.parents[0].tolist()) == paths(
            theirs["tokens"], theirs["parents"]
        )
        assert tree.scores[0].sort(descending=True).values.tolist() == pytest.approx(theirs["cum_logprob"], abs=1e-4)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_slots(name: str) -> None:
    """States of the slots in the first rounds, from the recorded features; and in a late one, where windows cut."""
    case, recorded = case_of(name), load_file(GOLDENS / name / "tensors.safetensors")
    heads = load_heads(GOLDENS / name / "draft").bind(target_of((GOLDENS / name / case["target"]).resolve()))
    starts = [(recorded[f"r{i}.target_features"], r["root"], f"r{i}") for i, r in enumerate(case["rounds"][:3])]
    cache = heads.new_draft_cache()
    if "late_round" in case:
        starts.append((recorded["late.context_features"], case["late_round"]["block_ids"][0], "late"))
    for features, root, prefix in starts:
        cache = heads.new_draft_cache() if prefix == "late" else cache
        ids = torch.tensor([[0] * len(features) + [root]])
        slots = heads.draft_block(cache, ids, features[None])[0, heads.config.first_slot :]
        expected = recorded[f"{prefix}.slot_hidden"][heads.config.first_slot :]
        torch.testing.assert_close(slots, expected, rtol=1e-4, atol=1e-4)
        if f"{prefix}.slot_logits" in recorded:
            torch.testing.assert_close(
                heads.draft_logits(slots), recorded[f"{prefix}.slot_logits"], rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_candidates() -> None:
    """DFlash 2: unary logits, and scores of the candidates of every slot after the token drafted before it."""
    name = "dflash2_b8_swa"
    case, recorded = case_of(name), load_file(GOLDENS / name / "tensors.safetensors")
    heads = load_heads(GOLDENS / name / "draft", kind="chain", depth=7)
    heads.bind(target_of((GOLDENS / name / case["target"]).resolve()))
    first, features = case["rounds"][0], recorded["r0.target_features"]
    cache, before = heads.new_draft_cache(), [first["root"], *first["drafted"]]
    state, logits = heads.start_draft(cache, torch.tensor([[0] * len(features) + [first["root"]]]), features[None])
    for position in range(7):
        if position:
            state, logits = heads.extend_draft(cache, position, torch.tensor([[before[position]]]), state, None)
        unary = heads.slot_logits(cache, position)[0, 0]
        torch.testing.assert_close(unary, recorded["r0.unary_logits"][position], rtol=1e-4, atol=1e-4)
        scores = logits[0, 0, first["candidates"][position]]
        torch.testing.assert_close(scores, recorded["r0.candidate_scores"][position], rtol=1e-4, atol=1e-4)
        assert int(logits.isfinite().sum()) == len(first["candidates"][position])


@pytest.mark.parametrize("name", ["dspark_vanilla_b7", "dspark_gated_b7", "dspark_rnn_b4", "domino_b7_shift"])
@torch.no_grad()
def test_corrected_logits_and_confidence(name: str) -> None:
    """Of every slot after the tokens recorded before it; before the correction, too."""
    case, recorded = case_of(name), load_file(GOLDENS / name / "tensors.safetensors")
    heads = load_heads(GOLDENS / name / "draft", kind="chain", depth=case["settings"]["block_size"])
    heads.bind(target_of((GOLDENS / name / case["target"]).resolve()))
    first, features = case["rounds"][0], recorded["r0.target_features"]
    cache, before = heads.new_draft_cache(), [first["root"], *first.get("all_slot_tokens", first["drafted"])]
    state, logits = heads.start_draft(cache, torch.tensor([[0] * len(features) + [first["root"]]]), features[None])
    for position in range(heads.published_tree.depth):  # without slots that their code throws away
        token = torch.tensor([[before[position]]])
        if position:
            state, logits = heads.extend_draft(cache, position, token, state, None)
        torch.testing.assert_close(logits[0, 0], recorded["r0.slot_logits"][position], rtol=1e-4, atol=1e-4)
        base = heads.slot_logits(cache, position)[0, 0]
        torch.testing.assert_close(base, recorded["r0.base_logits"][position], rtol=1e-4, atol=1e-4)
        if not heads.predicts_acceptance:
            continue
        confidence = heads.predicted_acceptance(cache, position, token)
        expected = recorded["r0.confidence_logits"][position].sigmoid()
        torch.testing.assert_close(confidence[0, 0], expected, rtol=1e-4, atol=1e-5)


def test_the_window_is_seen_in_the_recording() -> None:
    """Without it, or counted from the root, the late round has other states."""
    recorded = load_file(GOLDENS / "dflash_swa_b6" / "tensors.safetensors")
    case = case_of("dflash_swa_b6")
    heads = load_heads(GOLDENS / "dflash_swa_b6" / "draft")
    heads.bind(target_of((GOLDENS / "dflash_swa_b6" / case["target"]).resolve()))
    ids = torch.tensor([[0] * 64 + case["late_round"]["block_ids"][:1]])
    for changes in ({"sliding_layers": ()}, {"window_from": "anchor"}, {"sliding_causal": True}):
        kept = {name: getattr(heads.config, name) for name in changes}
        for name, value in changes.items():
            setattr(heads.config, name, value)
        with torch.no_grad():
            slots = heads.draft_block(heads.new_draft_cache(), ids, recorded["late.context_features"][None])[0]
        assert (slots - recorded["late.slot_hidden"])[1:].abs().max() > 1e-2, changes
        for name, value in kept.items():
            setattr(heads.config, name, value)
