"""Where the wall time of a round goes, and how much of it is spent outside the bare model forwards.

    python -m benchmarks round --heads model_cards/poss3
    python -m benchmarks round --shape llama-100m

Bare forwards are timed in place, inside real rounds: the target's forward over the tree (with the mask, positions and
cache that it gets there), and the heads' `fuse`, `forward` and `draft_logits`. Everything else in a round (building
masks and positions, choosing children and nodes, accepting, compacting, emitting, the loop) is "outside". To check
that the loop does not slow the target down, its bare forward is also replayed on a fresh cache of the same length.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_specheads.cache.names import CACHE_NAME
from hf_specheads.cache.target import TreeCache
from hf_specheads.heads.base import DraftHead

from .. import setup
from ..results import Result, column_table, draft_tree, footnote, percent
from ..setup import Inputs
from ..sides import generate_once, timed_calls, timed_in_turns

STAGES = ("draft", "target", "accept", "commit")
REPLAYS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair or its sizes, and for the prompts."""
    setup.add_generation_arguments(parser, heads=["poss3"], prompts=["chats"])
    setup.add_shape_arguments(parser, depth=4)


def profile_prompt(target: PreTrainedModel, heads: DraftHead, inputs: Inputs, new_tokens: int) -> dict[str, float]:
    """Returns the seconds of one generation's rounds by stage, and those spent in bare forwards."""
    with (
        timed_calls(target, "forward") as forwards,
        timed_calls(heads, "fuse") as fused,
        timed_calls(heads, "forward") as drafted,
        timed_calls(heads, "draft_logits") as projected,
    ):
        stats = generate_once(target, {"assistant_model": heads}, inputs, new_tokens).stats
    stages = {stage: stats.seconds.get(stage, 0.0) for stage in STAGES}
    whole = stats.seconds["total"] - stats.seconds["prefill"]
    return {
        **stages,
        "loop": whole - sum(stages.values()),
        "whole round": whole,
        "bare_target": sum(forwards[1:]),  # the first forward is the prefill
        "bare_draft": sum(fused + drafted + projected),
        "rounds": stats.rounds,
    }


@torch.no_grad()
def replay_target(target: PreTrainedModel, heads: DraftHead, length: int) -> list[float]:
    """Times bare target forwards over the nodes of the largest recorded tree, after `length` tokens on a fresh
    cache."""
    tree = max(heads.last_stats.trees, key=lambda tree: tree.num_nodes)
    cache = DynamicCache(config=target.config)
    target(input_ids=tree.token_ids[:, :1].expand(-1, length), **{CACHE_NAME: cache}, use_cache=True)
    slots = TreeCache(cache, target, 1, None, torch.tensor([[length]]), target.dtype)
    inputs = {"input_ids": tree.token_ids, **slots.forward_inputs(tree), "use_cache": True}
    return timed_in_turns({"replay": lambda: target(**inputs)}, REPLAYS)[0]["replay"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the first heads over all prompts: means per round, and their median over repeats."""
    target, loaded, prompts = setup.load_pair(args, every_round=True)
    name, heads = next(iter(loaded.items()))
    heads.profile = heads.trace = True
    generate_once(target, {"assistant_model": heads}, prompts[0], args.max_new_tokens)
    repeats, replays = [], []
    for _ in range(args.repeats):
        samples = []
        for inputs in prompts:
            samples.append(profile_prompt(target, heads, inputs, args.max_new_tokens))
            if samples[-1]["rounds"]:
                replays += replay_target(target, heads, inputs["input_ids"].shape[1] + args.max_new_tokens // 2)
        repeats.append({name: sum(sample[name] for sample in samples) for name in samples[0]})
    ms = {name: statistics.median(1000 * r[name] / r["rounds"] for r in repeats) for name in repeats[0]}
    inside = ms["bare_draft"] + ms["bare_target"]
    bare = {"draft": ms["bare_draft"], "target": ms["bare_target"], "whole round": inside}
    stages = {
        stage: {"milliseconds": ms[stage], "bare_forwards": spent, "outside": ms[stage] - spent}
        for stage, spent in {**dict.fromkeys((*STAGES, "loop"), 0.0), **bare}.items()
    }
    return {
        "heads": f"random {name.upper()} heads" if args.shape else name,
        "target_parameters": target.num_parameters(),
        "tree": heads.tree_config.to_dict(),
        "nodes": heads.tree_config.num_nodes,
        "rounds": int(repeats[0]["rounds"]),
        "round_milliseconds": ms["whole round"],
        "outside_share": 1 - inside / ms["whole round"],
        "replayed_target_milliseconds": 1000 * statistics.median(replays),
        "stages": stages,
    }


def table(result: Result) -> str:
    """One row per stage, with milliseconds per round."""
    columns = {
        "ms": ("milliseconds", 2), "bare forwards, ms": ("bare_forwards", 2), "outside forwards, ms": ("outside", 2),
        "outside forwards / round": lambda stage: percent(stage["outside"] / result["round_milliseconds"]),
    }  # fmt: skip
    return column_table(columns, result["stages"], "stage of a round") + footnote(
        result, f"{{heads}}, {draft_tree(result['tree'])}, {{rounds}} rounds",
        "bare target forward over {nodes} nodes, replayed on a fresh cache: {replayed_target_milliseconds:.2f} ms",
    )  # fmt: skip
