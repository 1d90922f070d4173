"""Ways to damage a checkpoint: each changes the files of a folder at random, the same way for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.layouts import write_file

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.int8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
VALUES = (float("nan"), float("inf"), float("-inf"), 1e6, -3e30)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, 1e-5, 1e300, 10**18, 10**400, "", "eagle", "../x", [], [1, 2, 3], [[]],
    {},
    {"a": 1}, {"rope_type": "yarn"}, "\u0000", "9" * 50,
)  # fmt: skip
GARBAGE = (b"", b"{", b"[1]", b"null", b"{" * 10, b'{"a":' * 50_000, b"\xff\xfe\x00", b'{"a": 1, "a": 2}', b"NaN",
           b"\x80\x04}\x94.")  # fmt: skip


def weight_paths(folder: Path) -> list[Path]:
    """Weight files of a folder, but no optimizer's."""
    return sorted(
        p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin", ".pt") and "optimizer" not in p.name
    )


def read_tensors(path: Path) -> Tensors:
    """The tensors of a file as PyTorch's and safetensors' own readers see them."""
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)


def all_tensors(folder: Path) -> Tensors | None:
    """All tensors of a folder, `None` if its files cannot be read."""
    tensors: Tensors = {}
    try:
        for path in weight_paths(folder):
            tensors |= read_tensors(path)
    except (SafetensorError, RuntimeError, OSError, ValueError, EOFError, KeyError):
        return None
    return tensors


def _edit(folder: Path, rng: random.Random, edit: Callable[[Tensors, str], str]) -> str:
    """Applies `edit(tensors, key)` to a random tensor of a random weight file."""
    path = rng.choice(weight_paths(folder))
    tensors = read_tensors(path)
    what = edit(tensors, rng.choice(sorted(tensors)))
    write_file(path, tensors)
    return what


def drop(folder: Path, rng: random.Random) -> str:
    def edit(tensors: Tensors, key: str) -> str:
        del tensors[key]
        if not tensors:
            tensors["left.over"] = torch.zeros(1)
        index = next(iter(folder.glob("*.index.json")), None)
        if index is not None and rng.random() < 0.7:  # as if it had never been there
            content = json.loads(index.read_text())
            content["weight_map"].pop(key)
            write_file(index, content)
        return key

    return _edit(folder, rng, edit)


def rename(folder: Path, rng: random.Random) -> str:
    def edit(tensors: Tensors, key: str) -> str:
        place = rng.randrange(len(key))
        new = key[:place] + rng.choice("abz019._") + key[place + rng.randint(0, 1) :]
        tensors[new] = tensors.pop(key)
        return f"{key} -> {new}"

    return _edit(folder, rng, edit)


def resize(folder: Path, rng: random.Random) -> str:
    def edit(tensors: Tensors, key: str) -> str:
        tensor = tensors[key]
        shape = list(tensor.shape)
        change = rng.randrange(5)
        if change == 0 or not shape:
            shape.append(1)
        elif change == 1:
            shape = [tensor.numel()] if len(shape) > 1 else [1, *shape]
        elif change == 2:
            shape[rng.randrange(len(shape))] = 0
        else:
            axis = rng.randrange(len(shape))
            shape[axis] = max(shape[axis] + rng.choice((-1, 1, 8, -8, shape[axis])), 1)
        tensors[key] = torch.ones(shape).to(tensor.dtype)
        return f"{key} {list(tensor.shape)} -> {shape}"

    return _edit(folder, rng, edit)


def value(folder: Path, rng: random.Random) -> str:
    def edit(tensors: Tensors, key: str) -> str:
        tensor = tensors[key].clone().contiguous()
        number = rng.choice(VALUES) if tensor.is_floating_point() else rng.choice((0, 1, 2, -1, 10**6))
        tensor.view(-1)[rng.randrange(tensor.numel())] = number
        tensors[key] = tensor
        return f"{key} {number}"

    return _edit(folder, rng, edit)


def cast(folder: Path, rng: random.Random) -> str:
    def edit(tensors: Tensors, key: str) -> str:
        dtype = rng.choice(DTYPES)
        tensors[key] = tensors[key].to(dtype)
        return f"{key} {dtype}"

    return _edit(folder, rng, edit)


def again(folder: Path, rng: random.Random) -> str:
    """A tensor a second time, under another name or in another shard."""
    paths = weight_paths(folder)
    source, destination = read_tensors(rng.choice(paths)), rng.choice(paths)
    key = rng.choice(sorted(source))
    tensors = read_tensors(destination)
    new = key if key not in tensors else rng.choice(("model.", "module.", "x.")) + key
    write_file(destination, tensors | {new: source[key].clone()})
    return new


def extra(folder: Path, rng: random.Random) -> str:
    names = ("lm_head.weight", "norm.weight", "mask_hidden", "fc.bias", "d2t", "t2d", "layers.1.mlp.up_proj.weight",
             "embed_layernorm.weight", "layers.0.input_layernorm.weight", "token_map", "0.0.linear.weight",
             "layers.0.hidden_norm.weight", "fusion_fc.weight", "medusa_head.0.0.linear.weight", "rotary_emb.inv_freq",
             "hydra_mlp.0.0.linear.weight", "layers.99999.x", "layers.1e3.x")  # fmt: skip

    def edit(tensors: Tensors, key: str) -> str:
        new = rng.choice(names)
        if new in tensors:
            new += "x"
        tensors[new] = torch.zeros(rng.choice(((32,), (99, 32), (32, 32), (99,))))
        return new

    return _edit(folder, rng, edit)


