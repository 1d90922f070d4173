"""How one call of `generate` drafts and verifies: the settings of the heads, read once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..contract import DraftingContract
from ..tree.config import DraftTreeConfig
from .observer import Observer


@dataclass(frozen=True)
class DraftingOptions:
    """Settings that heads had when a call began; what a user assigns to them later is for the next call.

    Attributes:
        tree: The draft tree in force.
        verification: Name of a rule in `verification.rules.RULES`.
        posterior_threshold, posterior_alpha, exact_seed, loop, adaptive, probe, compiled, profile, trace, on_round:
            As in `DraftHead`.
        free_tree: Nobody has assigned a tree, so rounds may draft others than `tree`.
        in_stream: The text joins others, and leaves them ([`generate_stream`]).
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
    in_stream: bool = False

    @classmethod
    def of(cls, heads: DraftingContract) -> DraftingOptions:
        """What the heads say now."""
        derived = ("tree", "free_tree", "in_stream")
        settings = {field.name: getattr(heads, field.name) for field in fields(cls) if field.name not in derived}
        return cls(tree=heads.tree_config, free_tree=not heads.tree_is_assigned, **settings)
