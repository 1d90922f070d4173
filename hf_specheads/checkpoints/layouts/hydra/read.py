"""The authors' layout of Hydra and Hydra++ heads (arXiv 2402.05109): a state dict, `hydra_lm_head.pt`.

    hydra_mlp.{i}.{j}.linear.*            blocks of head i; with dropout between them in Hydra++, so j = 1, 3, 5, ...
    hydra_mlp.{i}.{first}.res_connection.*    only of grounded heads: R of the first block
    hydra_lm_head.{i}(.1).*               projections [V, H], with bias
    prefix_embeding_layer.*               Hydra++: a one-layer Llama (the name is spelled like this)
    input_embed_fn.weight                 a copy of the target's embedding, which tells the target

The later blocks of a head are one module that is listed several times. `config.json` has none of the prefix layer's
fields: the authors build it from the target's config. Sizes follow from the tensors, head size and rope base from the
stored rope table.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ....errors import CheckpointKeysError, CheckpointShapeError, HeadConfigError, refuse_wrong_keys
from ....heads import HydraHead, HydraHeadConfig
from ....heads.auto import build_config
from ..fields import Converted, activation, are_copies, integer, number, rope, special_tokens, target_of

EMBEDDING = "input_embed_fn.weight"
PREFIX = "prefix_embeding_layer."
ROPE_TABLE = f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"
NOT_KEPT = (EMBEDDING, f"{PREFIX}embed_tokens.weight", ROPE_TABLE)
ROPE_TOLERANCE = 0.01  # relative; tables are stored in the weights' dtype, which may have 8 bits
BLOCK = re.compile(r"hydra_mlp\.(\d{1,3})\.(\d{1,3})\.linear\.weight")


def recognises(shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> bool:
    """Whether the keys are those of Hydra heads."""
    return any(key.startswith(("hydra_mlp.", "hydra_lm_head.", PREFIX)) for key in shapes)


def convert(
    raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str, positions_per_specialist: int | None
) -> Converted:
    """Builds config and weights of Hydra heads.

    Args:
        raw_config: The checkpoint's `config.json`.
        tensors: Its tensors.
        name: Repository or folder name, for messages.
        positions_per_specialist: Has no meaning here.

    Raises:
        CheckpointKeysError: for missing or unknown keys, and heads or blocks numbered with gaps.
        CheckpointShapeError: if shapes contradict one another or the config.
        HeadConfigError: if a field is missing or impossible.
    """
    notes: list[str] = []
    prefixed = any(key.startswith(PREFIX) for key in tensors)
    step, first = (2, 1) if prefixed else (1, 0)
    num_heads, num_blocks = _count(tensors, step, first)
    grounded = f"hydra_mlp.0.{first}.res_connection.weight" in tensors
    names = _names(tensors, num_heads, num_blocks, prefixed, grounded)
    refuse_wrong_keys(missing=set(names) - set(tensors), unknown=set(tensors) - set(names) - set(NOT_KEPT))
    fields: dict[str, Any] = {
        **_sizes(raw_config, tensors, first, grounded),
        "num_heads": num_heads,
        "num_blocks": num_blocks,
        "tied_blocks": are_copies(_repeated(tensors, num_heads, num_blocks, step, first, grounded)),
        "grounded": grounded,
        "head_arch": "prefix-mlp" if prefixed else "mlp",
        "hidden_state_offset": _offset(raw_config),
        "target": target_of(raw_config.get("base_model_name_or_path"), tensors.get(EMBEDDING)),
        **(_layer_fields(raw_config, tensors, notes) if prefixed else {}),
    }
    for field, found in (("hydra_num_heads", num_heads), ("grounded_heads", grounded)):
        if raw_config.get(field, found) != found:
            notes.append(f"{field}={found}, as the weights say (config.json: {raw_config[field]!r})")
    fields |= special_tokens(raw_config)
    try:
        config = build_config(HydraHeadConfig, fields)
    except ValueError as error:
        raise HeadConfigError(f"config.json of {name!r} does not fit its weights: {error}") from error
    stored = min(num_blocks, 1 + grounded) if config.tied_blocks else num_blocks
    kept = {ours: tensors[theirs] for theirs, (ours, block) in names.items() if block < stored}
    _check_shapes(kept, config)
    return Converted(config, kept, notes)


# ------------------------------------------------------------------ keys
def _count(tensors: dict[str, torch.Tensor], step: int, first: int) -> tuple[int, int]:
    """Heads, and blocks of each."""
    blocks: dict[int, set[int]] = {}
    for key in tensors:
        if match := BLOCK.fullmatch(key):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    if not blocks or set(blocks) != set(range(len(blocks))):
        raise CheckpointKeysError(f"Hydra heads are numbered {sorted(blocks)}, expected 0, 1, 2, ... without gaps.")
    count = len(blocks.get(0, ()))
    expected = set(range(first, first + step * count, step))
    for head, found in blocks.items():
        if found != expected:
            raise CheckpointKeysError(
                f"the blocks of Hydra head {head} are numbered {sorted(found)}, expected {sorted(expected)}."
            )
    return len(blocks), count


def _names(
    tensors: dict[str, torch.Tensor], num_heads: int, num_blocks: int, prefixed: bool, grounded: bool
) -> dict[str, tuple[str, int]]:
    """Their key of every tensor, our key, and the block it belongs to (0 for all that is in no block)."""
    step, first, projection = (2, 1, ".1") if prefixed else (1, 0, "")
    names: dict[str, tuple[str, int]] = {}
    for head in range(num_heads):
        for part in ("weight", "bias"):
            names[f"hydra_lm_head.{head}{projection}.{part}"] = (f"lm_heads.{head}.{part}", 0)
            for block in range(num_blocks):
                theirs, ours = f"hydra_mlp.{head}.{first + step * block}", f"blocks.{head}.{block}"
                if block or not grounded:
                    names[f"{theirs}.linear.{part}"] = (f"{ours}.{part}", block)
                    continue
                names[f"{theirs}.linear.{part}"] = (f"{ours}.linear.{part}", 0)
                names[f"{theirs}.res_connection.{part}"] = (f"{ours}.residual.{part}", 0)
    if not prefixed:
        return names
    parts = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{x}_proj.bias" for x in "qkvo" if f"{PREFIX}layers.0.self_attn.{x}_proj.bias" in tensors]
    names |= {f"{PREFIX}layers.0.{part}": (f"prefix.{part}", 0) for part in parts}
    return names | {f"{PREFIX}norm.weight": ("prefix.norm.weight", 0)}


def _repeated(
    tensors: dict[str, torch.Tensor], num_heads: int, num_blocks: int, step: int, first: int, grounded: bool
) -> list[list[dict[str, torch.Tensor]]]:
    """The blocks of every head that the authors' code repeats: all after the first, of ungrounded heads all."""
    places = range(first + step * int(grounded), first + step * num_blocks, step)
    return [
        [{part: tensors[f"hydra_mlp.{head}.{place}.linear.{part}"] for part in ("weight", "bias")} for place in places]
        for head in range(num_heads)
    ]


