"""Stores features of the target on disk as sharded bf16 safetensors, and reads them like a data set.

A shard concatenates E examples of N tokens in all: `input_ids` int32 [N], `loss_mask` uint8 [N], `lengths` int64 [E],
`features` bf16 [N, F], and, if the draft heads read other hidden states than the last, `final_features` bf16 [N, H].
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_specheads.heads.base import DraftHead
from hf_specheads.target.identity import fingerprints_match, target_identity

from ..arguments import DraftHeadTrainingArguments
from .batches import PaddedCollator
from .packing import Examples
from .shards import ShardFolder, read_manifest

KIND = "features"
BYTES = 2  # size of a bf16 number


class StoredFeatures(Dataset):
    """Examples with their features, read from a folder written by `specheads features`.

    Args:
        folder: Path of the folder. Only its complete shards are read.
        indices: Indices of the examples to use. Default: all.

    Attributes:
        manifest: Settings the features were made with, such as `target`, `layers` and `max_length`.

    Raises:
        ValueError: if no shard is complete.
    """

    def __init__(self, folder: str | os.PathLike, indices: Sequence[int] | None = None):
        self.folder, self.manifest = Path(folder), read_manifest(folder)
        records = sorted(self.folder.glob("shard-*.json"))
        counts = [json.loads(path.read_text(encoding="utf-8"))["examples"] for path in records]
        if not sum(counts):
            raise ValueError(f"{folder} holds no complete shard of features; run `specheads features` again.")
        self._paths = [path.with_suffix(".safetensors") for path in records]
        self._starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        self._indices = range(self._starts[-1]) if indices is None else indices
        self._offsets: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._indices)

    def select(self, indices: Sequence[int]) -> StoredFeatures:
        """Returns a data set of some of the examples."""
        return StoredFeatures(self.folder, [self._indices[index] for index in indices])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = self._indices[index]
        shard = bisect.bisect_right(self._starts, place) - 1
        while self._starts[shard] == self._starts[shard + 1]:  # a shard without examples
            shard += 1
        with safe_open(self._paths[shard], "pt") as tensors:
            if shard not in self._offsets:
                self._offsets[shard] = torch.cat(
                    [torch.zeros(1, dtype=torch.long), tensors.get_tensor("lengths").cumsum(0)]
                )
            within = place - self._starts[shard]
            start, end = self._offsets[shard][within : within + 2].tolist()
            example = {name: tensors.get_slice(name)[start:end] for name in tensors.keys() if name != "lengths"}  # noqa: SIM118
        example["input_ids"], example["loss_mask"] = example["input_ids"].long(), example["loss_mask"].long()
        example.setdefault("final_features", example["features"])
        return example

    def refuse_other(self, identity: Mapping[str, Any], layers: Sequence[int]) -> None:
        """Refuses features of another target, or of other hidden states than the draft heads read.

        Args:
            identity: Identity of the target, see [`hf_specheads.target.identity.target_identity`].
            layers: Hidden states that the draft heads read, `DraftHead.feature_layers`.

        Raises:
            ValueError: naming what is stored and what is expected.
        """
        theirs = self.manifest["target"]
        if not fingerprints_match(theirs["fingerprint"], identity["fingerprint"]):
            raise ValueError(
                f"the features in {self.folder} were computed by {theirs['name']!r}, but the target is "
                f"{identity['name']!r} (fingerprints of the token embedding differ); write them again with "
                "`specheads features`."
            )
        if list(layers) != list(self.manifest["layers"]):
            raise ValueError(
                f"the features in {self.folder} are the hidden states {self.manifest['layers']}, but these heads read "
                f"{list(layers)}; write them again with `specheads features --method ...`."
            )


class FeatureCollator(PaddedCollator):
    """Collates one example per sequence, and adds `features` [B, T, F] and `final_features` [B, T, H], padded with
    zeros. For examples without stored features the target computes them."""

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(examples)
        if not all("features" in example for example in examples):  # e.g. an evaluation set without stored features
            return batch
        for name in ("features", "final_features"):
            rows = [example[name][: self.max_length] for example in examples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return batch


def write_shard(folder: ShardFolder, index: int, examples: Sequence[Mapping[str, Any]], features: list[tuple]) -> None:
    """Writes a shard atomically: the complete shard or nothing.

    Args:
        folder: Folder to write into.
        index: Index of the shard.
        examples: Examples with `input_ids` and `loss_mask`.
        features: For each example, the features that the draft heads read, [T, F], and the final features, [T, H], or
            `None` if the two are the same.
    """
    tensors = {
        "input_ids": torch.tensor([token for e in examples for token in e["input_ids"]], dtype=torch.int32),
        "loss_mask": torch.tensor([bit for e in examples for bit in e["loss_mask"]], dtype=torch.uint8),
        "lengths": torch.tensor([len(e["input_ids"]) for e in examples]),
        "features": torch.cat([read for read, _ in features]).bfloat16().cpu().contiguous(),
    }
    if features[0][1] is not None:
        tensors["final_features"] = torch.cat([final for _, final in features]).bfloat16().cpu().contiguous()
    path = folder.data_path(index, ".safetensors")
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(tensors, partial)
    os.replace(partial, path)
    folder.finish(index, {"examples": len(examples), "tokens": len(tensors["input_ids"])})


def collator_of(
    datasets: Sequence[Dataset | Examples],
    heads: DraftHead,
    target: PreTrainedModel,
    pad_token_id: int,
    args: DraftHeadTrainingArguments,
) -> FeatureCollator | None:
    """Checks the data sets that are stored features, and returns their collator; `None` if no data set is one.

    Raises:
        ValueError: for features of another target or of other hidden states, and for `packing`.
    """
    stored = [dataset for dataset in datasets if isinstance(dataset, StoredFeatures)]
    if not stored:
        return None
    if args.packing:
        raise ValueError("packing=True cannot be used with stored features; set packing=False.")
    for dataset in stored:
        dataset.refuse_other(target_identity(target), heads.feature_layers)
    return FeatureCollator(pad_token_id, args.max_length)
