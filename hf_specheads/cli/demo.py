"""Show heads at work: the same text as plain generate, in fewer forwards; fails if a text differs.

Uses the target and the POSS heads that come with the project, or a target and heads of your own.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import load_tokenizer
from .display import (
    brackets,
    emit,
    hide_progress,
    marked_text,
    note,
    number,
    plain_steps_text,
    pos_acc_text,
    table,
    use_colour,
)
from .generate import encode
from .measure import Sample, Summary, run_sample, warm_up
from .pair import add_pair_arguments, find_pair, heads_of_pair, member, preferred_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..heads.base import DraftHead

TASKS = "hf_specheads.trainer.shipped_pair.tasks"  # has the checkers of right answers
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
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

No heads for it yet?  specheads train --config eagle target=your/target output_dir=runs/eagle
(more in the repository: docs/training.md, and examples/ for all of this in Python)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the pair of models, the prompts and their number."""
    add_pair_arguments(parser, help="draft heads, named like the target (default: the best heads of the pair)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=".jsonl file of `prompt` entries (default: the built-in prompts)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N", help="new tokens per prompt")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")


def load_demo_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DraftHead]:
    """Loads target, tokenizer and heads in fp32, in which plain and speculative generation give the same tokens."""
    chosen = args.heads or preferred_of(heads_of_pair(find_pair(args.pair)))
    target_name, heads_name = member(args.pair, args.target), member(args.pair, chosen)
    note(args, f"Loading {target_name} and {heads_name} ...")
    import torch
    from transformers import AutoModelForCausalLM

    from .. import load_heads

    tokenizer = load_tokenizer(target_name)
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32).eval()
    return target, tokenizer, load_heads(heads_name, dtype=torch.float32).bind(target)


def read_demo_prompts(path: Path | None, chats: bool = False) -> list[dict[str, Any]]:
    """Reads entries with `name`, and `prompt` or `messages`, from a file or the built-in ones.

    The built-in prompts were written for the demo, so no model was trained on them. `chats` selects the built-in
    prompts for a target that chats.
    """
    built_in = resources.files(__package__).joinpath("demo_chats.jsonl" if chats else "demo_prompts.jsonl")
    text = (path or built_in).read_text(encoding="utf-8")
    prompts = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [{**entry, "name": entry.get("name", f"prompt {i}")} for i, entry in enumerate(prompts, start=1)]


def prompt_of(entry: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Returns the text of an entry, or its chat up to the start of the answer."""
    return entry["prompt"] if "prompt" in entry else _asked(entry)


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> list[str | list[dict[str, Any]]]:
    """Returns the built-in texts, or chats for a target that chats.

    Chats with tools are left out, because not every chat template supports tools.
    """
    entries = read_demo_prompts(None, bool(tokenizer.chat_template))
    return [prompt_of(entry) for entry in entries if not entry.get("tools")]


def _inputs(
    entry: dict[str, Any], tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """Token ids and mask of a text, or of a chat up to the start of the answer."""
    if "prompt" in entry:
        return encode(tokenizer, target, entry["prompt"])
    options = {"tools": entry.get("tools"), **(entry.get("chat_template_kwargs") or {})}
    import torch

    from ..texts import chat_token_ids

    ids = torch.tensor([chat_token_ids(_asked(entry), tokenizer, **options)])
    ids = ids.to(target.get_input_embeddings().weight.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _asked(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages of a chat; the right answer at the end of a chat with `facts` is left out."""
    return entry["messages"][:-1] if "facts" in entry else entry["messages"]


def answer_problem(entry: dict[str, Any], answer: str) -> str | None:
    """Checks an answer to a chat and says what is wrong with it, or returns `None` if it is right."""
    tasks = import_module(TASKS)
    row = {name: value for name, value in entry.items() if name != "name"}
    return tasks.answer_problem(tasks.Example.from_row(row), answer)


def run(args: argparse.Namespace) -> int:
    """Prints texts with marked accepted tokens, and tables, greedy and sampled; returns 1 if a text differs."""
    say = (lambda *words, **options: None) if args.json else print
    say("hf-specheads: the same text as plain generate, in fewer forward passes. Loading ...", flush=True)
    hide_progress()  # loading two small models is quick, so progress bars would only disturb the texts
    target, tokenizer, heads = load_demo_pair(args)
    prompts = read_demo_prompts(args.prompts, bool(tokenizer.chat_template))[: args.limit]
    colour = use_colour()
    say(f"{heads.config.method} heads ({_parameters(heads)}) on a target of {_parameters(target)}.")
    marks = "green" if colour else "brackets".join(brackets())
    say(f"Accepted draft tokens are in {marks}; everything else is the target's own "
        "next token.\n", flush=True)  # fmt: skip
    warm_up(target, heads, _inputs(prompts[0], tokenizer, target))
    found: dict[str, Summary] = {}
    for mode, options in MODES.items():
        found[mode] = Summary()
        for entry in prompts:
            inputs = _inputs(entry, tokenizer, target)
            note(args, f"{entry['name']}, {mode} ...")
            sample = run_sample(target, heads, inputs, True, max_new_tokens=args.max_new_tokens, **options)
            found[mode].samples.append(sample)
            if mode == "greedy":
                say(_text(entry, sample, tokenizer, colour), end="\n\n", flush=True)
    names = [entry["name"] for entry in prompts]
    facts = {mode: {**summary.to_dict(), "names": names} for mode, summary in found.items()}
    emit(args, {**facts["greedy"], "sampled": facts["temperature 1"]}, _report(names, found))
    return 0 if all(summary.all_identical for summary in found.values()) else 1


def _text(entry: dict[str, Any], sample: Sample, tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    """Question and answer of one prompt, and whether the answer is right if there is a checker."""
    shown = marked_text(sample.token_ids, sample.steps, tokenizer.decode, colour)
    if "prompt" in entry:
        return f"--- {entry['name']}\n{entry['prompt']}{shown}"
    question = "\n".join(f"{message['role']}: {message['content']}" for message in _asked(entry))
    text = f"--- {entry['name']}\n{question}\nassistant: {shown}"
    if "facts" not in entry:
        return text
    problem = answer_problem(entry, tokenizer.decode(sample.token_ids, skip_special_tokens=True))
    return f"{text}\n{'✓ right' if problem is None else f'✗ {problem}'}"


def _report(names: list[str], found: dict[str, Summary]) -> str:
    lines = []
    for mode, summary in found.items():
        lines += [f"{mode}:", _table(names, summary), f"pos_acc  {pos_acc_text(summary.pos_acc)}"]
        lines += [f"plain steps in between  {plain_steps_text(summary.plain_steps, summary.plain_because)}\n"]
    lines.append("tau: tokens per round that drafted; pos_acc: how often a draft at that position was accepted, given "
                 "that all before it were.\n")  # fmt: skip
    differing = [f"{name} ({mode})" for mode, summary in found.items()
                 for name, sample in zip(names, summary.samples, strict=True) if not sample.identical]  # fmt: skip
    if differing:
        return "\n".join([*lines, f"FAILED: the text differs from plain generate for {differing}."])
    return "\n".join([*lines, f"All {len(names)} texts are identical to plain generate.\n",
                       USAGE])  # fmt: skip


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