# ------------------------------------------------------------------ sizes and fields
def _sizes(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], first: int, grounded: bool) -> dict[str, int]:
    block = tensors[f"hydra_mlp.0.{first}.linear.weight"]
    projection = next(tensor for key, tensor in tensors.items() if re.match(r"hydra_lm_head\.0\.(1\.)?weight", key))
    if block.ndim != 2 or projection.ndim != 2 or block.shape[1] <= block.shape[0] * int(grounded):
        raise CheckpointShapeError(
            f"the first block of head 0 has the shape {list(block.shape)}, its projection {list(projection.shape)}, "
            "expected [H, H + E] (ungrounded: [H, H]) and [V, H]."
        )
    width = block.shape[0]
    sizes = {"vocab_size": projection.shape[0], "hidden_size": width}
    for key, value in sizes.items():
        if (stated := raw_config.get(key)) is not None and stated != value:
            raise CheckpointShapeError(f"config.json says {key}={stated!r}, the weights say {value}; one is damaged.")
    narrow = block.shape[1] - width if grounded else width
    if EMBEDDING in tensors:
        embedding = tensors[EMBEDDING]
        narrow = narrow if grounded or embedding.ndim != 2 else embedding.shape[1]
        if tuple(embedding.shape) != (sizes["vocab_size"], narrow):
            raise CheckpointShapeError(
                f"{EMBEDDING} has the shape {list(embedding.shape)}, expected [{sizes['vocab_size']}, {narrow}]."
            )
    return {**sizes, "feature_size": width, "embedding_size": narrow}


