"""Hypotheses: settings that the files of heads do not determine, and their alternative values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..heads.base import DraftHead
from ..heads.block_config import spread_layers
from ..heads.layers import DraftAttention, LayerHeadConfig
from ..heads.mtp_config import MtpHeadConfig
from ..target.projection import output_weight
from .alternative import Alternative
from .block_settings import block_settings
from .evidence import BEFORE_NORM, Level
from .layouts import layouts

# Inputs of EAGLE heads that have the same width, so the weights do not tell them apart.
PAIRINGS = ("feature+shifted_token", "feature+token")
ROPE_BASES = (10000.0, 500000.0, 1000000.0)
PARTIAL = (0.25, 0.5)
MOST_TO_PERMUTE = 3


# ---------------------------------------------------------------------- what could be otherwise
def alternatives(heads: DraftHead, target: PreTrainedModel, depth: int, levels: Sequence[Level]) -> list[Alternative]:
    """Lists alternatives for everything that the tensors of these heads leave open.

    Args:
        heads: Heads, bound to the target.
        target: The target.
        depth: Number N of layers of the target.
        levels: Hidden states that were captured.
    """
    found = [*tap_sets(heads, depth, levels), *flags(heads), *ropes(heads, target), *partial_ropes(heads, target)]
    found += [*shifts(heads), *halves(heads), *borrowed_parts(heads, target), *block_settings(heads, target)]
    return [*found, *layouts(heads, target)]


def tap(heads: DraftHead, levels: tuple[Level, ...], what: str) -> Alternative:
    """Alternative that reads other hidden states."""
    numbers = [level for level in levels if isinstance(level, int)]
    in_config = hasattr(heads.config, "feature_layers") and len(numbers) == len(levels)
    return Alternative(
        "hidden states read",
        f"{list(levels)}{f' ({what})' if what else ''}",
        str(list(heads.feature_layers)),
        "taps",
        {"feature_layers": tuple(numbers)} if in_config else {},
        f"the heads were trained on the hidden states {list(levels)}, but heads of this kind read "
        f"{list(heads.feature_layers)}; train them anew on these",
        levels,
    )


def tap_sets(heads: DraftHead, depth: int, levels: Sequence[Level]) -> list[Alternative]:
    """Alternatives for the hidden states that are read.

    These are all hidden states one layer up or down, defaults of other programs, other orders, and the last hidden
    state without the final norm.
    """
    ours = tuple(depth if level == -1 else level for level in heads.feature_layers)
    if not ours:
        return []
    known: dict[tuple[Level, ...], str] = {}
    for step in (-1, 1):
        known.setdefault(tuple(level + step for level in ours), f"all {step:+d}")
    if len(ours) > 1:
        known.setdefault(ours[::-1], "the other way round")
    for other in permutations(ours) if len(ours) <= MOST_TO_PERMUTE else ():
        known.setdefault(other, "another order")
    if len(ours) == 3:
        known.setdefault((2, depth // 2, depth - 3), "the usual layers")
        known.setdefault((3, depth // 2 + 1, depth - 2), "the usual layers, counted after a layer")
        known.setdefault((1, depth // 2 - 1, depth - 4), "the usual layers minus one")
    if heads.trains_at_anchors:
        outputs = spread_layers(depth, len(ours))
        known.setdefault(outputs, "spread evenly")
        known.setdefault(tuple(level - 1 for level in outputs), "spread evenly, counted before a layer")
    if ours == (depth,):
        known.setdefault((BEFORE_NORM,), "without the final norm")
    available = set(levels)
    return [tap(heads, other, what) for other, what in known.items()
            if other != ours and len(set(other)) == len(other) and available.issuperset(other)]  # fmt: skip


def single_taps(heads: DraftHead, depth: int, levels: tuple[Level, ...]) -> Iterator[tuple[int, list[Alternative]]]:
    """For every part of the feature, alternatives that read any other hidden state as this part."""
    for place in range(len(levels)):
        others = [(*levels[:place], level, *levels[place + 1 :]) for level in range(depth + 1)]
        yield place, [tap(heads, other, "") for other in others if len(set(other)) == len(other) and other != levels]


def flags(heads: DraftHead) -> list[Alternative]:
    """Alternatives for norm flags that no tensor reveals, and for the token that a row is made of."""
    found = []
    for name in ("norm_before_residual", "norm_output"):
        if hasattr(heads.config, name):
            now = bool(getattr(heads.config, name))
            found.append(Alternative(name, str(not now), str(now), "norm flags", {name: not now}))
    inputs = getattr(heads.config, "inputs", None)
    if inputs in PAIRINGS:
        other = next(one for one in PAIRINGS if one != inputs)
        found.append(Alternative("inputs", other, inputs, "token shift", {"inputs": other}))
    return found


def ropes(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives for the rope: the usual bases, the target's rope, and no scaling."""
    held = _rope_of(heads)
    if held is None:
        return []
    now, wrap = held
    base = float(now.get("rope_theta") or 10000.0)
    theirs = target_rope(target)
    theirs.pop("partial_rotary_factor", None)
    others: list[dict[str, Any]] = [{"rope_type": "default", "rope_theta": other} for other in ROPE_BASES]
    if "rope_theta" in theirs:
        others.append({"rope_type": "default", "rope_theta": float(theirs["rope_theta"])})
        others.append(theirs)
    if now.get("rope_type", "default") != "default":
        others.append({"rope_type": "default", "rope_theta": base})
    found: dict[str, Alternative] = {}
    for other in others:
        same = other.get("rope_type", "default") == now.get("rope_type", "default") == "default"
        if other == now or (same and float(other["rope_theta"]) == base):
            continue
        words = _rope_words(other)
        found.setdefault(words, Alternative("rope", words, _rope_words(now), "rope", wrap(other)))
    return list(found.values())


