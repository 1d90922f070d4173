"""Reads MTP layers as `speculators` saves them: one layer under the library's names, with the whole target's config.

Copies of the target's embedding and `lm_head` in the file are ignored; one of them may be all NaN.
"""

from __future__ import annotations

from ....errors import UnknownFormatError
from ....heads.mtp_config import FILE_FIELDS, MtpHeadConfig
from ....target.mtp import joined_experts
from ..fields import Conversion, Source, config_of, integer, renamed, special_tokens
from . import keys


def convert(source: Source) -> Conversion:
    """Builds config and weights of MTP heads.

    Args:
        source: Checkpoint whose `raw_config` holds the fields of the layer, which are those of a target.

    Raises:
        HeadConfigError: If a field is missing or impossible.
        UnknownFormatError: If there are other tensors.
    """
    notes: list[str] = []
    tensors = {key: tensor for key, tensor in source.tensors.items() if key not in keys.OF_THE_TARGET}
    width = integer(source.raw_config, "hidden_size", notes)
    fields = {
        "hidden_size": width,
        "feature_size": width,
        "embedding_size": width,
        "vocab_size": integer(source.raw_config, "vocab_size", notes),
        "layer_config": {name: value for name, value in source.raw_config.items() if name not in FILE_FIELDS},
        "num_mtp_layers": 1,
        "native": False,
        **special_tokens(source.raw_config),
    }
    if len(tensors) < len(source.tensors):
        notes.append("embedding and `lm_head` in the file are copies of the target's; the target's own are used")
    return Conversion(
        config_of(MtpHeadConfig, fields, source.name), joined_experts(renamed(tensors, _our_name)), notes
    )


def _our_name(key: str) -> str:
    rest = key.removeprefix(keys.MTP_LAYER)
    if rest == key:
        raise UnknownFormatError(
            f"the file has a tensor {key}, but only files with the single MTP layer `{keys.MTP_LAYER}*` are supported."
        )
    module, _, kind = rest.rpartition(".")
    if module in keys.MTP_NAMES:
        return f"layers.0.{keys.MTP_NAMES[module]}.{kind}"
    return f"layers.0.block.{rest}"
