"""Reads the authors' layout of P-EAGLE heads (arXiv 2602.01469). In addition to EAGLE-3's tensors it has

    mask_hidden [1, 1, F]   the feature of mask rows, before `fc`
    layers.1.*, ...         further, ordinary decoder layers

The mask token is `mask_token_id` in `config.json`, or `ptd_token_id` in vLLM's spelling.
"""

from __future__ import annotations

import re

import torch

from ....errors import CheckpointKeysError, CheckpointShapeError
from ....heads import PEagleHeadConfig
from ..eagle3 import read as eagle3
from ..fields import Conversion, RawConfig, Source, config_of, number
from ..keys import INPUT_NORM, LAYER_WEIGHTS, POST_NORM

MASK_HIDDEN = "mask_hidden"
MASK_TOKEN, VLLM_MASK_TOKEN = "mask_token_id", "ptd_token_id"
DEEPER = re.compile(r"layers\.([1-9]\d*)\.(.+)")


def recognises(shapes: dict[str, tuple[int, ...]], config: RawConfig) -> bool:
    """Whether the keys are those of P-EAGLE heads."""
    return MASK_HIDDEN in shapes


def convert(source: Source) -> Conversion:
    """Builds config and weights of P-EAGLE heads; EAGLE-3's reader converts the shared part.

    Raises:
        HeadLoadError: One of its subclasses, as for EAGLE-3 heads.
    """
    tensors, raw_config = dict(source.tensors), source.raw_config
    mask = tensors.pop(MASK_HIDDEN, None)
    if mask is None:
        raise CheckpointKeysError(f"`{MASK_HIDDEN}` is missing: without it these are not P-EAGLE heads.")
    deeper = {key: tensors.pop(key) for key in list(tensors) if DEEPER.fullmatch(key)}
    layers = 1 + _deeper_layers(deeper)
    raw_layer = {name: value for name, value in raw_config.items() if name != "num_hidden_layers"}
    shared = eagle3.convert(Source(raw_layer, tensors, source.name))
    if tuple(mask.shape) != (1, 1, shared.tensors["fc.weight"].shape[1]):
        raise CheckpointShapeError(
            f"`{MASK_HIDDEN}` has the shape {list(mask.shape)}, expected [1, 1, "
            f"{shared.tensors['fc.weight'].shape[1]}] to fit fc.weight."
        )
    fields = {name: value for name, value in shared.config.to_dict().items() if name not in ("model_type", "method")}
    name = MASK_TOKEN if raw_config.get(MASK_TOKEN) is not None else VLLM_MASK_TOKEN
    token = 0 if raw_config.get(name) == 0 else int(number(raw_config, name, shared.assumptions))
    fields |= {"num_hidden_layers": layers, "mask_token_id": token}
    config = config_of(PEagleHeadConfig, fields, source.name)
    return Conversion(config, {**shared.tensors, **deeper, MASK_HIDDEN: mask}, shared.assumptions)


def _deeper_layers(tensors: dict[str, torch.Tensor]) -> int:
    """Counts the layers after the first.

    Raises:
        CheckpointKeysError: If a layer lacks a tensor, or layers are numbered with gaps.
    """
    found: dict[int, set[str]] = {}
    for key in tensors:
        if (layer := DEEPER.fullmatch(key)) is not None:
            found.setdefault(int(layer[1]), set()).add(layer[2])
    expected = {*LAYER_WEIGHTS, INPUT_NORM, POST_NORM}
    for number_, names in found.items():
        if missing := sorted(expected - names):
            raise CheckpointKeysError(f"layers.{number_} lacks {missing[:3]}; the file is damaged, download it again.")
    if found and set(found) != set(range(1, 1 + len(found))):
        raise CheckpointKeysError(
            f"the layers after the first are numbered {sorted(found)}, expected 1, 2, ... without gaps."
        )
    return len(found)
