"""Names in the layouts of EAGLE-3 that differ from those of our heads, or that several modules use."""

from __future__ import annotations

from ..keys import FIRST_LAYER

NORM, HIDDEN_NORM = "norm.weight", "hidden_norm.weight"
# The authors' prefix of the only decoder layer. ModelOpt and `speculators` write `layers.0.`, as our heads do.
MIDLAYER = "midlayer."
Q_NORM, K_NORM = (f"{FIRST_LAYER}self_attn.{x}_norm.weight" for x in "qk")
# Prefixes of the norms before `fc`: one norm over all levels, or one norm per level.
LEVELS_NORM, LEVEL_NORMS = "input_norm.", "fc_norm."
# Prefixes of the authors and of older versions, and the prefixes of our heads that replace them.
PREFIXES = {
    MIDLAYER: FIRST_LAYER,
    **{f"aux_norm_{level}.": f"{LEVEL_NORMS}{index}." for index, level in enumerate(("low", "mid", "high"))},
}
# Boolean fields of `config.json`; our config has the same names.
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
LEVELS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_LEVELS = "target_layer_ids"  # DeepSpec's field for the levels
