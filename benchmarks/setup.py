"""Targets, draft heads and prompts of measurements, and the arguments that name them.

    python -m benchmarks.setup --tokenizer model_cards/target

This command writes the prompts. `chats.jsonl` and `chats_tuning.jsonl` hold held-out chats from all families of the
shipped pair's tasks, made with seeds that nothing else uses; `chats_tuning.jsonl` is for choosing options such as a
draft tree. `long.jsonl` holds the beginnings of files that the pair was never trained on. They are longer than the
texts that the draft heads were trained on. Files are chosen by hash, so the same Python version gives the same
prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from hf_specheads import DraftHead, DraftTreeConfig, load_heads
from hf_specheads.heads.auto import METHODS
from hf_specheads.heads.block_config import BlockHeadConfig
from hf_specheads.texts import chat_token_ids, left_padded
from hf_specheads.trainer.shipped_pair.corpus import corpus_files, is_held_out
from hf_specheads.trainer.shipped_pair.tasks import FAMILIES, example_at

LOUD = 100.0  # scale of a random target's embeddings, so large that the layers hardly change the residual stream
PROMPTS = Path(__file__).parent / "prompts"
LONG_TOKENS, LONG_FILES = 1536, 12
LINES = 8  # long prompts end at a multiple of this many lines, and at least four times as many lines must follow
CHATS = {"chats": (16, 100), "chats_tuning": (3, 101)}  # chats per family, and the seed
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "llama-100m": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHAPED_HEADS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"draft_vocab_size": 32000},
    "poss": {"num_specialists": 3, "positions_per_specialist": 2},
    "dflash": {},
}

Inputs = dict[str, torch.Tensor]


# ---------------------------------------------------------------------- arguments, and loading what they name
def add_generation_arguments(
    parser: argparse.ArgumentParser, heads: Sequence[str] | None, prompts: Sequence[str], repeats: int | None = 3
) -> None:
    """Adds the arguments that every generating measurement takes.

    Args:
        parser: Parser of the measurement.
        heads: Default draft heads, as names of folders in `model_cards/`; `None` to add no such argument.
        prompts: Default prompt sets.
        repeats: Default number of times that everything is timed; `None` if nothing is timed.
    """
    parser.add_argument("--target", default="model_cards/target", help="target: folder or Hub id")
    if heads is not None:
        folders = [f"model_cards/{name}" for name in heads]
        parser.add_argument("--heads", nargs="+", default=folders, help="head folders or Hub ids")
    parser.add_argument("--prompts", nargs="+", default=prompts, help="sets in benchmarks/prompts, or .jsonl files")
    # Timed measurements use one chat per family by default; measurements of acceptance use all chats.
    limit = None if repeats is None else len(FAMILIES)
    parser.add_argument("--limit", type=int, default=limit, help="use only the first N prompts of every set")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="type of all weights")
    parser.add_argument("--device", default="cpu", help="device that everything runs on")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="number of times that everything is timed")


def add_shape_arguments(parser: argparse.ArgumentParser, depth: int) -> None:
    """Adds the arguments of a pair with random weights, for measurements in which only the time is meaningful."""
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of these sizes instead of --target")
    parser.add_argument("--depth", type=int, default=depth, help="depth of the chains that the heads of --shape draft")
    parser.add_argument(
        "--methods", nargs="+", default=[*SHAPED_HEADS], choices=[*SHAPED_HEADS], help="methods of heads of --shape"
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that every result records, as far as the measurement has these arguments."""
    found = {
        name: getattr(args, name) for name in ("max_new_tokens", "dtype", "device", "repeats") if hasattr(args, name)
    }
    if getattr(args, "shape", None):
        return {"target": args.shape, "num_prompts": args.limit, **found}
    if hasattr(args, "prompts"):
        count = sum(len(prompt_entries(name)[: args.limit]) for name in args.prompts)
        found |= {"target": display_name(args.target), "prompts": args.prompts, "num_prompts": count}
    return found


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the target and the tokenizer that the arguments name."""
    disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    return target, AutoTokenizer.from_pretrained(args.target)


def load_bound_heads(target: PreTrainedModel, folder: str, *, every_round: bool = False) -> DraftHead:
    """Loads draft heads in the target's dtype and binds them to the target, which checks them. If an adapter comes
    with them, it is loaded into the target.

    By default the heads behave as for any user: they take plain steps where drafting does not pay. Set `every_round`
    to draft in every round, which measures drafts rather than time.
    """
    heads = load_heads(folder, dtype=target.dtype)
    heads.adaptive = not every_round
    if heads.config.target_adapter is not None:
        heads.load_target_adapter(target)
    return heads.bind(target)


def load_all_heads(target: PreTrainedModel, folders: Iterable[str], **how: Any) -> dict[str, DraftHead]:
    """Loads draft heads with [`load_bound_heads`], by their names in tables.

    Raises:
        ValueError: if two folders would have the same name in tables; raised before anything is measured.
    """
    folders = list(folders)
    called: dict[str, str] = {}
    for folder in folders:
        if (other := called.setdefault(display_name(folder), folder)) is not folder:
            raise ValueError(
                f"--heads {other} and {folder} would both be called {display_name(folder)!r} in the results; rename a "
                "folder, or pass a link with another name."
            )
    return {display_name(folder): load_bound_heads(target, folder, **how) for folder in folders}


def load_pair(
    args: argparse.Namespace, *, every_round: bool = False
) -> tuple[PreTrainedModel, dict[str, DraftHead], list[Inputs]]:
    """Loads target, draft heads (by their names in tables) and prompts. With `--shape` all of them are random."""
    if getattr(args, "shape", None):
        return random_pair(args, args.device)
    target, tokenizer = load_target(args)
    heads = load_all_heads(target, args.heads, every_round=every_round)
    return target, heads, load_prompts(args.prompts, tokenizer, args.limit)


def load_prompts(names: Iterable[str], tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[Inputs]:
    """Loads and tokenizes prompts, the first `limit` of every set."""
    return [_tokenized(entry, tokenizer) for name in names for entry in prompt_entries(name)[:limit]]


def _tokenized(entry: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Inputs:
    """Tokenizes a text as it is, or a chat with the tokenizer's own template."""
    if "prompt" in entry:
        return left_padded([tokenizer(entry["prompt"])["input_ids"]], 0)
    options = {"tools": entry.get("tools"), "enable_thinking": entry.get("thinking", False)}
    return left_padded([chat_token_ids(entry["messages"], tokenizer, **options)], 0)


