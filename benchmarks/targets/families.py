"""Draft heads on every family of language models in transformers: the same text as plain generation, or a refusal.

    python -m benchmarks families [MODEL_TYPE ...] [--kinds KIND ...] [--rows FILE]

For every class known to `AutoModelForCausalLM`, and every class of `AutoModelForImageTextToText`
(`image-text/MODEL_TYPE`), a tiny random target generates greedily in fp32, by itself and with heads that know its
text, so that some rounds accept several tokens and others reject some. The kinds of rounds are: draft trees; chains;
trees (or chains if trees are refused) in a batch of prompts of different lengths, whose sequences end in different
rounds; compiled trees (the graphs and guards of `torch.compile`, run as traced; tests/claims/test_compiled.py runs
generated code for five families); and trees after a `DynamicCache()` that the caller passed in. Prompts are text.
Prompts with images are tried for families that `support.images` can make them for. Each kind must give the text of
plain generation or be refused.

With `--rows`, every measured family is appended to a file at once, and families in the file are not measured again
unless they are named. An interruption therefore loses nothing. The table reports rows that were measured with another
state of the engine.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, PreTrainedModel

from hf_specheads.cache.names import CACHE_NAME
from hf_specheads.errors import UnsupportedGenerationError, WrongTargetError
from hf_specheads.generation.compiled.rounds import CompiledRounds
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.texts import left_padded
from hf_specheads.tree.draft_tree import DraftTree
from tests.support.families import NOT_BUILT, families, image_text_families, varied_target
from tests.support.images import OVERRIDES, image_inputs, image_target
from tests.support.stubs import StubHead
from tests.support.targets import prompt

from ..results import Result, footnote, hash_of, markdown_table

NEW = 30
LENGTHS = (19, 7, 13)
# Ranks of the true token in the drafts: mostly first, sometimes lower, sometimes missing.
MIXED = (0, 0, 1, 0, None, 0, 0, 0, 2)
CHAIN: dict[str, Any] = {"kind": "chain", "depth": 4}
KINDS: dict[str, dict[str, Any]] = {
    "tree": {},
    "chain": CHAIN,
    "batch": {},
    "compiled": {},
    "own cache": {},
    "image": CHAIN,
}
# These check the graphs, guards and caches of compiled rounds without the minutes that code generation takes.
BACKEND = "graphs of `torch.compile` with its backend `eager`, which generates no code"
IMAGE_TEXT = "image-text/"
NO_IMAGE = "no image here"
IDENTICAL, REFUSED, WRONG, CRASHED = "identical", "refused", "wrong", "crashed"
WITHOUT = "plain generate fails"  # a failure of transformers itself, so there is no text to compare with
OUTCOMES = (IDENTICAL, REFUSED, WITHOUT, WRONG, CRASHED, NO_IMAGE)
INSTEAD = "draft a chain instead"
REFUSALS = (UnsupportedGenerationError, WrongTargetError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that select families and kinds of rounds."""
    parser.add_argument("families", nargs="*", default=[], help="model types (default: all)", metavar="MODEL_TYPE")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="rounds to measure (default: all)"
    )
    parser.add_argument("--rows", type=Path, help="JSON lines file of measured families, to be extended")


