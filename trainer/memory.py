"""Estimates the memory that a training needs on each device, from sizes alone.

The estimate is the sum of everything that exists at the same time: weights, optimizer state, what the unroll saves for
its backward, and one chunk of logits. It leaves out the allocator's cache and the work space of attention kernels.
`benchmarks/training/memory.py` compares the estimate with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices.gradients import BUCKET_BYTES
from .unroll.chunks import CHUNK_ROWS

CHUNK_TENSORS = 3  # fp32 tensors over V: draft logits (overwritten by their gradient), p, and one temporary
GATHERED_LAYERS = 2  # whole layers of a sharded target: the running layer and the next
OPTIMIZER_BYTES = 8  # AdamW's two moments in fp32


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a Llama-like decoder layer.

    Args:
        hidden: Hidden size H.
        intermediate: Width of the MLP.
        queries: Total width of all query heads.
        key_values: Total width of all key heads, which is also that of all value heads.
    """

    hidden: int
    intermediate: int
    queries: int
    key_values: int

    @property
    def parameters(self) -> int:
        """Number of weights in the matrices of the layer."""
        return self.hidden * (2 * self.queries + 2 * self.key_values + 3 * self.intermediate)

    @property
    def kept(self) -> int:
        """Numbers that a row saves for the backward: inputs and outputs of both norms, the residual, queries and keys
        before and after rotation, values, and the output of attention; in the MLP gate, up, the activation of gate,
        and its product with up."""
        return 5 * self.hidden + 3 * (self.queries + self.key_values) + 4 * self.intermediate


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target whose layers all have the same size.

    Args:
        layer: Sizes of a layer.
        layers: Number of layers.
        vocabulary: Vocabulary size V.
        tied: Whether embedding and `lm_head` are one tensor.
    """

    layer: LayerSizes
    layers: int
    vocabulary: int
    tied: bool = False

    @property
    def shared_parameters(self) -> int:
        """Number of weights that are never sharded: embedding and `lm_head`."""
        return self.vocabulary * self.layer.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class TrainingSizes:
    """Sizes of a training of draft heads whose layers are like the target's, after a projection of feature and
    embedding.

    Args:
        specialists: Number of layers; each pass runs one of them.
        passes: Number of draft positions D.
        batch: Sequences per device.
        length: Tokens per sequence, T.
        chunk_rows: Rows whose logits exist at the same time.
        weight_bytes: Bytes per weight of the draft heads; 4 for fp32.
        state_bytes: Bytes per number that the unroll saves; 2 under bf16, else 4.
        target_bytes: Bytes per weight of the target.
    """

    specialists: int = 1
    passes: int = 1
    batch: int = 1
    length: int = 2048
    chunk_rows: int = CHUNK_ROWS
    weight_bytes: int = 4
    state_bytes: int = 2
    target_bytes: int = 2


def head_parameters(target: TargetSizes, training: TrainingSizes) -> int:
    """Returns the number of weights of the draft heads: the layers, and the projection [H, 2 H]."""
    return training.specialists * target.layer.parameters + 2 * target.layer.hidden**2


def unroll_bytes(target: TargetSizes, training: TrainingSizes) -> dict[str, int]:
    """Returns the bytes that a step needs beyond weights: gradients of the draft heads, what the passes save, and one
    chunk of logits.

    Per row, a pass saves the numbers of its layer, and 6 H more: the input (2 H) and the output of the projection, the
    drafted features, their gradient, and the input of the next stream.
    """
    rows, width = training.batch * training.length, target.layer.hidden
    chunk = min(training.chunk_rows, rows)
    return {
        "gradients": head_parameters(target, training) * training.weight_bytes,
        "passes": rows * training.passes * (target.layer.kept + 6 * width) * training.state_bytes,
        "logits": CHUNK_TENSORS * chunk * target.vocabulary * 4,
    }


def training_bytes(target: TargetSizes, training: TrainingSizes, processes: int, sharded: bool) -> dict[str, int]:
    """Returns the bytes on each device, by what they hold.

    Args:
        target: Sizes of the frozen target.
        training: Sizes of the training; draft heads are data-parallel.
        processes: Number of devices.
        sharded: Whether `shard_target=true`; otherwise each device holds the whole target.
    """
    layers = target.layers * target.layer.parameters
    if sharded:
        layers = layers // processes + min(GATHERED_LAYERS, target.layers) * target.layer.parameters
    rows, heads = training.batch * training.length, head_parameters(target, training)
    # The target's forward saves nothing but the features; only the numbers of the running layer exist meanwhile.
    forward = rows * (target.layer.kept + 2 * target.layer.hidden) * training.target_bytes
    step = unroll_bytes(target, training)
    step["passes"] = max(step["passes"], forward)
    return {
        "target": (layers + target.shared_parameters) * training.target_bytes,
        "heads": heads * training.weight_bytes,
        "optimizer": heads * OPTIMIZER_BYTES,
        **step,
        "buckets": 2 * BUCKET_BYTES * (processes > 1),
    }
