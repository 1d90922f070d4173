"""The configuration of draft trees: [`DraftTreeConfig`]."""

import dataclasses
from typing import Any

TREE_KINDS = ("chain", "static", "dynamic", "optimal")

CHILDREN = ("top_k", "sampled")


@dataclasses.dataclass(frozen=True)
class DraftTreeConfig:
    """How a draft tree grows in every round.

    Args:
        kind: `"dynamic"` grows the tree by cumulative draft probability (EAGLE-2, section 4). `"chain"` drafts a
            single path. `"static"` uses the same `choices` in every round (Medusa, EAGLE-1). `"optimal"` is a static
            tree whose choices [`search_tree`] found for a target, its draft heads and a machine (Sequoia).
        depth: Number of draft positions, i.e. levels below the root. Derived from `choices` for static trees.
        top_k: Children considered per node, and nodes expanded per level. Derived from `choices` for static trees.
        total_tokens: Nodes verified per round **including the root** (`total_token` in EAGLE's and PosS's code).
            Derived from `choices` for static trees.
        choices: Paths of a static or optimal tree, each a list of child ranks (0 is the draft's favourite). Every
            prefix of a path must be listed too.
        children: `"top_k"` takes the most probable tokens. `"sampled"` draws children without replacement from the
            draft distribution (verified by Leviathan's rule on chains, by SpecInfer's and Sequoia's on trees);
            it only applies with `do_sample=True`, greedy decoding always takes the most probable tokens.
        draft_temperature: Temperature that the draft logits are divided by.
        stop_below: A level is drafted only if the best node of the previous level has at least this probability,
            measured as the product of draft probabilities from the root to that node. Costs one host sync per level.
            Draft heads that predict acceptance (DSpark) compare their prediction instead, for each level separately
            and including the first. 0 always drafts `depth` levels.
        lookup: Number of nodes to copy from the text itself (prompt lookup). If the last two or three tokens occurred
            earlier in the text, the tokens that followed them become a path of the tree, and `lookup` nodes are
            verified in addition to the drafted ones. A round without such a match is unchanged. Not available with
            sampled children: a verification rule covers either drawn or chosen nodes, not both.

    Raises:
        ValueError: if a size is below its minimum, a name is unknown, or `choices` do not form a tree.
    """

    kind: str = "dynamic"
    depth: int = 6
    top_k: int = 10
    total_tokens: int = 60
    choices: tuple[tuple[int, ...], ...] | None = None
    children: str = "top_k"
    draft_temperature: float = 1.0
    stop_below: float = 0.0
    lookup: int = 0

    def __post_init__(self) -> None:
        for name, known in (("kind", TREE_KINDS), ("children", CHILDREN)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"`{name}` of a draft tree must be one of {list(known)}, got {value!r}.")
        if self.kind in ("static", "optimal"):
            self._take_choices()
        elif self.choices is not None:
            raise ValueError(f"`choices` belong to a static or optimal tree, got kind={self.kind!r}; drop `choices`.")
        for name, minimum in (("depth", 1), ("top_k", 1), ("total_tokens", 2), ("lookup", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(f"`{name}` of a draft tree must be an integer of at least {minimum}, got {value!r}.")
        if not isinstance(self.draft_temperature, (int, float)) or not 0 < self.draft_temperature < float("inf"):
            raise ValueError(f"`draft_temperature` must be a number above 0, got {self.draft_temperature!r}.")
        if not isinstance(self.stop_below, (int, float)) or not 0 <= self.stop_below < 1:
            raise ValueError(f"`stop_below` must be a probability from 0 to below 1, got {self.stop_below!r}.")
        if self.children == "sampled":
            self._refuse_biased_sampling()

    def _take_choices(self) -> None:
        if not self.choices:
            raise ValueError(
                f"a draft tree of kind {self.kind!r} needs `choices`, a list of paths of child ranks such as "
                "[[0], [1], [0, 0]]; `hf_specheads.tree.EAGLE_CHOICES` is EAGLE's own list."
            )
        try:
            paths = [tuple(int(rank) for rank in path) for path in self.choices]
        except TypeError as error:
            raise ValueError(f"`choices` must be a list of lists of child ranks, got {self.choices!r}.") from error
        known = {(), *paths}
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(f"`choices` must hold paths of child ranks from 0, got {list(path)}.")
            if path[:-1] not in known:
                raise ValueError(f"`choices` has the path {list(path)} but not its beginning; add {list(path[:-1])}.")
        if len(known) != len(paths) + 1:
            raise ValueError("`choices` has the same path twice; list every path once.")
        paths.sort(key=lambda path: (len(path), path))
        derived = {"choices": tuple(paths), "depth": len(paths[-1]), "total_tokens": len(paths) + 1}
        derived["top_k"] = 1 + max(path[-1] for path in paths)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _refuse_biased_sampling(self) -> None:
        """Refuses options under which the choice of drawn children to verify depends on what was drawn."""
        if self.lookup:
            raise ValueError(
                f"looked-up tokens (lookup={self.lookup}) are copied, not drawn, and the rule for drawn children "
                "divides by the probability of having drawn them; use children='top_k', or lookup=0."
            )
        if self.kind == "dynamic":
            raise ValueError(
                "a dynamic tree keeps the most probable of the drawn children, which would bias sampling; use "
                "children='top_k', or kind='chain', 'static' or 'optimal'."
            )
        choices = self.choices or ()
        for path in choices:
            if path[-1] and (*path[:-1], path[-1] - 1) not in choices:
                raise ValueError(
                    "with sampled children the ranks of siblings must be 0, 1, 2, ... without gaps, but `choices` "
                    f"lacks the sibling before {list(path)}; add it."
                )

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Paths of child ranks, sorted by length, of a tree whose shape is known in advance.

        Raises:
            ValueError: if the tree is dynamic.
        """
        if self.kind == "dynamic":
            raise ValueError("a dynamic tree has no fixed paths.")
        return self.choices or tuple((0,) * length for length in range(1, self.depth + 1))

    @property
    def num_nodes(self) -> int:
        """Upper bound N of nodes verified per round, including the root."""
        return self.depth + 1 if self.kind == "chain" else self.total_tokens

    @property
    def most_nodes(self) -> int:
        """Upper bound of nodes verified per round: [`num_nodes`] plus the nodes copied by `lookup`."""
        return self.num_nodes + self.lookup

    @property
    def most_levels(self) -> int:
        """Upper bound of levels below the root: `depth` plus the levels that `lookup` may add."""
        return self.depth + self.lookup

    @property
    def is_chain(self) -> bool:
        """Whether every round verifies a single path."""
        return self.kind == "chain" and not self.lookup

    def replace(self, **changes: Any) -> "DraftTreeConfig":
        """Returns a copy with some fields changed.

        Raises:
            ValueError: if a field does not exist or a value is out of range.
        """
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(changes) - known):
            raise ValueError(f"unknown draft tree option(s) {unknown}; known options: {sorted(known)}.")
        if changes.get("kind", self.kind) not in ("static", "optimal"):
            changes = {"choices": None, **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for the saved config."""
        return dataclasses.asdict(self)
