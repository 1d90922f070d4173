"""Damages valid checkpoints of every layout and watches what `load_heads` makes of them.

    PYTHONPATH=tests python tests/checkpoints/layouts/fuzz.py --cases 5000        # counts per mutation and outcome

Every case is one of:
    refused          one of this package's own errors, on loading or on binding to the target
    same             loaded, and it drafts bit for bit what the undamaged heads draft
    other weights    loaded, with other numbers in tensors of the same names and shapes, all finite and of a size that
                     weights have, and exactly those that the file holds: nothing tells them from the right ones
    other config     loaded, with another value in a field that only the config tells, which is in force
    said             loaded without a field that only the config tells, and the notes name it
    other layout     loaded as another published layout, which is what the file has become (heads without fc.bias)
and otherwise a failure: another exception, a hang, or heads that draft differently and say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mutations import MUTATIONS, all_tensors
from support.layouts import LAYOUTS, stored, target

from hf_specheads import DraftHead, load_heads
from hf_specheads.checkpoints.layouts.dflash.keys import MARKOV_OUT
from hf_specheads.checkpoints.read import StoredHeads
from hf_specheads.errors import HeadLoadError, WrongTargetError

SECONDS = 20
ROUNDING = 3e-5  # of the spread of logits
# Fields that nothing but a config tells, and what they are in ours.
FIELDS = ("rms_norm_eps", "hidden_act", "num_attention_heads", "norm_before_residual", "norm_output", "num_blocks",
          "tied_blocks", "hidden_state_offset", "positions_per_specialist", "inputs", "feature_layers")  # fmt: skip
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_type", "factor")
TOLD_BY_CONFIG = {name: name for name in FIELDS} | dict.fromkeys(ROPE_FIELDS, "rope_parameters")
TOLD_BY_CONFIG |= {name: name for name in (
    "block_size", "mask_token_id", "sliding_window", "markov_head", "plain_positions", "selector_top_k",
    "conv_group_size", "causal", "sliding_causal", "num_mtp_layers",
)}  # fmt: skip
TOLD_BY_CONFIG |= {"eagle_aux_hidden_state_layer_ids": "feature_layers", "target_hidden_size": "feature_size"}
TOLD_BY_CONFIG |= dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids"), "feature_layers")
TOLD_BY_CONFIG |= dict.fromkeys(("shift_label", "sample_from_anchor", "architectures"), "anchor_slot")
# What notes call a field whose name they do not say.
NOTED = {"rope_parameters": ("rope_theta",), "feature_layers": ("target_layer_ids",)}
# Tensors whose absence makes the files those of other published heads.
OTHER_LAYOUT = {"drop": ("fc.bias",), "forget_field": ("causal_head",)}


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    layout: str
    mutation: str
    seed: int
    change: str
    outcome: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("crash", "hang", "silently wrong")


@dataclass(frozen=True)
class Draft:
    """What heads draft: logits of every position, over which tokens, from which levels of the target."""

    logits: tuple[torch.Tensor, ...]
    vocabulary: list[int] | None
    levels: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draft) and (
            (self.vocabulary, self.levels, len(self.logits)) == (other.vocabulary, other.levels, len(other.logits))
            and all(map(alike, self.logits, other.logits))
        )


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether logits differ by rounding at most: products of weights that lie elsewhere in memory, as those of a file
    with another tensor in front do, are not the same to the last bit."""
    if a.shape != b.shape:
        return False
    finite = a[a.isfinite()]
    spread = float(finite.std()) if finite.numel() > 1 else 1.0
    return torch.allclose(a, b, rtol=0, atol=ROUNDING * spread, equal_nan=True)


