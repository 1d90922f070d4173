"""Names in the layout of block drafters."""

from __future__ import annotations

from ..keys import INPUT_NORM, LAYER_WEIGHTS, POST_NORM

CONTEXT_NORM, NORM = "hidden_norm.weight", "norm.weight"
Q_NORM, K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
# Weights of a layer, without the layer's prefix.
LAYER_PARTS = (*LAYER_WEIGHTS, INPUT_NORM, POST_NORM, Q_NORM, K_NORM)
# The nested object that holds the fields of the method. Some writers put these fields at the top level instead.
NESTED = "dflash_config"
BLOCK_SIZE, MASK_TOKEN, TAPS, TARGET_DEPTH = "block_size", "mask_token_id", "target_layer_ids", "num_target_layers"
LAYER_TYPES, SLIDING, FULL, WINDOW = "layer_types", "sliding_attention", "full_attention", "sliding_window"
MULTIPLIER, SOFTCAP, EMBEDDING_SCALE = "output_multiplier", "final_logit_softcapping", "input_embedding_scale"
NON_CAUSAL = "sliding_window_non_causal"
MARKOV, CONFIDENCE = "markov_head.", "confidence_head."
MARKOV_IN, MARKOV_OUT = MARKOV + "markov_w1.weight", MARKOV + "markov_w2.weight"
# Additional tensors of a Markov head, by its kind.
MARKOV_PARTS = {"vanilla": (), "gated": ("gate_proj.weight", "gate_proj.bias"),
                "rnn": ("joint_proj.weight", "joint_proj.bias")}  # fmt: skip
CONFIDENCE_PARTS = (CONFIDENCE + "proj.weight", CONFIDENCE + "proj.bias")
SELECTOR = "candidate_selector."
SELECTOR_PARTS = tuple(
    SELECTOR + part for part in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
)
SELECTOR_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Tensors of the convolutions in every layer of DFlash 2, without the layer's prefix.
CONVOLUTION_PARTS = tuple(
    f"{place}_conv.{part}" for place in ("attention", "mlp") for part in ("base_kernel", "kernel_projection.weight")
)
GRU, PROJECTION = "prefix_gru.", "embed_proj."
GRU_PARTS = (GRU + "weight_ih_l0", GRU + "weight_hh_l0")
PROJECTION_PARTS = (PROJECTION + "0.weight", PROJECTION + "2.weight")
# Domino: `projector_type` identifies the method; `DOMINO_FIELDS` maps our field names to the authors'.
PROJECTOR, DOMINO = "projector_type", "domino"
DOMINO_FIELDS = {"gru_hidden_size": "gru_hidden_dim", "correction_rank": "emb_dim",
                 "plain_positions": "pure_draft_prefix_len"}  # fmt: skip
SHIFT_LABEL = "shift_label"
# Entries of `architectures` of z-lab's and SpecForge's files, and the common part of DeepSpec's.
ZLAB, ZLAB2, DEEPSPEC, SPECFORGE_DOMINO = "DFlashDraftModel", "DFlash2DraftModel", "DSparkModel", "DominoDraftModel"
