"""Names in the layouts of Medusa, to be written with `format` and read with patterns."""

from __future__ import annotations

import re

# Head i has its blocks, and after the last of them its projection.
BLOCK, PROJECTION = "{head}.{block}.linear.{part}", "{head}.{block}.weight"
SERVED_BLOCK, SERVED_PROJECTION = "blocks.{head}.layers.{block}.{part}", "lm_heads.{head}.weight"
# Fields of `config.json`.
NUM_HEADS, NUM_BLOCKS, SERVED_BIAS = "medusa_num_heads", "medusa_num_layers", "medusa_fc_bias"


def pattern(name: str) -> re.Pattern[str]:
    """What matches all keys of a name above, with the groups `head`, `block` and `part` as far as it has them."""
    number = r"(?P<{}>\d{{1,3}})"
    groups = {field: number.format(field) for field in ("head", "block")}
    return re.compile(name.replace(".", r"\.").format(**groups, part="(?P<part>weight|bias)"))
