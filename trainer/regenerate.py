"""Lets the target answer the prompts of a data set, because draft heads should learn from the target's own words.

    specheads regenerate --target org/model --data org/prompts --out runs/data
    specheads regenerate --target org/model --data prompts.jsonl --out runs/data --server http://localhost:8000/v1

The target answers every turn after its own earlier replies; recorded tool results follow its tool calls. Rows hold
the exact token ids. Called again, the command resumes where it stopped. Train with train_data=runs/data.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from hf_specheads.cli.arguments import Parser, load_tokenizer, torch_dtype

from .commands import add_folder_options, add_output_options, write_folder
from .data.packing import Examples
from .data.sources import DataSource

ROWS_PER_SHARD = 500


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("specheads regenerate", description=__doc__)
    parser.add_argument(
        "--target", required=True, help="target model: folder or Hub id (with --server, of its tokenizer)"
    )
    add_folder_options(parser, "file, folder or Hub id, with a column messages, conversations or prompt")
    parser.add_argument("--limit", type=int, help="maximum number of rows to read")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0], help="for each chat, one of these is drawn"
    )
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--max-length", type=int, default=4096, help="longest prompt and reply together, in tokens")
    parser.add_argument("--thinking", choices=("on", "off"), help="enable_thinking for the chat template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows-per-shard", type=int, default=ROWS_PER_SHARD)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts answered together")
    here = parser.add_argument_group("in this process")
    here.add_argument("--heads", help="draft heads that speed up generation, e.g. from an earlier training")
    here.add_argument("--dtype", default="auto", help="dtype of the target")
    here.add_argument("--device", default="cpu", help="cpu, cuda, ... or 'auto' to spread over all accelerators")
    there = parser.add_argument_group("by a server (vLLM, SGLang, any with OpenAI's completions API)")
    there.add_argument("--server", metavar="URL", help="e.g. http://localhost:8000/v1")
    there.add_argument("--model", help="name of the target on the server (default: --target)")
    there.add_argument("--concurrency", type=int, default=32, help="number of simultaneous requests")
    there.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    there.add_argument(
        "--retokenize", action="store_true", help="tokenize the text if the server returns no token ids"
    )
    add_output_options(parser.add_argument_group("output"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes shards until all rows are processed; returns exit code 0 if some row was answered, 1 if none was, 2 for
    wrong input, 130 if interrupted."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    counts = write_folder("regenerate", args, regenerate)
    if isinstance(counts, int):
        return counts
    if not args.json:
        told = f"{counts['rows']} rows: {counts['success']} answered, {counts['error']} failed, "
        print(f"{told}{counts['skipped']} skipped; {counts['generations']} generations, {counts['tokens']} tokens")
        print(f"train with train_data={args.out}; what was lost is in {args.out}/shard-*.lost.jsonl")
    return 0 if counts["success"] else 1


def regenerate(args: argparse.Namespace) -> dict[str, int]:
    """Regenerates the chats that the arguments describe.

    Returns:
        Counts over the whole folder; `success`, `error` and `skipped` add up to `rows`.

    Raises:
        ValueError: for wrong arguments or data, and for a folder started with other settings.
        RuntimeError: if no chat of a shard could be answered, for example because the server is down.
    """
    if args.server and args.heads:
        raise ValueError(
            "--heads are used in this process, but --server generates elsewhere; drop one of the two options."
        )
    from .data.regeneration import RegenerationOptions, Regenerator
    from .data.shards import ShardFolder

    kwargs = {**args.template_kwargs, **({"enable_thinking": args.thinking == "on"} if args.thinking else {})}
    options = RegenerationOptions(
        tuple(args.temperature), args.max_new_tokens, args.max_length, args.top_p, args.top_k, kwargs,
        args.batch_size, args.seed,
    )  # fmt: skip
    rows, tokenizer = load_rows(args), load_chat_tokenizer(args)
    folder = ShardFolder(args.out, "regeneration", settings_of(args, kwargs, len(rows)))
    starts = range(0, len(rows), args.rows_per_shard)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    todo = [index for index in range(rank, len(starts), world) if not folder.is_done(index)]
    if todo:
        answerer = load_answerer(args, tokenizer)
        done = sum(map(folder.is_done, range(len(starts)))) * args.rows_per_shard
        with _progress(args, len(rows), done) as told:
            regenerator = Regenerator(answerer, tokenizer, options, told.add_tokens)
            for index in todo:
                part = rows.select(range(starts[index], min(starts[index] + args.rows_per_shard, len(rows))))
                generated, lost, counts = regenerator.run(list(part), starts[index])
                if counts["error"] and not counts["generations"]:  # a server that is down
                    raise RuntimeError(
                        f"none of {counts['error']} chats was answered, so nothing is written for them; the first "
                        f"error: {next(row['problem'] for row in lost if row['status'] == 'error')}"
                    )
                folder.write_lines(index, generated)
                folder.write_lines(index, lost, ".lost.jsonl")
                folder.finish(index, {"rows": len(part), **counts})
                told.add_rows(len(part))
    found = folder.counts()
    return {name: found[name] for name in ("rows", "success", "error", "skipped", "generations", "tokens")}


def load_rows(args: argparse.Namespace) -> Examples:
    """Loads the data set, which must hold chats or prompts.

    Raises:
        RecipeError: if the data cannot be read.
        ValueError: if no column holds prompts.
    """
    rows = DataSource(args.data, args.name, args.split).load_raw()
    if not {"messages", "conversations", "prompt"} & set(rows.column_names):
        raise ValueError(
            f"data {args.data!r} has the columns {rows.column_names}, but one of messages, conversations and prompt "
            "is needed; rename one."
        )
    return rows if args.limit is None else rows.select(range(min(args.limit, len(rows))))


def settings_of(args: argparse.Namespace, template_kwargs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Returns the settings that all shards of a folder must share. Draft heads, server and batch size may change,
    because the target stays the same."""
    names = ("target", "data", "name", "split", "limit", "temperature", "top_p", "top_k", "max_new_tokens")
    settings = {name: getattr(args, name) for name in (*names, "max_length", "seed", "rows_per_shard")}
    return {**settings, "template_kwargs": template_kwargs, "rows": rows, "retokenized": args.retokenize}


