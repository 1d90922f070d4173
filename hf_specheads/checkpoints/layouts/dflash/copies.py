"""Copies of a target's embedding and `lm_head`, which belong to some layouts of block drafters."""

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
    """The target to copy from.

    Args:
        heads: Block drafters.
        target: The loaded target.
        elsewhere: Where heads can go that scale what they read and draft.

    Raises:
        ExportError: without a target, or if the heads draft with more than its plain matrices.
        WrongTargetError: if it is not theirs.
    """
    if target is None:
        raise ExportError("the layout has copies of the target's embedding and `lm_head`; pass the loaded `target=`.")
    heads.check_target(target)
    config = heads.config
    if (config.embedding_scale, config.logit_multiplier, config.logit_softcap) != (1, 1, None):
        raise ExportError(
            f"these heads scale embeddings or logits, or cap them, which the layout has no field for; {elsewhere}."
        )
    return target


@torch.no_grad()
def copies_of(heads: BlockHead, target: PreTrainedModel, kept: torch.Tensor | None) -> Tensors:
    """Copies of the target's weights, and which tokens are drafted.

    Args:
        heads: Heads, whose type the copies get.
        target: Their target.
        kept: int64 [Vd], drafted tokens; `None` for all.
    """
    weight, ids = output_weight(target), torch.arange(heads.config.vocab_size, device=target.device)
    copies = {EMBEDDING: target.get_input_embeddings()(ids).to(heads.dtype)}
    if kept is None:
        return {**copies, LM_HEAD: weight.to(heads.dtype)}
    d2t, t2d = mapping_of(kept, heads.config.vocab_size)
    return {**copies, LM_HEAD: weight[kept.to(weight.device)].to(heads.dtype), D2T: d2t, T2D: t2d}
