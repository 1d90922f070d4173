"""Losses of one draft position, as plain functions over the supervised rows of a batch.

Letters: S supervised rows, H feature width, V vocabulary, K of the top-k loss. A row of the draft head predicts the
feature that follows it, and through the target's `lm_head` the distribution of the token after that:

    row          (x_1, f_0)   (x_2, f_1)   (x_3, f_2)
    feature of   f_1          f_2          f_3
    token        x_2          x_3          x_4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TargetDistribution:
    """What the target says at the supervised rows; made once per batch and used by every pass.

    Attributes:
        probs: fp32 [S, V], the target's distribution, over the draft vocabulary if the heads have one.
        top_k_probs: fp32 [S, K], its K largest probabilities, **not** renormalised.
        top_k_ids: int64 [S, K], where they are.
        labels: int64 [S], where the token that follows in the data is, -100 if it is not known or not drafted.
        weight: fp32 [S], 0 where the target's favourite token is outside the draft vocabulary (EAGLE-3's code), else
            1; `None` without a draft vocabulary.
    """

    probs: torch.Tensor
    top_k_probs: torch.Tensor
    top_k_ids: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor | None = None

    @classmethod
    def from_logits(
        cls,
        logits: torch.Tensor,
        top_k: int,
        labels: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> TargetDistribution:
        """From target logits [S, V] of any float dtype; a `top_k` above V means all of V.

        Args:
            logits: Target logits.
            top_k: K.
            labels: int64 [S], tokens that follow in the data.
            vocabulary: int64 [Vd], the heads' draft vocabulary, ascending.
        """
        if labels is None:
            labels = logits.new_full(logits.shape[:1], -100, dtype=torch.long)
        weight = None
        if vocabulary is not None:
            weight = torch.isin(logits.argmax(dim=-1), vocabulary).float()
            logits = logits[:, vocabulary]
            place = torch.searchsorted(vocabulary, labels).clamp_max(len(vocabulary) - 1)
            labels = torch.where(vocabulary[place] == labels, place, -100)
        probs = torch.softmax(logits.float(), dim=-1)  # [S, V]
        top_k_probs, top_k_ids = probs.topk(min(top_k, probs.shape[-1]), dim=-1)  # [S, K] each
        return cls(probs, top_k_probs, top_k_ids, labels, weight)

    def select(self, rows: torch.Tensor) -> TargetDistribution:
        """The same at some of the rows, int64 [S']."""
        weight = None if self.weight is None else self.weight[rows]
        tensors = (self.probs, self.top_k_probs, self.top_k_ids, self.labels)
        return TargetDistribution(*(tensor[rows] for tensor in tensors), weight)


class DraftedRows:
    """Drafts of one pass at S supervised rows, next to what the target says there; what every loss reads.

    Args:
        logits: Draft logits [S, V] of any float dtype.
        target: The target's distribution at the same rows.
        features: Drafted and target features, [S, H] each; `None` for heads that draft none.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        target: TargetDistribution,
        features: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        self.logits, self.target, self.features = logits.float(), target, features

    @property
    def weight(self) -> torch.Tensor | float:
        """Factor of every row's losses, fp32 [S] or 1."""
        return 1.0 if self.target.weight is None else self.target.weight

    @cached_property
    def cross_entropies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token and top-k loss, computed together; see [`token_and_top_k_loss`]."""
        return token_and_top_k_loss(self.logits, self.target)


def feature_loss(drafted: torch.Tensor, target_features: torch.Tensor) -> torch.Tensor:
    """SmoothL1 (beta 1) between drafted and target features, the mean over H (EAGLE, arXiv 2401.15077, section 3.2).

    Args:
        drafted: [S, H].
        target_features: [S, H], features of the rows' next tokens.

    Returns:
        fp32 [S].
    """
    return F.smooth_l1_loss(drafted.float(), target_features.float(), reduction="none").mean(dim=-1)


class _CrossEntropies(torch.autograd.Function):
    """Token and top-k loss of [`token_and_top_k_loss`], with one [S, V] tensor kept and the gradient written once.

    Over a large vocabulary the losses cost as much as `lm_head` when every operation reads and writes [S, V]; the
    gradient to the logits is  (g + h P) q - g p - h p_K  with g, h the gradients of the two losses and P the mass of
    the target's top K.
    """

    @staticmethod
    def forward(ctx, logits, probs, top_k_probs, top_k_ids):
        with torch.autocast(logits.device.type, enabled=False):
            draft = torch.softmax(logits, dim=-1)  # q, [S, V]
            # The largest probability is 1 / sum(exp(logits - max)): its log gives the normaliser, log-softmax does not
            # have to be computed (on CPUs it costs several times as much as softmax).
            normaliser = logits.amax(dim=-1) - draft.amax(dim=-1).log()
            token = normaliser - torch.bmm(probs[:, None], logits[..., None])[:, 0, 0]
            top_k = (top_k_probs * (normaliser[:, None] - logits.gather(-1, top_k_ids))).sum(dim=-1)
        ctx.save_for_backward(draft, probs, top_k_probs, top_k_ids)
        return token, top_k

    @staticmethod
    def backward(ctx, token_grad, top_k_grad):
        draft, probs, top_k_probs, top_k_ids = ctx.saved_tensors
        draft_scale = token_grad + top_k_grad * top_k_probs.sum(dim=-1)
        grad = (draft * draft_scale[:, None]).addcmul_(probs, token_grad[:, None], value=-1)
        grad.scatter_add_(-1, top_k_ids, -top_k_grad[:, None] * top_k_probs)
        return grad, None, None, None


def token_and_top_k_loss(logits: torch.Tensor, target: TargetDistribution) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropies of the draft distribution q against the target's distribution p, fp32 [S] each.

    token loss = -sum_x p(x) log q(x)                    (EAGLE, arXiv 2401.15077, section 3.2)
    top-k loss = -sum_{x in top-K of p} p(x) log q(x)    (HASS, arXiv 2408.15766, section 3.1), p not renormalised

    Args:
        logits: Draft logits [S, V].
        target: The target's distribution at the same rows.
    """
    return _CrossEntropies.apply(logits.float(), target.probs, target.top_k_probs, target.top_k_ids)


def masked_mean(values: torch.Tensor, num_items: torch.Tensor | float | None = None) -> torch.Tensor:
    """Sum of the supervised rows' losses over the number of supervised rows; 0 when there are none.

    Args:
        values: [S].
        num_items: What to divide by instead of S: with several processes or accumulation steps, the supervised rows
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


# Losses by name, each fp32 [S] from the drafts of one pass.
LOSSES: dict[str, Callable[[DraftedRows], torch.Tensor]] = {
    "feature": lambda rows: feature_loss(*rows.features),
    "token": lambda rows: rows.cross_entropies[0],
    "top_k": lambda rows: rows.cross_entropies[1],
}