def load_chat_tokenizer(args: argparse.Namespace) -> Any:
    """Loads the target's tokenizer, before anything is written.

    Raises:
        FileNotFoundError: for a folder without a tokenizer.
        ValueError: for a tokenizer without a chat template.
    """
    tokenizer = load_tokenizer(args.target)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {args.target!r} has no chat template, so it cannot render prompts; set "
            "`tokenizer.chat_template` and save it with the target, or train on texts as they are (data with a `text` "
            "column need no regeneration)."
        )
    return tokenizer


def load_answerer(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Returns the answerer: a server, or the target in this process."""
    from transformers import AutoModelForCausalLM

    from hf_specheads import load_heads
    from hf_specheads.texts import pad_token_id_of

    from .data.answering import Server, TargetInProcess

    if args.server:
        known = tokenizer if args.retokenize else None
        name = args.model or args.target
        return Server(args.server, name, args.concurrency, args.api_key, tokenizer=known)
    how = {"dtype": torch_dtype(args.dtype), "device_map": args.device}
    target = AutoModelForCausalLM.from_pretrained(args.target, **how)
    heads = None if args.heads is None else load_heads(args.heads, dtype=target.dtype).bind(target)
    return TargetInProcess(target, pad_token_id_of(tokenizer), heads)


class _progress:
    """Progress bar of rows with tokens per second; hidden under `--quiet` or if stderr is no terminal."""

    def __init__(self, args: argparse.Namespace, rows: int, done: int):
        import time

        from tqdm import tqdm

        hidden = args.quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=rows, initial=min(done, rows), unit="row", disable=hidden, desc="regenerating")
        self.tokens, self.clock = 0, time.perf_counter
        self.started = self.clock()

    def __enter__(self) -> _progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def add_tokens(self, count: int) -> None:
        self.tokens += count
        self.bar.set_postfix_str(f"{self.tokens / max(self.clock() - self.started, 1e-9):.0f} tokens/s")

    def add_rows(self, count: int) -> None:
        self.bar.update(count)


if __name__ == "__main__":
    sys.exit(main())