def padded(prompts: Sequence[Inputs]) -> Inputs:
    """Joins prompts into one batch, padded on the left."""
    return left_padded([one["input_ids"][0].tolist() for one in prompts], 0)


def full_batches(prompts: Sequence[Inputs], size: int) -> list[Inputs]:
    """Splits prompts into batches of exactly `size`. The prompts of an incomplete last batch are dropped."""
    return [padded(prompts[start : start + size]) for start in range(0, len(prompts) - size + 1, size)]


def cut(prompts: Iterable[Inputs], length: int) -> list[Inputs]:
    """Returns the last `length` tokens of every prompt that has at least as many; drops shorter prompts."""
    return [
        {name: tensor[:, -length:] for name, tensor in inputs.items()}
        for inputs in prompts
        if inputs["input_ids"].shape[1] >= length
    ]


def prompt_entries(name: str) -> list[dict[str, Any]]:
    """Reads the entries of a set in `benchmarks/prompts` or of a .jsonl file.

    An entry has `prompt`, or `messages` with `tools`, `thinking` and `group`. Entries of our own sets also have
    `name`.
    """
    path = Path(name) if name.endswith(".jsonl") else PROMPTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def display_name(folder: str) -> str:
    """Returns the name of a model in tables: the last part of its folder or Hub id."""
    return Path(folder).name or folder


def describe(heads: DraftHead, folder: str) -> dict[str, Any]:
    """Returns method and parameter count of draft heads and, if their folder records it, the cost of their
    training."""
    path = Path(folder) / "training_facts.json"
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    told = {name: facts[name] for name in ("training_flops", "hours", "steps") if name in facts}
    started = {"starts_from": (facts.get("recipe") or {}).get("starts_from")} if facts else {}
    return {"method": heads.config.method, "parameters": heads.num_parameters(), **started, **told}


