"""Stand-ins for trained heads: stubs that know the answer and use that knowledge for or against the target.

A stub implements the drafting contract of `DraftHead` and nothing else. It knows the target's whole output in advance
(`truth`) and finds its place in it by counting committed rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_specheads import AutoDraftHead, DraftHead, DraftHeadConfig
from hf_specheads.cache import DraftCache
from hf_specheads.features import target_sizes


class StubHead(DraftHead):
    """Drafts the true continuation at a rank of the test's choosing, among arbitrary other tokens.

    Args:
        target: The target.
        truth: int64 [1, T], prompt and whole output of plain generation.
        ranks: Rank of the true token among the children of a node whose ancestors are all true, by sequence position
            (cycled); 0 is the draft's favourite, `None` keeps the true token out of the draft.
        tree: Fields of the tree config.
    """

    def __init__(self, target: Any, truth: torch.Tensor, ranks: tuple[int | None, ...] = (0,), **tree: Any):
        sizes = target_sizes(target)
        super().__init__(DraftHeadConfig(**sizes, hidden_size=sizes["feature_size"]))
        self.weight = nn.Parameter(torch.zeros(1))
        self.tree_config = self.tree_config.replace(**({"depth": 4, "top_k": 4, "total_tokens": 14} | tree))
        self.truth, self.ranks = truth[0].tolist(), ranks
        self.levels: list[torch.Tensor] = []
        self.calls = 0

    def new_draft_cache(self) -> DraftCache:
        return DraftCache(0)

    def _token(self, index: int) -> int | None:
        return self.truth[index] if index < len(self.truth) else None

    def _logits(self, index: int, on_path: torch.Tensor) -> torch.Tensor:
        """Logits [1, K, V] for sequence position `index`; `on_path` bool [K] says which nodes are true so far."""
        generator = torch.Generator().manual_seed(1000 + index)
        vocab = self.config.vocab_size
        logits = torch.randn(len(on_path), vocab, generator=generator)
        rank, token = self.ranks[index % len(self.ranks)], self._token(index)
        if token is not None:
            for row in on_path.nonzero()[:, 0].tolist():
                logits[row, token] = -1e9
                if rank is not None:
                    others = logits[row].sort(descending=True).values
                    # Close behind the token one rank better: low ranks lie beside the draft's favourite path.
                    logits[row, token] = others[0] + 4 if rank == 0 else others[rank - 1] - 1e-4
        return logits[None]

    def start_draft(self, cache, token_ids, features):
        self.calls += 1
        cache.commit(features.shape[1])
        self.levels = []
        drafted = features[:, -1:]
        return drafted, self._logits(cache.committed + 1, torch.tensor([True]))

    def extend_draft(self, cache, position, token_ids, features, visible):
        expected = self._token(cache.committed + position)
        self.levels.append(token_ids[0] == expected if expected is not None else torch.zeros_like(token_ids[0]).bool())
        true_rows = torch.cat(self.levels)  # [position * K], which drafted rows carry the true token of their level
        on_path = (true_rows | ~visible[0]).all(-1)
        return features, self._logits(cache.committed + position + 1, on_path)


def random_heads(target: Any, method: str = "eagle", *, seed: int = 3, **tree: Any) -> DraftHead:
    """Freshly initialised heads; they know nothing and are seldom right."""
    torch.manual_seed(seed)
    options = {} if method != "poss" else {"num_specialists": 2, "positions_per_specialist": 2}
    tree = {"depth": 4, "top_k": 4, "total_tokens": 14} | tree
    return AutoDraftHead.from_target(target, method, tree_config=tree, **options).eval()


class CountForwards:
    """Counts the forwards of a target inside a `with` block."""

    def __init__(self, target: Any):
        self.target, self.count = target, 0

    def __enter__(self) -> CountForwards:
        self.hook = self.target.register_forward_pre_hook(self._add)
        return self

    def _add(self, *args: Any) -> None:
        self.count += 1

    def __exit__(self, *args: Any) -> None:
        self.hook.remove()
