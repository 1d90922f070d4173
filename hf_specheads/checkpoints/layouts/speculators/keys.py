"""Names in the layouts of the library `speculators`."""

from __future__ import annotations

from ..dflash.keys import SELECTOR_FIELDS
from ..eagle3.keys import FLAGS, LEVELS
from ..keys import FIRST_LAYER, INPUT_NORM

# The field of `config.json` that names the type of the model, and the types that are supported.
KIND, EAGLE_KIND, EAGLE3_KIND, PEAGLE_KIND = "speculators_model_type", "eagle", "eagle3", "peagle"
DFLASH_KIND, DSPARK_KIND, DFLASH2_KIND, MTP_KIND = "dflash", "dspark", "dflash2", "mtp"
BLOCK_KINDS = (DFLASH_KIND, DSPARK_KIND, DFLASH2_KIND)
KINDS = (EAGLE_KIND, EAGLE3_KIND, PEAGLE_KIND, *BLOCK_KINDS, MTP_KIND)
# Entries of `architectures` for block drafters.
BLOCK_ARCHITECTURES = {DFLASH_KIND: "DFlashSpeculator", DSPARK_KIND: "DSparkSpeculator",
                       DFLASH2_KIND: "DFlash2DraftModel"}  # fmt: skip
# Fields of block drafters that stand outside `transformer_layer_config`.
AUX_LAYERS = "aux_hidden_state_layer_ids"
BLOCK_FIELDS = ("block_size", "mask_token_id", "sample_from_anchor", "shift_label", "sliding_window_non_causal",
                "projector_type", "target_hidden_size", "markov_rank", "markov_head_type",
                *SELECTOR_FIELDS)  # fmt: skip
# Nested objects of `config.json`, which hold the layer's fields and the name of the target.
LAYER_CONFIG, OWN_CONFIG = "transformer_layer_config", "speculators_config"
VERIFIER, VERIFIER_NAME = "verifier", "name_or_path"
# Fields of EAGLE-3 heads that stand outside `transformer_layer_config`.
DRAFT_VOCAB_SIZE, TARGET_HIDDEN_SIZE = "draft_vocab_size", "target_hidden_size"
EAGLE3_FIELDS = (DRAFT_VOCAB_SIZE, TARGET_HIDDEN_SIZE, *FLAGS, LEVELS)
MASK_TOKEN = "mask_token_id"
PEAGLE_FIELDS = (*EAGLE3_FIELDS, MASK_TOKEN)
# MTP: the prefix of its layer, the types of layers, module names with ours, and the names of copies of the target's
# embedding and `lm_head`. The last of these copies may be all NaN.
MTP_LAYER = "mtp_layers.0."
MTP_LAYER_TYPES = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MTP_NAMES = {"input_proj": "fc", "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm",
             "final_layernorm": "norm"}  # fmt: skip
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
# Rope fields, which some writers repeat outside `transformer_layer_config`.
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
LAYER_TYPES = LLAMA, QWEN3 = ("llama", "qwen3")
# EAGLE and HASS: prefixes of the keys and the three norms of a variant. `NORMS` and `PREFIXES` map them to the names
# in EAGLE's own layout.
FUSION, FUSION_BIAS, LAYER = "fusion_fc.", "fusion_fc.bias", "transformer."
LAST_NORM = "pre_lm_head_layernorm.weight"
NORMS = {
    "embedding_layernorm.weight": "embed_layernorm.weight",
    f"{LAYER}{INPUT_NORM}": "hidden_layernorm.weight",
    LAST_NORM: "lm_head_layernorm.weight",
}
PREFIXES = {FUSION: "fc.", LAYER: FIRST_LAYER}
