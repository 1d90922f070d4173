"""`DraftHeadTrainingArguments`: transformers' `TrainingArguments` with options for the unroll, data and evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from transformers import TrainingArguments

from .unroll.chunks import CHUNK_ROWS
from .unroll.losses import LOSSES

BACKWARDS = ("per_pass", "summed")
PASS_REDUCTIONS = ("sum", "mean")
NOISE_SCALINGS = ("none", "eagle", "neftune")
PACKING_STRATEGIES = ("best_fit", "batch")
SHARDINGS = ("fsdp2", "zero3")
STEPS_IN_BACKWARD = ("lomo", "adalomo")


@dataclass
class DraftHeadTrainingArguments(TrainingArguments):
    """Arguments of [`DraftHeadTrainer`].

    Args:
        num_passes: Number of draft positions to train, one pass of the unroll each. Default: `trained_positions` of
            the draft heads' config, else the method's: EAGLE trains 1 pass, HASS 3, POSS
            `num_specialists * positions_per_specialist`.
        feature_loss_weight: Weight of the SmoothL1 loss between drafted and target features (EAGLE: 1.0). This and
            every other loss weight, and `pass_decay`, default to the method's value; see [`methods.DEFAULTS`].
        token_loss_weight: Weight of the cross-entropy against the target's distribution (EAGLE: 0.1).
        top_k_loss_weight: Weight of the top-K cross-entropy (HASS: 1.0; EAGLE and PosS train with 0.0).
        next_token_loss_weight: Weight of the cross-entropy against the token that follows in the data (Medusa: 1.0).
        total_variation_loss_weight: Weight of 1 - a, where a is the probability that a sampled draft token is
            accepted.
        acceptance_loss_weight: Weight of -log a.
        lk_loss_weight: Weight of the LK loss, which moves from KL(p, q) to 1 - a. [`unroll.losses`] describes every
            loss.
        confidence_loss_weight: Weight of the loss on the predicted acceptance (DSpark: 1.0).
        selector_loss_weight: Weight of the loss on the choice among candidates (DFlash 2: 0.5).
        base_loss_weight: Weight, from 0 to 1, of the loss on drafts before they are corrected (Domino: 1.0). This is
            the weight at the start; it falls linearly to 0 at the end of training. The other losses are multiplied by
            1 minus the current weight.
        lk_decay: Decay of the KL term of the LK loss, whose weight is `exp(-lk_decay * a)` (arXiv 2602.23881: 3).
        pass_decay: The losses of draft position i (0-based) are multiplied by `pass_decay ** i` (EAGLE-3: 0.8;
            Medusa's paper: 0.8; most other methods: 1).
        top_k: K of the top-K loss (HASS: 10).
        num_anchors: Rows per sequence at which block drafters (DFlash, JetSpec) are trained (DFlash: 512). All other
            draft heads are trained at every row.
        feature_noise: Half width a of the uniform noise U(-a, a) added to the input features, never to the features
            that the losses compare with. EAGLE's paper (section 4.1) uses 0.1; the default 0.0 adds no noise.
        feature_noise_scaling: `"none"` as in EAGLE's paper; `"eagle"` as in the authors' code, which multiplies the
            noise by 512 / length of the document in tokens; `"neftune"` divides it by sqrt(length * width).
        embedding_noise: alpha of the NEFTune noise U(-1, 1) * alpha / sqrt(length * width) added to the token
            embeddings that the draft heads read (Hydra, arXiv 2402.05109; for Hydra without a prefix layer, set
            `feature_noise` to the same value with scaling `"neftune"`). The default 0.0 adds no noise, as in Hydra's
            published recipe.
        backward: `"summed"` runs one backward through all passes and computes the target's distribution once.
            `"per_pass"` runs one backward per pass and frees its graph, as HASS and PosS do, and computes the target's
            distribution once per pass: it needs less memory and more time. The gradients are equal, because passes
            exchange detached tensors. Where they do not (EAGLE-3), the backward is always summed.
        max_nonfinite_steps: Number of consecutive steps with infinite or NaN loss or gradients after which training
            stops with an error. Each such step is skipped and counted in the log (`skipped_steps`).
        max_grad_value: Clip every gradient to [-max_grad_value, max_grad_value], after `max_grad_norm` (the authors of
            EAGLE, HASS and PosS clip by value, at 0.5, and not by norm: `max_grad_norm=0`). Default: no clipping by
            value.
        peak_tflops: Peak TFLOP/s of the device, from which `mfu` in the log is computed. Default: the data sheet's
            value for 16-bit products, for devices listed in [`utilisation`]; other devices log no `mfu`.
        loss_chunk_rows: Number of rows whose full logits exist at the same time. The losses need a few times
            `loss_chunk_rows` * vocabulary size numbers of memory.
        pass_reduction: `"sum"` adds up the losses of all passes, which gives the authors' gradients; `"mean"` divides
            the sum by `num_passes`, which keeps the effective learning rate when the depth changes.
        upstream_masking: Train with the attention of the HASS and PosS training code, in which masked scores count
            as 0. For parity experiments only, because drafting uses a true mask.
        max_length: Longest training example in tokens. Longer chats are cut, longer texts are split.
        packing: Put several examples into one sequence of up to `max_length` tokens, with no attention between them.
            The target is first probed with two documents, and refused if one of them sees the other.
        shard_target: Shard the decoder layers of the frozen target over the processes. Draft heads stay data-parallel.
        target_sharding: What shards the target: `"fsdp2"`, or `"zero3"` (DeepSpeed, which has to be installed).
        packing_strategy: `"best_fit"` packs the whole data set, so that a batch holds `per_device_train_batch_size`
            rows of nearly `max_length` tokens; `"batch"` packs the examples within each batch.
        chat_template_kwargs: Arguments for the chat template, e.g. `{"enable_thinking": False}`. Values in a
            `chat_template_kwargs` column of the data take precedence.
        dataset_num_proc: Number of tokenizing processes. Default: chosen from the number of cores and of rows.
        eval_acceptance_prompts: Number of prompts of the evaluation set to generate from, for
            `eval_acceptance_length` and `eval_pos_acc_i`; 0 leaves out both metrics. Generation is tried before the
            first step: a target that supports no draft trees is evaluated with chains, and a warning is issued if
            nothing can be generated.
        eval_prompt_length: Longest prompt cut from a plain text, in tokens. A chat is cut where its first reply
            begins.
        eval_max_new_tokens: Tokens to generate per prompt.

    Raises:
        ValueError: if a value is out of range.
    """

    num_passes: int | None = field(default=None, metadata={"help": "Number of draft positions to train."})
    feature_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the feature loss."})
    token_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the token loss."})
    top_k_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the top-K loss."})
    next_token_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the next-token loss."})
    total_variation_loss_weight: float | None = field(default=None, metadata={"help": "Weight of 1 - acceptance."})
    acceptance_loss_weight: float | None = field(default=None, metadata={"help": "Weight of -log of the acceptance."})
    lk_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the LK loss."})
    confidence_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the confidence loss."})
    selector_loss_weight: float | None = field(default=None, metadata={"help": "Weight of the selector loss."})
    base_loss_weight: float | None = field(
        default=None, metadata={"help": "Initial weight of the loss on uncorrected drafts."}
    )
    lk_decay: float = field(default=3.0, metadata={"help": "How fast the LK loss turns from KL to acceptance."})
    pass_decay: float | None = field(default=None, metadata={"help": "Loss factor from one position to the next."})
    top_k: int = field(default=10, metadata={"help": "K of the top-K loss."})
    num_anchors: int = field(default=512, metadata={"help": "Rows per sequence to train block drafters at."})
    feature_noise: float = field(default=0.0, metadata={"help": "Half width of the uniform noise on input features."})
    feature_noise_scaling: str = field(
        default="none", metadata={"help": f"Scaling of the noise, one of {NOISE_SCALINGS}."}
    )
    embedding_noise: float = field(default=0.0, metadata={"help": "alpha of the NEFTune noise on token embeddings."})
    backward: str = field(default="summed", metadata={"help": f"When backwards run, one of {BACKWARDS}."})
    loss_chunk_rows: int = field(default=CHUNK_ROWS, metadata={"help": "Rows whose full logits exist at a time."})
    max_grad_value: float | None = field(default=None, metadata={"help": "Clip gradients to [-value, value]."})
    peak_tflops: float | None = field(default=None, metadata={"help": "Peak TFLOP/s of the device, for `mfu`."})
    pass_reduction: str = field(
        default="sum", metadata={"help": f"How passes are combined, one of {PASS_REDUCTIONS}."}
    )
    max_nonfinite_steps: int = field(default=5, metadata={"help": "Infinite or NaN steps in a row before stopping."})
    upstream_masking: bool = field(default=False, metadata={"help": "The authors' zero-logit masks; for parity only."})
    max_length: int = field(default=2048, metadata={"help": "Longest training example in tokens."})
    packing: bool = field(default=False, metadata={"help": "Put several separate examples into a sequence."})
    shard_target: bool = field(default=False, metadata={"help": "Shard the frozen target over the processes."})
    target_sharding: str = field(default="fsdp2", metadata={"help": f"What shards the target, one of {SHARDINGS}."})
    packing_strategy: str = field(default="best_fit", metadata={"help": f"How to pack, one of {PACKING_STRATEGIES}."})
    chat_template_kwargs: dict | None = field(default=None, metadata={"help": "Arguments for the chat template."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Number of tokenizing processes."})
    eval_acceptance_prompts: int = field(default=16, metadata={"help": "Prompts to generate from in evaluation."})
    eval_prompt_length: int = field(default=64, metadata={"help": "Tokens of a prompt cut from a plain text."})
    eval_max_new_tokens: int = field(default=64, metadata={"help": "Tokens generated per evaluation prompt."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must be False: the heads' forward takes rows."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_passes is not None:
            _at_least("num_passes", self.num_passes, 1)
        scales = ("feature_noise", "embedding_noise", "pass_decay", "lk_decay")
        for name in (*(f"{loss}_loss_weight" for loss in LOSSES), *scales):
            _at_least(name, getattr(self, name) or 0, 0)
        if all(getattr(self, f"{loss}_loss_weight") == 0 for loss in LOSSES):
            names = ", ".join(f"`{loss}_loss_weight`" for loss in LOSSES)
            raise ValueError(f"all of {names} are 0, so nothing would be trained; set at least one above 0.")
        if (self.base_loss_weight or 0) > 1:
            raise ValueError(f"`base_loss_weight` is a share and must be at most 1, got {self.base_loss_weight!r}.")
        _at_least("top_k", self.top_k, 1)
        _at_least("num_anchors", self.num_anchors, 1)
        _at_least("max_nonfinite_steps", self.max_nonfinite_steps, 1)
        _at_least("loss_chunk_rows", self.loss_chunk_rows, 1)
        for name in ("max_grad_value", "peak_tflops"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"`{name}` must be above 0, got {value!r}.")
        _at_least("max_length", self.max_length, 3)
        _at_least("eval_acceptance_prompts", self.eval_acceptance_prompts, 0)
        _at_least("eval_prompt_length", self.eval_prompt_length, 1)
        _at_least("eval_max_new_tokens", self.eval_max_new_tokens, 1)
        if self.optim in STEPS_IN_BACKWARD:
            raise ValueError(
                f"optim={str.__str__(self.optim)!r} updates the weights inside a backward, but the unroll may run "
                "several backwards in a step; choose another optimizer, e.g. optim=adamw_torch."
            )
        _one_of("backward", self.backward, BACKWARDS)
        _one_of("target_sharding", self.target_sharding, SHARDINGS)
        _one_of("packing_strategy", self.packing_strategy, PACKING_STRATEGIES)
        if isinstance(self.chat_template_kwargs, str):  # a command line passes JSON text
            self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
        _one_of("pass_reduction", self.pass_reduction, PASS_REDUCTIONS)
        _one_of("feature_noise_scaling", self.feature_noise_scaling, NOISE_SCALINGS)
        if self.remove_unused_columns:
            raise ValueError(
                "`remove_unused_columns` must be False: the columns of a batch are read by the unroll, not by the "
                "heads' forward; leave it out."
            )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of every loss, by name; 0 for weights left to the method, until a trainer fills them in."""
        return {loss: getattr(self, f"{loss}_loss_weight") or 0.0 for loss in LOSSES}

    def loss_weights_at(self, progress: float) -> dict[str, float]:
        """Loss weights when a share `progress` (0 to 1) of training is done: the weight b of the loss on uncorrected
        drafts falls linearly, and the other weights are multiplied by 1 - b."""
        base = (self.base_loss_weight or 0.0) * (1 - progress)
        return {loss: base if loss == "base" else weight * (1 - base) for loss, weight in self.loss_weights.items()}

    def decay_at(self, position: int) -> float:
        """Factor of the losses of a draft position (0-based)."""
        return (1.0 if self.pass_decay is None else self.pass_decay) ** position


def _at_least(name: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value!r}.")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}.")
