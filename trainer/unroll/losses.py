"""Losses of one draft position, as plain functions over the supervised rows of a batch.

Shape letters are those of [`hf_specheads.contract`]: R supervised rows, K of the top-k loss, V vocabulary size. Each
row of the draft head predicts the next feature and, through the target's `lm_head`, the distribution of the token
after that:

    row          (x_1, f_0)   (x_2, f_1)   (x_3, f_2)
    feature of   f_1          f_2          f_3
    token        x_2          x_3          x_4

Let p be the target's distribution, q the draft distribution, f the target's feature, g the drafted feature, y the
token that follows in the data, and a = sum_x min(p(x), q(x)) the probability that a token drawn from q is accepted:

| loss              | formula                                  | source                                             |
|-------------------|------------------------------------------|----------------------------------------------------|
| `feature`         | SmoothL1(g - f), mean over H             | EAGLE, arXiv 2401.15077, 3.2                       |
| `token`           | -sum_x p(x) log q(x)                     | EAGLE, 3.2; "teacher loss" of Hydra (2402.05109)   |
| `top_k`           | `token` over the K largest p(x)          | HASS, arXiv 2408.15766, 3.1; p is not renormalised |
| `next_token`      | -log q(y)                                | Medusa, arXiv 2401.10774, 2.2.1                    |
| `total_variation` | 1/2 sum_x abs(p(x) - q(x)) = 1 - a       | Leviathan et al., arXiv 2211.17192, 3.2            |
| `acceptance`      | -log a                                   | LK losses, arXiv 2602.23881                        |
| `lk`              | w KL(p, q) + (1 - w)(1 - a)              | LK losses; w = exp(-`lk_decay` a) is held constant |
| `selector`        | -log softmax over K candidates, at y     | DFlash 2, inco.ai/blog/dflash2                     |
| `base`            | -log q0(y), q0 without corrections       | Domino, arXiv 2605.29707                           |
| `confidence`      | BCE(c, a), c predicted, a held constant  | DSpark, arXiv 2607.05147                           |

When to use them:
- `feature`: draft heads that read their own drafted features (EAGLE, HASS, POSS).
- `token`: greedy and sampled drafting, the default. It equals KL(p, q) up to a constant.
- `top_k`: concentrates the capacity of draft heads on the tokens that draft trees contain.
- `next_token`: text that the target itself wrote, or training without the target's distribution (Medusa-1).
- `total_variation`: sampled drafting, trained draft heads; gradients are small where p and q hardly overlap.
- `acceptance`: sampled drafting, from scratch. Its gradient is that of `total_variation` divided by a.
- `lk`: sampled drafting, from scratch. Mostly KL while the overlap is small, mostly 1 - a later.
- `selector`: draft heads that select among candidates (DFlash 2).
- `base`: trains drafts before correction as well (Domino); its weight falls to 0 during training.
- `confidence`: draft heads that predict how likely a draft is to be accepted (DSpark).

With a draft vocabulary, `token`, `top_k` and KL use p renormalised over the draft vocabulary (EAGLE-3). The acceptance
a uses p without renormalisation, because a is the probability of real acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .fused import cross_entropy, cross_entropy_gradient

IGNORED = -100  # label of a row whose next token is unknown or not in the draft vocabulary


@dataclass(frozen=True)
class TargetDistribution:
    """The target's distribution at supervised rows, shared by the passes of a batch.

    Attributes:
        probs: fp32 [R, V], the target's distribution, renormalised over the draft vocabulary if there is one.
        top_k_probs: fp32 [R, K], the K largest entries of `probs`, **not** renormalised.
        top_k_ids: int64 [R, K], indices of `top_k_probs` in `probs`.
        labels: int64 [R], index in `probs` of the token that follows in the data; -100 if that token is unknown or
            outside the draft vocabulary.
        weight: fp32 [R], 0 where the target's most probable token is outside the draft vocabulary (EAGLE-3's code),
            else 1; `None` without a draft vocabulary.
        mass: fp32 [R], probability that the target gives to the whole draft vocabulary; `None` without one.
    """

    probs: torch.Tensor
    top_k_probs: torch.Tensor
    top_k_ids: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor | None = None
    mass: torch.Tensor | None = None

    @classmethod
    def from_logits(
        cls,
        logits: torch.Tensor,
        top_k: int,
        labels: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> TargetDistribution:
        """Builds the distribution from target logits.

        Args:
            logits: [R, V] target logits of any float dtype.
            top_k: K of the top-k loss; a value above V selects all of V.
            labels: int64 [R], ids of the tokens that follow in the data.
            vocabulary: int64 [Vd], draft vocabulary of the draft heads, ascending.
        """
        if labels is None:
            labels = logits.new_full(logits.shape[:1], IGNORED, dtype=torch.long)
        weight = mass = None
        if vocabulary is not None:
            weight = torch.isin(logits.argmax(dim=-1), vocabulary).float()
            whole = logits.float().logsumexp(dim=-1)
            logits = logits[:, vocabulary]
            mass = (logits.float().logsumexp(dim=-1) - whole).exp().clamp_max(1)
            place = torch.searchsorted(vocabulary, labels).clamp_max(len(vocabulary) - 1)
            labels = torch.where(vocabulary[place] == labels, place, IGNORED)
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32)  # [R, V]
        top_k_probs, top_k_ids = probs.topk(min(top_k, probs.shape[-1]), dim=-1)  # [R, K] each
        return cls(probs, top_k_probs, top_k_ids, labels, weight, mass)

    def select(self, rows: torch.Tensor) -> TargetDistribution:
        """Returns the distribution at some of the rows, given as int64 [R']."""
        return TargetDistribution(
            self.probs[rows],
            self.top_k_probs[rows],
            self.top_k_ids[rows],
            self.labels[rows],
            None if self.weight is None else self.weight[rows],
            None if self.mass is None else self.mass[rows],
        )

    @cached_property
    def entropy(self) -> torch.Tensor:
        """Entropy of `probs`, fp32 [R], the difference between the token loss and KL(p, q)."""
        return torch.special.entr(self.probs).sum(dim=-1)


class DraftedRows:
    """Drafts of one pass at R supervised rows together with the target's distribution; the input of every loss.

    Args:
        logits: Draft logits [R, V] of any float dtype.
        target: The target's distribution at the same rows.
        features: Drafted and target features, [R, H] each; `None` for draft heads that draft no features.
        lk_decay: Decay of the KL term of the LK loss.
        confidence: Logits [R] of the draft being accepted; `None` for draft heads that predict no acceptance.
        selected: Candidates int64 [R, K] and their scores [R, K]; `None` for draft heads that do not select.
        base: Draft logits [R, V] before corrections; `None` for draft heads that do not correct their logits.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        target: TargetDistribution,
        features: tuple[torch.Tensor, torch.Tensor] | None = None,
        lk_decay: float = 3.0,
        confidence: torch.Tensor | None = None,
        selected: tuple[torch.Tensor, torch.Tensor] | None = None,
        base: torch.Tensor | None = None,
    ):
        self.confidence, self.selected, self.base = confidence, selected, base
        self.logits, self.target, self.features = logits, target, features
        self.lk_decay = lk_decay

    @property
    def weight(self) -> torch.Tensor | float:
        """Factor of each row's losses, fp32 [R], or 1 for all rows."""
        return 1.0 if self.target.weight is None else self.target.weight

    @cached_property
    def cross_entropies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token and top-k loss, computed together; see [`token_and_top_k_loss`]."""
        return token_and_top_k_loss(self.logits, self.target)

    @cached_property
    def overlap_losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """1 - a and -log a, computed together; see [`overlap_losses`]."""
        return overlap_losses(self.logits, self.target)


def feature_loss(drafted: torch.Tensor, target_features: torch.Tensor) -> torch.Tensor:
    """SmoothL1 (beta 1) between drafted and target features, the mean over H (EAGLE, arXiv 2401.15077, section 3.2).

    Args:
        drafted: [R, H], drafted features.
        target_features: [R, H], target features of the rows' next tokens.

    Returns:
        fp32 [R].
    """
    return F.smooth_l1_loss(drafted.float(), target_features.float(), reduction="none").mean(dim=-1)


class _CrossEntropies(torch.autograd.Function):
    """Token and top-k loss of [`token_and_top_k_loss`], computed by the kernels of [`fused`].

    The gradient with respect to the logits is (g + h P) q - g p - h p_K, where g and h are the gradients of the two
    losses, P is the mass of the target's top K, and p_K is p at the top K and 0 elsewhere. The gradient overwrites
    the logits. Autograd therefore raises an error for a second backward of the same graph, and for the backward of
    another function that has saved the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, probs: torch.Tensor, top_k_probs: torch.Tensor, top_k_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(logits.device.type, enabled=False):
            token, normaliser = cross_entropy(logits, probs)
            top_k = (top_k_probs * (normaliser[:, None] - logits.gather(-1, top_k_ids).float())).sum(dim=-1)
        ctx.save_for_backward(logits, normaliser, probs, top_k_probs, top_k_ids)
        return token, top_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_grad: torch.Tensor, top_k_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, normaliser, probs, top_k_probs, top_k_ids = ctx.saved_tensors
        draft_grad = token_grad + top_k_grad * top_k_probs.sum(dim=-1)
        # The complete gradient at the top K is computed in fp32 and rounded once, as at all other tokens.
        at_top_k = (logits.gather(-1, top_k_ids).float() - normaliser[:, None]).exp() * draft_grad[:, None]
        at_top_k -= (token_grad + top_k_grad)[:, None] * top_k_probs
        grad = cross_entropy_gradient(logits, normaliser, probs, draft_grad, token_grad)
        grad.scatter_(-1, top_k_ids, at_top_k.to(grad.dtype))
        return grad, None, None, None


def token_and_top_k_loss(logits: torch.Tensor, target: TargetDistribution) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropies of the draft distribution q against the target's distribution p, fp32 [R] each.

    token loss = -sum_x p(x) log q(x)                    (EAGLE, arXiv 2401.15077, section 3.2)
    top-k loss = -sum_{x in top-K of p} p(x) log q(x)    (HASS, arXiv 2408.15766, section 3.1), p not renormalised

    Args:
        logits: Draft logits [R, V].
        target: The target's distribution at the same rows.
    """
    return _CrossEntropies.apply(logits, target.probs, target.top_k_probs, target.top_k_ids)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log q of the token that follows in the data (Medusa, section 2.2.1), 0 where that token is unknown.

    Args:
        logits: Draft logits [R, V].
        labels: int64 [R], indices of the following tokens, -100 where unknown.

    Returns:
        fp32 [R].
    """
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


class _Overlap(torch.autograd.Function):
    """1 - a and -log a of [`overlap_losses`]; saves only log q, a mask and log a for the backward.

    With m(x) = 1 where q < p and 0 elsewhere, and A = sum m q, the gradient of a with respect to the logits is
    m q - q A. All of it is computed in logarithms, so that an acceptance a far below the smallest float still has a
    gradient (for a one-hot p, that of the cross-entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, probs: torch.Tensor, mass: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(logits.device.type, enabled=False):
            log_draft = torch.log_softmax(logits, dim=-1)  # [R, V]
            log_target = probs.log()
            outside: torch.Tensor | float = 0.0
            if mass is not None:
                log_target += mass.clamp_min(torch.finfo(mass.dtype).tiny).log()[:, None]
                outside = 1 - mass
            below = log_draft < log_target
            log_overlap = torch.minimum(log_draft, log_target).logsumexp(dim=-1)
            # -inf occurs where the draft logits of every acceptable token are -inf; it would turn gradients into NaN.
            log_overlap = log_overlap.clamp_min(torch.finfo(log_overlap.dtype).min)
            # Equals 1 - a, but without cancellation where a is nearly 1.
            distance = outside + log_target.exp_().sub_(log_draft.exp()).clamp_min_(0).sum(dim=-1)
        ctx.save_for_backward(log_draft, below, log_overlap)
        return distance, -log_overlap

    @staticmethod
    def backward(ctx: Any, distance_grad: torch.Tensor, log_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_draft, below, log_overlap = ctx.saved_tensors
        # kept = m (g q + h q / a), with g and h the incoming gradients; the gradient is q sum(kept) - kept.
        kept = (log_draft - log_overlap[:, None]).exp_().mul_(log_grad[:, None])
        draft = log_draft.exp()
        kept.addcmul_(draft, distance_grad[:, None]).masked_fill_(~below, 0)
        return draft.mul_(kept.sum(dim=-1, keepdim=True)).sub_(kept), None, None


def overlap_losses(logits: torch.Tensor, target: TargetDistribution) -> tuple[torch.Tensor, torch.Tensor]:
    """1 - a and -log a, fp32 [R] each, for a = sum_x min(p(x), q(x)).

    a is the probability that speculative sampling accepts a token drawn from q (arXiv 2211.17192, section 3.2), and
    1 - a is the total variation 1/2 sum |p - q|. The loss -log a is from arXiv 2602.23881.

    Args:
        logits: Draft logits [R, V].
        target: The target's distribution at the same rows. With a draft vocabulary, `mass` undoes the
            renormalisation of `probs`.
    """
    return _Overlap.apply(logits.float(), target.probs, target.mass)


def lk_loss(rows: DraftedRows) -> torch.Tensor:
    """w KL(p, q) + (1 - w)(1 - a), fp32 [R], with w = exp(-`lk_decay` a); no gradient flows through w.

    This is the hybrid of "LK Losses" (arXiv 2602.23881). Where p and q overlap little, draft heads learn from KL,
    whose gradient does not vanish; as the overlap grows, they learn more from the acceptance itself.
    """
    distance, _ = rows.overlap_losses
    weight = torch.exp(rows.lk_decay * (distance.detach() - 1))
    divergence = rows.cross_entropies[0] - rows.target.entropy
    return weight * divergence + (1 - weight) * distance


def _drafted_feature_loss(rows: DraftedRows) -> torch.Tensor:
    if rows.features is None:
        raise ValueError("these heads draft no features, so they have no feature loss; leave 'feature' out.")
    return feature_loss(*rows.features)


def _confidence_loss(rows: DraftedRows) -> torch.Tensor:
    """Binary cross-entropy between the predicted acceptance and a, fp32 [R]; no gradient flows through a."""
    if rows.confidence is None:
        raise ValueError("these heads predict no acceptance, so they have no such loss; leave 'confidence' out.")
    accepted = 1 - rows.overlap_losses[0].detach().clamp(0, 1)
    return F.binary_cross_entropy_with_logits(rows.confidence.float(), accepted, reduction="none")


def _selector_loss(rows: DraftedRows) -> torch.Tensor:
    """-log of the label's probability among the candidates, fp32 [R]; 0 where the label is not a candidate."""
    if rows.selected is None:
        raise ValueError("these heads select no candidates, so they have no such loss; leave 'selector' out.")
    candidates, scores = rows.selected
    found = candidates == rows.target.labels[:, None]
    labels = torch.where(found.any(-1), found.long().argmax(-1), IGNORED)
    return next_token_loss(scores, labels)


def _base_loss(rows: DraftedRows) -> torch.Tensor:
    """-log q0 of the token that follows in the data, fp32 [R]; 0 where that token is unknown."""
    if rows.base is None:
        raise ValueError("these heads do not correct their logits, so they have no such loss; leave 'base' out.")
    return next_token_loss(rows.base, rows.target.labels)


@torch.no_grad()
def agreement(rows: DraftedRows) -> torch.Tensor:
    """Measures how the drafts of one pass agree with the target, fp32 [3]: the number of rows whose most probable
    token is the target's, the sum over rows of the acceptance probability a, and the number of rows."""
    accepted = 1 - rows.overlap_losses[0]
    same = (rows.logits.argmax(dim=-1) == rows.target.probs.argmax(dim=-1)) * rows.weight
    return torch.stack([same.float().sum(), accepted.sum(), accepted.new_tensor(float(len(accepted)))])


def masked_mean(values: torch.Tensor, num_items: torch.Tensor | float | None = None) -> torch.Tensor:
    """Divides the sum of the supervised rows' losses by the number of supervised rows; 0 when there are none.

    Args:
        values: [R], losses of the supervised rows.
        num_items: Divisor instead of R. With several processes or accumulation steps this is the number of supervised
            rows of the whole optimizer step, so that a step does not depend on how its batch was split.

    Returns:
        Scalar. Its gradient for an empty batch is zero, not NaN.
    """
    if num_items is None:
        num_items = max(values.shape[0], 1)
    elif not isinstance(num_items, torch.Tensor):
        num_items = max(num_items, 1)
    else:
        num_items = num_items.clamp_min(1)
    return values.sum() / num_items


# Losses by name. Each maps the drafts of one pass to fp32 [R].
LOSSES: dict[str, Callable[[DraftedRows], torch.Tensor]] = {
    "feature": _drafted_feature_loss,
    "token": lambda rows: rows.cross_entropies[0],
    "top_k": lambda rows: rows.cross_entropies[1],
    "next_token": lambda rows: next_token_loss(rows.logits, rows.target.labels),
    "total_variation": lambda rows: rows.overlap_losses[0],
    "acceptance": lambda rows: rows.overlap_losses[1],
    "lk": lk_loss,
    "confidence": _confidence_loss,
    "selector": _selector_loss,
    "base": _base_loss,
}


def mean_loss(name: str, rows: DraftedRows, num_items: torch.Tensor | float | None = None) -> torch.Tensor:
    """Mean of one of [`LOSSES`] over the supervised rows, a scalar.

    `next_token` and `base` are averaged over the rows that have a label. All other losses are multiplied by the
    `weight` of the target distribution and averaged over all supervised rows, those of weight 0 included. With
    `num_items`, every loss is the sum over rows divided by `num_items`.

    Args:
        name: Name of the loss in [`LOSSES`].
        rows: Drafts of one pass.
        num_items: As in [`masked_mean`].
    """
    values = LOSSES[name](rows)
    if name in ("next_token", "base"):
        known = torch.count_nonzero(rows.target.labels != IGNORED)
        return masked_mean(values, known if num_items is None else num_items)
    return masked_mean(values * rows.weight, num_items)
