"""Upload heads to the Hub: weights, config, a model card rendered from facts, and its figures.

Facts of training and speed are read from `training_facts.json` and `eval_results.json` in the folder of the heads.
What you wrote into the card on the Hub is kept. Log in with `hf auth login`, or set HF_TOKEN. With --to-folder the
repository is written to a folder, and the Hub is not accessed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .arguments import add_heads_arguments, load_heads_from
from .display import emit, note

CARD = ("base_model", "license", "datasets", "language", "tags")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for source, repository and commit, and facts for the card."""
    parser.add_argument("heads", help="folder or Hub id of the heads; any layout that can be read")
    parser.add_argument(
        "repository", nargs="?",
        help="Hub id to push to, created if it does not exist; with --to-folder, the name on the card (then by "
             "default the name of the folder)",
    )  # fmt: skip
    parser.add_argument(
        "--to-folder", type=Path, metavar="DIR", help="write the repository to DIR, without network access"
    )
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--private", action="store_true", help="make the repository private if it is new")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to, created if it does not exist")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--commit-message", metavar="TEXT", help="first line of the commit (default: 'Upload ...')")
    parser.add_argument("--token", help="access token (default: the one you logged in with)")
    parser.add_argument("--max-shard-size", default="50GB", metavar="SIZE", help="largest size of a file of weights")
    parser.add_argument(
        "--custom-generate", action="store_true", help="also write the code for generate(custom_generate=...)"
    )
    facts = parser.add_argument_group("facts for the model card")
    facts.add_argument("--base-model", metavar="ID", help="the target's Hub id, if it was trained with a local copy")
    facts.add_argument("--results", type=Path, nargs="+", help="files with what `specheads eval --json` printed")
    facts.add_argument("--license", metavar="ID", help="licence of these weights")
    facts.add_argument("--datasets", nargs="+", metavar="ID", help="data sets on the Hub")
    facts.add_argument("--language", nargs="+", metavar="CODE", help="languages of the texts, e.g. en")
    facts.add_argument("--tags", nargs="+", metavar="TAG", help="more tags")
    add_heads_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the heads, so that damaged files are never pushed, and uploads them or writes them to a folder."""
    refuse_wrong_place(args)
    card = {name: getattr(args, name) for name in CARD if getattr(args, name) is not None}
    if args.results:
        card["evaluations"] = [read_results(file) for file in args.results]
    heads = load_heads_from(args, args.heads)
    options = {"max_shard_size": args.max_shard_size, "custom_generate": args.custom_generate, **card}
    facts = {"class": type(heads).__name__, "method": heads.config.method}
    if args.to_folder is not None:
        from ..publishing.push import write_repository

        folder = write_repository(heads, args.to_folder, args.repository or name_after(args.to_folder), **options)
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        text = f"wrote {facts['class']} ({facts['method']}) to {folder}: {', '.join(files)}"
        emit(args, {**facts, "folder": str(folder), "files": files}, text)
        return 0
    note(args, f"Uploading to {args.repository} ...")
    with naming_the_hub(args.repository):
        commit = heads.push_to_hub(
            args.repository,
            private=args.private or None,
            revision=args.revision,
            create_pr=args.create_pr,
            commit_message=args.commit_message,
            token=args.token,
            **options,
        )
    url = commit.pr_url or commit.commit_url
    emit(args, {**facts, "url": url}, f"pushed {facts['class']} ({facts['method']}) to {url}")
    return 0


@contextmanager
def naming_the_hub(repository: str) -> Iterator[None]:
    """Adds the address of the Hub to errors of a Hub that does not answer; its answers contain the address already.

    Raises:
        ConnectionError: With the reason.
    """
    from huggingface_hub import constants

    from ..checkpoints.fetch import HUB_ERRORS

    try:
        yield
    except HUB_ERRORS as error:
        if isinstance(error, OSError):
            raise
        raise ConnectionError(
            f"{repository!r} cannot be pushed because {constants.ENDPOINT} does not answer: {error}; check the "
            "connection, or write the repository with --to-folder DIR."
        ) from error


def refuse_wrong_place(args: argparse.Namespace) -> None:
    """Refuses a call without destination, an invalid repository name, or a folder that is not empty.

    Raises:
        ValueError: If neither repository nor folder is given, or the repository's name is invalid.
        FileExistsError: If the folder is not empty.
    """
    if args.to_folder is None and args.repository is None:
        raise ValueError("say where to push: `specheads push HEADS OWNER/NAME`, or pass --to-folder DIR.")
    if args.repository is not None:
        refuse_impossible_name(args.repository)
    folder = args.to_folder
    if folder is None or args.overwrite or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder or pass --overwrite.")


def refuse_impossible_name(repository: str) -> None:
    """Refuses names that the Hub would refuse, before anything is loaded.

    Raises:
        ValueError: The message names the rule that is broken.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is not a valid name of a repository; use OWNER/NAME. {error}") from error


def name_after(folder: Path) -> str:
    """Makes a valid repository name from a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]|--|\.\.", "-", folder.resolve().name).strip("-.") or "draft-heads"


def read_results(file: Path) -> dict:
    """Reads results of `specheads eval --json`; the file's name becomes their `task`.

    Raises:
        ValueError: If the file holds something else.
    """
    try:
        return {"task": file.stem, **json.loads(file.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} holds no results of `specheads eval --json`: {error}") from error
