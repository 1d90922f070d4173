"""Target features of the blocks that the shipped heads train on, computed once and read by every run.

    python -m hf_specheads.trainer.shipped_pair.feature_cache --target model_cards/target --output_dir runs/features

The target's forward is two thirds of a one-pass training step, and twenty runs read the same blocks. Stored in fp32,
so a run that reads the cache trains exactly as one that computes the features itself. Can be called again after an
interruption, and by several processes at once with `--part 0/2`, `--part 1/2`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..target_features import FrozenTarget
from .corpus import PackedBlocks, pack_tokens, read_split

BLOCK = 512
META = "features.json"


class CachedBlocks(Dataset):
    """Packed blocks with the target's features, from a cache folder; in the order of the cache.

    Args:
        blocks: All blocks of the split, int32 [blocks, T].
        folder: Folder written by this script.
        layers: Hidden states to hand out, concatenated; indices as in transformers' `hidden_states`.

    Raises:
        ValueError: for a layer that is not in the cache.
    """

    def __init__(self, blocks: PackedBlocks, folder: Path, layers: tuple[int, ...] = (-1,)):
        meta = json.loads((folder / META).read_text())
        if missing := set(layers) - set(meta["layers"]):
            raise ValueError(f"{folder} holds hidden states {meta['layers']}, not {sorted(missing)}; make it again.")
        self.blocks, self.indices = blocks, meta["indices"]
        self.columns = [meta["layers"].index(layer) for layer in layers]
        self.last = meta["layers"].index(-1)
        self.features = np.memmap(folder / "features.bin", dtype=np.float32, mode="r", shape=tuple(meta["shape"]))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        states = self.features[index]  # [T, layers, H]
        rows = torch.from_numpy(np.concatenate([states[:, column] for column in self.columns], axis=-1))
        final = torch.from_numpy(np.array(states[:, self.last]))
        return {**self.blocks[self.indices[index]], "features": rows, "final_features": final}


def stack_blocks(items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collator of full blocks, with or without cached features: every token but the first is supervised."""
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0] if name != "labels"}
    loss_mask = torch.ones_like(batch["input_ids"])
    loss_mask[:, 0] = 0
    return {**batch, "attention_mask": torch.ones_like(loss_mask), "loss_mask": loss_mask}


def drawn_indices(num_blocks: int, count: int, seed: int) -> list[int]:
    """The first `count` blocks that a Trainer with this seed draws."""
    sampler = RandomSampler(range(num_blocks), generator=torch.Generator().manual_seed(seed))
    return [index for index, _ in zip(sampler, range(count), strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--part", default="0/1", help="i/n: compute every n-th batch, starting with the i-th")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    target = FrozenTarget(AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32))
    depth = target.model.config.num_hidden_layers
    layers = [2, depth // 2, depth - 3, -1]
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    blocks = PackedBlocks(pack_tokens(read_split(held_out=False), tokenizer, BLOCK, args.seed + 1))
    indices = drawn_indices(len(blocks), args.blocks, args.seed)
    shape = (len(indices), BLOCK, len(layers), target.model.config.hidden_size)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "features.bin"
    whole = path.exists() and path.stat().st_size == 4 * np.prod(shape, dtype=np.int64)
    mode: Literal["r+", "w+"] = "r+" if whole else "w+"
    states = np.memmap(path, dtype=np.float32, mode=mode, shape=shape)
    part, parts = map(int, args.part.split("/"))
    for start in range(part * args.batch, len(indices), parts * args.batch):
        chosen = indices[start : start + args.batch]
        ids = torch.stack([blocks[index]["input_ids"] for index in chosen])
        with torch.no_grad():
            hidden = target.model(ids, output_hidden_states=layers, logits_to_keep=1, use_cache=False).hidden_states
        states[start : start + len(chosen)] = torch.stack([hidden[layer] for layer in layers], dim=2).numpy()
    states.flush()
    meta = {"target": str(args.target), "layers": layers, "indices": indices, "shape": shape}
    (args.output_dir / META).write_text(json.dumps(meta))


if __name__ == "__main__":
    main()
