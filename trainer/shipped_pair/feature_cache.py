"""Caches the target features of the answers that the shipped draft heads train on.

    python -m hf_specheads.trainer.shipped_pair.feature_cache --target runs/target/final \\
        --answers runs/answers.jsonl --output_dir runs/features

The target's forward is two thirds of a one-pass training step, and some thirty runs read the same sequences, so the
features are computed once. They are stored in fp32, so that a run with the cache trains exactly like one that computes
the features itself. An interrupted call can be repeated and resumes where it stopped.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..unroll.target_features import FrozenTarget
from .answers import AnswerBlocks, read_answers
from .costs import add_costs

BLOCK = 512
META, FEATURES = "features.json", "features.bin"


class CachedBlocks(Dataset):
    """Sequences with the target's features from a cache folder, in the same order.

    Args:
        blocks: Sequences that the cache was made from.
        folder: Folder written by this script.
        layers: Hidden states to concatenate into features; indices as in transformers' `hidden_states`.

    Raises:
        ValueError: for a layer that is not in the cache, or a different number or length of sequences.
    """

    def __init__(self, blocks: AnswerBlocks, folder: Path, layers: tuple[int, ...] = (-1,)):
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if missing := set(layers) - set(meta["layers"]):
            raise ValueError(f"{folder} holds hidden states {meta['layers']}, not {sorted(missing)}; write it again.")
        if meta["shape"][:2] != [len(blocks), blocks.block_size]:
            raise ValueError(
                f"{folder} holds features of shape {meta['shape'][:2]} (sequences, tokens), expected "
                f"{[len(blocks), blocks.block_size]}; write it again from these answers."
            )
        self.blocks = blocks
        self.columns = [meta["layers"].index(layer) for layer in layers]
        self.last = meta["layers"].index(-1)
        self.features = np.memmap(folder / FEATURES, dtype=np.float32, mode="r", shape=tuple(meta["shape"]))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        states = self.features[index]  # [T, layers, H]
        rows = torch.from_numpy(np.concatenate([states[:, column] for column in self.columns], axis=-1))
        final = torch.from_numpy(np.array(states[:, self.last]))
        return {**self.blocks[index], "features": rows, "final_features": final}


def stack_blocks(items: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collates packed sequences of one length, with or without cached features."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def cached_layers(num_hidden_layers: int) -> list[int]:
    """Returns the hidden states that the shipped draft heads read: EAGLE-3's three, and the final one."""
    return [2, num_hidden_layers // 2, num_hidden_layers - 3, -1]


def write_features(model: PreTrainedModel, blocks: AnswerBlocks, folder: Path, batch: int = 4) -> None:
    """Computes and writes the features of all sequences, except those that an interrupted call has written already."""
    target, layers = FrozenTarget(model), cached_layers(model.config.num_hidden_layers)
    shape = (len(blocks), blocks.block_size, len(layers), model.config.hidden_size)
    folder.mkdir(parents=True, exist_ok=True)
    row_bytes = 4 * int(np.prod(shape[1:]))
    path, started = folder / FEATURES, time.time()
    written = path.stat().st_size // (batch * row_bytes) * batch if path.exists() else 0
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(written * row_bytes)
        file.seek(0, 2)
        for start in tqdm(range(written, len(blocks), batch), desc="features"):
            rows = stack_blocks([blocks[index] for index in range(start, min(start + batch, len(blocks)))])
            states, _ = target.features({name: value.to(model.device) for name, value in rows.items()}, tuple(layers))
            file.write(states.float().cpu().numpy().tobytes())
    tokens = max(len(blocks) - written, 0) * blocks.block_size
    add_costs(folder, model, tokens, time.time() - started, logits=False)
    (folder / META).write_text(json.dumps({"layers": layers, "shape": shape}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="file written by answers.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    blocks = AnswerBlocks(read_answers(args.answers), BLOCK, tokenizer.pad_token_id)
    write_features(model, blocks, args.output_dir, args.batch)
    print(f"features of {len(blocks)} sequences of {BLOCK} tokens in {args.output_dir}")


if __name__ == "__main__":
    main()
