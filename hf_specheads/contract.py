"""The interface through which the engine, the tuner and the trainer use draft heads, whatever their method.

**A new family** is one file in `heads/` with a configuration (a subclass of [`DraftHeadConfig`] with its own
`model_type`) and a class that inherits from `DraftHead`, plus one row in `heads.auto.METHODS` and the registrations
listed in `docs/architecture.md`. The class must implement

* for drafting: [`DraftingContract.new_draft_cache`], [`DraftingContract.start_draft`] and
  [`DraftingContract.extend_draft`];
* for training: [`TrainingContract.unroll`].

Every other method in this file has a default here or in `DraftHead`. A family overrides the defaults that do not fit
it: which hidden states it reads (`feature_layers`), how deep it can draft (`max_draft_positions`), which tokens it
drafts over (`trained_vocabulary`, `own_projections` in `heads/pruning.py`), how many passes train it
(`default_passes`). A single forward of the family serves prefill, drafting and training. Support for another library's
checkpoint layout is a separate folder in `checkpoints/layouts/`.

Letters used in shapes, with the same meaning everywhere:

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
    """What calls have learnt about draft heads with each target, kept for later calls: speeds per settings of a call,
    and compiled steps. An entry lives as long as its target. Deep copies and pickled copies of the heads have weights
    of their own, so their memory starts empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        return Memory()

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()


