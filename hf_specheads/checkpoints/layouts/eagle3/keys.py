"""Names in the layouts of EAGLE-3; all others are those of our heads."""

from __future__ import annotations

from ..keys import FIRST_LAYER

NORM, HIDDEN_NORM = "norm.weight", "hidden_norm.weight"
# The one decoder layer's prefix, as the authors write it; ModelOpt and `speculators` write ours.
MIDLAYER = "midlayer."
Q_NORM, K_NORM = (f"{FIRST_LAYER}self_attn.{x}_norm.weight" for x in "qk")
# Norms of the levels, before `fc`: one over all of them, or one for each.
LEVELS_NORM, LEVEL_NORMS = "input_norm.", "fc_norm."
# What keys of the authors and of older versions begin with, and ours.
PREFIXES = {
    MIDLAYER: FIRST_LAYER,
    **{f"aux_norm_{level}.": f"{LEVEL_NORMS}{index}." for index, level in enumerate(("low", "mid", "high"))},
}
# Fields of `config.json`, named as ours.
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
LEVELS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_LEVELS = "target_layer_ids"  # of DeepSpec
