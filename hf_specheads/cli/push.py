"""Upload heads to the Hub: weights, config, a model card rendered from facts, and its figures.

Facts of training and speed are read from `training_facts.json` and `eval_results.json` beside the heads. What you
wrote into the card on the Hub stays. Log in with `hf auth login`, or set HF_TOKEN.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .arguments import add_heads_arguments, load_heads_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, repository, how to commit, and facts for the card."""
    parser.add_argument("heads", help="folder or Hub id of the heads; any layout that can be read")
    parser.add_argument("repository", help="Hub id to push to; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="make the repository private if it is new")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to, made if it does not exist")
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--commit_message", metavar="TEXT")
    parser.add_argument("--token", help="access token (default: the one you logged in with)")
    parser.add_argument("--max_shard_size", default="50GB", metavar="SIZE")
    parser.add_argument(
        "--custom_generate", action="store_true", help="also upload the code for generate(custom_generate=...)"
    )
    facts = parser.add_argument_group("facts for the model card")
    facts.add_argument("--base_model", metavar="ID", help="the target's Hub id, if it was trained with a local copy")
    facts.add_argument("--results", type=Path, nargs="+", help="files that `specheads eval --json` wrote")
    facts.add_argument("--license", metavar="ID", help="licence of these weights")
    facts.add_argument("--datasets", nargs="+", metavar="ID", help="data sets on the Hub")
    facts.add_argument("--language", nargs="+", metavar="CODE")
    facts.add_argument("--tags", nargs="+")
    add_heads_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the heads, so that nothing damaged is pushed, and uploads them."""
    card = {name: getattr(args, name) for name in ("base_model", "license", "datasets", "language", "tags")}
    if args.results:
        card["evaluations"] = [
            {"task": file.stem, **json.loads(file.read_text(encoding="utf-8"))} for file in args.results
        ]
    heads = load_heads_from(args, args.heads)
    commit = heads.push_to_hub(
        args.repository,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
        commit_message=args.commit_message,
        token=args.token,
        max_shard_size=args.max_shard_size,
        custom_generate=args.custom_generate,
        **{name: value for name, value in card.items() if value is not None},
    )
    print(f"pushed {type(heads).__name__} ({heads.config.method}) to {commit.pr_url or commit.commit_url}")
    return 0
