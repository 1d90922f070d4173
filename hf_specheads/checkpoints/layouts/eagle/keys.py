"""Names in the layout of EAGLE-1/2, HASS and PosS; all others are those of our heads."""

from __future__ import annotations

from ..keys import FIRST_LAYER, INPUT_NORM

# The norms of a variant of HASS, and their names in our heads.
EXTRA_NORMS = {
    "embed_layernorm.weight": "embed_layernorm.weight",
    "hidden_layernorm.weight": f"{FIRST_LAYER}{INPUT_NORM}",
    "lm_head_layernorm.weight": "lm_head_layernorm.weight",
}
