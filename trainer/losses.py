"""Losses of one draft position, as plain functions over the supervised rows of a batch.

Letters: S supervised rows, H feature width, V vocabulary, K of the top-k loss. A row of the draft head predicts the
feature that follows it, and through the target's `lm_head` the distribution of the token after that:

    row          (x_1, f_0)   (x_2, f_1)   (x_3, f_2)
    feature of   f_1          f_2          f_3
    token        x_2          x_3          x_4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TargetDistribution:
    """What the target says at the supervised rows; made once per batch and used by every pass.

    Attributes:
        probs: fp32 [S, V], the target's distribution.
        top_k_probs: fp32 [S, K], its K largest probabilities, **not** renormalised.
        top_k_ids: int64 [S, K], their token ids.
    """

    probs: torch.Tensor
    top_k_probs: torch.Tensor
    top_k_ids: torch.Tensor

    @classmethod
    def from_logits(cls, logits: torch.Tensor, top_k: int) -> TargetDistribution:
        """From target logits [S, V] of any float dtype; a `top_k` above V means all of V."""
        probs = torch.softmax(logits.float(), dim=-1)  # [S, V]
        top_k_probs, top_k_ids = probs.topk(min(top_k, probs.shape[-1]), dim=-1)  # [S, K] each
        return cls(probs, top_k_probs, top_k_ids)


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
