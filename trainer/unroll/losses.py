"""Losses of one draft position, as plain functions over the supervised rows of a batch.

Letters as in [`hf_specheads.contract`]: R supervised rows, K of the top-k loss, V vocabulary. A row of the draft head
predicts the feature that follows it, and through the target's `lm_head` the distribution of the token after that:

    row          (x_1, f_0)   (x_2, f_1)   (x_3, f_2)
    feature of   f_1          f_2          f_3
    token        x_2          x_3          x_4

With p the target's distribution, q the drafted one, f the target's feature, g the drafted one, y the token that
follows in the data, and a = sum_x min(p(x), q(x)), the probability that a token drawn from q is accepted:

| loss              | formula                                  | when | source |
|-------------------|------------------------------------------|------|--------|
| `feature`         | SmoothL1(g - f), mean over H             | heads that feed drafted features back (EAGLE, HASS, POSS) | EAGLE, arXiv 2401.15077, 3.2 |
| `token`           | -sum_x p(x) log q(x)                     | the default for greedy and sampled use; KL(p, q) up to a constant; Hydra's "teacher loss" | EAGLE 3.2; Hydra, arXiv 2402.05109 |
| `top_k`           | the same over the K largest p, unnormalised | draws the heads' capacity to the tokens that trees offer | HASS, arXiv 2408.15766, 3.1 |
| `next_token`      | -log q(y)                                | text the target itself wrote, or no target distribution wanted (Medusa-1) | Medusa, arXiv 2401.10774, 2.2.1 |
| `total_variation` | 1/2 sum_x abs(p(x) - q(x)) = 1 - a       | sampled use, heads that are trained already: small gradients where p and q hardly overlap | Leviathan et al., arXiv 2211.17192, 3.2 |
| `acceptance`      | -log a                                   | sampled use, from scratch: the gradient of `total_variation` over a | LK losses, arXiv 2602.23881 |
| `lk`              | w KL(p, q) + (1 - w)(1 - a), w = exp(-`lk_decay` a) held constant | sampled use, from scratch: KL while the overlap is small, 1 - a later | LK losses, arXiv 2602.23881 |
| `selector`        | -log softmax over K candidates at y      | heads that select among candidates (DFlash 2) | inco.ai/blog/dflash2 |
| `base`            | -log q0(y), q0 without corrections       | heads whose corrected drafts shall not cost the others (Domino), less and less | Domino, arXiv 2605.29707 |
| `confidence`      | BCE(c, a), a held constant               | heads that predict how likely a draft is to be accepted (DSpark) | DSpark, arXiv 2607.05147 |

With a draft vocabulary, `token`, `top_k` and KL compare with p renormalised over it (EAGLE-3); a is what is really
accepted, so there p keeps the mass it has.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .fused import cross_entropy, cross_entropy_gradient

IGNORED = -100  # label of a row whose next token is not known


@dataclass(frozen=True)
class TargetDistribution:
    """What the target says at the supervised rows; made once per batch and used by every pass.

    Attributes:
        probs: fp32 [R, V], the target's distribution, over the draft vocabulary if the heads have one.
        top_k_probs: fp32 [R, K], its K largest probabilities, **not** renormalised.
        top_k_ids: int64 [R, K], where they are.
        labels: int64 [R], where the token that follows in the data is, -100 if it is not known or not drafted.
        weight: fp32 [R], 0 where the target's favourite token is outside the draft vocabulary (EAGLE-3's code), else
            1; `None` without a draft vocabulary.
        mass: fp32 [R], what the target gives to the whole draft vocabulary; `None` without one.
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
        """From target logits [R, V] of any float dtype; a `top_k` above V means all of V.

        Args:
            logits: Target logits.
            top_k: K.
            labels: int64 [R], tokens that follow in the data.
            vocabulary: int64 [Vd], the heads' draft vocabulary, ascending.
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
        """The same at some of the rows, int64 [R']."""
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
        """Entropy of `probs`, fp32 [R]: what separates the token loss from KL."""
        return torch.special.entr(self.probs).sum(dim=-1)


class DraftedRows:
    """Drafts of one pass at R supervised rows, next to what the target says there; what every loss reads.

    Args:
        logits: Draft logits [R, V] of any float dtype.
        target: The target's distribution at the same rows.
        features: Drafted and target features, [R, H] each; `None` for heads that draft none.
        lk_decay: How fast the LK loss turns from KL to 1 - a.
        confidence: Logits [R] of being accepted; `None` for heads that predict none.
        selected: Candidates int64 [R, K] and their scores [R, K]; `None` for heads that select none.
        base: Draft logits [R, V] before corrections; `None` for heads whose logits are not corrected.
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
        """Factor of every row's losses, fp32 [R] or 1."""
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
        drafted: [R, H].
        target_features: [R, H], features of the rows' next tokens.

    Returns:
        fp32 [R].
    """
    return F.smooth_l1_loss(drafted.float(), target_features.float(), reduction="none").mean(dim=-1)


class _CrossEntropies(torch.autograd.Function):
    """Token and top-k loss of [`token_and_top_k_loss`]; see [`fused`] for what makes them cheap.

    The gradient to the logits is  (g + h P) q - g p - h p_K  with g, h the gradients of the two losses and P the mass
    of the target's top K. It is written over the logits, which nobody needs any more: a second backward of the same
    graph, or of another function that has kept the logits, is an error of autograd's.
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
        # Whole before it is rounded to the dtype of the logits, as everywhere else.
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
    """-log q of the token that follows in the data (Medusa, section 2.2.1), 0 where it is not known.

    Args:
        logits: Draft logits [R, V].
        labels: int64 [R], -100 where not known.

    Returns:
        fp32 [R].
    """
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


class _Overlap(torch.autograd.Function):
    """1 - a and -log a of [`overlap_losses`], with log q and a mask kept and the gradient written once.

    With m(x) = 1 where q < p and 0 elsewhere, A = sum m q, the gradient of a to the logits is  m q - q A.  All in
    logarithms, so that a far below the smallest float still has its gradient (that of the cross-entropy, for a
    target that is sure).
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
            # Only where every token that could be accepted is forbidden to the draft; infinity would make NaN.
            log_overlap = log_overlap.clamp_min(torch.finfo(log_overlap.dtype).min)
            # The same as 1 - a, but exact where a is nearly 1.
            distance = outside + log_target.exp_().sub_(log_draft.exp()).clamp_min_(0).sum(dim=-1)
        ctx.save_for_backward(log_draft, below, log_overlap)
        return distance, -log_overlap

    @staticmethod
    def backward(ctx: Any, distance_grad: torch.Tensor, log_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_draft, below, log_overlap = ctx.saved_tensors
        # Row by row m (g q + h q / a), of which both the gradient's terms are made.
        kept = (log_draft - log_overlap[:, None]).exp_().mul_(log_grad[:, None])
        draft = log_draft.exp()
        kept.addcmul_(draft, distance_grad[:, None]).masked_fill_(~below, 0)
        return draft.mul_(kept.sum(dim=-1, keepdim=True)).sub_(kept), None, None


def overlap_losses(logits: torch.Tensor, target: TargetDistribution) -> tuple[torch.Tensor, torch.Tensor]:
    """1 - a and -log a, fp32 [R] each, for a = sum_x min(p(x), q(x)).

    a is the probability that speculative sampling accepts a token drawn from q (arXiv 2211.17192, section 3.2), and
    1 - a the total variation 1/2 sum |p - q|. -log a: arXiv 2602.23881.

    Args:
        logits: Draft logits [R, V].
        target: The target's distribution at the same rows; a draft vocabulary's `mass` scales it back to what the
            target gives its tokens.
    """
    return _Overlap.apply(logits.float(), target.probs, target.mass)


def lk_loss(rows: DraftedRows) -> torch.Tensor:
    """w KL(p, q) + (1 - w)(1 - a) with w = exp(-`lk_decay` a), through which no gradient flows; fp32 [R].

    The hybrid of "LK Losses" (arXiv 2602.23881): heads that overlap little learn from KL, whose gradient does not
    vanish, later ones from the acceptance itself.
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
    """Binary cross-entropy of the predicted acceptance towards a, through which no gradient flows; fp32 [R]."""
    if rows.confidence is None:
        raise ValueError("these heads predict no acceptance, so they have no such loss; leave 'confidence' out.")
    accepted = 1 - rows.overlap_losses[0].detach().clamp(0, 1)
    return F.binary_cross_entropy_with_logits(rows.confidence.float(), accepted, reduction="none")


def _selector_loss(rows: DraftedRows) -> torch.Tensor:
    """-log of the label's share among the candidates, 0 where it is none of them; fp32 [R]."""
    if rows.selected is None:
        raise ValueError("these heads select no candidates, so they have no such loss; leave 'selector' out.")
    candidates, scores = rows.selected
    found = candidates == rows.target.labels[:, None]
    labels = torch.where(found.any(-1), found.long().argmax(-1), IGNORED)
    return next_token_loss(scores, labels)


def _base_loss(rows: DraftedRows) -> torch.Tensor:
    """-log q0 of the token that follows in the data, 0 where it is not known; fp32 [R]."""
    if rows.base is None:
        raise ValueError("these heads do not correct their logits, so they have no such loss; leave 'base' out.")
    return next_token_loss(rows.base, rows.target.labels)


@torch.no_grad()
def agreement(rows: DraftedRows) -> torch.Tensor:
    """How the drafts of one pass agree with the target, fp32 [3]: rows whose most probable token is the target's, the
    sum of a, the probability that a drawn draft is accepted, and the number of rows."""
    accepted = 1 - rows.overlap_losses[0]
    same = (rows.logits.argmax(dim=-1) == rows.target.probs.argmax(dim=-1)) * rows.weight
    return torch.stack([same.float().sum(), accepted.sum(), accepted.new_tensor(float(len(accepted)))])


def masked_mean(values: torch.Tensor, num_items: torch.Tensor | float | None = None) -> torch.Tensor:
    """Sum of the supervised rows' losses over the number of supervised rows; 0 when there are none.

    Args:
        values: [R].
        num_items: What to divide by instead of R: with several processes or accumulation steps, the supervised rows
            of the whole optimizer step, so that a step does not depend on how its batch was split.

    Returns:
        Scalar, with a finite gradient (zero) for an empty batch.
    """
    if num_items is None:
        num_items = max(values.shape[0], 1)
    elif not isinstance(num_items, torch.Tensor):
        num_items = max(num_items, 1)
    else:
        num_items = num_items.clamp_min(1)
    return values.sum() / num_items


# Losses by name, each fp32 [R] from the drafts of one pass.
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
    """Mean over the supervised rows of one of [`LOSSES`]; scalar.

    The loss on labels is the mean over the rows that have one; the others leave out what the target distribution's
    `weight` leaves out, but count it. With `num_items` every loss is a sum over that.

    Args:
        name: Which.
        rows: Drafts of one pass.
        num_items: As in [`masked_mean`].
    """
    values = LOSSES[name](rows)
    if name in ("next_token", "base"):
        known = torch.count_nonzero(rows.target.labels != IGNORED)
        return masked_mean(values, known if num_items is None else num_items)
    return masked_mean(values * rows.weight, num_items)
