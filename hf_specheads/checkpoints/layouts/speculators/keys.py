"""Names in the layouts of the library `speculators`."""

from __future__ import annotations

from ..dflash.keys import SELECTOR_FIELDS
from ..eagle3.keys import FLAGS, LEVELS
from ..keys import FIRST_LAYER, INPUT_NORM

# The field of `config.json` that names the type of the model, and the types that are read.
KIND, EAGLE_KIND, EAGLE3_KIND, PEAGLE_KIND = "speculators_model_type", "eagle", "eagle3", "peagle"
DFLASH_KIND, DSPARK_KIND, DFLASH2_KIND, MTP_KIND = "dflash", "dspark", "dflash2", "mtp"
BLOCK_KINDS = (DFLASH_KIND, DSPARK_KIND, DFLASH2_KIND)
KINDS = (EAGLE_KIND, EAGLE3_KIND, PEAGLE_KIND, *BLOCK_KINDS, MTP_KIND)
# What kinds of block drafters are called in `architectures`.
BLOCK_ARCHITECTURES = {DFLASH_KIND: "DFlashSpeculator", DSPARK_KIND: "DSparkSpeculator",
                       DFLASH2_KIND: "DFlash2DraftModel"}  # fmt: skip
# Fields of block drafters that stand beside the layer's.
AUX_LAYERS = "aux_hidden_state_layer_ids"
BLOCK_FIELDS = ("block_size", "mask_token_id", "sample_from_anchor", "shift_label", "sliding_window_non_causal",
                "projector_type", "target_hidden_size", "markov_rank", "markov_head_type",
                *SELECTOR_FIELDS)  # fmt: skip
# The objects that hold the layer's fields, and the target's name.
LAYER_CONFIG, OWN_CONFIG = "transformer_layer_config", "speculators_config"
VERIFIER, VERIFIER_NAME = "verifier", "name_or_path"
# Fields of EAGLE-3 heads that stand beside the layer's.
DRAFT_VOCAB_SIZE, TARGET_HIDDEN_SIZE = "draft_vocab_size", "target_hidden_size"
EAGLE3_FIELDS = (DRAFT_VOCAB_SIZE, TARGET_HIDDEN_SIZE, *FLAGS, LEVELS)
MASK_TOKEN = "mask_token_id"
PEAGLE_FIELDS = (*EAGLE3_FIELDS, MASK_TOKEN)
# MTP: its layer, the part of a name that stands for ours, and copies of the target's `lm_head`, one of them all NaN.
MTP_LAYER = "mtp_layers.0."
MTP_LAYER_TYPES = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MTP_NAMES = {"input_proj": "fc", "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm",
             "final_layernorm": "norm"}  # fmt: skip
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
# Fields of the rope, which some writers repeat beside the layer's.
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
LAYER_TYPES = LLAMA, QWEN3 = ("llama", "qwen3")
# EAGLE and HASS: the three norms of a variant, and what all other keys begin with, by EAGLE's own names.
FUSION, FUSION_BIAS, LAYER = "fusion_fc.", "fusion_fc.bias", "transformer."
LAST_NORM = "pre_lm_head_layernorm.weight"
NORMS = {
    "embedding_layernorm.weight": "embed_layernorm.weight",
    f"{LAYER}{INPUT_NORM}": "hidden_layernorm.weight",
    LAST_NORM: "lm_head_layernorm.weight",
}
PREFIXES = {FUSION: "fc.", LAYER: FIRST_LAYER}
