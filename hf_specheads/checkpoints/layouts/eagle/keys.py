"""Names in the layout of EAGLE-1/2, HASS and PosS that differ from those of our heads."""

from __future__ import annotations

from ..keys import FIRST_LAYER, INPUT_NORM

# Norms of a variant of HASS, with their names in our heads.
EXTRA_NORMS = {
    "embed_layernorm.weight": "embed_layernorm.weight",
    "hidden_layernorm.weight": f"{FIRST_LAYER}{INPUT_NORM}",
    "lm_head_layernorm.weight": "lm_head_layernorm.weight",
}
