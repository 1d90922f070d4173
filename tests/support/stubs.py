"""Stubs in place of trained heads. They know the target's output, and draft it or deliberately wrong tokens.

A stub implements only the drafting contract of `DraftHead`. It knows the target's whole output in advance (`truth`)
and finds its place in it by counting committed rows.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import CompileConfig

from hf_specheads import DraftHead, DraftHeadConfig, DraftTreeConfig
from hf_specheads.cache.draft import DraftCache
from hf_specheads.target.identity import target_sizes

TABLE_VOCAB = 11  # vocabulary of [`TableHead`]


class StubHead(DraftHead):
    """Drafts the true continuation at a rank that the test chooses, among arbitrary other tokens.

    Args:
        target: The target.
        truth: Per batch row int64 [T], prompt and whole output of plain generation, without padding.
        ranks: Rank of the true token among the children of a node whose ancestors are all true, by sequence position
            (cycled); 0 is the draft's favourite, `None` keeps the true token out of the draft.
        tree: Fields of the tree config.
    """

    def __init__(self, target: Any, truth: Any, ranks: tuple[int | None, ...] = (0,), **tree: Any):
        sizes = target_sizes(target)
        super().__init__(DraftHeadConfig(**sizes, hidden_size=sizes["feature_size"]))
        self.weight = nn.Parameter(torch.zeros(1))
        self.tree_config = self.tree_config.replace(**({"depth": 4, "top_k": 4, "total_tokens": 14} | tree))
        self.truth, self.ranks = [row.tolist() for row in truth], ranks
        self.levels: list[torch.Tensor] = []
        self.calls: list[int] = []  # one entry per draft; all copies of the stub share this list

    @classmethod
    def of_batch(cls, target: Any, inputs: Any, texts: torch.Tensor, ranks: tuple[int | None, ...], **tree: Any):
        """Makes a stub that knows the texts [B, T] of prompts padded on the left, and drafts in every round."""
        starts = inputs["attention_mask"].shape[1] - inputs["attention_mask"].sum(1)
        heads = cls(target, [text[start:] for text, start in zip(texts, starts, strict=True)], ranks, **tree)
        heads.adaptive = False
        return heads

    def new_draft_cache(self) -> DraftCache:
        return StubCache(list(range(len(self.truth))))

    def _token(self, row: int, index: int) -> int | None:
        return self.truth[row][index] if index < len(self.truth[row]) else None

    def _logits(self, row: int, index: int, on_path: torch.Tensor) -> torch.Tensor:
        """Returns logits [K, V] for sequence position `index`. `on_path` bool [K] marks nodes that are true so far."""
        generator = torch.Generator().manual_seed(1000 + index)
        vocab = self.config.vocab_size
        logits = torch.randn(len(on_path), vocab, generator=generator)
        rank, token = self.ranks[(index + row) % len(self.ranks)], self._token(row, index)
        if token is not None:
            for node in on_path.nonzero()[:, 0].tolist():
                logits[node, token] = -1e9
                if rank is not None:
                    others = logits[node].sort(descending=True).values
                    # Just below the token one rank better, so that low ranks lie beside the draft's favourite path.
                    logits[node, token] = others[0] + 4 if rank == 0 else others[rank - 1] - 1e-4
        return logits

    def start_draft(self, cache, token_ids, features):
        self.calls.append(len(self.calls))
        cache.commit(features.shape[1])
        self.levels = []
        logits = [self._logits(row, n + 1, torch.tensor([True])) for row, n in cache.numbered()]
        return features[:, -1:], torch.stack(logits)

    def extend_draft(self, cache, position, token_ids, features, visible):
        visible = torch.ones(1, 1, position, dtype=torch.bool) if visible is None else visible
        expected = [self._token(row, n + position) for row, n in cache.numbered()]
        self.levels.append(torch.stack([ids == (-1 if token is None else token)
                                        for ids, token in zip(token_ids, expected, strict=True)]))  # fmt: skip
        true_rows = torch.cat(self.levels, dim=1)  # [B, rows], which drafted rows carry the true token of their level
        on_path = (true_rows[:, None] | ~visible).all(-1)
        logits = [self._logits(row, n + position + 1, true)
                  for (row, n), true in zip(cache.numbered(), on_path, strict=True)]  # fmt: skip
        return features, torch.stack(logits)


class StubCache(DraftCache):
    """A cache that counts rows and remembers which rows of the batch remain."""

    def __init__(self, rows: list[int]):
        super().__init__(0)
        self.rows = rows

    def numbered(self) -> list[tuple[int, int]]:
        """Returns, per remaining row, its index in the batch and its number of committed rows."""
        counts = self.counts if len(self.counts) == len(self.rows) else self.counts * len(self.rows)
        return list(zip(self.rows, counts, strict=True))

    def select_sequences(self, kept: list[int]) -> None:
        self.become_ragged(len(self.rows), torch.device("cpu"))
        super().select_sequences(kept)
        self.rows = [self.rows[row] for row in kept]


class TableHead(DraftHead):
    """Drafts from a table: the logits after a path are a fixed random function of the path."""

    def __init__(self, seed: int, rows: int, tied: bool = False, broken_level: int | None = None, **tree):
        torch.nn.Module.__init__(self)
        self.register_buffer("pruned_token_ids", None)
        self.tree_config = DraftTreeConfig(**tree)
        self.seed, self.rows, self.tied, self.broken_level = seed, rows, tied, broken_level
        self.drafted: list[list[tuple[int, ...]]] = []  # per row, the paths of all drafted rows so far

    def logits_after(self, row: int, path: tuple[int, ...]) -> torch.Tensor:
        if self.broken_level is not None and len(path) >= self.broken_level:
            return torch.full((TABLE_VOCAB,), torch.nan)
        if self.tied:
            return torch.zeros(TABLE_VOCAB).index_fill(0, torch.tensor([1]), 200.0)  # one child of probability 1
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**31)
        return torch.randn(TABLE_VOCAB, generator=generator)

    def start_draft(self, cache, token_ids, features):
        self.drafted = [[] for _ in range(self.rows)]
        return features[:, -1:], torch.stack([self.logits_after(row, ()) for row in range(self.rows)])[:, None]

    def extend_draft(self, cache, position, token_ids, features, visible):
        logits = []
        if visible is None:
            visible = torch.ones(self.rows, 1, position, dtype=torch.bool)
        for row in range(self.rows):
            tokens = [path[-1] for path in self.drafted[row]] + token_ids[row].tolist()
            # The tokens of the visible drafted rows, in order, are the path of each frontier node.
            paths = [tuple(tokens[i] for i in seen.nonzero()[:, 0].tolist()) for seen in visible[row]]
            self.drafted[row] += paths
            logits.append(torch.stack([self.logits_after(row, path) for path in paths]))
        return features, torch.stack(logits)


class CountForwards:
    """Counts the forwards of a target inside a `with` block."""

    def __init__(self, target: Any):
        self.target, self.count = target, 0

    def __enter__(self) -> CountForwards:
        # A hook would make the engine keep autograd's layers, which it otherwise bypasses.
        forward = self.target.forward

        @functools.wraps(forward)  # generate inspects the signature
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return forward(*args, **kwargs)

        self.patch = mock.patch.object(self.target, "forward", counting)
        self.patch.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.patch.stop()


def counted(target, heads) -> list[Any]:
    """Returns the list of graphs that calls of the target compile from now on. They run as they are."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    heads.compiled = True
    target.generation_config.compile_config = CompileConfig(backend=backend, mode=None)
    return graphs
