"""Writes the target's features of a data set to disk, so that training does not have to run the target.

    specheads features --target org/model --data runs/data --out runs/features --method eagle
    specheads train --config eagle target=org/model train_data=runs/features output_dir=runs/eagle

This is seldom worth it: at H = 4096 a token takes 8 KiB, and four times that for EAGLE-3, while the trainer computes
features in process as fast as it needs them. The command first prints the total size, and requires --yes above a
limit. Called again, it resumes where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_specheads.cli.arguments import Parser, load_tokenizer, torch_dtype

from .commands import add_folder_options, add_output_options, write_folder
from .data.packing import Examples
from .data.sources import DataSource

if TYPE_CHECKING:
    from .data.shards import ShardFolder
    from .unroll.target_features import FrozenTarget


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("specheads features", description=__doc__)
    parser.add_argument("--target", required=True, help="target model: folder or Hub id")
    add_folder_options(parser, "file, folder or Hub id, as for train_data of a recipe")
    parser.add_argument("--method", default="eagle", help="method of the heads that will read the features")
    parser.add_argument("--max-length", type=int, default=2048, help="longest example in tokens")
    parser.add_argument("--batch-size", type=int, default=8, help="examples per forward")
    parser.add_argument("--rows-per-shard", type=int, default=256)
    parser.add_argument("--dtype", default="auto", help="dtype of the target")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... or 'auto' to spread over all accelerators")
    parser.add_argument("--limit-gib", type=float, default=50.0, help="size above which --yes is required")
    parser.add_argument("--yes", action="store_true", help="write features of any size")
    add_output_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes shards until all examples are stored; returns exit code 0, 2 for wrong input, or 130 if interrupted."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    counts = write_folder("features", args, write_features)
    if isinstance(counts, int):
        return counts
    if not args.json:
        print(f"{counts['examples']} examples, {counts['tokens']} tokens, {counts['bytes'] / 2**30:.2f} GiB")
        print(f"train with train_data={args.out}")
    return 0


def write_features(args: argparse.Namespace) -> dict[str, int]:
    """Writes the features that the arguments describe; returns `examples`, `tokens` and `bytes` of the whole folder.

    Raises:
        ValueError: for wrong arguments or data, a folder begun with other settings, or more than `--limit-gib`.
    """
    from hf_specheads.target.identity import target_identity, target_sizes

    from .data.preparing import prepare_dataset
    from .data.shards import ShardFolder
    from .data.stored_features import BYTES, KIND
    from .unroll.target_features import FrozenTarget

    tokenizer = load_tokenizer(args.target)
    rows = DataSource(args.data, args.name, args.split).load()
    data = prepare_dataset(rows, tokenizer, args.max_length, template_kwargs=args.template_kwargs)
    target, layers = load_target(args)
    width = target_sizes(target)["feature_size"] * (1 if layers == (-1,) else len(layers) + 1)
    tokens = sum(map(len, data["input_ids"]))
    size = tokens * width * BYTES
    print(f"{len(data)} examples, {tokens} tokens, {width} numbers each: {size / 2**30:.2f} GiB", file=sys.stderr)
    if size > args.limit_gib * 2**30 and not args.yes:
        raise ValueError(
            f"the features exceed --limit-gib {args.limit_gib:g}; pass --yes to write them, or train without stored "
            "features."
        )
    settings = {name: getattr(args, name) for name in ("data", "name", "split", "max_length", "rows_per_shard")}
    settings |= {"template_kwargs": args.template_kwargs, "layers": list(layers), "target": target_identity(target)}
    folder = ShardFolder(args.out, KIND, {**settings, "examples": len(data)})
    fill(folder, data, FrozenTarget(target), layers, args)
    found = folder.counts()
    return {"examples": found["examples"], "tokens": found["tokens"], "bytes": found["tokens"] * width * BYTES}


def load_target(args: argparse.Namespace) -> tuple[Any, tuple[int, ...]]:
    """Loads the target, and determines the hidden states that draft heads of the method read.

    Raises:
        ValueError: for an unknown method, or one whose draft heads read no hidden states.
    """
    from transformers import AutoModelForCausalLM

    from hf_specheads.heads.auto import METHODS

    if args.method not in METHODS:
        raise ValueError(f"--method must be one of {sorted(METHODS)}, got {args.method!r}.")
    how = {"dtype": torch_dtype(args.dtype), "device_map": args.device}
    target = AutoModelForCausalLM.from_pretrained(args.target, **how)
    fields = METHODS[args.method].config_class.fields_for_target(target, args.method)
    layers = tuple(fields.get("feature_layers") or (-1,))
    if args.method == "draft-lm":
        raise ValueError(
            "draft heads of method 'draft-lm' read no features of the target; train them without stored features."
        )
    return target, layers


def fill(
    folder: ShardFolder, data: Examples, frozen: FrozenTarget, layers: tuple[int, ...], args: argparse.Namespace
) -> None:
    """Writes the missing shards. Several processes (`RANK`, `WORLD_SIZE`) divide them among themselves."""
    from tqdm import tqdm

    from .data.batches import PaddedCollator
    from .data.stored_features import write_shard

    collate = PaddedCollator(0, args.max_length)
    device = frozen.model.get_input_embeddings().weight.device
    starts = range(0, len(data), args.rows_per_shard)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    todo = [index for index in range(rank, len(starts), world) if not folder.is_done(index)]
    hidden = args.quiet or not sys.stderr.isatty()
    for index in tqdm(todo, unit="shard", desc="features", disable=hidden):
        examples = list(data.select(range(starts[index], min(starts[index] + args.rows_per_shard, len(data)))))
        features = []
        for first in range(0, len(examples), args.batch_size):
            part = examples[first : first + args.batch_size]
            batch = {name: value.to(device) for name, value in collate(part).items()}
            read, final = frozen.features(batch, layers)
            for row, example in enumerate(part):
                length = len(example["input_ids"])
                features.append((read[row, :length], None if layers == (-1,) else final[row, :length]))
        write_shard(folder, index, examples, features)


if __name__ == "__main__":
    sys.exit(main())