class DraftingContract:
    """What drafting requires of draft heads, and the settings a user may assign to them."""

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
    on_round: Callable[[Any], None] | None = None  # called with a `generation.observer.Round`
    last_stats: GenerationStats | None
    memory: Memory  # shared with the copies that `with_tree` makes

    # ------------------------------------------------------------------ implemented by `DraftHead` for all families
    @property
    def tree_config(self) -> DraftTreeConfig:
        """The draft tree that rounds draft now."""
        raise NotImplementedError

    @tree_config.setter
    def tree_config(self, tree: DraftTreeConfig) -> None:
        raise NotImplementedError

    @property
    def tree_is_assigned(self) -> bool:
        """Whether a user has assigned the tree. If so, every round drafts this tree or nothing."""
        raise NotImplementedError

    @property
    def draft_vocabulary(self) -> torch.Tensor | None:
        """Token ids that the draft logits stand for, int64 [Vd], ascending; `None` for heads that draft all of V."""
        raise NotImplementedError

    @property
    def target_vocab_size(self) -> int:
        """V of the target. A distribution over drafts must have this width to be verified."""
        raise NotImplementedError

    @property
    def borrowed(self) -> BorrowedModules:
        """The modules that the heads borrow from the target they are bound to."""
        raise NotImplementedError

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuses a target that the heads were not made for, before any forward."""
        raise NotImplementedError

    def bind(self, target: PreTrainedModel, *, follow: bool = True) -> Self:
        """Borrows the target's embedding and `lm_head`, and moves the heads to the target's device if `follow` is set.
        The target is checked first unless the heads are bound to it already."""
        raise NotImplementedError

    def for_call(self, target: PreTrainedModel) -> Self:
        """Returns these heads for one call with a target. They stay bound to it during the call, even if other calls
        bind the original to another target."""
        raise NotImplementedError

    def with_tree(self, **overrides: Any) -> Self:
        """Returns the same heads (weights shared) with another draft tree."""
        raise NotImplementedError

    def forget_tree(self) -> None:
        """Withdraws an assigned tree, so that the tree is chosen automatically, as after loading."""
        raise NotImplementedError

    def prune_draft_vocabulary(self, token_ids: TokenIds | None) -> Self:
        """Restricts drafts to the given tokens; `None` lifts the restriction."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what a family may override
    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that are concatenated into a feature: indices as in transformers'
        `hidden_states`; -1 is the last one, after the final norm. Empty for heads that read no features."""
        return (-1,)

    @property
    def max_draft_positions(self) -> int | None:
        """Largest number of draft positions the heads can draft; `None` if there is no limit."""
        return None

    @property
    def independent_positions(self) -> bool:
        """Whether the draft logits of a position are the same at all nodes, whatever was drafted before. The best
        tree can then be found without running the heads along its paths."""
        return False

    @property
    def drafts_in_one_forward(self) -> bool:
        """Whether [`start_draft`] runs the layers for all draft positions, and [`extend_draft`] runs none."""
        return False

    def drafted_logits(self, cache: DraftCache, depth: int) -> torch.Tensor | None:
        """Draft logits [B, depth, Vd] of a round's first positions, if [`start_draft`] has computed all of them and
        they do not depend on what is drafted. Otherwise `None`, and the positions are drafted one by one."""
        return None

    @property
    def predicts_acceptance(self) -> bool:
        """Whether the heads implement [`predicted_acceptance`]. If so, `stop_below` is compared with that prediction
        at every position. If the first position falls short, the round becomes a plain step."""
        return False

    def predicted_acceptance(self, cache: DraftCache, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Probabilities [B, K] that a draft at `position` (0-based) is accepted after nodes with tokens [B, K]. They
        must not depend on the tokens drafted at this position or at deeper ones."""
        raise NotImplementedError

    def draft_rows(self, tree: DraftTreeConfig) -> int:
        """Largest number of rows that a round writes to the draft cache, not counting the rows to commit."""
        per_level = 1 if tree.kind == "chain" else max(tree.num_nodes, tree.top_k)
        return tree.num_nodes + tree.depth * per_level

    def tree_problem(self, tree: DraftTreeConfig) -> str | None:
        """Says why these heads cannot draft a tree, and what to do about it; `None` if they can."""
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
        """Lengths of the longest and the shortest n-gram that the heads look up, for heads that only copy from
        elsewhere in the text. A round is a plain step if no such n-gram occurs in the text a second time. `None` for
        all other heads."""
        return None

    # ------------------------------------------------------------------ the drafting contract
    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in the newly committed rows and predicts the first draft position.

        Args:
            cache: Draft cache of this generation, which holds the rows committed before.
            token_ids: int64 [B, M + 1], tokens of the M newly committed rows and of the root. The root has no feature
                yet. If the prompt was given as embeddings, its first token is unknown and set to 0.
            features: [B, M, F], the target's features of the M rows ([`feature_layers`]).

        Returns:
            Drafted state of the root [B, 1, *] and draft logits after it [B, 1, Vd]. Every family defines its own
            state (EAGLE: a drafted feature); nodes pass theirs on to their children.
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
            position: Draft position to predict, at least 1.
            token_ids: int64 [B, K], tokens of the frontier nodes.
            features: [B, K, *], states of the parents of the frontier nodes.
            visible: bool [B, K, R], which of the R drafted rows each node may see, namely its ancestors and itself.
                The rows are those of all frontiers so far, this one last; levels may differ in size. `None` for the
                single node of a chain, which sees all `position` rows.

        Returns:
            States [B, K, *] and draft logits [B, K, Vd].
        """
        raise NotImplementedError

    @property
    def link_layers(self) -> Sequence[nn.Module] | None:
        """Layers that draft the links of a chain, one per layer of the draft cache, for heads with a method `link`
        that takes one of these layers. `None` for all other heads."""
        return None

    def new_draft_cache(self) -> DraftCache:
        """Returns an empty draft cache for one generation."""
        raise NotImplementedError


class TrainingContract:
    """What training requires of draft heads."""

    config: DraftHeadConfig

    # Whether the heads are trained at sampled rows only (`TrainingRows.anchors`), with a block of rows after each.
    trains_at_anchors: ClassVar[bool] = False
    # Whether each pass may run its own backward, because no gradient flows from a pass into earlier ones.
    passes_are_detached: ClassVar[bool] = True

    @property
    def max_draft_positions(self) -> int | None:
        """As in [`DraftingContract`]."""
        raise NotImplementedError

    @property
    def default_passes(self) -> int:
        """Number of draft positions to train if none is given."""
        return 1

    def passes_problem(self, num_passes: int) -> str | None:
        """Says why `num_passes` draft positions cannot be trained, and what to do about it; `None` if they can."""
        if self.max_draft_positions is not None and num_passes > self.max_draft_positions:
            return f"is more than the {self.max_draft_positions} position(s) these heads draft; lower it to that."
        return None

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Yields what the heads draft at every row, for draft positions 0, 1, ...; see [`hf_specheads.unroll`]."""
        raise NotImplementedError
