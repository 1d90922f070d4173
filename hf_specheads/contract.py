"""What engine, tuner and trainer may ask of heads, whatever their method.

**A new family** is one file in `heads/` with a configuration (a subclass of [`DraftHeadConfig`] with a `model_type` of
its own) and a class that inherits `DraftHead`, and one row in `heads.auto.METHODS`. It must write

* to draft: [`DraftingContract.new_draft_cache`], [`DraftingContract.start_draft`] and
  [`DraftingContract.extend_draft`];
* to be trained: [`TrainingContract.unroll`].

Everything else here has a default; a family overrides what it knows better: which hidden states it reads
(`feature_layers`), how deep it can draft (`max_draft_positions`), what it drafts over (`trained_vocabulary`,
`own_projections` in `heads/pruning.py`), how many passes train it (`default_passes`). One forward of the family serves
prefill, drafting and training. A layout of other libraries is a folder in `checkpoints/layouts/`.

Letters of shapes, one meaning everywhere:

    B  sequences of a batch                N  nodes of a draft tree, the root included
    T  committed tokens; length of a text  D  depth: draft positions, levels below the root
    M  rows taken in by a round            K  nodes of one level that are expanded; children looked at per node
    R  rows of one forward, or of its loss L  specialists
    Q  rows of it that attend              S  streams of the unroll
    F  width of a feature as heads read it (several hidden states of width H side by side)
    H  hidden size of the target           h  hidden size of the draft head
    E  width of the token embedding        V, Vd  vocabulary of the target, of the draft
    A  nodes of an accepted path           C  candidates for nodes; slots of a cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .cache.draft import DraftCache
from .configuration import DraftHeadConfig
from .draft_vocabulary import TokenIds
from .metrics import GenerationStats
from .target.borrowed import BorrowedModules
from .tree.config import DraftTreeConfig
from .unroll.rows import DraftedPass, TrainingRows

LOOPS = ("own", "transformers")


class Memory(WeakKeyDictionary[PreTrainedModel, dict[tuple, Any]]):
    """What calls with a target have learnt about heads, for the next ones: speeds by the settings of a call, compiled
    steps. It goes with the target. Of heads with weights of their own, deep copies and pickled ones, nothing is known
    yet."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        return Memory()

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()


