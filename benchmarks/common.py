"""What all benchmarks share: models, prompts, interleaved timed generation, and results with their provenance."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hf_specheads import load_heads
from hf_specheads.cli.env import collect
from hf_specheads.cli.measure import timed_generate
from hf_specheads.heads.base import DraftHead
from hf_specheads.metrics import GenerationStats, acceptance_length, position_acceptance

from .tables import RENDERERS

ROOT = Path(__file__).parents[1]
PROMPTS = Path(__file__).parent / "prompts"
RESULTS = Path(__file__).parent / "results"

Inputs = dict[str, torch.Tensor]


# ---------------------------------------------------------------------- arguments, models, prompts
def argument_parser(doc: str | None, heads: list[str], prompts: list[str]) -> argparse.ArgumentParser:
    """A parser with the arguments of every benchmark that generates.

    Args:
        doc: Docstring of the benchmark; its first paragraph becomes the description.
        heads: Default head folders.
        prompts: Default prompt sets.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--target", default="model_cards/target", help="target: folder or Hub id")
    parser.add_argument("--heads", nargs="+", default=heads, help="head folders or Hub ids")
    parser.add_argument("--prompts", nargs="+", default=prompts, help="sets in benchmarks/prompts, or .jsonl files")
    parser.add_argument("--limit", type=int, help="use only the first N prompts of every set")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--dtype", default="float32", help="type of all weights")
    add_output_argument(parser)
    return parser


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON and the table")


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Target and tokenizer, as the arguments say; sets the number of threads."""
    disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    return target, AutoTokenizer.from_pretrained(args.target)


def load_bound_heads(target: PreTrainedModel, folder: str, adaptive: bool = False, **tree_overrides: Any) -> DraftHead:
    """Heads of the target's type, bound (and thereby checked) to it; an adapter that comes with them is put on it.

    They draft every round, for a fair comparison of heads, unless `adaptive`.
    """
    heads = load_heads(folder, dtype=target.dtype, **tree_overrides)
    heads.adaptive = adaptive
    if heads.config.target_adapter is not None:
        heads.load_target_adapter(target)
    return heads.bind(target)


def load_prompts(name: str, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[Inputs]:
    """Tokenised prompts of a set in `benchmarks/prompts`, or of a .jsonl file with `prompt` entries."""
    texts = prompt_texts(name, limit)
    return [dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False)) for text in texts]


def prompt_texts(name: str, limit: int | None = None) -> list[str]:
    """The same prompts as text."""
    path = Path(name) if name.endswith(".jsonl") else PROMPTS / f"{name}.jsonl"
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [entry["prompt"] for entry in entries[:limit]]


def count_parameters(model: PreTrainedModel) -> int:
    """Parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------- generation
@dataclass
class Side:
    """One way to generate the same text: `options` are what `generate` gets on top of the common ones."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> DraftHead | None:
        """Its draft heads, if it has any."""
        assistant = self.options.get("assistant_model")
        return assistant if isinstance(assistant, DraftHead) else None


@dataclass
class Run:
    """One generation of one prompt; `stats` only with heads."""

    token_ids: list[int]
    seconds: float
    target_forwards: int
    stats: GenerationStats | None = None


def generate_once(
    target: PreTrainedModel,
    side: Side,
    inputs: Inputs,
    max_new_tokens: int,
    sampling: dict[str, Any] | None = None,
    seed: int = 0,
) -> Run:
    """One timed generation, counting the target's forwards; greedy, or with sampling options and a seed."""
    mode = {"do_sample": False} if sampling is None else {"do_sample": True, **sampling}
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = target.register_forward_pre_hook(count)
    try:
        torch.manual_seed(seed)
        ids, seconds = timed_generate(target, inputs, max_new_tokens=max_new_tokens, **mode, **side.options)
    finally:
        hook.remove()
    return Run(ids, seconds, forwards, side.heads.last_stats if side.heads else None)


