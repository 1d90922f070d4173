"""Writes a script that repeats a comparison of two generations, on another machine or with another version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..contract import DraftingContract
from ..provenance import processor, versions

PACKAGES = ("torch", "transformers", "hf-specheads")
SCRIPT = '''"""Compares a generation with draft heads to the plain one: python {name} [TARGET HEADS]

Written on {processor} with {versions}.
What it said then:
{said}
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from hf_specheads import explain_difference, load_heads

TARGET, HEADS = sys.argv[1:3] if len(sys.argv) > 2 else ({target!r}, {heads!r})
INPUT_IDS = {input_ids!r}
TREE = {tree!r}
OPTIONS = {options!r}

torch.set_num_threads({threads})
target = AutoModelForCausalLM.from_pretrained(
    TARGET, dtype=torch.{dtype}, attn_implementation={attention!r}, device_map={device!r}
).eval()
heads = load_heads(HEADS, dtype=target.dtype).bind(target)
heads.tree_config = heads.tree_config.replace(**TREE)
input_ids = torch.tensor([INPUT_IDS])
inputs = {{"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}}
found = explain_difference(target, inputs, heads, **OPTIONS)
print(found)
sys.exit(int(found.verdict == "bug"))
'''


def write_reproducer(
    path: Path,
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    heads: DraftingContract,
    options: dict[str, Any],
    found: dict[str, Any],
) -> None:
    """Writes the script. Options of `generate` that are not plain values are left out, and the script names them.

    Args:
        path: File to write; its folder is created.
        target: The target; the script loads it by its name.
        inputs: `input_ids` [1, T].
        heads: Draft heads, with the tree that was used.
        options: Arguments of `generate`.
        found: Result of the comparison.
    """
    plain = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str | list)}
    said = {name: found[name] for name in ("verdict", "because", "position", "token", "plain_token", "rounding")}
    if left_out := sorted(set(options) - set(plain)):
        said["options_left_out"] = left_out
    script = SCRIPT.format(
        name=path.name,
        processor=processor(),
        versions=", ".join(f"{name} {version}" for name, version in versions(PACKAGES).items()),
        said=json.dumps(said, indent=1),
        target=target.config.name_or_path or "TARGET",
        heads=heads.config.name_or_path or "HEADS",
        input_ids=inputs["input_ids"][0].tolist(),
        tree=_tree_fields(heads),
        options={name: value for name, value in plain.items() if name != "do_sample"},
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        attention=target.config._attn_implementation,
        device=str(target.device),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")


def _tree_fields(heads: DraftingContract) -> dict[str, Any]:
    return heads.tree_config.to_dict()
