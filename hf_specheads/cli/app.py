"""Open a page in the browser: chat with draft heads next to plain decoding, pictures of draft trees, the doctor.

Uses the shipped pair, or a target and heads of your own. Needs the extra `app`: pip install "hf-specheads[app]".
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .demo import prompt_of, read_demo_prompts
from .display import emit
from .pair import (
    add_pair_arguments,
    add_placement_arguments,
    find_pair,
    heads_of_pair,
    load_placed_target,
    member,
    preferred_of,
    sources_of,
)

if TYPE_CHECKING:
    from ..app.models import Models
    from ..heads.base import DraftHead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the models, and for the address of the page."""
    add_pair_arguments(parser, nargs="+", help="draft heads, named like the target (default: all heads of the pair)")
    add_placement_arguments(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=".jsonl file of `prompt` entries to start from")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all addresses of the machine"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of the page (default: the first free port from 7860)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Serves the page until the process is interrupted."""
    refuse_without_gradio()
    models, chosen = load_models(args)
    from ..app.page import build_page, launch_options

    entries = read_demo_prompts(args.prompts, models.chats)
    # Prompts with tools are left out, because the page has no tools.
    prompts = [(entry["name"], question_of(entry)) for entry in entries if not entry.get("tools")]
    page = build_page(models, prompts, chosen)
    where = {"server_name": args.host, "server_port": args.port, "inbrowser": args.open}
    _, url, _ = page.launch(prevent_thread_lock=True, **launch_options(), **where)
    facts = {"url": url, "target": models.target_name, "heads": list(models.loaders)}
    emit(args, facts, f"{url}  (press Ctrl-C to stop)")
    try:
        page.block_thread()
    finally:
        page.close(verbose=False)
    return 0


def question_of(entry: dict[str, Any]) -> str:
    """Returns the text of a prompt, or the last question of a chat."""
    prompt = prompt_of(entry)
    if isinstance(prompt, str):
        return prompt
    return next((message["content"] for message in reversed(prompt) if message["role"] == "user"), "")


def refuse_without_gradio() -> None:
    """Refuses to start if gradio is not installed, before any model is loaded.

    Raises:
        ImportError: With the command that installs gradio.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ImportError('the page needs gradio, which is not installed; pip install "hf-specheads[app]".')


def load_models(args: argparse.Namespace) -> tuple[Models, str]:
    """Loads the target, prepares its heads by name, and chooses the heads that are selected at first.

    Raises:
        FileNotFoundError: If a folder or a pair does not exist, or the pair has no heads.
    """
    sources = sources_of(args.pair, args.heads or heads_of_pair(find_pair(args.pair)))
    target, tokenizer, options = load_placed_target(args)
    from ..app.models import Models

    loaders: dict[str, Callable[[], DraftHead]] = {
        name: partial(_load, source, options) for name, source in sources.items()
    }
    models = Models(target, tokenizer, loaders, member(args.pair, args.target))
    chosen = preferred_of(list(loaders))
    models.heads(chosen)  # loaded now, so that heads of another target are refused before the page opens
    return models, chosen


def _load(source: str, options: dict[str, Any]) -> DraftHead:
    from .. import load_heads

    return load_heads(source, **options)
