"""Reads the layouts of Medusa heads (arXiv 2401.10774): three of the authors, and those of ModelOpt and of vLLM.

    authors, heads alone      `{i}.{j}.linear.{weight,bias}`, then `{i}.{n}.weight` [V, H], head i's own projection;
                              without it ("version 2"), the heads share the target's `lm_head`
    authors, Medusa-2         the same under `medusa_head.`, inside the checkpoint of a target trained with them
    ModelOpt                  the same under `medusa_heads.`, inside the checkpoint of a target
    vLLM                      `blocks.{i}.layers.{j}.{weight,bias}`, `lm_heads.{i}.weight`

The numbers of heads and blocks are taken from the keys, not from `config.json`: published files with 5 heads say 2. Of
a target's checkpoint only the heads and the embedding are read.
"""

from __future__ import annotations

from typing import Any

import torch

from ....errors import CheckpointKeysError, CheckpointShapeError
from ....heads import MedusaHeadConfig
from ...files import EMBEDDINGS, IN_TARGET
from ..fields import (
    Conversion,
    RawConfig,
    Source,
    Tensors,
    are_copies,
    boolean,
    config_of,
    integer,
    refuse_contradiction,
    special_tokens,
    target_of,
)
from ..keys import TARGET_NAME
from . import keys

BLOCK, PROJECTION = keys.pattern(keys.BLOCK), keys.pattern(keys.PROJECTION)
SERVED_BLOCK, SERVED_PROJECTION = keys.pattern(keys.SERVED_BLOCK), keys.pattern(keys.SERVED_PROJECTION)
Blocks = dict[int, list[Tensors]]  # by Medusa head: its blocks in order, each by the names of its parts


def recognises(shapes: dict[str, tuple[int, ...]], config: RawConfig) -> bool:
    """Whether the keys are those of Medusa heads, alone or inside the checkpoint of their target."""
    if any(IN_TARGET.match(key) for key in shapes):
        return True
    served = any(SERVED_BLOCK.fullmatch(key) for key in shapes)
    return served or (bool(shapes) and all(BLOCK.fullmatch(key) or PROJECTION.fullmatch(key) for key in shapes))


def convert(source: Source) -> Conversion:
    """Builds config and weights of Medusa heads.

    Raises:
        CheckpointKeysError: If keys are missing or unknown, or heads are numbered with gaps.
        CheckpointShapeError: If sizes contradict one another or the config.
        HeadConfigError: If a field is missing or impossible.
    """
    raw_config, notes = source.raw_config, list[str]()
    ours, embedding = _heads_alone(source, notes)
    blocks, projections = _parts(ours, boolean(raw_config, keys.SERVED_BIAS))
    num_heads, num_blocks = len(blocks), len(blocks[0])
    tied = are_copies(list(blocks.values()))
    sizes = _sizes(raw_config, blocks, projections, notes)
    if raw_config.get(keys.NUM_HEADS, num_heads) != num_heads:
        notes.append(f"{num_heads} heads, as the weights say (config.json: {raw_config[keys.NUM_HEADS]!r})")
    fields: dict[str, Any] = {
        **sizes,
        "num_heads": num_heads,
        "num_blocks": num_blocks,
        "tied_blocks": tied,
        "lm_head": "own" if projections else "target",
        "target": target_of(raw_config.get(TARGET_NAME), embedding),
        **special_tokens(raw_config),
    }
    config = config_of(MedusaHeadConfig, fields, source.name)
    stored = 1 if tied else num_blocks
    weights = {f"lm_heads.{head}.weight": weight for head, weight in projections.items()}
    for head, parts in blocks.items():
        for index in range(stored):
            weights |= {f"blocks.{head}.{index}.{part}": tensor for part, tensor in parts[index].items()}
    return Conversion(config, weights, notes)


# ------------------------------------------------------------------ keys
def _heads_alone(source: Source, notes: list[str]) -> tuple[Tensors, torch.Tensor | None]:
    """Returns the heads' tensors without prefix, and the embedding of the target if the file contains it."""
    tensors = source.tensors
    inside = {IN_TARGET.sub("", key, count=1): value for key, value in tensors.items() if IN_TARGET.match(key)}
    if len(inside) in (0, len(tensors)):
        return inside or tensors, None
    notes.append(
        f"only the heads are read; load the target from {source.name!r} too, because it was trained with them"
    )
    embedding = next((tensors[key] for key in EMBEDDINGS if key in tensors), None)
    return inside, embedding