@torch.no_grad()
def draft(heads: DraftHead) -> Draft:
    """Drafts two branches from fixed tokens and features, as deep as every specialist is reached."""
    heads = heads.bind(target())
    config, generator = heads.config, torch.Generator().manual_seed(5)
    depth = heads.max_draft_positions or getattr(config, "trained_positions", None) or 3
    depth = min(max(depth, 2), 16) if heads.max_draft_positions is None else depth
    heads = heads.with_tree(kind="chain", depth=depth)
    width = config.feature_size * len(heads.feature_layers)
    tokens = torch.randint(3, 99, (1, 7), generator=generator)
    features = torch.randn(1, 6, width, generator=generator)
    cache = heads.new_draft_cache()
    states, logits = heads.start_draft(cache, tokens, features)
    every = [logits]
    for position in range(1, depth):
        nodes = torch.tensor([[7 + position, 30 + position]])
        visible = torch.eye(2, dtype=torch.bool).repeat(1, position)[None]
        states, logits = heads.extend_draft(cache, position, nodes, states.expand(-1, 2, -1), visible)
        every.append(logits)
    vocabulary = heads.draft_vocabulary
    return Draft(tuple(every), None if vocabulary is None else vocabulary.tolist(), tuple(heads.feature_layers))


@cache
def original(name: str) -> tuple[Path, Draft, StoredHeads]:
    """Folder of an undamaged checkpoint, and what it holds."""
    layout = LAYOUTS[name]
    folder = layout.write(Path(tempfile.mkdtemp(prefix="layouts-")))
    heads = load_heads(folder, **layout.arguments)
    return folder, draft(heads), stored(folder, **layout.arguments)


# ------------------------------------------------------------------ judging heads that loaded
def only_weights_differ(name: str, folder: Path, heads: DraftHead) -> bool:
    """Whether all that differs are numbers, and the heads have those of the file."""
    source, _, found = original(name)
    before, after = all_tensors(source), all_tensors(folder)
    if after is None or {k: t.shape for k, t in before.items()} != {k: t.shape for k, t in after.items()}:
        return False
    ours, theirs = heads.config.to_diff_dict(), found.config.to_diff_dict()
    ignored = ("target", "dtype", "name_or_path", "_name_or_path")
    if {k: v for k, v in ours.items() if k not in ignored} != {k: v for k, v in theirs.items() if k not in ignored}:
        return False
    read = [after[key].to(heads.dtype) for key in after if not same(before[key], after[key])]
    state = heads.state_dict()
    kept = heads.pruned_token_ids
    if kept is not None and MARKOV_OUT in state:  # the file has rows of drafted tokens only
        state = state | {MARKOV_OUT: state[MARKOV_OUT][kept]}
    loaded = [state[key] for key, tensor in found.tensors.items() if not same(tensor, heads.state_dict()[key])]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in read)
    return bool(read) and finite and all(any(same(tensor, other) for other in read) for tensor in loaded)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their types."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def fields(config: Any) -> dict[str, Any]:
    """All fields of a config, inner objects' without their outer name."""
    flat: dict[str, Any] = {}
    for key, item in config.items() if isinstance(config, dict) else ():
        flat |= fields(item) if isinstance(item, dict) else {}
        flat[key] = item
    return flat


def judge_config(name: str, folder: Path, heads: DraftHead, notes: str) -> str:
    """`other config` or `said` if fields that only the config tells explain the difference."""
    source, _, found = original(name)
    before, after = (fields(json.loads((where / "config.json").read_text())) for where in (source, folder))
    changed = [key for key in before.keys() | after.keys() if before.get(key, ...) != after.get(key, ...)]
    if getattr(heads.config, "anchor_slot", None) == getattr(found.config, "anchor_slot", None):
        changed = [key for key in changed if key != "architectures"]  # which tell nothing else
    told = [key for key in changed if key in TOLD_BY_CONFIG]
    in_force, said = [], []
    for key in told:
        ours = field_of(heads, key)
        value = after.get(key)
        if value is None:
            words = {key, TOLD_BY_CONFIG[key], *NOTED.get(TOLD_BY_CONFIG[key], ())}
            same_field = ours == getattr(found.config, TOLD_BY_CONFIG[key], None)
            said.append(same_field or any(word in notes for word in words) or heads.config.method == "mtp")
        else:
            in_force.append(holds(ours, value))
    if not told or not all(in_force + said):
        return "silently wrong"
    return "other config" if in_force else "said"


