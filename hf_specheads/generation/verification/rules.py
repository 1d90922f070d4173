"""The rules of verification that `heads.verification` can name. A new rule is a file here and a row in [`RULES`]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...tree.draft_tree import DraftTree
from ..options import DraftingOptions
from ..outputs import EmittedOutputs
from ..sampling import TokenSampler
from ..sequences import Sequences
from ..stopping import StopRule
from .accepted import Accepted, Meanwhile, cut_where_it_stops
from .sampled import verify_sampled_at_once, verify_sampled_token_by_token
from .top_k import verify_all_nodes, verify_token_by_token
from .typical import verify_typical

LOSSY = (
    "these draft heads verify by typical acceptance, so sampled text does not follow the target's distribution; set "
    "`heads.verification = 'lossless'` for exact sampling."
)


@dataclass(frozen=True)
class Verification:
    """What a rule may look at: a verified tree and the call to which it belongs.

    Attributes:
        tree: Draft tree of B sequences and N nodes.
        logits: [B, N, V], raw target logits at the nodes.
        active: The B sequences.
        limits: Most tokens that each of them may gain; `None` for no limit. Processors and criteria are not asked
            about later ones, which the next rounds draft again.
        sequences, sampler, stop, outputs, options: Those of the call.
        meanwhile: Gives the device further work before the host waits for the choices at all nodes; `None` for none.
    """

    tree: DraftTree
    logits: torch.Tensor
    active: list[int]
    limits: list[int | None]
    sequences: Sequences
    sampler: TokenSampler
    stop: StopRule
    outputs: EmittedOutputs
    options: DraftingOptions
    meanwhile: Meanwhile | None = None

    @property
    def seeded(self) -> bool:
        """Whether tokens are drawn in plain `generate`'s order."""
        one = len(self.sequences.lengths) == 1 and self.tree.sampled is None
        return one and self.sampler.do_sample and self.options.exact_seed

    @property
    def texts(self) -> list[torch.Tensor]:
        """Committed tokens int64 [1, T] of each sequence."""
        return [self.sequences.tokens_of(sequence) for sequence in self.active]

    def at_nodes(self) -> Verification:
        """The same with a sampler that chooses tokens at all nodes at once, if there is one."""
        if self.sampler.row_wise or self.seeded:
            return self
        return replace(self, sampler=self.sampler.at_nodes(self.tree, self.texts, self.active))

    def rows_in_order(self) -> list[int]:
        """The rows whose tokens must be chosen one after the other: processors that look at the text need this, and
        so do draws in plain `generate`'s order."""
        if self.seeded:
            return [0]
        if self.sampler.row_wise:
            return []
        return [row for row, one in enumerate(self.active) if not self.sampler.for_sequence(one).row_wise]

    def of_rows(self, rows: list[int]) -> Verification:
        """The part of some sequences, which are verified apart from the others."""
        tree, logits = self.tree.of_sequences(rows), self.logits[rows]
        active, limits = [self.active[row] for row in rows], [self.limits[row] for row in rows]
        sampler = self.sampler.of_sequences(active)
        return replace(self, tree=tree, logits=logits, active=active, limits=limits, sampler=sampler, meanwhile=None)

    def at_once(self, verify: Callable[..., list[Accepted]]) -> list[Accepted]:
        """Verifies all sequences at once, with a function such as [`verify_all_nodes`]."""
        accepted = verify(self.tree, self.logits, self.sampler, self.outputs.scores is not None)
        accepted = [one.limited(most) for one, most in zip(accepted, self.limits, strict=True)]
        rules = [self.stop.for_sequence(sequence) for sequence in self.active]
        return cut_where_it_stops(
            accepted, self.texts, rules, lambda row: self.outputs.earlier_scores(self.active[row])
        )

    def one_by_one(self, verify: Callable[..., list[Accepted]], *parameters: float) -> list[Accepted]:
        """Verifies one sequence after the other, with a function such as [`verify_token_by_token`]."""
        results = []
        for index, sequence in enumerate(self.active):
            results += verify(
                self.tree.of_sequence(index),
                self.sequences.tokens_of(sequence),
                self.logits[index : index + 1],
                self.sampler.for_sequence(sequence),
                self.stop.for_sequence(sequence),
                self.outputs.earlier_scores(sequence),
                *parameters,
                most=self.limits[index],
            )
        return results


@dataclass(frozen=True)
class Rule:
    """One rule of verification.

    Attributes:
        accept: Returns the accepted path and the bonus token of every active sequence.
        lossless: Whether sampled text has the target's distribution. Greedy text is the target's with every rule.
        problem: Says why the rule cannot serve sampling with these options, and the way out; `None` if it can.
    """

    accept: Callable[[Verification], list[Accepted]]
    lossless: bool
    problem: Callable[[DraftingOptions], str | None] = lambda options: None


def accept_losslessly(verification: Verification) -> list[Accepted]:
    """Applies the exact rule for the way in which the tree's children were chosen."""
    verification = verification.at_nodes()
    in_order, batch = verification.rows_in_order(), len(verification.active)
    if not in_order:
        return _accept_at_once(verification)
    if len(in_order) == batch:
        return _accept_in_order(verification)
    others = [row for row in range(batch) if row not in in_order]
    accepted = dict(zip(others, _accept_at_once(verification.of_rows(others)), strict=True))
    accepted |= zip(in_order, _accept_in_order(verification.of_rows(in_order)), strict=True)
    return [accepted[row] for row in range(batch)]


def _accept_at_once(verification: Verification) -> list[Accepted]:
    if verification.tree.sampled is not None:
        return verification.at_once(verify_sampled_at_once)
    given = verification.meanwhile
    return verification.at_once(verify_all_nodes if given is None else partial(verify_all_nodes, meanwhile=given))


def _accept_in_order(verification: Verification) -> list[Accepted]:
    drawn = verification.tree.sampled is not None
    return verification.one_by_one(verify_sampled_token_by_token if drawn else verify_token_by_token)


def accept_typically(verification: Verification) -> list[Accepted]:
    """Applies typical acceptance if tokens are sampled, and the exact rule in greedy decoding."""
    if not verification.sampler.do_sample:
        return accept_losslessly(verification)
    options = verification.options
    return verification.one_by_one(verify_typical, options.posterior_threshold, options.posterior_alpha)


def typical_problem(options: DraftingOptions) -> str | None:
    """Why typical acceptance cannot serve these options; `None` if it can."""
    if options.loop == "transformers":
        return "is not supported by transformers' own loop; use `heads.loop = 'own'`"
    if options.tree.children == "sampled":
        return "does not work with drawn children; use `heads.with_tree(children='top_k')`"
    if not 0 <= options.posterior_threshold <= 1:
        return f"takes a `posterior_threshold` from 0 to 1, got {options.posterior_threshold!r}"
    if not 0 <= options.posterior_alpha < float("inf"):
        return f"takes a `posterior_alpha` of at least 0, got {options.posterior_alpha!r}"
    return None


RULES: dict[str, Rule] = {
    "lossless": Rule(accept_losslessly, lossless=True),
    "typical": Rule(accept_typically, lossless=False, problem=typical_problem),
}
