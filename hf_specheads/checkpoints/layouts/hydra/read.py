"""Reads the authors' layout of Hydra and Hydra++ heads (arXiv 2402.05109): a state dict, `hydra_lm_head.pt`.

    hydra_mlp.{i}.{j}.linear.*            blocks of head i; in Hydra++ j = 1, 3, 5, ..., because dropout is in between
    hydra_mlp.{i}.{first}.res_connection.*    only if grounded: R of the first block
    hydra_lm_head.{i}(.1).*               projections [V, H], with bias
    prefix_embeding_layer.*               Hydra++: a one-layer Llama (the authors' spelling)
    input_embed_fn.weight                 a copy of the target's embedding, which identifies the target

The later blocks of a Hydra head are one module that is listed several times. `config.json` has no fields of the prefix
layer, because the authors build it from the target's config. Sizes are taken from the tensors; the size of an
attention head and the rope base from the stored rope table.
"""

from __future__ import annotations

from typing import Any

import torch

from ....errors import CheckpointKeysError, CheckpointShapeError, HeadConfigError, refuse_wrong_keys
from ....heads import HydraHeadConfig
from ..fields import (
    Conversion,
    RawConfig,
    Source,
    Tensors,
    are_copies,
    config_of,
    integer,
    layer_fields,
    matrix_shape,
    refuse_contradiction,
    special_tokens,
    target_of,
)
from ..keys import EMBEDDING, GATE_PROJ, K_PROJ, Q_PROJ, TARGET_NAME, attention_bias
from . import keys
from .keys import Numbering

NOT_KEPT = (keys.EMBEDDING_COPY, keys.PREFIX + EMBEDDING, keys.ROPE_TABLE)
ROPE_TOLERANCE = 0.01  # relative; tables are stored in the weights' dtype, which may have only 8 significant bits


def recognises(shapes: dict[str, tuple[int, ...]], config: RawConfig) -> bool:
    """Whether the keys are those of Hydra heads."""
    return any(key.startswith((keys.BLOCKS, keys.PROJECTIONS, keys.PREFIX)) for key in shapes)


def convert(source: Source) -> Conversion:
    """Builds config and weights of Hydra heads.

    Raises:
        CheckpointKeysError: If keys are missing or unknown, or heads or blocks are numbered with gaps.
        CheckpointShapeError: If sizes contradict one another or the config.
        HeadConfigError: If a field is missing or impossible.
    """
    raw_config, tensors, notes = source.raw_config, source.tensors, list[str]()
    numbering = _numbering(tensors)
    num_heads, num_blocks = _count(tensors, numbering)
    biases = [attention_bias(x) for x in "qkvo" if keys.PREFIX_LAYER + attention_bias(x) in tensors]
    names = numbering.names(num_heads, num_blocks, num_blocks, biases)
    refuse_wrong_keys(missing=set(names) - set(tensors), unknown=set(tensors) - set(names) - set(NOT_KEPT))
    tied = are_copies(_repeated(tensors, num_heads, num_blocks, numbering))
    fields: dict[str, Any] = {
        **_sizes(raw_config, tensors, numbering),
        "num_heads": num_heads,
        "num_blocks": num_blocks,
        "tied_blocks": tied,
        "grounded": numbering.grounded,
        "head_arch": "prefix-mlp" if numbering.prefixed else "mlp",
        "hidden_state_offset": _offset(raw_config),
        "target": target_of(raw_config.get(TARGET_NAME), tensors.get(keys.EMBEDDING_COPY)),
        **(_prefix_fields(raw_config, tensors, notes) if numbering.prefixed else {}),
        **special_tokens(raw_config),
    }
    for field, value in ((keys.NUM_HEADS, num_heads), (keys.GROUNDED, numbering.grounded)):
        if raw_config.get(field, value) != value:
            notes.append(f"{field}={value}, as the weights say (config.json: {raw_config[field]!r})")
    config = config_of(HydraHeadConfig, fields, source.name)
    stored = min(num_blocks, 1 + numbering.grounded) if tied else num_blocks
    names = numbering.names(num_heads, num_blocks, stored, biases)
    return Conversion(config, {ours: tensors[theirs] for theirs, ours in names.items()}, notes)


# ------------------------------------------------------------------ keys
def _numbering(tensors: Tensors) -> Numbering:
    """Infers the numbering from the keys."""
    return Numbering(
        prefixed=any(key.startswith(keys.PREFIX) for key in tensors),
        grounded=any(key.endswith(f".{keys.RESIDUAL}weight") for key in tensors),
    )


