"""Compares our exports of block drafters, P-EAGLE and MTP heads with the library `speculators`: draft logits.

Needs `speculators` next to this package, in a folder of its own ([`compare_speculators`]):

    PYTHONPATH=SIDE python -m benchmarks.oracles.compare_speculators_blocks

The heads are tiny, random and in float32; they draft on a random text, teacher-forced after several roots. Our logits
are those of drafting itself (`start_draft`, `extend_draft`); theirs are what the library passes to its losses. The
library's MTP layer is run row by row, as engines do. Its training forward differs from that: from the second draft
position on, it has drafted states in place of the true ones at all earlier rows. The result records this difference,
too.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_specheads import DraftHead, export_heads

from .compare_speculators import PACKAGES, VOCAB, gap, random_heads, tiny_target
from .render import parser_of, write

BLOCK = {"num_hidden_layers": 2, "block_size": 5}
MARKOV = {**BLOCK, "markov_rank": 6}
SLIDING = {"sliding_layers": (0,), "sliding_window": 8, "window_from": "anchor"}
REDUCED = list(range(0, VOCAB, 2))
HEADS: dict[str, dict[str, Any]] = {
    "DFlash": {"method": "dflash", **BLOCK, **SLIDING},
    "DFlash, reduced vocabulary": {"method": "dflash", **BLOCK, "kept": REDUCED},
    "DSpark, vanilla": {"method": "dspark", **MARKOV},
    "DSpark, vanilla, idle root": {"method": "dspark", **MARKOV, "anchor_slot": "idle"},
    "DSpark, gated, reduced vocabulary": {"method": "dspark", **MARKOV, "markov_head": "gated", "kept": REDUCED},
    "DSpark, gated, idle root": {"method": "dspark", **MARKOV, "markov_head": "gated", "anchor_slot": "idle"},
    "DSpark, rnn": {"method": "dspark", **MARKOV, "markov_head": "rnn"},
    "DSpark, rnn, idle root": {"method": "dspark", **MARKOV, "markov_head": "rnn", "anchor_slot": "idle"},
    "DFlash 2": {"method": "dflash2", **BLOCK, **SLIDING, "selector_rank": 6, "selector_top_k": 8},
    "P-EAGLE": {"method": "peagle", "feature_layers": (1, 3, 6), "num_hidden_layers": 2},
    "P-EAGLE, reduced vocabulary": {"method": "peagle", "feature_layers": (1, 3, 6), "num_hidden_layers": 2,
                                    "draft_token_ids": REDUCED},
    "MTP, fine-tuned": {"method": "mtp", "native": False},
}  # fmt: skip
# Tensors that the library takes from the target, not from the heads' file.
OF_THE_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight", "embed_tokens.weight", "lm_head.weight")
TOKENS, ROOTS, POSITIONS = 24, (2, 7, 12, 17), 4


# ---------------------------------------------------------------------- tensors
def loaded(folder: Path) -> Any:
    """Loads an export as a model of the library."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    if config.speculators_model_type != "mtp":
        # its default attention works in blocks of 128 rows
        config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def tensors_of(model: Any, folder: Path) -> dict[str, Any]:
    """Tells which class loaded an export, and which of its tensors are unchanged or missing."""
    theirs, ours = model.state_dict(), load_file(folder / "model.safetensors")
    equal = [
        key for key, tensor in ours.items() if key in theirs and torch.equal(theirs[key].to(tensor.dtype), tensor)
    ]
    missing = sorted(set(theirs) - set(ours) - set(OF_THE_TARGET))
    return {"class": type(model).__name__, "tensors": len(ours), "equal_tensors": len(equal), "missing": missing}


