"""A training step as it is usually written: one dense mask over all streams, and full [B, T, V] logits in fp32.

The benchmark `step` compares times with this step and checks gradients against it. It uses the heads' own modules, but
not the package's unroll, attention or losses. Every pass fuses and projects the rows of all streams again and attends
to S * T columns under an additive mask, as the training code of HASS, PosS and EAGLE-3 essentially does. Every row of
the batch is one document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_specheads.heads.base import DraftHead

Drafted = tuple[torch.Tensor, torch.Tensor | None, int]  # logits [B, T, V], features [B, T, H] or None, offset


def dense_step(
    heads: DraftHead,
    *,
    features: torch.Tensor,
    next_token_ids: torch.Tensor,
    target_features: torch.Tensor,
    embed_tokens: Callable[[torch.Tensor], torch.Tensor],
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    num_passes: int,
    weights: dict[str, float],
) -> float:
    """Adds the gradients of one batch to `.grad`, for the losses `feature`, `token` and `top_k` (K = 10).

    Args:
        heads: EAGLE, HASS, POSS (full or LoRA), EAGLE-3 or POSS-on-EAGLE-3 heads.
        features, next_token_ids, target_features: [B, T, ...] as in [`trainer.Unroll`]; all rows are supervised.
        embed_tokens, lm_head: Modules of the target.
        num_passes: D.
        weights: Weights of the losses, by name.

    Returns:
        The weighted loss.
    """
    with torch.no_grad():
        target = _target(lm_head(target_features).float(), heads.draft_vocabulary)
        embeddings = embed_tokens(next_token_ids)
    detached = heads.passes_are_detached
    passes = (_detached_passes if detached else _test_time_passes)(heads, features, embeddings, lm_head, num_passes)
    total, gathered = 0.0, []
    for drafted in passes:
        loss = _loss(drafted, target, target_features, weights)
        total += float(loss.detach())
        if detached:
            loss.backward()
        else:
            gathered.append(loss)
    if gathered:
        torch.stack(gathered).sum().backward()
    return total


def _detached_passes(
    heads: DraftHead, features: torch.Tensor, embeddings: torch.Tensor, lm_head: Callable, num_passes: int
) -> Iterator[Drafted]:
    """Runs the passes of EAGLE, HASS and POSS: with `last` earlier passes, a pass reads stream 0 at lags of `last` and
    more, and stream s at lag `last` - s."""
    index = torch.arange(features.shape[1])
    lag = index[:, None] - index
    streams = [features]
    for last in range(num_passes):
        blocks = [lag >= last] + [lag == last - stream for stream in range(1, last + 1)]
        fused = torch.cat([heads.fuse(embeddings, stream) for stream in streams], dim=1)
        drafted = _dense_forward(heads, fused, index.repeat(last + 1), torch.cat(blocks, dim=1), last)
        yield lm_head(drafted), drafted, 0
        streams.append(torch.cat([features[:, :1], drafted.detach()[:, :-1]], dim=1))


def _test_time_passes(
    heads: DraftHead, features: torch.Tensor, embeddings: torch.Tensor, lm_head: Callable, num_passes: int
) -> Iterator[Drafted]:
    """Runs the passes of EAGLE-3's training-time test: each reads stream 0 up to its own row, and only its own row of
    later streams."""
    index = torch.arange(features.shape[1])
    lag = index[:, None] - index
    if heads.embed_tokens is not None:
        raise ValueError("the dense unroll does not support heads that have their own embedding.")
    fused, positions = [heads.fuse(embeddings, features)], [index]
    for offset in range(num_passes):
        visible = torch.cat([lag >= 0] + [lag == 0] * offset, dim=1)
        states = _dense_forward(heads, torch.cat(fused, dim=1), torch.cat(positions), visible, offset)
        yield heads.draft_logits(states), None, offset
        ahead = (index + offset + 1).clamp_max(len(index) - 1)
        fused.append(heads.fuse_drafted(embeddings[:, ahead], states))
        positions.append(index + offset + 1)


def _dense_forward(
    heads: DraftHead, fused: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, position: int
) -> torch.Tensor:
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
    return heads(
        fused, positions.expand(len(fused), -1), mask, specialist=heads.specialist_of(position),
        num_queries=visible.shape[0], attention_function=eager_attention_forward,
    )  # fmt: skip


def _target(logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """Returns the target's distribution [B, T, V], or that over the draft vocabulary, which is 0 in rows whose most
    likely token is not in the draft vocabulary."""
    if vocabulary is None:
        return F.softmax(logits, dim=-1)
    known = torch.isin(logits.argmax(dim=-1), vocabulary)[..., None]
    return F.softmax(logits[..., vocabulary], dim=-1) * known


def _loss(
    drafted: Drafted, target: torch.Tensor, target_features: torch.Tensor, weights: dict[str, float]
) -> torch.Tensor:
    """Returns the weighted losses of one pass, summed over the rows whose target is in the batch and divided by the
    number of all rows."""
    logits, features, offset = drafted
    rows, target = target.shape[0] * target.shape[1], target[:, offset:]
    log_draft = F.log_softmax(logits[:, : target.shape[1]].float(), dim=-1)
    total = logits.new_zeros(())
    if token := weights.get("token"):
        total = total - token * (target * log_draft).sum()
    if top_k := weights.get("top_k"):
        largest, ids = target.topk(min(10, target.shape[-1]), dim=-1)
        total = total - top_k * (largest * log_draft.gather(-1, ids)).sum()
    if features is not None and (feature := weights.get("feature")):
        losses = F.smooth_l1_loss(features.float(), target_features.float(), reduction="none").mean(dim=-1)
        total = total + feature * losses.sum()
    return total / rows