# ---------------------------------------------------------------------- random pairs of given sizes
def random_llama(dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes: Any) -> PreTrainedModel:
    """Makes a Llama of these sizes with random weights.

    If `lm_head` has its own weights, it is set so that the model predicts token `t + 1` after token `t`, by margins
    too large for rounding to matter. Without this, 16-bit logits of random weights would tie, texts would differ, and
    with them the acceptance.
    """
    torch.manual_seed(0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval()
    if device != "meta" and not target.config.tie_word_embeddings:
        with torch.no_grad():
            embedding, scale = target.get_input_embeddings().weight, target.config.initializer_range
            target.get_output_embeddings().weight.copy_(embedding.normal_().roll(1, 0) * scale)
            embedding.mul_(LOUD)
    return target


def random_pair(
    args: argparse.Namespace, device: str = "cpu"
) -> tuple[PreTrainedModel, dict[str, DraftHead], list[Inputs]]:
    """Makes a random target of the given shape, random draft heads by method, and random prompts.

    The heads draft chains in every round. On the device `meta` nothing takes memory; only the sizes exist.
    """
    sizes = SHAPES[args.shape] | {"eos_token_id": None, "pad_token_id": 0}
    target = random_llama(getattr(torch, args.dtype), device, **sizes)
    heads = {method: random_head(target, method, args.depth) for method in args.methods}
    return target, heads, random_prompts(args.limit, device)


def random_head(target: PreTrainedModel, method: str, depth: int) -> DraftHead:
    """Makes draft heads of random weights for a target. They draft chains in every round."""
    config_class = METHODS[method].config_class
    fields = config_class.fields_for_target(target, method) | SHAPED_HEADS[method]
    if issubclass(config_class, BlockHeadConfig):
        fields["block_size"] = depth + 1
    tree = DraftTreeConfig(kind="chain", depth=depth).to_dict()
    with target.device:
        heads = METHODS[method](config_class(**fields, tree_config=tree)).to(target.dtype).eval()
    heads.adaptive = False
    return heads


def random_prompts(count: int, device: str, tokens: int = 64) -> list[Inputs]:
    """Makes prompts of random tokens."""
    ids = [torch.randint(5, 1000, (1, tokens), device=device) for _ in range(count)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


# ---------------------------------------------------------------------- making prompts
def make_long(tokenizer: PreTrainedTokenizerBase, root: Path) -> list[dict[str, str]]:
    """Makes prompts from the beginnings of held-out files: at least LONG_TOKENS tokens each, with more of the file
    left to continue. Files are chosen by hash."""
    prompts: list[dict[str, str]] = []
    for path in corpus_files(root):
        lines = path.read_text(encoding="utf-8").splitlines() if is_held_out(path, root) else []
        for end in range(LINES, len(lines) - 4 * LINES, LINES):
            text = "\n".join(lines[:end]).rstrip()
            if len(tokenizer(text, add_special_tokens=False)["input_ids"]) >= LONG_TOKENS:
                prompts.append({"name": path.relative_to(root).as_posix(), "prompt": text})
                break
    prompts.sort(key=lambda prompt: hashlib.sha256(f"{prompt['name']}/long".encode()).digest())
    return sorted(prompts[:LONG_FILES], key=lambda prompt: prompt["name"])


def make_chats(per_family: int, seed: int) -> list[dict[str, Any]]:
    """Makes held-out chats without their answers, from all families in turn."""
    asked = [example_at(family, place, seed, held_out=True) for place in range(per_family) for family in FAMILIES]
    return [
        {"name": f"{one.family} {place // len(FAMILIES)}", "group": one.family, "thinking": one.thinking,
         "tools": one.tools, "messages": one.prompt}
        for place, one in enumerate(asked)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.setup", description="Writes the prompts.")
    parser.add_argument("--tokenizer", type=Path, default=Path("model_cards/target"))
    args = parser.parse_args()
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    chats = {name: make_chats(*how) for name, how in CHATS.items()}
    for name, prompts in {"long": make_long(tokenizer, root), **chats}.items():
        text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        (PROMPTS / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
