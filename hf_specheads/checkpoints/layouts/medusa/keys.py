"""Names in the layouts of Medusa: templates for `str.format` when writing, and for [`pattern`] when reading."""

from __future__ import annotations

import re

# In the authors' layout, the projection of a Medusa head follows its last block, so it has the next index.
BLOCK, PROJECTION = "{head}.{block}.linear.{part}", "{head}.{block}.weight"
SERVED_BLOCK, SERVED_PROJECTION = "blocks.{head}.layers.{block}.{part}", "lm_heads.{head}.weight"
# Fields of `config.json`.
NUM_HEADS, NUM_BLOCKS, SERVED_BIAS = "medusa_num_heads", "medusa_num_layers", "medusa_fc_bias"


def pattern(name: str) -> re.Pattern[str]:
    """Regular expression for all keys of a template, with the groups `head`, `block` and `part` of its fields."""
    number = r"(?P<{}>\d{{1,3}})"
    groups = {field: number.format(field) for field in ("head", "block")}
    return re.compile(name.replace(".", r"\.").format(**groups, part="(?P<part>weight|bias)"))