# ---------------------------------------------------------------------- draft logits
@torch.no_grad()
def our_logits(heads: DraftHead, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Returns our draft logits after every root, fp32 [roots, positions, Vd]; `features` cover all tokens."""
    positions = min(heads.max_draft_positions or POSITIONS, POSITIONS)
    heads.tree_config = heads.tree_config.replace(kind="chain", depth=positions, top_k=1, total_tokens=positions + 1)
    drafted = []
    for root in ROOTS:
        cache = heads.new_draft_cache()
        state, logits = heads.start_draft(cache, token_ids[:, : root + 1], features[:, :root])
        drafted.append(logits)
        for position in range(1, positions):
            node = token_ids[:, root + position : root + position + 1]
            state, logits = heads.extend_draft(cache, position, node, state, None)
            drafted.append(logits)
    return torch.cat(drafted, dim=1).unflatten(1, (len(ROOTS), -1))[0].float()


@torch.no_grad()
def handed_to_losses(model: Any, **inputs: Any) -> dict[str, Any]:
    """Returns what the library's forward passes to the computation of its losses and metrics."""
    module, seen = sys.modules[type(model).__module__], {}

    def keep(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict]:
        seen.update(kwargs, **({"logits": args[0]} if args else {}))
        return torch.zeros(()), {}

    with mock.patch.object(module, "compute_metrics", keep):
        model(document_ids=torch.zeros_like(inputs["input_ids"]), **inputs)
    return seen


def block_logits(model: Any, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a block drafter for the block after every root. For DFlash 2 these are the scores of its
    candidates, and -inf elsewhere."""
    roots = torch.zeros_like(token_ids)
    roots[:, list(ROOTS)] = 1
    last = torch.zeros(1, TOKENS, model.config.transformer_layer_config.hidden_size)
    module = sys.modules[type(model).__module__]
    # In training, DFlash 2's candidates would be given the right token if it is missing.
    candidates = mock.patch.object(module, "selector_training_candidates", lambda ids, right: (ids, None, None))
    with candidates if hasattr(model, "candidate_selector") else mock.MagicMock():
        seen = handed_to_losses(
            model, hidden_states=features, input_ids=token_ids, loss_mask=roots, verifier_last_hidden_states=last,
            max_anchors=len(ROOTS),
        )  # fmt: skip
    logits = seen.get("logits", seen.get("unary_logits"))
    if "candidate_logits" in seen:
        nothing = torch.full_like(logits, -torch.inf)
        logits = nothing.scatter(-1, seen["training_candidate_ids"], seen["candidate_logits"])
    blocks = logits.view(len(ROOTS), model.block_size, -1)
    return blocks[:, not model.config.sample_from_anchor :][:, :POSITIONS]


def peagle_logits(model: Any, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Returns the logits of P-EAGLE, whose mask rows begin at every row except the last ones."""
    ids = token_ids[:, 1:]
    every_row = torch.ones_like(ids)
    every_row[:, 0] = 0  # otherwise the rows of the first draft position would begin before the text
    seen = handed_to_losses(
        model, hidden_states=features[:, :-1], input_ids=ids, loss_mask=every_row, num_depths=POSITIONS,
        verifier_last_hidden_states=torch.zeros(1, TOKENS - 1, model.hidden_size), down_sample_ratio_min=TOKENS,
    )  # fmt: skip
    places = [
        ((seen["anchor_pos"] == root - 1) & (seen["depth"] == depth)).nonzero().item()
        for root in ROOTS
        for depth in range(POSITIONS)
    ]
    return seen["logits"][0, places].unflatten(0, (len(ROOTS), -1))


@torch.no_grad()
def mtp_logits(model: Any, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Returns the logits of the library's MTP layer, run row by row: a drafted row sees the true rows and the rows
    drafted before it."""
    drafted = []
    for root in ROOTS:
        states = features[:, :root]
        for _ in range(POSITIONS):
            count = states.shape[1]
            positions = torch.arange(count)[None]
            after = model.mtp_layers[0](
                hidden_states=states, token_embeddings=model.embed_tokens(token_ids[:, 1 : count + 1]),
                position_ids=positions, position_embeddings=model.rotary_emb(states, positions),
            )[:, -1:]  # fmt: skip
            states = torch.cat([states, after], dim=1)
            drafted.append(model.lm_head(after))
    return torch.cat(drafted, dim=1).unflatten(1, (len(ROOTS), -1))[0]


@torch.no_grad()
def forward_of_mtp(model: Any, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Returns the logits of its training forward, [roots, draft positions of its own, V]."""
    passes = model(input_ids=token_ids, hidden_states=features)[0]
    return torch.stack([logits[0, [root - 1 for root in ROOTS]] for logits in passes], dim=1)


THEIRS = {"mtp": mtp_logits, "peagle": peagle_logits}


# ---------------------------------------------------------------------- all of them
def entry_of(title: str, heads: DraftHead, folder: Path, target: PreTrainedModel) -> dict[str, Any]:
    """Compares the tensors and draft logits of one export."""
    token_ids = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    states = target(token_ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[level] for level in heads.feature_layers], dim=-1).detach()
    model, ours = loaded(folder), our_logits(heads, token_ids, features)
    theirs = THEIRS.get(heads.config.method, block_logits)(model, token_ids, features)
    entry = {"heads": title, **tensors_of(model, folder), "slots": ours[..., 0].numel(), **gap(ours, theirs)}
    if heads.config.method == "mtp":
        trained = forward_of_mtp(model, token_ids, features)
        entry["training_forward"] = [
            float(errors.max()) for errors in (ours[:, : trained.shape[1]] - trained).abs().unbind(1)
        ]
    return entry


def main() -> None:
    """Loads and drafts, prints a line per entry and writes the result."""
    args, entries = parser_of(__doc__, "speculators_blocks").parse_args(), []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        target = tiny_target(work / "target", "qwen3", head_dim=8)
        for index, (title, options) in enumerate(HEADS.items()):
            heads = random_heads(target, seed=index, **options)
            exported = export_heads(heads, work / str(index), to="speculators", target=target)
            entries.append(entry_of(title, heads, exported.folder, target))
    command = "PYTHONPATH=SIDE python -m benchmarks.oracles.compare_speculators_blocks"
    write(args.output, command, entries, PACKAGES)


if __name__ == "__main__":
    main()