def _parts(tensors: Tensors, served_bias: bool | None) -> tuple[Blocks, dict[int, torch.Tensor]]:
    """Sorts tensors into the blocks of every Medusa head, in order, and projections by head.

    Args:
        tensors: Tensors of the heads. Blocks of vLLM's layout without a bias get a bias of 0.
        served_bias: vLLM's field `medusa_fc_bias`: whether the blocks should have biases.
    """
    blocks: dict[int, dict[int, Tensors]] = {}
    projections: dict[int, torch.Tensor] = {}
    places: dict[int, int] = {}
    unknown = []
    for key, tensor in tensors.items():
        if match := BLOCK.fullmatch(key) or SERVED_BLOCK.fullmatch(key):
            blocks.setdefault(int(match["head"]), {}).setdefault(int(match["block"]), {})[match["part"]] = tensor
        elif match := PROJECTION.fullmatch(key) or SERVED_PROJECTION.fullmatch(key):
            projections[int(match["head"])] = tensor
            places[int(match["head"])] = int(match["block"]) if match.re is PROJECTION else -1
        else:
            unknown.append(key)
    if unknown:
        raise CheckpointKeysError(
            f"the file has tensors that Medusa heads do not have: {sorted(unknown)[:6]}. A reduced vocabulary "
            "(`token_map`) is not supported; otherwise the file is of another kind, or damaged."
        )
    _check_numbering(blocks, projections, places)
    ordered = {head: [blocks[head][index] for index in sorted(blocks[head])] for head in sorted(blocks)}
    every = [part for head in ordered.values() for part in head]
    without = [part for part in every if "bias" not in part]
    served = any(SERVED_BLOCK.fullmatch(key) for key in tensors)
    if without and (len(without) < len(every) or not served or served_bias):
        raise CheckpointKeysError(
            f"{len(without)} of {len(every)} blocks have no bias; in the authors' files all blocks have one, and in "
            "vLLM's all or none, as `medusa_fc_bias` says. The file is damaged, download it again."
        )
    for parts in without:
        parts["bias"] = parts["weight"].new_zeros(parts["weight"].shape[:1])
    return ordered, dict(sorted(projections.items()))


def _check_numbering(
    blocks: dict[int, dict[int, Tensors]], projections: dict[int, torch.Tensor], places: dict[int, int]
) -> None:
    if not blocks or set(blocks) != set(range(len(blocks))):
        raise CheckpointKeysError(f"Medusa heads are numbered {sorted(blocks)}, expected 0, 1, 2, ... without gaps.")
    count = len(blocks[0])
    for head, indices in blocks.items():
        if set(indices) != set(range(count)) or any("weight" not in parts for parts in indices.values()):
            raise CheckpointKeysError(
                f"head {head} has the blocks {sorted(indices)}, expected a `weight` for each of 0 to {count - 1}, as "
                "in head 0."
            )
    if projections and (set(projections) != set(blocks) or not set(places.values()) <= {count, -1}):
        raise CheckpointKeysError(
            f"projections to the vocabulary exist for heads {sorted(projections)}, expected one after the {count} "
            f"block(s) of each of the {len(blocks)} heads, or none."
        )


# ------------------------------------------------------------------ sizes
def _sizes(
    raw_config: RawConfig,
    blocks: Blocks,
    projections: dict[int, torch.Tensor],
    notes: list[str],
) -> dict[str, int]:
    width = blocks[0][0]["weight"].shape[0]
    for head, parts_of_head in blocks.items():
        for index, parts in enumerate(parts_of_head):
            shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
            if shapes != {"weight": (width, width), "bias": (width,)}:
                raise CheckpointShapeError(
                    f"block {index} of head {head} has the shapes {shapes}, expected [{width}, {width}] and [{width}]."
                )
    vocab_size = projections[0].shape[0] if projections else integer(raw_config, "vocab_size", notes)
    for head, weight in projections.items():
        if tuple(weight.shape) != (vocab_size, width):
            raise CheckpointShapeError(
                f"the projection of head {head} has the shape {list(weight.shape)}, expected [{vocab_size}, {width}]."
            )
    sizes = {"vocab_size": vocab_size, "hidden_size": width}
    refuse_contradiction(raw_config, sizes)
    notes.append(f"embedding_size={width}, as wide as the features")
    return {**sizes, "feature_size": width, "embedding_size": width}
