"""Show the shipped heads at work: the same text as plain generate, in fewer forwards; fails if a text differs."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..heads.base import DraftHead
from .display import marked_text, number, pos_acc_text, table, use_colour
from .generate import encode
from .measure import Sample, Summary, run_sample, warm_up

USAGE = """\
On your own model:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from hf_specheads import load_heads

    target = AutoModelForCausalLM.from_pretrained("your/target", dtype="auto", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained("your/target")
    heads = load_heads("your/heads")          # heads of any method, trained for this target
    inputs = tokenizer("Hello", return_tensors="pt").to(target.device)
    out = target.generate(**inputs, assistant_model=heads, max_new_tokens=256)
    print(heads.last_stats.acceptance_length, heads.last_stats.pos_acc)

No heads for it yet?  specheads train --config recipe.yaml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the shipped pair is, how much to generate."""
    parser.add_argument(
        "--model_cards", type=Path, help="folder with the shipped pair (default: model_cards/ of the checkout)"
    )
    parser.add_argument("--target", default="target", help="target: folder inside --model_cards, or a path")
    parser.add_argument("--heads", default="poss3", help="heads: folder inside --model_cards, or a path")
    parser.add_argument("--prompts", type=Path, help=".jsonl with `prompt` entries instead of the built-in prompts")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use only the first N prompts")


def find_model_cards(given: Path | None) -> Path:
    """The folder of the shipped pair: as given, in the checkout this package runs from, or in the working folder.

    Raises:
        FileNotFoundError: saying where it looked.
    """
    candidates = [given] if given else [Path(__file__).parents[2] / "model_cards", Path("model_cards")]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"the shipped pair is not in {[str(folder) for folder in candidates]}; run from a checkout of the project or "
        "pass --model_cards FOLDER."
    )


def _member(args: argparse.Namespace, name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        path = find_model_cards(args.model_cards) / name
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; pass a folder with a model.")
    return path


def load_shipped_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DraftHead]:
    """Target, tokenizer and heads in fp32, in which plain and speculative generation agree to the last token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import load_heads

    folder = _member(args, args.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    heads = load_heads(_member(args, args.heads), dtype=torch.float32)
    return target, tokenizer, heads.bind(target)


def read_demo_prompts(path: Path | None) -> list[dict[str, str]]:
    """Prompts with `name` and `prompt`; the built-in ones were written for the demo, so no model has seen them."""
    text = (path or resources.files(__package__).joinpath("demo_prompts.jsonl")).read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [{"name": entry.get("name", f"prompt {i}"), **entry} for i, entry in enumerate(prompts, start=1)]


def run(args: argparse.Namespace) -> int:
    """Texts with accepted runs marked, then a table; 1 if any text differs from plain generation."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    target, tokenizer, heads = load_shipped_pair(args)
    heads.adaptive = False  # plain steps in between would have no place among the marks
    prompts = read_demo_prompts(args.prompts)[: args.limit]
    colour = use_colour()
    mark = "in green" if colour else "in ⟦brackets⟧"
    tree = heads.tree_config
    print(f"{heads.config.method} heads ({_parameters(heads)}) on a target of {_parameters(target)};")
    print(f"draft tree: {tree.kind}, depth {tree.depth}, at most {tree.num_nodes} nodes.")
    print(f"Accepted draft tokens are {mark}; everything else is the target's own next token.\n")
    warm_up(target, heads, encode(tokenizer, target, prompts[0]["prompt"]))
    summary = Summary()
    for entry in prompts:
        inputs = encode(tokenizer, target, entry["prompt"])
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        sample = run_sample(target, heads, inputs, compare=True, **options)
        summary.samples.append(sample)
        print(f"--- {entry['name']}\n{entry['prompt']}", end="")
        print(marked_text(sample.token_ids, sample.num_accepted, tokenizer.decode, colour), end="\n\n")
    print(_table([entry["name"] for entry in prompts], summary))
    print(f"\npos_acc (draft position: accepted if all before it were)  {pos_acc_text(summary.pos_acc)}\n")
    if not summary.all_identical:
        differing = [entry["name"] for entry, s in zip(prompts, summary.samples, strict=True) if not s.identical]
        print(f"FAILED: the text differs from plain generate for {differing}.")
        return 1
    print(f"All {len(prompts)} texts are identical to plain generate.\n\n{USAGE}")
    return 0


def _table(names: list[str], summary: Summary) -> str:
    header = ("prompt", "tokens", "plain tok/s", "heads tok/s", "speed-up", "tau", "forwards", "saved", "identical")
    rows = [_row(name, Summary([sample]), sample) for name, sample in zip(names, summary.samples, strict=True)]
    return table(header, [*rows, _row("all", summary, None)])


def _row(name: str, summary: Summary, sample: Sample | None) -> tuple[str, ...]:
    identical = summary.all_identical if sample is None else sample.identical
    return (
        name,
        str(summary.num_tokens),
        number(summary.plain_tokens_per_second, 1),
        number(summary.tokens_per_second, 1),
        number(summary.speed_up, suffix="x"),
        number(summary.acceptance_length),
        str(summary.target_forwards),
        f"{1 - summary.target_forwards / max(summary.num_tokens, 1):.0%}",
        "yes" if identical else "NO",
    )


def _parameters(model: PreTrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M parameters"