def inputs_of(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Makes prompts of these lengths, padded on the left."""
    return left_padded([prompt(length, seed=seed)[0].tolist() for seed, length in enumerate(lengths)], 0)


def generate(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Generates greedily; [B, T + NEW]."""
    return target.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def oracle(target: PreTrainedModel, inputs: dict[str, torch.Tensor], texts: torch.Tensor, **tree: Any) -> StubHead:
    """Makes heads that know the texts of a batch."""
    return StubHead.of_batch(target, inputs, texts, MIXED, **tree)


def grow_uncompiled(
    rounds: CompiledRounds, head: Any, cache: Any, tree: Any, token_ids: Any, features: Any, depth: int,
    in_shape: bool = True, reach: Any = None,
) -> DraftTree:  # fmt: skip
    """Grows a tree without compilation, since heads that look their text up cannot be compiled. The target's forward,
    which this benchmark checks, stays compiled."""
    return grow_tree(head, cache, tree, token_ids, features, depth, reach=reach)


def outcome_of(kind: str, target: PreTrainedModel) -> Result:
    """Runs one kind of rounds with a target. Returns the `outcome` and, for a refusal or an error, its `sentence`."""
    if kind == "image" and target.config.model_type not in OVERRIDES:
        return {"outcome": NO_IMAGE}
    inputs = image_inputs(target) if kind == "image" else inputs_of(LENGTHS if kind == "batch" else LENGTHS[:1])
    cache = {CACHE_NAME: DynamicCache()} if kind == "own cache" else {}
    try:
        expected = generate(target, inputs, **cache)
    except Exception as error:
        return {"outcome": WITHOUT, "sentence": _first_line(error)}
    found = _tried(kind, target, inputs, expected, KINDS[kind])
    # Heads without a tree of the user's choice draft chains there.
    if kind == "batch" and INSTEAD in found.get("sentence", ""):
        found = _tried(kind, target, inputs, expected, CHAIN)
        return found | {"drafts": "chains"} if found["outcome"] == IDENTICAL else found
    return found


def _tried(
    kind: str, target: PreTrainedModel, inputs: dict[str, torch.Tensor], expected: torch.Tensor, tree: dict[str, Any]
) -> Result:
    """Runs one kind of rounds with heads of one tree."""
    options = {CACHE_NAME: DynamicCache()} if kind == "own cache" else {}
    try:
        heads = oracle(target, inputs, expected, **tree)
        heads.compiled = kind == "compiled"
        with mock.patch.object(CompiledRounds, "grow", grow_uncompiled):
            got = generate(target, inputs, assistant_model=heads, **options)
    except REFUSALS as refusal:
        return {"outcome": REFUSED, "sentence": str(refusal)}
    except Exception as error:
        return {"outcome": CRASHED, "sentence": _first_line(error)}
    if not torch.equal(got, expected):
        return {"outcome": WRONG, "sentence": f"{int((got != expected).sum())} tokens differ"}
    accepted = [number for sequence in heads.last_stats.num_accepted for number in sequence]
    if max(accepted) < 2 or min(accepted) > 3:
        return {"outcome": CRASHED, "sentence": f"these rounds show nothing, they accept {accepted}"}
    return {"outcome": IDENTICAL}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def target_of(model_type: str) -> PreTrainedModel:
    """Makes a tiny target that generates varied text: a causal language model, or `image-text/MODEL_TYPE`."""
    name, auto = model_type.removeprefix(IMAGE_TEXT), AutoModelForCausalLM
    if name != model_type:
        auto = transformers.AutoModelForImageTextToText
        if name in OVERRIDES:
            return image_target(name)
    return varied_target(name, lambda target: generate(target, inputs_of(LENGTHS[:1]))[0, LENGTHS[0] :], auto)


def measure_family(model_type: str, kinds: Sequence[str] = tuple(KINDS)) -> Result:
    """Measures one family. Returns its class and the outcome of every kind of rounds, or why no such target can be
    made."""
    if (reason := NOT_BUILT.get(model_type)) is not None:
        return {"not_built": reason}
    try:
        target = target_of(model_type)
    except Exception as error:  # an error in transformers for one family must not end the measurement of the others
        return {"not_built": f"not by rule, or plain `generate` fails ({_first_line(error)[:120]})"}
    target.generation_config.compile_config = CompileConfig(backend="eager", mode=None)
    torch._dynamo.reset()
    outcomes = {kind: outcome_of(kind, target) for kind in kinds}
    gc.collect()
    return {"class": type(target).__name__, **outcomes}


def measure(args: argparse.Namespace) -> Result:
    """Measures all families asked for."""
    engine = hash_of(["hf_specheads"])
    every = [*families(), *(IMAGE_TEXT + name for name in image_text_families())]
    rows = {} if args.rows is None else read_rows(args.rows)
    for model_type in args.families or every:
        row = {} if args.families else rows.get(model_type, {})
        kinds = [] if "not_built" in row else [kind for kind in args.kinds if kind not in row]
        if not kinds:
            continue
        found = {**measure_family(model_type, kinds), "engine": engine}
        rows[model_type] = rows.get(model_type, {}) | found
        print(f"{model_type}: {found}")
        if args.rows is not None:
            with args.rows.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"model_type": model_type, **found}) + "\n")
    ordered = {name: rows[name] for name in every if name in rows}
    return {"families": ordered, "counts": counts(ordered), "new_tokens": NEW}


def read_rows(path: Path) -> Result:
    """Reads rows by model type; newer lines replace older ones. Empty if there is no file."""
    rows: Result = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        line = json.loads(text)
        name = line.pop("model_type")
        rows[name] = rows.get(name, {}) | line
    return rows


def counts(rows: Result) -> Result:
    """Counts families by kind of rounds and outcome."""
    built = [row for row in rows.values() if "not_built" not in row]
    found = {kind: [row[kind]["outcome"] for row in built if kind in row] for kind in KINDS}
    return {kind: {outcome: each.count(outcome) for outcome in OUTCOMES} for kind, each in found.items()}


def texts_agree(result: Result) -> bool:
    """Tells whether no text is wrong and nothing crashed."""
    return not any(numbers[WRONG] or numbers[CRASHED] for numbers in result["counts"].values())


def table(result: Result) -> str:
    """One row per family, followed by the texts of the refusals."""
    sentences: dict[str, int] = {}
    rows = []
    for model_type, row in result["families"].items():
        if "not_built" in row:
            rows.append((f"`{model_type}`", f"not built: {row['not_built']}", *["-"] * len(KINDS)))
            continue
        rows.append((f"`{model_type}`", f"`{row['class']}`", *(_cell(row, kind, sentences) for kind in KINDS)))
    built = sum("not_built" not in row for row in result["families"].values())
    total = ("all", "", *(_total(result["counts"][kind], built) for kind in KINDS))
    refusals = [f"{number}. {sentence}" for sentence, number in sentences.items()]
    text = markdown_table(("model type", "class", *KINDS), [total, *rows])
    notes = (f"greedy, fp32, {result['new_tokens']} tokens, random weights", f"compiled: {BACKEND}", *_engines(result))
    return "\n".join([text, "Refusals:", "", *refusals, footnote(result, *notes)])


def _engines(result: Result) -> list[str]:
    """Returns a note on the number of rows measured with another engine than the result's, if there are any."""
    others = sum(row["engine"] != result["provenance"]["sources"] for row in result["families"].values())
    return [f"{others} rows were measured with an earlier state of the engine"] if others else []


def _cell(row: Result, kind: str, sentences: dict[str, int]) -> str:
    if kind not in row:
        return "not tried"
    found = row[kind]
    if found["outcome"] == IDENTICAL:
        return f"same text ({found['drafts']})" if "drafts" in found else "same text"
    if found["outcome"] == NO_IMAGE:
        return "-"
    sentence = found["sentence"].replace(row["class"], "TARGET")
    return f"{found['outcome']} ({sentences.setdefault(sentence, len(sentences) + 1)})"


def _total(numbers: Result, built: int) -> str:
    everything = numbers | {"not tried": built - sum(numbers.values())}
    return ", ".join(f"{number} {outcome}" for outcome, number in everything.items() if number)