def _count(tensors: Tensors, numbering: Numbering) -> tuple[int, int]:
    """Counts the Hydra heads, and the blocks of each."""
    blocks: dict[int, set[int]] = {}
    for key in tensors:
        if match := keys.BLOCK.fullmatch(key):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    if not blocks or set(blocks) != set(range(len(blocks))):
        raise CheckpointKeysError(f"Hydra heads are numbered {sorted(blocks)}, expected 0, 1, 2, ... without gaps.")
    count = len(blocks[0])
    expected = {numbering.place(block) for block in range(count)}
    for head, places in blocks.items():
        if places != expected:
            raise CheckpointKeysError(
                f"the blocks of Hydra head {head} are numbered {sorted(places)}, expected {sorted(expected)}."
            )
    return len(blocks), count


def _repeated(tensors: Tensors, num_heads: int, num_blocks: int, numbering: Numbering) -> list[list[Tensors]]:
    """Blocks that may be repetitions: per Hydra head, all after the first if grounded, otherwise all."""
    return [
        [
            {part: tensors[key] for part, key in numbering.linear(head, block).items()}
            for block in range(int(numbering.grounded), num_blocks)
        ]
        for head in range(num_heads)
    ]


# ------------------------------------------------------------------ sizes and fields
def _sizes(raw_config: RawConfig, tensors: Tensors, numbering: Numbering) -> dict[str, int]:
    width, inputs = matrix_shape(tensors, numbering.linear(0, 0)["weight"])
    vocab_size, _ = matrix_shape(tensors, numbering.projection(0)["weight"])
    if inputs <= width * int(numbering.grounded):
        raise CheckpointShapeError(
            f"the first block of head 0 has the shape [{width}, {inputs}], expected [H, H + E] with the width E of an "
            "embedding; the file is damaged, download it again."
        )
    sizes = {"vocab_size": vocab_size, "hidden_size": width}
    refuse_contradiction(raw_config, sizes)
    narrow = inputs - width if numbering.grounded else width
    if keys.EMBEDDING_COPY in tensors:
        embedding = tensors[keys.EMBEDDING_COPY]
        narrow = narrow if numbering.grounded or embedding.ndim != 2 else embedding.shape[1]
        if tuple(embedding.shape) != (vocab_size, narrow):
            raise CheckpointShapeError(
                f"{keys.EMBEDDING_COPY} has the shape {list(embedding.shape)}, expected [{vocab_size}, {narrow}]."
            )
    return {**sizes, "feature_size": width, "embedding_size": narrow}


def _offset(raw_config: RawConfig) -> int:
    offset = raw_config.get(keys.OFFSET, 0)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise HeadConfigError(f"config.json has hidden_state_offset={offset!r}, expected a non-negative integer.")
    return offset


def _prefix_fields(raw_config: RawConfig, tensors: Tensors, notes: list[str]) -> dict[str, Any]:
    """Config fields of the prefix layer."""
    (queries, _), (rows, _), (middle, _) = (
        matrix_shape(tensors, keys.PREFIX_LAYER + name) for name in (Q_PROJ, K_PROJ, GATE_PROJ)
    )
    fields = layer_fields(raw_config, notes)
    table = tensors.get(keys.ROPE_TABLE)
    if table is None:
        heads = integer(raw_config, "num_attention_heads", notes)
        head_dim = queries // heads
    else:
        if not table.is_meta:
            fields["rope_parameters"] = _rope_of(table.double(), fields["rope_parameters"], notes)
        head_dim = 2 * table.numel()
        heads = queries // head_dim
    if heads * head_dim != queries or rows % head_dim:
        raise CheckpointShapeError(
            f"the prefix layer has {queries} query and {rows} key rows, expected multiples of its head size "
            f"{head_dim}; one of the two is damaged."
        )
    return {
        **fields,
        "intermediate_size": middle,
        "num_attention_heads": heads,
        "num_key_value_heads": rows // head_dim,
        "head_dim": head_dim,
        "attention_bias": keys.PREFIX_LAYER + attention_bias("q") in tensors,
        "attention_out_bias": keys.PREFIX_LAYER + attention_bias("o") in tensors,
    }


def _rope_of(table: torch.Tensor, parameters: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the rope parameters with the base of the stored table of inverse frequencies.

    Raises:
        CheckpointShapeError: If no base gives this table.
    """
    if table.ndim != 1:
        raise CheckpointShapeError(f"{keys.ROPE_TABLE} has the shape {list(table.shape)}, expected [head size / 2].")
    exponents = torch.arange(table.numel(), dtype=torch.float64) / table.numel()

    def fits(base: float) -> bool:
        return bool(((table - base**-exponents).abs() <= ROPE_TOLERANCE * base**-exponents).all())

    base = parameters["rope_theta"]
    if not fits(base) and table.numel() > 1 and 0 < table[-1] < 1:
        base = float(f"{float(table[-1]) ** (-1 / float(exponents[-1])):.3g}")
        notes.append(f"rope_theta={base} from the stored table")
    if not fits(base):
        raise CheckpointShapeError(
            f"{keys.ROPE_TABLE} is not a table of rotary frequencies for any base; the file is damaged."
        )
    return {**parameters, "rope_theta": base}