def field_of(heads: DraftHead, key: str) -> Any:
    """What heads say of a field. MTP heads have a target's own config of their layer, which is filled in by
    transformers where it is silent, as the target's is."""
    layer, name = getattr(heads.config, "layer_config", None) or {}, TOLD_BY_CONFIG[key]
    return layer.get(key, layer.get(name)) if key in layer or name in layer else getattr(heads.config, name, None)


def holds(ours: Any, value: Any) -> bool:
    """Whether our field has the value that the config says, in one spelling or another."""
    if isinstance(ours, dict):  # rope parameters
        inner = value.values() if isinstance(value, dict) else [value]
        return all(item in ours.values() for item in inner)
    if isinstance(ours, (tuple, list)) and isinstance(value, (tuple, list)):
        return list(ours) in (list(value), [item + 1 for item in value if isinstance(item, int)])
    return ours == value


def run_case(name: str, mutation: str, seed: int) -> Result:
    """Damages a copy of a layout's files and tries it."""
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as parent:
        folder = layout.write(Path(parent))
        change = MUTATIONS[mutation](folder, random.Random(f"{name} {mutation} {seed}"))
        outcome, detail = attempt(name, mutation, folder, change)
    return Result(name, mutation, seed, change, outcome, detail)


def attempt(name: str, mutation: str, folder: Path, change: str) -> tuple[str, str]:
    """Outcome of loading a damaged folder, and a word on it."""
    layout, started = LAYOUTS[name], time.process_time()
    notes, handler = io.StringIO(), None
    logger = logging.getLogger("hf_specheads")
    handler = logging.StreamHandler(notes)
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            heads = load_heads(folder, **layout.arguments)
            drafted = draft(heads)
    except (HeadLoadError, WrongTargetError) as error:
        outcome, detail = "refused", f"{type(error).__name__}: {str(error)[:300]}"
    except TimeoutError:
        return "hang", f"more than {SECONDS} s"
    except Exception as error:  # whatever else comes out is what is looked for
        return "crash", f"{type(error).__name__}: {str(error)[:300]}"
    else:
        outcome, detail = judge(name, mutation, folder, change, heads, drafted, notes.getvalue()), ""
    finally:
        logger.removeHandler(handler)
    return ("hang", "slow") if time.process_time() - started > SECONDS else (outcome, detail)


def judge(name: str, mutation: str, folder: Path, change: str, heads: DraftHead, drafted: Draft, notes: str) -> str:
    """What heads that loaded are."""
    if drafted == original(name)[1]:
        return "same"
    if only_weights_differ(name, folder, heads):
        return "other weights"
    if change.endswith(OTHER_LAYOUT.get(mutation, ("\0",))):
        return "other layout"
    return judge_config(name, folder, heads, notes)


def cases(count: int, first: int = 0) -> list[tuple[str, str, int]]:
    """`count` cases: every mutation of every layout in turn, again and again with other seeds."""
    pairs = [(name, mutation) for mutation in MUTATIONS for name in LAYOUTS]
    random.Random(0).shuffle(pairs)
    return [(*pairs[i % len(pairs)], i // len(pairs)) for i in range(first, first + count)]


def main() -> int:
    """Runs the cases and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()

    def too_slow(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_slow)
    counts: dict[str, Counter] = {}
    failures = []
    for name, mutation, seed in cases(args.cases, args.first):
        signal.alarm(SECONDS * 2)
        result = run_case(name, mutation, seed)
        signal.alarm(0)
        counts.setdefault(mutation, Counter())[result.outcome] += 1
        if result.failed:
            failures.append(result)
            sys.stdout.write(f"{result}\n")
    outcomes = sorted({outcome for counter in counts.values() for outcome in counter})
    lines = ["| mutation | " + " | ".join(outcomes) + " | all |", "|---" * (len(outcomes) + 2) + "|"]
    for mutation, counter in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        lines.append(f"| {mutation} | " + " | ".join(str(counter[o]) for o in outcomes) + f" | {counter.total()} |")
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