def target_rope(target: PreTrainedModel) -> dict[str, Any]:
    """Rope parameters of the target; those of its full-attention layers if it has several kinds."""
    theirs = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return {**(theirs.get("full_attention") or theirs)}


def _rope_of(heads: DraftHead) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]] | None:
    """Rope parameters of the heads, and a function that makes config fields with others; `None` without rope."""
    config: Any = heads.config
    if isinstance(config, MtpHeadConfig):
        layer = dict(config.layer_config or {})
        kept = layer.get("rope_parameters") or {}
        whole = "rope_theta" in kept  # false if there is a rope for each kind of layer
        return (
            (dict(kept), lambda other: {"layer_config": {**layer, "rope_parameters": {**kept, **other}}})
            if whole
            else None
        )
    rotates = any(isinstance(module, LlamaRotaryEmbedding) for module in heads.modules())
    if not (rotates and isinstance(config, LayerHeadConfig)):
        return None
    return dict(getattr(config, "rope_parameters", None) or {}), lambda other: {"rope_parameters": other}


def partial_ropes(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives that rotate only a half or quarter of every attention head, or the share that the target does."""
    plain = (getattr(heads.config, "rope_parameters", None) or {}).get("rope_type", "default") == "default"
    layers = [module for module in heads.modules() if isinstance(module, DraftAttention)]
    whole = all(
        len(weight) == part.out_features
        for layer in layers
        for part in (layer.q_proj, layer.k_proj)
        for weight in part.parameters()
    )  # false for low-rank factors, which have no row per output dimension
    if not (plain and layers and whole):
        return []
    shares = {*PARTIAL, float(target_rope(target).get("partial_rotary_factor") or 1.0)} - {1.0}
    mend = (
        "the heads were trained with rope over part of every attention head, which {} heads do not support; train "
        "them anew"
    )
    return [Alternative("rope", f"over {share:.0%} of the dimensions", "over all", "rope", rotated=share,
                        mend=mend.format(heads.config.method)) for share in sorted(shares)]  # fmt: skip


def _rope_words(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type", "default")
    scaled = "" if kind == "default" else f", {kind} scaling by {rope.get('factor', '?')}"
    return f"base {float(rope.get('rope_theta') or 10000.0):g}{scaled}"


def shifts(heads: DraftHead) -> list[Alternative]:
    """Alternatives that pair tokens with an earlier or later feature.

    The later feature was computed from the token itself and reveals more about the next one, so this alternative must
    gain more to win.
    """
    if not heads.feature_layers:
        return []
    words = {1: "the feature two tokens before it", -1: "its own feature"}
    mend = (
        "tokens and features were paired differently in training; pair token t + 1 with feature t, as here, and train "
        "anew"
    )
    return [Alternative("a token is read with", said, "the feature of the token before", "token shift", mend=mend,
                        shift=shift, least=0.1 if shift < 0 else 0.0) for shift, said in words.items()]  # fmt: skip


@torch.no_grad()
def halves(heads: DraftHead) -> list[Alternative]:
    """Alternative with the halves of `fc` swapped, if embedding and feature have the same width."""
    found, sizes = [], (heads.config.embedding_size, heads.config.feature_size)
    for name, module in heads.named_modules():
        fuses = isinstance(module, nn.Linear) and name.rpartition(".")[2] == "fc" and len(heads.feature_layers) == 1
        if fuses and sizes[0] == sizes[1] and module.in_features == sum(sizes):
            found.append((f"{name}.weight", module.weight.roll(sizes[0], dims=1)))
    if not found:
        return []
    mend = (
        "in these files, embedding and feature enter `fc` in the other order; swap the halves of its weight's columns"
    )
    return [Alternative("halves of fc", "swapped", "as in the files", "row order", mend=mend, modules=dict(found))]


@torch.no_grad()
def borrowed_parts(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """Alternatives that use the target's weights instead of the heads' own `lm_head` or embedding.

    The heads' own weights may be random, damaged, or those of another target.
    """
    found = []
    lm_head = heads._modules.get("lm_head")
    if isinstance(lm_head, nn.Linear) and lm_head.in_features == heads.config.feature_size:
        rows = heads.trained_vocabulary
        weight = output_weight(target)
        weight = weight if rows is None else weight[rows.to(weight.device)]
        if weight.shape == lm_head.weight.shape:
            mend = (
                "the heads' own `lm_head` is not the trained one (it is random, or from another file); get the "
                "complete file"
            )
            found.append(Alternative("lm_head", "the target's", "the heads' own", "damaged weights", mend=mend,
                                     modules={"lm_head.weight": weight}))  # fmt: skip
    own = heads._modules.get("embed_tokens")
    if isinstance(own, nn.Embedding):
        ids = torch.arange(own.num_embeddings, device=target.device)
        weight = target.get_input_embeddings()(ids)
        if weight.shape == own.weight.shape:
            mend = "the heads' own embedding is not the trained one; remove it from the file to use the target's"
            found.append(Alternative("embedding", "the target's", "the heads' own", "damaged weights", mend=mend,
                                     modules={"embed_tokens.weight": weight}))  # fmt: skip
    return found
