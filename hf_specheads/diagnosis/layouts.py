"""Alternatives for errors of file converters that change no shape, so that no loader can notice them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from ..heads.base import DraftHead
from ..heads.block_config import BlockHeadConfig, embedding_scale_of
from ..heads.hydra import GroundedBlock
from ..heads.layers import DraftAttention, LayerHeadConfig
from .alternative import Alternative

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu")
STACKS = ("layers", "blocks", "lm_heads")  # module lists whose order matters
MOST_TO_REORDER = 8
SHARED_NAMES = ("lora_A", "lora_B")  # adapters of specialists, which are identified by name, not by order


@torch.no_grad()
def layouts(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives for weights in other programs' conventions, and for attention shapes that fit the same matrices."""
    found = [*attention_shapes(heads), *activations(heads), *norm_offsets(heads), *swapped_gates(heads)]
    found += [*interleaved(heads), *transposed(heads), *orders(heads), *tokens_first(heads)]
    return [*found, *embedding_scales(heads, target)]


# ---------------------------------------------------------------------- settings
def attention_shapes(heads: DraftHead) -> Iterator[Alternative]:
    """Alternatives with twice or half as many attention heads, of half or twice the width."""
    config = heads.config
    layers = [module for module in heads.modules() if isinstance(module, DraftAttention)]
    if not isinstance(config, LayerHeadConfig) or not layers or any(layer.q_norm is not None for layer in layers):
        return  # a norm of queries has the width of an attention head, so the width is certain
    queries, keys, width = config.num_attention_heads, config.num_key_value_heads or 1, config.head_dim or 1
    now = f"{queries} heads of width {width}, {keys} key heads"
    for times in (2.0, 0.5):
        other = [queries * times, keys * times, width / times]
        if all(size == int(size) and size >= 1 for size in other) and int(other[2]) % 2 == 0:
            heads_of, keys_of, wide = map(int, other)
            sizes = {"num_attention_heads": heads_of, "num_key_value_heads": keys_of, "head_dim": wide}
            said = f"{heads_of} heads of width {wide}, {keys_of} key heads"
            yield Alternative("attention", said, now, "attention shape", sizes)


def activations(heads: DraftHead) -> Iterator[Alternative]:
    """Alternatives with other activation functions of the MLP."""
    now = getattr(heads.config, "hidden_act", None)
    if now is None or not any(hasattr(module, "act_fn") for module in heads.modules()):
        return
    for other in ACTIVATIONS:
        if other != now:
            yield Alternative("hidden_act", other, now, "activation", {"hidden_act": other})


def embedding_scales(heads: DraftHead, target: PreTrainedModel) -> Iterator[Alternative]:
    """Alternative for targets that scale their embeddings: the heads were trained on unscaled ones."""
    scale = embedding_scale_of(target.get_input_embeddings())
    if scale == 1 or isinstance(heads.config, BlockHeadConfig):  # block drafters have a setting for the scale
        return
    mend = (
        f"the heads were trained on embeddings without this target's factor of {scale:.3g}; divide the weights that "
        f"read embeddings by {scale:.3g}, or train anew"
    )
    yield Alternative("embedding", f"not scaled by {scale:.3g}", "scaled", "embedding scale", mend=mend,
                      embedding=1 / scale)  # fmt: skip


# ---------------------------------------------------------------------- weights
def norm_offsets(heads: DraftHead) -> Iterator[Alternative]:
    """Alternatives for norm weights written as the difference from one (as in Gemma and Qwen 3.5), or vice versa."""
    norms = {name: weight for name, weight in heads.named_parameters()
             if weight.ndim == 1 and name.endswith("norm.weight")}  # fmt: skip
    if not norms:
        return
    for step, said in ((1.0, "plus one"), (-1.0, "minus one")):
        mend = f"the weights of norms follow another convention in these files; load them {said}"
        yield Alternative("weights of norms", said, "as in the files", "norm weights", mend=mend,
                          modules={name: weight + step for name, weight in norms.items()})  # fmt: skip


def swapped_gates(heads: DraftHead) -> Iterator[Alternative]:
    """Alternative with `gate_proj` and `up_proj` exchanged, as if a fused `gate_up_proj` was split the wrong way."""
    weights = dict(heads.named_parameters())
    found = {}
    for name, weight in weights.items():
        other = name.replace("gate_proj", "up_proj")
        if other != name and other in weights and weights[other].shape == weight.shape:
            found |= {name: weights[other].detach(), other: weight.detach()}
    if found:
        mend = "`gate_proj` and `up_proj` are swapped in these files; swap them back"
        yield Alternative("gate and up", "exchanged", "as in the files", "row order", mend=mend, modules=found)