def _check_shapes(tensors: dict[str, torch.Tensor], config: HydraHeadConfig) -> None:
    """Compares with the heads that the config describes."""
    with torch.device("meta"):
        expected = {key: tuple(tensor.shape) for key, tensor in HydraHead(config).state_dict().items()}
    refuse_wrong_keys(missing=set(expected) - set(tensors), unknown=set(tensors) - set(expected))
    for key, shape in expected.items():
        if tuple(tensors[key].shape) != shape:
            raise CheckpointShapeError(f"{key} has the shape {list(tensors[key].shape)}, expected {list(shape)}.")


def _offset(raw_config: dict[str, Any]) -> int:
    offset = raw_config.get("hidden_state_offset", 0)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise HeadConfigError(f"config.json has hidden_state_offset={offset!r}, expected an integer from 0.")
    return offset


def _rows(tensors: dict[str, torch.Tensor], key: str) -> int:
    if tensors[key].ndim != 2:
        raise CheckpointShapeError(f"{key} has the shape {list(tensors[key].shape)}, expected two dimensions.")
    return tensors[key].shape[0]


def _layer_fields(raw_config: dict[str, Any], tensors: dict[str, torch.Tensor], notes: list[str]) -> dict[str, Any]:
    """Fields of the prefix layer."""
    rows = {x: _rows(tensors, f"{PREFIX}layers.0.self_attn.{x}_proj.weight") for x in "qk"}
    parameters = rope(raw_config, notes)
    table = tensors.get(ROPE_TABLE)
    if table is None:
        heads = integer(raw_config, "num_attention_heads", notes)
        head_dim = rows["q"] // heads
    else:
        parameters = parameters if table.is_meta else _rope_of(table.double(), parameters, notes)
        head_dim = 2 * table.numel()
        heads = rows["q"] // head_dim
    if heads * head_dim != rows["q"] or rows["k"] % head_dim:
        raise CheckpointShapeError(
            f"the prefix layer has {rows['q']} query and {rows['k']} key rows, expected multiples of its head size "
            f"{head_dim}."
        )
    return {
        "intermediate_size": _rows(tensors, f"{PREFIX}layers.0.mlp.gate_proj.weight"),
        "num_attention_heads": heads,
        "num_key_value_heads": rows["k"] // head_dim,
        "head_dim": head_dim,
        "attention_bias": f"{PREFIX}layers.0.self_attn.q_proj.bias" in tensors,
        "attention_out_bias": f"{PREFIX}layers.0.self_attn.o_proj.bias" in tensors,
        "rms_norm_eps": number(raw_config, "rms_norm_eps", notes, default=1e-6),
        "hidden_act": activation(raw_config, notes),
        "rope_parameters": parameters,
        "max_position_embeddings": integer(raw_config, "max_position_embeddings", notes, default=2048),
    }


def _rope_of(table: torch.Tensor, parameters: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The rope parameters, with the base that the stored table of inverse frequencies has.

    Raises:
        CheckpointShapeError: if the table is that of no base.
    """
    if table.ndim != 1:
        raise CheckpointShapeError(f"{ROPE_TABLE} has the shape {list(table.shape)}, expected [head size / 2].")
    exponents = torch.arange(table.numel(), dtype=torch.float64) / table.numel()

    def fits(base: float) -> bool:
        return bool(((table - base**-exponents).abs() <= ROPE_TOLERANCE * base**-exponents).all())

    base = parameters["rope_theta"]
    if not fits(base) and table.numel() > 1 and 0 < table[-1] < 1:
        base = float(f"{float(table[-1]) ** (-1 / float(exponents[-1])):.3g}")
        notes.append(f"rope_theta={base} from the stored table")
    if not fits(base):
        raise CheckpointShapeError(f"{ROPE_TABLE} is no table of rotary frequencies of any base; the file is damaged.")
    return {**parameters, "rope_theta": base}
