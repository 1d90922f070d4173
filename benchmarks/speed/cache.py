"""Rounds on pre-allocated slots against rounds on transformers' `DynamicCache`, by length of the context.

    python -m benchmarks cache

Both sides run the same forward of a random Llama over the same tree and keep the same path. With `DynamicCache`, every
forward copies the whole cache to append to it, and a path is kept by moving its rows and narrowing the tensors. With
slots, rows are written in place and one indexed copy moves the path.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_specheads.cache.masks import additive_mask, slot_mask
from hf_specheads.cache.names import CACHE_NAME
from hf_specheads.cache.target import TreeCache
from hf_specheads.tree.draft_tree import DraftTree

from ..results import Result, footnote, markdown_table
from ..setup import random_llama
from ..sides import timed_in_turns

ROUNDS = 12
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for context lengths and tree sizes."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32])


def comb(nodes: int) -> tuple[DraftTree, list[int]]:
    """Makes a tree whose accepted path is every other node, at most eight of them, so that rows have to move."""
    path = list(range(0, nodes, 2))[:8]
    parents = [max((p for p in path if p < node), default=-1) for node in range(nodes)]
    depths = [sum(p < node for p in path) for node in range(nodes)]
    tokens = torch.arange(nodes)[None] + 5
    tree = DraftTree(tokens, torch.tensor([parents]), torch.tensor([depths]), tokens.float(), max(depths))
    return tree, path


class Slots:
    """Rounds on the slots of this library's cache."""

    def __init__(self, target: LlamaForCausalLM, stock: DynamicCache, length: int):
        self.target = target
        self.cache = TreeCache(stock, target, 1, None, torch.tensor([[length]]), target.dtype)

    def round(self, tree: DraftTree, path: list[int]) -> None:
        self.target(tree.token_ids, use_cache=True, **self.cache.forward_inputs(tree))
        count = len(path)
        self.cache.keep_paths(torch.tensor([path]), [count], torch.tensor([count]), path == list(range(count)))


class Dynamic:
    """Rounds on transformers' cache. Its contents are those of the slots, so the masks are made in the same way."""

    def __init__(self, target: LlamaForCausalLM, stock: DynamicCache, length: int):
        self.target, self.cache, self.length = target, stock, length

    def round(self, tree: DraftTree, path: list[int]) -> None:
        nodes, length = tree.num_nodes, self.length
        mask = additive_mask(slot_mask(tree.ancestor_mask, length, 0, length + nodes), self.target.dtype)[:, None]
        self.target(
            tree.token_ids, use_cache=True, **{CACHE_NAME: self.cache}, attention_mask=mask,
            position_ids=length + tree.depths,
        )  # fmt: skip
        index = torch.tensor([length + node for node in path])
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                states[:, :, length : length + len(path)] = states[:, :, index]
                setattr(layer, name, states[:, :, : length + len(path)])
        self.length += len(path)


@torch.no_grad()
def measure_rounds(target: LlamaForCausalLM, length: int, nodes: int) -> dict[str, Any]:
    """Measures the milliseconds per round on both caches, in turns."""
    torch.manual_seed(0)
    prompt = torch.randint(5, 4000, (1, length))
    tree, path = comb(nodes)
    rounds = {}
    for name, side in (("slots", Slots), ("dynamic", Dynamic)):
        stock = DynamicCache(config=target.config)
        for start in range(0, length, 2048):
            target(prompt[:, start : start + 2048], **{CACHE_NAME: stock}, use_cache=True, logits_to_keep=1)
        rounds[name] = partial(side(target, stock, length).round, tree, path)
    seconds, _ = timed_in_turns(rounds, ROUNDS, warm_ups=2)
    ratios = [b / a for a, b in zip(seconds["slots"], seconds["dynamic"], strict=True)]
    return {
        "slots_milliseconds": 1000 * statistics.median(seconds["slots"]),
        "dynamic_milliseconds": 1000 * statistics.median(seconds["dynamic"]),
        "ratio": statistics.median(ratios),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all context lengths and numbers of nodes."""
    target = random_llama(**SIZES, max_position_embeddings=2 * max(args.lengths))
    return {
        "parameters": target.num_parameters(),
        "layers": target.config.num_hidden_layers,
        "key_value_width": target.config.num_key_value_heads * target.config.head_dim,
        "dtype": "float32",
        "rounds": ROUNDS,
        "lengths": {
            str(length): {str(nodes): measure_rounds(target, length, nodes) for nodes in args.nodes}
            for length in args.lengths
        },
    }


def table(result: Result) -> str:
    """One row per context length, one column per number of nodes."""
    lengths = result["lengths"]
    nodes = list(next(iter(lengths.values())))
    header = ["context", *(f"{n} node{'s' * (n != '1')}: ms on slots, on DynamicCache, ratio" for n in nodes)]
    cell = "{slots_milliseconds:.1f}, {dynamic_milliseconds:.1f}, {ratio:.2f}x"
    rows = [[f"{length} tokens", *(cell.format(**one) for one in of.values())] for length, of in lengths.items()]
    size = f"{result['parameters'] / 1e6:.0f} M parameters"
    return markdown_table(header, rows) + footnote(
        result, f"Random Llama of {size} and {{layers}} layers, keys of width {{key_value_width}}; {{dtype}}; whole "
        "rounds (forward, and keeping the accepted path), median of {rounds} interleaved rounds",
    )  # fmt: skip
