"""Training runs of draft heads for the shipped target: those that are released, and those of studies.

Compute is counted in units of EAGLE steps; a share of 1 is `--eagle_steps` of them. Methods with several detached
passes (HASS, POSS) start from the EAGLE draft heads of the first stage, because six-pass objectives trail one-pass
training for a long time (`benchmarks/results/history/early_switch.json`). EAGLE itself and the control get the same
two stages. Methods that cannot start from EAGLE draft heads get the compute of both stages in one run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

DEPTH = 6
FINAL_SHARE = 0.4  # compute of the second stage, as a share of the first
WHOLE = 1.0 + FINAL_SHARE
HEAD_WIDTH = {"intermediate_size": 512}
# Width of the control: fc + one layer of this width have as many parameters as POSS-3's fc + two layers.
CONTROL_WIDTH = {"intermediate_size": 1280}


@dataclass(frozen=True)
class Run:
    """Training run of one draft head.

    Attributes:
        method: As in `AutoDraftHead.from_target`.
        passes: Draft positions of the unroll; `None` for the default of the draft heads.
        starts_from: Name of the run to start from, or `None` for random weights.
        options: Fields of the draft heads' config.
        share: Compute of the run, as a share of `--eagle_steps` EAGLE steps.
        training: Training arguments that differ from the common ones.
        tree: Fields of the evaluation's draft tree that differ from the common one.
        joint: Whether to train an adapter of the target too (Medusa-2); the target's forward is then part of every
            step.
        equal_steps: Whether `share` counts EAGLE's steps, whatever a step costs, instead of EAGLE's compute.
        on_corpus: Whether to train on the corpus's answers instead of the target's own.
    """

    method: str
    passes: int | None
    starts_from: str | None
    options: dict
    share: float = 1.0
    training: dict = field(default_factory=dict)
    tree: dict = field(default_factory=dict)
    joint: bool = False
    equal_steps: bool = False
    on_corpus: bool = False


def poss(positions: int) -> Run:
    """Returns a run of POSS with `positions` draft positions per specialist."""
    options = {"num_specialists": DEPTH // positions, "positions_per_specialist": positions}
    return Run("poss", DEPTH, "eagle-base", options, FINAL_SHARE)


def hass() -> Run:
    """Returns a run of HASS: one layer that is trained on its own drafts."""
    return Run("hass", DEPTH, "eagle-base", {}, FINAL_SHARE)


# Training arguments common to all methods, so that runs differ only in their draft heads.
COMMON = {"feature_loss_weight": 1.0, "token_loss_weight": 0.1, "top_k_loss_weight": 1.0, "pass_decay": 1.0}
# Draft heads that draft no features learn from the target's distribution alone.
TEACHER = {"feature_loss_weight": 0.0, "token_loss_weight": 1.0, "top_k_loss_weight": 0.0}
TEST_TIME = {**TEACHER, "pass_decay": 0.8}
ADAPTER = {"target_lora_rank": 4, "target_lora_alpha": 8.0, "learning_rate": 1.5e-3}
# Per-position draft heads share the target's `lm_head`; with projections of their own they would exceed the target.
SHARED = {"lm_head": "target"}
SMALL_LM = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 2}  # fmt: skip
# Block drafters have two layers, and so as many parameters as POSS-3.
BLOCK_HEADS = {**HEAD_WIDTH, "num_hidden_layers": 2}


def parallel(method: str, positions: int, **options: Any) -> Run:
    """Returns a run of Medusa or Hydra: one MLP per draft position, all trained at once."""
    heads = {"num_heads": positions, **SHARED, **options}
    return Run(method, positions, None, heads, WHOLE, TEACHER, {"depth": positions})


def block(method: str, block_size: int, **options: Any) -> Run:
    """Returns a run of a block drafter such as DFlash, which drafts a block in one forward and is trained at sampled
    rows, with the method's own losses."""
    heads = {**BLOCK_HEADS, "block_size": block_size, **options}
    training = {**dict.fromkeys(COMMON), "num_anchors": 64, "pass_decay": 0.7788}  # exp(-1/4), as for blocks of 8
    return Run(method, None, None, heads, WHOLE, training, {"depth": DEPTH})


def dspark() -> Run:
    """Returns a run of DSpark, a block drafter whose slots are corrected by their parents' tokens."""
    return block("dspark", DEPTH, anchor_slot="drafts", markov_rank=64)