def interleaved(heads: DraftHead) -> Iterator[Alternative]:
    """Alternatives for rows of `q_proj` and `k_proj` that were written for another pairing of rope dimensions.

    Files of the first Llama and GGUF pair neighbouring dimensions; transformers pairs the two halves.
    """
    for said, back in (("pairs of neighbours", False), ("pairs of halves", True)):
        found = {}
        for name, module in heads.named_modules():
            if isinstance(module, DraftAttention) and module.q_norm is None:
                order = torch.arange(module.head_dim).view(-1, 2).T.flatten()
                order = order.argsort() if back else order
                for part in ("q_proj", "k_proj"):
                    for which, weight in getattr(module, part).named_parameters():
                        if len(weight) != getattr(module, part).out_features:
                            return  # a low-rank factor has no row per output dimension
                        rows = weight.unflatten(0, (-1, module.head_dim))[:, order.to(weight.device)]
                        found[f"{name}.{part}.{which}"] = rows.flatten(0, 1)
        if found:
            mend = f"rows of `q_proj` and `k_proj` are written for rope over {said}; reorder them within each head"
            yield Alternative("rows of queries and keys", f"for rope over {said}", "as in the files", "row order",
                              mend=mend, modules=found)  # fmt: skip


def transposed(heads: DraftHead) -> Iterator[Alternative]:
    """Alternative with square matrices transposed, which keeps their shape."""
    found = {
        f"{name}.weight": module.weight.detach().T
        for name, module in heads.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == module.out_features
    }
    if found:
        mend = "square matrices are transposed in these files; transpose them"
        yield Alternative("square matrices", "transposed", "as in the files", "row order", mend=mend, modules=found)


def tokens_first(heads: DraftHead) -> Iterator[Alternative]:
    """Alternative for Hydra's blocks: inputs in the order embeddings, feature instead of feature, embeddings."""
    width = heads.config.feature_size
    found = {
        f"{name}.{part}.weight": getattr(module, part).weight.detach().roll(width, dims=1)
        for name, module in heads.named_modules()
        if isinstance(module, GroundedBlock)
        for part in ("linear", "residual")
    }
    if found:
        mend = "in these files the blocks read the tokens before the feature; move the feature's columns to the front"
        yield Alternative("inputs of blocks", "tokens, then feature", "feature, then tokens", "row order", mend=mend,
                          modules=found)  # fmt: skip


def orders(heads: DraftHead) -> Iterator[Alternative]:
    """Alternatives with layers, specialists or per-position heads reversed, or the first exchanged with another."""
    if any(part in name for name, _ in heads.named_parameters() for part in SHARED_NAMES):
        return
    stacks = {name: len(stack) for name in STACKS if isinstance(stack := heads._modules.get(name), nn.ModuleList)}
    count = max(stacks.values(), default=1)
    if not 1 < count <= MOST_TO_REORDER:
        return
    backwards = list(range(count))[::-1]
    others = {"backwards": backwards}
    for place in range(1, count):
        swapped = list(range(count))
        swapped[0], swapped[place] = place, 0
        if swapped != backwards:
            others[f"1 and {place + 1} exchanged"] = swapped
    for said, order in others.items():
        found = reordered(heads, [name for name, size in stacks.items() if size == count], order)
        if found:
            mend = f"layers or heads are in another order in these files ({said}); restore the order of training"
            yield Alternative("order of layers", said, "as in the files", "row order", mend=mend, modules=found)


def reordered(heads: DraftHead, stacks: list[str], order: list[int]) -> dict[str, torch.Tensor]:
    """Weights by name after reordering the stacks; empty if shapes do not allow the order."""
    weights, found = dict(heads.named_parameters()), {}
    for name, weight in weights.items():
        stack, _, rest = name.partition(".")
        place, _, rest = rest.partition(".")
        if stack in stacks and place.isdecimal() and order[int(place)] != int(place):
            other = weights.get(f"{stack}.{order[int(place)]}.{rest}")
            if other is None or other.shape != weight.shape:
                return {}
            found[name] = other.detach()
    return found
