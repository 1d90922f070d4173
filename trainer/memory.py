"""How much memory a training takes on each device, before it is started: from sizes alone.

What is counted is there at the same time: weights, what the optimizer keeps, what the unroll keeps for its backward,
and one chunk of logits. `benchmarks/training/memory.py` compares it with measured peaks. (Without: what an allocator
keeps, and attention kernels' work space.)
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices.gradients import BUCKET_BYTES
from .unroll.chunks import CHUNK_ROWS

CHUNK_TENSORS = 3  # fp32 over the vocabulary: draft logits, in which their gradient is written, p, and one on its way
GATHERED_LAYERS = 2  # of a sharded target: the one that computes, and the next
OPTIMIZER_BYTES = 8  # AdamW's two moments in fp32


@dataclass(frozen=True)
class LayerSizes:
    """A Llama-like decoder layer.

    Args:
        hidden: H.
        intermediate: Width of the MLP.
        queries: Width of all queries together.
        key_values: Width of all key heads together, and of all value heads.
    """

    hidden: int
    intermediate: int
    queries: int
    key_values: int

    @property
    def parameters(self) -> int:
        """Weights of its products."""
        return self.hidden * (2 * self.queries + 2 * self.key_values + 3 * self.intermediate)

    @property
    def kept(self) -> int:
        """Numbers that a row leaves for the backward: what goes into both norms and out of them, queries and keys
        before and after rotation, values, attention's output and sum, the residual; gate, up, and their product with
        and without the activation."""
        return 5 * self.hidden + 3 * (self.queries + self.key_values) + 4 * self.intermediate


@dataclass(frozen=True)
class TargetSizes:
    """A target, all layers alike.

    Args:
        layer: Of each.
        layers: How many.
        vocabulary: V.
        tied: Embedding and `lm_head` are one tensor.
    """

    layer: LayerSizes
    layers: int
    vocabulary: int
    tied: bool = False

    @property
    def shared_parameters(self) -> int:
        """What every process has whole: embedding and `lm_head`."""
        return self.vocabulary * self.layer.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class TrainingSizes:
    """A training of heads that are layers like the target's, fed by a projection of feature and embedding.

    Args:
        specialists: Layers; each pass runs one.
        passes: D.
        batch: Sequences on a device.
        length: T.
        chunk_rows: Rows of which logits exist at a time.
        weight_bytes: Of the heads' numbers: 4 for fp32.
        state_bytes: Of what the unroll keeps: 2 under bf16, else 4.
        target_bytes: Of the target's numbers.
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
    """Weights of the heads: the layers, and the projection [H, 2 H]."""
    return training.specialists * target.layer.parameters + 2 * target.layer.hidden**2


def unroll_bytes(target: TargetSizes, training: TrainingSizes) -> dict[str, int]:
    """What a step adds to weights: gradients of the heads, what the passes keep, and a chunk of logits.

    With a pass there are, besides its layer's, the projection's input (2 H) and output, the drafted features, their
    gradient and the next stream's.
    """
    rows, width = training.batch * training.length, target.layer.hidden
    chunk = min(training.chunk_rows, rows)
    return {
        "gradients": head_parameters(target, training) * training.weight_bytes,
        "passes": rows * training.passes * (target.layer.kept + 6 * width) * training.state_bytes,
        "logits": CHUNK_TENSORS * chunk * target.vocabulary * 4,
    }


def training_bytes(target: TargetSizes, training: TrainingSizes, processes: int, sharded: bool) -> dict[str, int]:
    """Bytes on each device, by what they hold.

    Args:
        target: The frozen one.
        training: Of the heads, data-parallel.
        processes: Devices.
        sharded: With `shard_target=true`; otherwise each device has the whole target.
    """
    layers = target.layers * target.layer.parameters
    if sharded:
        layers = layers // processes + min(GATHERED_LAYERS, target.layers) * target.layer.parameters
    rows, heads = training.batch * training.length, head_parameters(target, training)
    # The target's own forward keeps nothing but the features; one layer's numbers are there while it computes.
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