# ------------------------------------------------------------------ bytes
def truncate(folder: Path, rng: random.Random) -> str:
    path = rng.choice([*weight_paths(folder), *folder.glob("*.json")])
    content = path.read_bytes()
    keep = rng.choice((0, 1, 8, 100, rng.randrange(len(content)), len(content) - 1))
    path.write_bytes(content[:keep])
    return f"{path.name} to {keep} bytes"


def grow(folder: Path, rng: random.Random) -> str:
    path = rng.choice(weight_paths(folder))
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 100, 5000))))
    return path.name


def flip(folder: Path, rng: random.Random, first: int | None = None, last: int | None = None) -> str:
    """Random bytes anywhere, or among the first or last ones, where headers and directories are."""
    path = rng.choice(weight_paths(folder))
    content = bytearray(path.read_bytes())
    low = max(len(content) - last, 0) if last else 0
    places = [rng.randrange(low, min(first or len(content), len(content))) for _ in range(rng.choice((1, 1, 2, 8)))]
    for place in places:
        content[place] = rng.randrange(256)
    path.write_bytes(bytes(content))
    return f"{path.name} at {places}"


def flip_head(folder: Path, rng: random.Random) -> str:
    return flip(folder, rng, first=600)


def flip_tail(folder: Path, rng: random.Random) -> str:
    return flip(folder, rng, last=600)


def retype(folder: Path, rng: random.Random) -> str:
    """Another type in a safetensors header over the same bytes; in a pickle, another kind of storage."""
    path = rng.choice(weight_paths(folder))
    content = path.read_bytes()
    names = ((b'"F32"', b'"I32"'), (b'"F16"', b'"BF16"'), (b'"F32"', b'"F16"'), (b'"I64"', b'"F64"'),
             (b'"BOOL"', b'"U8"'), (b"FloatStorage", b"HalfStorage"), (b"FloatStorage", b"LongStorage"),
             (b"FloatStorage", b"IntStorage"))  # fmt: skip
    old, new = rng.choice([pair for pair in names if pair[0] in content] or [(b"{", b"[")])
    places = [place for place in range(len(content)) if content.startswith(old, place)]
    place = rng.choice(places)
    path.write_bytes(content[:place] + new.ljust(len(old))[: max(len(old), len(new))] + content[place + len(old) :])
    return f"{old!r} -> {new!r} in {path.name}"


# ------------------------------------------------------------------ JSON
def _json(folder: Path, rng: random.Random) -> tuple[Path, dict, dict]:
    """A config or index, its content, and a random object in it that has fields."""
    path = rng.choice([*sorted(folder.glob("*.json")), folder / "config.json"])
    content = json.loads(path.read_text())
    inside = [content, *(item for item in content.values() if isinstance(item, dict) and item)]
    return path, content, rng.choice(inside)


def forget_field(folder: Path, rng: random.Random) -> str:
    path, content, inside = _json(folder, rng)
    key = rng.choice(sorted(inside))
    del inside[key]
    write_file(path, content)
    return f"{path.name}: {key}"


def change_field(folder: Path, rng: random.Random) -> str:
    path, content, inside = _json(folder, rng)
    key = rng.choice(sorted(inside))
    old = inside[key]
    if isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.5:
        inside[key] = rng.choice((old * 2, old + 1, old - 1, -old, old * 10**6, old / 2, str(old)))
    else:
        inside[key] = rng.choice(ODD_VALUES)
    write_file(path, content)
    return f"{path.name}: {key}={str(inside[key])[:40]!r}"


def add_field(folder: Path, rng: random.Random) -> str:
    path, content, inside = _json(folder, rng)
    names = ("save_pretrained", "to_dict", "__class__", "_name", "rope_scaling", "rope_parameters", "mask_token_id",
             "bias", "model_type", "quantization_config", "draft_vocab_size", "eagle_config", "norm_output",
             "speculators_model_type", "target_hidden_size", "extra_norms", "num_specialists", "auto_map",
             "attn_implementation", "dtype")  # fmt: skip
    key = rng.choice(names)
    inside[key] = rng.choice(ODD_VALUES)
    write_file(path, content)
    return f"{path.name}: {key}={str(inside[key])[:40]!r}"


def garble_json(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.json")))
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        content = bytearray(rng.choice(GARBAGE))
    else:
        for _ in range(rng.choice((1, 2, 4))):
            content[rng.randrange(len(content))] = rng.choice(b'0123456789"{}[],:.-eabc \\')
    path.write_bytes(bytes(content))
    return path.name


def misdirect(folder: Path, rng: random.Random) -> str:
    """An index that leads elsewhere; without one, a weight file that is something else."""
    index = next(iter(folder.glob("*.index.json")), None)
    if index is None:
        path = rng.choice(weight_paths(folder))
        path.write_bytes(rng.choice(GARBAGE))
        return path.name
    content = json.loads(index.read_text())
    key = rng.choice(sorted(content["weight_map"]))
    places = ("../config.json", "/etc/passwd", "missing.safetensors", "config.json", "", 3, None, "a/b.bin",
              *sorted(set(content["weight_map"].values())))  # fmt: skip
    content["weight_map"][key] = rng.choice(places)
    write_file(index, content)
    return f"{key} in {content['weight_map'][key]!r}"


MUTATIONS: dict[str, Callable[[Path, random.Random], str]] = {
    function.__name__: function
    for function in (
        drop, rename, resize, value, cast, again, extra, truncate, grow, flip, flip_head, flip_tail, retype,
        forget_field, change_field, add_field, garble_json, misdirect,
    )
}  # fmt: skip