class DraftingContract:
    """What drafting asks of heads, and the settings a user may assign to them."""

    config: DraftHeadConfig
    device: torch.device
    dtype: torch.dtype
    verification: str
    posterior_threshold: float
    posterior_alpha: float
    exact_seed: bool
    loop: str
    adaptive: bool
    probe: bool
    compiled: bool
    profile: bool
    trace: bool
    on_round: Callable[[Any], None] | None = None  # is told a `generation.observer.Round`
    last_stats: GenerationStats | None
    memory: Memory  # shared by the copies that `with_tree` makes

    # ------------------------------------------------------------------ what `DraftHead` answers for all families
    @property
    def tree_config(self) -> DraftTreeConfig:
        """The draft tree in force."""
        raise NotImplementedError

    @tree_config.setter
    def tree_config(self, tree: DraftTreeConfig) -> None:
        raise NotImplementedError

    @property
    def tree_is_assigned(self) -> bool:
        """Whether a user has assigned the tree: then every round that drafts drafts it."""
        raise NotImplementedError

    @property
    def draft_vocabulary(self) -> torch.Tensor | None:
        """int64 [Vd], token ids of the draft logits, ascending; `None` when the head drafts over all of V."""
        raise NotImplementedError

    @property
    def target_vocab_size(self) -> int:
        """V of the target, as wide as a distribution over drafts must be for its verification."""
        raise NotImplementedError

    @property
    def borrowed(self) -> BorrowedModules:
        """What the heads borrow of the target they are bound to."""
        raise NotImplementedError

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuses a target the heads were not made for, before any forward."""
        raise NotImplementedError

    def bind(self, target: PreTrainedModel, *, follow: bool = True) -> Self:
        """Borrows the target's embedding and `lm_head`, and follows it to its device; checks the target first unless
        it is bound already."""
        raise NotImplementedError

    def for_call(self, target: PreTrainedModel) -> Self:
        """These heads for one call with a target, bound to it whatever other calls bind them to meanwhile."""
        raise NotImplementedError

    def with_tree(self, **overrides: Any) -> Self:
        """The same heads (weights shared) with another draft tree."""
        raise NotImplementedError

    def forget_tree(self) -> None:
        """Leaves the tree alone again, as after loading."""
        raise NotImplementedError

    def prune_draft_vocabulary(self, token_ids: TokenIds | None) -> Self:
        """Restricts drafts to some tokens."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what a family may state about itself
    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that make up a feature, concatenated: indices as in transformers'
        `hidden_states`, -1 after the final norm. Empty for heads that read none."""
        return (-1,)

    @property
    def max_draft_positions(self) -> int | None:
        """Draft positions the heads can draft at all, `None` without limit."""
        return None

    @property
    def independent_positions(self) -> bool:
        """Whether the draft logits of a position are the same at all nodes, whatever was drafted before; the best
        tree is then known without running the heads on any path."""
        return False

    @property
    def drafts_in_one_forward(self) -> bool:
        """Whether [`start_draft`] runs the layers for all draft positions, and [`extend_draft`] runs none."""
        return False

    def drafted_logits(self, cache: DraftCache, depth: int) -> torch.Tensor | None:
        """Draft logits [B, depth, Vd] of a round's first positions, where [`start_draft`] has computed them all and
        they are the same whatever is drafted; else `None`: then positions are asked for one by one."""
        return None

    @property
    def predicts_acceptance(self) -> bool:
        """Whether the heads have [`predicted_acceptance`]; `stop_below` then compares that, per position, and may
        leave a round without any draft: it becomes a plain step."""
        return False

    def predicted_acceptance(self, cache: DraftCache, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """How likely a draft at `position` (0-based) is to be accepted after nodes with tokens [B, K], probabilities
        [B, K]; it must not depend on what is drafted there, nor deeper."""
        raise NotImplementedError

    def draft_rows(self, tree: DraftTreeConfig) -> int:
        """Most rows of a round in the draft cache, those to commit not counted."""
        per_level = 1 if tree.kind == "chain" else max(tree.num_nodes, tree.top_k)
        return tree.num_nodes + tree.depth * per_level

    def tree_problem(self, tree: DraftTreeConfig) -> str | None:
        """Why these heads cannot draft a tree, with the mend; `None` if they can."""
        if self.max_draft_positions is not None and tree.depth > self.max_draft_positions:
            return (
                f"these {self.config.method} heads draft {self.max_draft_positions} position(s), and the draft tree "
                f"has depth {tree.depth}; use a tree that is no deeper, `heads.with_tree(...)`"
            )
        return None

    @property
    def borrows(self) -> bool:
        """Whether drafting calls modules of the target: its token embedding or its `lm_head`."""
        return bool(self.feature_layers)

    @property
    def copied_ngrams(self) -> tuple[int, int] | None:
        """Of heads that draft nothing but copies of what the text says elsewhere: the longest and the shortest n-gram
        they look for. A round in which the text has no such n-gram a second time is a plain step. `None` for others.
        """
        return None

    # ------------------------------------------------------------------ the drafting contract
    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in the newly committed rows and predicts the first draft position.

        Args:
            cache: Draft cache of this generation, holding the rows committed before.
            token_ids: [B, M + 1], tokens of the M newly committed rows, and the root, which has no feature yet.
                (The first token is unknown, and 0, where a prompt was given as embeddings.)
            features: [B, M, F], the target's features of these rows ([`feature_layers`]).

        Returns:
            Drafted state of the root [B, 1, *] and draft logits after it [B, 1, V]. What a state is, is the family's
            affair (EAGLE: a drafted feature); nodes hand it to their children.
        """
        raise NotImplementedError

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts draft position `position` (0-based) from the K frontier nodes.

        Args:
            cache: Draft cache of this generation.
            position: Draft position being predicted, at least 1.
            token_ids: [B, K], tokens of the frontier nodes.
            features: [B, K, *], states of their parents.
            visible: bool [B, K, R], which of the R drafted rows (frontiers so far, this one last; levels may differ
                in size) each node may see: its ancestors and itself. `None` for the one node of a chain, which sees
                all `position` of them.

        Returns:
            States [B, K, *] and draft logits [B, K, V].
        """
        raise NotImplementedError

    @property
    def link_layers(self) -> Sequence[nn.Module] | None:
        """The layers that draft the links of a chain, one per layer of the draft cache, of heads with a method `link`
        that is given one of them; `None` of other heads."""
        return None

    def new_draft_cache(self) -> DraftCache:
        """An empty draft cache for one generation."""
        raise NotImplementedError


class TrainingContract:
    """What training asks of heads."""

    config: DraftHeadConfig

    # Whether the heads are trained at sampled rows (`TrainingRows.anchors`), each a block of rows of its own.
    trains_at_anchors: ClassVar[bool] = False
    # Whether every pass may have its own backward (no gradient flows from one pass into those before it).
    passes_are_detached: ClassVar[bool] = True

    @property
    def max_draft_positions(self) -> int | None:
        """As in [`DraftingContract`]."""
        raise NotImplementedError

    @property
    def default_passes(self) -> int:
        """Draft positions to train when nobody says."""
        return 1

    def passes_problem(self, num_passes: int) -> str | None:
        """Why `num_passes` draft positions cannot be trained, with the mend; `None` if they can."""
        if self.max_draft_positions is not None and num_passes > self.max_draft_positions:
            return f"is more than the {self.max_draft_positions} position(s) these heads draft; lower it to that."
        return None

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Yields what the heads draft at draft position 0, 1, ... at every row; see [`hf_specheads.unroll`]."""
        raise NotImplementedError
