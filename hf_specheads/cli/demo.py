"""Show heads at work: the same text as plain generate, in fewer forwards; fails if a text differs.

Uses the target and the POSS heads that come with the project, or those of a pair of your own.
"""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from .display import emit, hide_progress, marked_text, note, number, plain_steps_text, pos_acc_text, table, use_colour
from .generate import encode
from .measure import Sample, Summary, run_sample, warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..heads.base import DraftHead

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
    """Which pair, how much to generate."""
    parser.add_argument(
        "--pair", type=Path, metavar="FOLDER", help="with target and heads (default: the shipped pair)"
    )
    parser.add_argument("--target", default="target", help="folder inside the pair's, another folder, or a Hub id")
    parser.add_argument("--heads", default="poss3", help="the same, of the heads")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=".jsonl with `prompt` entries (default: built in)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")


def find_pair(given: Path | None) -> Path:
    """The folder of the shipped pair: as given, as installed with the package, or in the checkout it runs from.

    Raises:
        FileNotFoundError: saying where it looked.
    """
    here = Path(__file__)
    candidates = [given] if given else [here.parents[1] / "demo_pair", here.parents[2] / "model_cards"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the pair is not in {[str(folder) for folder in candidates]}; pass --pair FOLDER.")


def member(pair: Path | None, name: str) -> str:
    """A model of the pair (`None` for the shipped one), or any other.

    Raises:
        FileNotFoundError: for a folder that does not exist.
    """
    if Path(name).is_dir():
        return name
    from ..publishing.card.facts import is_hub_id

    path = find_pair(pair) / name
    if not path.is_dir() and not is_hub_id(name):
        raise FileNotFoundError(f"{path} does not exist; pass a folder with a model, or a Hub id.")
    return str(path) if path.is_dir() else name


def load_demo_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DraftHead]:
    """Target, tokenizer and heads in fp32, in which plain and speculative generation agree to the last token."""
    target_name, heads_name = member(args.pair, args.target), member(args.pair, args.heads)
    note(args, f"Loading {target_name} and {heads_name} ...")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import load_heads

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32).eval()
    return target, tokenizer, load_heads(heads_name, dtype=torch.float32).bind(target)


def read_demo_prompts(path: Path | None) -> list[dict[str, str]]:
    """Prompts with `name` and `prompt`; the built-in ones were written for the demo, so no model has seen them."""
    text = (path or resources.files(__package__).joinpath("demo_prompts.jsonl")).read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [{"name": entry.get("name", f"prompt {i}"), **entry} for i, entry in enumerate(prompts, start=1)]


def run(args: argparse.Namespace) -> int:
    """Texts with accepted runs marked, then a table; 1 if any text differs from plain generation."""
    hide_progress()  # two small models: bars would only be in the way of the texts
    prompts = read_demo_prompts(args.prompts)[: args.limit]
    target, tokenizer, heads = load_demo_pair(args)
    heads.adaptive = False  # plain steps in between would have no place among the marks
    say = (lambda *words, **options: None) if args.json else print
    colour = use_colour()
    tree = heads.tree_config
    say(f"{heads.config.method} heads ({_parameters(heads)}) on a target of {_parameters(target)};")
    say(f"draft tree: {tree.kind}, depth {tree.depth}, at most {tree.num_nodes} nodes.")
    mark = "in green" if colour else "in ⟦brackets⟧"
    say(f"Accepted draft tokens are {mark}; everything else is the target's own next token.\n", flush=True)
    warm_up(target, heads, encode(tokenizer, target, prompts[0]["prompt"]))
    summary = Summary()
    for entry in prompts:
        inputs = encode(tokenizer, target, entry["prompt"])
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        sample = run_sample(target, heads, inputs, compare=True, **options)
        summary.samples.append(sample)
        say(f"--- {entry['name']}\n{entry['prompt']}", end="")
        say(marked_text(sample.token_ids, sample.num_accepted, tokenizer.decode, colour), end="\n\n", flush=True)
    names = [entry["name"] for entry in prompts]
    emit(args, {**summary.to_dict(), "names": names, "tree_config": tree.to_dict()}, _report(names, summary))
    return 0 if summary.all_identical else 1


def _report(names: list[str], summary: Summary) -> str:
    lines = [
        _table(names, summary),
        f"\npos_acc (draft position: accepted if all before it were)  {pos_acc_text(summary.pos_acc)}",
        f"plain steps in between  {plain_steps_text(summary.plain_steps, summary.plain_because)}\n",
    ]
    if summary.all_identical:
        return "\n".join([*lines, f"All {len(names)} texts are identical to plain generate.\n\n{USAGE}"])
    differing = [name for name, sample in zip(names, summary.samples, strict=True) if not sample.identical]
    return "\n".join([*lines, f"FAILED: the text differs from plain generate for {differing}."])


def _table(names: list[str], summary: Summary) -> str:
    header = ("prompt", "tokens", "plain tok/s", "heads tok/s", "speed-up", "tau", "forwards", "tokens/forward",
              "identical")  # fmt: skip
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
        number(summary.tokens_per_forward),
        "yes" if identical else "NO",
    )


def _parameters(model: PreTrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M parameters"
