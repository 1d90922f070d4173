"""Copies of the target's embedding and `lm_head`, which some layouts of block drafters include."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ....draft_vocabulary import mapping_of
from ....errors import ExportError
from ....heads.block import BlockHead
from ....target.projection import output_weight
from ..fields import Tensors
from ..keys import D2T, EMBEDDING, LM_HEAD, T2D


def copied_target(heads: BlockHead, target: PreTrainedModel | None, elsewhere: str) -> PreTrainedModel:
    """Returns the target to copy from, after checks.

    Args:
        heads: Block drafters.
        target: The loaded target.
        elsewhere: Advice for heads that scale or cap embeddings or logits, for the error message.

    Raises:
        ExportError: If there is no target, or the heads scale embeddings or logits or cap the latter, for which the
            layout has no fields.
        WrongTargetError: If the heads were made for another target.
    """
    if target is None:
        raise ExportError("the layout has copies of the target's embedding and `lm_head`; pass the loaded `target=`.")
    heads.check_target(target)
    config = heads.config
    if (config.embedding_scale, config.logit_multiplier, config.logit_softcap) != (1, 1, None):
        raise ExportError(
            "these heads scale embeddings, or scale or cap logits, and the layout has no fields for that; "
            f"{elsewhere}."
        )
    return target


@torch.no_grad()
def copies_of(heads: BlockHead, target: PreTrainedModel, kept: torch.Tensor | None) -> Tensors:
    """Copies the target's embedding and the drafted rows of its `lm_head`; adds `d2t` and `t2d` if `kept` is given.

    Args:
        heads: Block drafters; the copies get their dtype.
        target: The target of the heads.
        kept: int64 [Vd], token ids that are drafted; `None` for all.
    """
    weight, ids = output_weight(target), torch.arange(heads.config.vocab_size, device=target.device)
    copies = {EMBEDDING: target.get_input_embeddings()(ids).to(heads.dtype)}
    if kept is None:
        return {**copies, LM_HEAD: weight.to(heads.dtype)}
    d2t, t2d = mapping_of(kept, heads.config.vocab_size)
    return {**copies, LM_HEAD: weight[kept.to(weight.device)].to(heads.dtype), D2T: d2t, T2D: t2d}
