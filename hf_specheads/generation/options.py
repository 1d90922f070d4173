"""The settings of the draft heads for one call of `generate`, read once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..contract import DraftingContract
from ..tree.config import DraftTreeConfig
from .observer import Observer


@dataclass(frozen=True)
class DraftingOptions:
    """Settings of draft heads as they were when a call began. What a user assigns later is for the next call.

    Attributes:
        tree: The draft tree in force.
        verification: Name of a rule in `verification.rules.RULES`.
        posterior_threshold, posterior_alpha, exact_seed, loop, adaptive, probe, compiled, profile, trace, on_round:
            As in `DraftHead`.
        free_tree: Whether no tree was assigned, so that rounds may draft other trees than `tree`.
        takes_trees: Whether rounds may verify copied tokens beside a chain; known once the call is prepared.
        in_stream: Whether the text is one of a stream of requests ([`generate_stream`]).
    """

    tree: DraftTreeConfig
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
    on_round: Observer | None
    free_tree: bool
    takes_trees: bool = False
    in_stream: bool = False

    @classmethod
    def of(cls, heads: DraftingContract) -> DraftingOptions:
        """Reads the current settings of draft heads."""
        derived = ("tree", "free_tree", "takes_trees", "in_stream")
        settings = {field.name: getattr(heads, field.name) for field in fields(cls) if field.name not in derived}
        return cls(tree=heads.tree_config, free_tree=not heads.tree_is_assigned, **settings)