def ablation(inputs: str) -> Run:
    """Returns a short run of EAGLE's input ablation; these runs differ in the inputs of the draft heads."""
    return Run("eagle", 1, None, {**HEAD_WIDTH, "inputs": inputs}, share=0.125)


def trained_with(run: Run, **training: Any) -> Run:
    """Returns the same run with other training arguments."""
    return replace(run, training={**run.training, **training})


TOTAL_VARIATION = {"top_k_loss_weight": 0.0, "total_variation_loss_weight": 1.0}
EAGLE3 = {**HEAD_WIDTH, "draft_vocab_size": 2048}
RELEASED = {
    "eagle-base": Run("eagle", 1, None, HEAD_WIDTH),
    "control-base": Run("eagle", 1, None, CONTROL_WIDTH),
    "poss3": poss(3),
    "hass": hass(),
    "eagle": Run("eagle", 1, "eagle-base", {}, FINAL_SHARE),
    "poss2": poss(2),
    "poss1": poss(1),
    "control": Run("hass", DEPTH, "control-base", {}, FINAL_SHARE),
    "eagle3-base": Run("eagle3", DEPTH, None, EAGLE3, 1.0, TEST_TIME),
    "eagle3": Run("eagle3", DEPTH, "eagle3-base", {}, FINAL_SHARE, TEST_TIME),
    "poss3-eagle3": Run("poss-eagle3", DEPTH, "eagle3-base", poss(3).options, FINAL_SHARE, TEST_TIME),
    "dflash": block("dflash", DEPTH + 1),
    "dspark": dspark(),
    "peagle": Run("peagle", DEPTH, None, {**EAGLE3, "num_hidden_layers": 2}, WHOLE, TEACHER),
    "poss3-lora": replace(poss(3), method="poss-lora"),
    "poss3-total-variation": trained_with(poss(3), **TOTAL_VARIATION),
    # Shipped for use, not for comparison: 15 times the compute of the second stage.
    "poss3-longer": replace(
        trained_with(poss(3), **TOTAL_VARIATION), starts_from="poss3-total-variation", options={}, share=6.0
    ),
    # With three blocks per head, Medusa has as many parameters as POSS-3.
    "medusa": parallel("medusa", DEPTH, num_blocks=3, tied_blocks=False),
    "medusa2": Run("medusa", DEPTH, "medusa", {}, 0.15, {**TEACHER, **ADAPTER}, joint=True),
    "hydra": parallel("hydra", 4),
    "hydra-plus": parallel("hydra", 4, head_arch="prefix-mlp", num_blocks=2, **HEAD_WIDTH),
    "draft-lm": Run("draft-lm", 1, None, SMALL_LM, WHOLE, TEACHER),
}
# Studies of single choices of the recipe: each differs from POSS-3, HASS or EAGLE in one thing, as does
# `poss3-total-variation` above.
STUDIES = {
    "inputs-shifted": ablation("feature+shifted_token"),
    "inputs-unshifted": ablation("feature+token"),
    "inputs-token": ablation("token"),
    "inputs-feature": ablation("feature"),
    "eagle-total-variation": trained_with(Run("eagle", 1, "eagle-base", {}, FINAL_SHARE), **TOTAL_VARIATION),
    "hass-total-variation": trained_with(hass(), **TOTAL_VARIATION),
    "hass-equal-steps": replace(hass(), equal_steps=True),
    "poss3-equal-steps": replace(poss(3), equal_steps=True),
    "poss3-no-feature-loss": trained_with(poss(3), feature_loss_weight=0.0),
    "poss3-no-token-loss": trained_with(poss(3), token_loss_weight=0.0),
    "poss3-no-top-k-loss": trained_with(poss(3), top_k_loss_weight=0.0),
    "poss3-acceptance": trained_with(poss(3), top_k_loss_weight=0.0, acceptance_loss_weight=1.0),
    "poss3-upstream-masks": trained_with(poss(3), upstream_masking=True),
    "poss3-averaged-passes": trained_with(poss(3), pass_reduction="mean"),
    "poss3-cold": replace(poss(3), starts_from=None, options={**poss(3).options, **HEAD_WIDTH}, share=WHOLE),
    "hass-cold": replace(hass(), starts_from=None, options=HEAD_WIDTH, share=WHOLE),
    "dspark-longer": replace(dspark(), share=2 * WHOLE),
    "corpus-base": Run("eagle", 1, None, HEAD_WIDTH, on_corpus=True),
    "poss3-corpus": replace(poss(3), starts_from="corpus-base", on_corpus=True),
}
RUNS = {**RELEASED, **STUDIES}
