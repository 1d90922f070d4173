"""The library `speculators` loads our exports of block drafters, P-EAGLE and MTP heads: every tensor, with its value?

Needs `speculators` next to this package, in a folder of its own ([`compare_speculators`]):

    PYTHONPATH=SIDE python -m benchmarks.oracles.load_speculators
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_specheads import export_heads

from .compare_speculators import PACKAGES, VOCAB, random_heads, tiny_target
from .render import FOLDER, write

BLOCK = {"num_hidden_layers": 2, "block_size": 5}
MARKOV = {**BLOCK, "markov_rank": 6}
SLIDING = {"sliding_layers": (0,), "sliding_window": 8, "window_from": "anchor"}
HEADS: dict[str, dict[str, Any]] = {
    "DFlash": {"method": "dflash", **BLOCK, **SLIDING},
    "DSpark, vanilla": {"method": "dspark", **MARKOV},
    "DSpark, gated, reduced vocabulary": {"method": "dspark", **MARKOV, "markov_head": "gated"},
    "DSpark, rnn, idle root": {"method": "dspark", **MARKOV, "markov_head": "rnn", "anchor_slot": "idle"},
    "DFlash 2": {"method": "dflash2", **BLOCK, **SLIDING, "selector_rank": 6, "selector_top_k": 8},
    "P-EAGLE": {"method": "peagle", "feature_layers": (1, 3, 6), "num_hidden_layers": 2},
    "P-EAGLE, reduced vocabulary": {"method": "peagle", "feature_layers": (1, 3, 6), "num_hidden_layers": 2,
                                    "draft_token_ids": list(range(0, VOCAB, 2))},
    "MTP, fine-tuned": {"method": "mtp", "native": False},
}  # fmt: skip
PRUNED = "DSpark, gated, reduced vocabulary"
# What the library makes of the target, not of the heads' file.
OF_THE_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight", "embed_tokens.weight", "lm_head.weight")


def loaded(folder: Path) -> dict[str, Any]:
    """Which class loads an export, and what becomes of its tensors."""
    from speculators import SpeculatorModel

    model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
    theirs, ours = model.state_dict(), load_file(folder / "model.safetensors")
    equal = [
        key for key, tensor in ours.items() if key in theirs and torch.equal(theirs[key].to(tensor.dtype), tensor)
    ]
    missing = sorted(set(theirs) - set(ours) - set(OF_THE_TARGET))
    return {"class": type(model).__name__, "tensors": len(ours), "equal_tensors": len(equal), "missing": missing}


def main() -> None:
    """Loads, prints a line per entry and writes the result."""
    entries = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        target = tiny_target(work / "target", "qwen3", head_dim=8)
        for index, (title, options) in enumerate(HEADS.items()):
            heads = random_heads(target, seed=index, **options)
            if title == PRUNED:
                heads.prune_draft_vocabulary(list(range(0, VOCAB, 2)))
            exported = export_heads(heads, work / str(index), to="speculators", target=target)
            entries.append({"heads": title, **loaded(exported.folder)})
    command = "PYTHONPATH=SIDE python -m benchmarks.oracles.load_speculators"
    write(FOLDER / "speculators_loads.json", command, entries, PACKAGES)


if __name__ == "__main__":
    main()