def run_interleaved(
    target: PreTrainedModel,
    sides: list[Side],
    prompts: list[Inputs],
    max_new_tokens: int,
    repeats: int,
    sampling: dict[str, Any] | None = None,
) -> dict[str, list[list[Run]]]:
    """Every side on every prompt, `repeats` times; greedy, or sampled with a seed per prompt and repeat.

    All sides of a prompt run right after each other, in an order that rotates, so that whatever else the machine does
    meets all of them alike; a short warm-up of each side is not measured.

    Returns:
        Runs by name of the side, `[repeat][prompt]`.
    """
    for side in sides:
        generate_once(target, side, prompts[0], min(max_new_tokens, 16), sampling)
    runs: dict[str, list[list[Run]]] = {side.name: [] for side in sides}
    for repeat in range(repeats):
        for side in sides:
            runs[side.name].append([])
        for index, inputs in enumerate(prompts):
            shift = (index + repeat) % len(sides)
            for side in sides[shift:] + sides[:shift]:
                seed = repeat * len(prompts) + index
                runs[side.name][-1].append(generate_once(target, side, inputs, max_new_tokens, sampling, seed))
    return runs


def rate(runs: list[Run]) -> float:
    """Tokens per second over several prompts, prefill included."""
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def summarise(runs: list[list[Run]], plain: list[list[Run]]) -> dict[str, Any]:
    """Plain numbers about one side.

    The speed-up is the median over repeats of the ratio of tokens per second within a repeat; `speed_up_range` are
    the lowest and the highest.

    Args:
        runs: Of the side, `[repeat][prompt]`.
        plain: Of plain `generate`, from the same call of [`run_interleaved`].
    """
    ratios = [rate(mine) / rate(theirs) for mine, theirs in zip(runs, plain, strict=True)]
    first = runs[0]
    tokens = sum(len(run.token_ids) for run in first)
    forwards = sum(run.target_forwards for run in first)
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(first, plain[0], strict=True)]
    return {
        "tokens_per_second": statistics.median(rate(repeat) for repeat in runs),
        "speed_up": statistics.median(ratios),
        "speed_up_range": [min(ratios), max(ratios)],
        "new_tokens": tokens,
        "target_forwards": forwards,
        "forwards_saved": 1 - forwards / tokens,
        "identical": all(same),
        "differing_prompts": [index for index, equal in enumerate(same) if not equal],
        **acceptance([run.stats for run in first if run.stats is not None]),
    }


def acceptance(stats: list[GenerationStats]) -> dict[str, Any]:
    """Acceptance length and pos-acc, pooled over rounds of several generations; empty without any."""
    if not stats:
        return {}
    accepted = [row for one in stats for row in one.num_accepted]
    offered = [row for one in stats for row in one.offered]
    return {
        "acceptance_length": acceptance_length(accepted),
        "pos_acc": position_acceptance(accepted, offered),
        "draft_forwards": sum(one.draft_forwards for one in stats),
    }


# ---------------------------------------------------------------------- results
def provenance() -> dict[str, Any]:
    """How a result came about: command, commit, versions, processor, threads, date."""
    facts: dict[str, Any] = {
        "command": _command(sys.argv),
        "commit": _git("rev-parse", "HEAD"),
        # Results that were just written do not count.
        "uncommitted_changes": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", ":(exclude)benchmarks/results")
        ),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": _processor(),
    }
    versions = collect()
    facts["versions"] = {name: versions[name] for name in ("python", "torch", "transformers", "hf-specheads")}
    return {**facts, "threads": torch.get_num_threads(), "accelerators": versions["accelerators"]}


def _command(argv: list[str]) -> str:
    """The command line, with paths relative to the repository; of paths outside it only the name."""
    words = []
    for word in argv[1:]:
        path = Path(word)
        if path.is_absolute():
            word = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        words.append(word)
    return " ".join(["python", "-m", f"benchmarks.{Path(argv[0]).stem}", *words])


def display_name(folder: str) -> str:
    """What a table calls a model: the last part of its folder or Hub id."""
    return Path(folder).name or folder


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} logical cores" if names else platform.machine()


def write_result(folder: Path, name: str, data: dict[str, Any]) -> str:
    """Writes `<name>.json` and its table `<name>.md`; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"provenance": provenance(), **data}
    (folder / f"{name}.json").write_text(json.dumps(_rounded(data), indent=1) + "\n", encoding="utf-8")
    text = RENDERERS[name](_rounded(data))
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text


def _rounded(value: Any) -> Any:
    """Floats to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
