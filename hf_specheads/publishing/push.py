"""`push_to_hub`: uploads draft heads with their card, figures and facts in one commit, but no weights of the target.

Uploads, permissions, branches, pull requests and resuming after an interruption are left to huggingface_hub.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from ..version import __version__
from .card.facts import (
    CUSTOM_CODE,
    CUSTOM_GENERATE,
    EVAL_RESULTS,
    TRAINING_FACTS,
    CardFacts,
    collect_facts,
    is_hub_id,
    read_evaluations,
)
from .card.render import render_card
from .card.sections import target_link
from .curves import read_history
from .figures import FIGURES, can_draw, draw_figures
from .places import without_places

logger = logging.getLogger(__name__)

CODE = '''"""Generates with the draft heads of this repository; the text is the target's own.

    target.generate(**inputs, custom_generate="{source}", trust_remote_code=True)
"""

import sys

from hf_specheads.custom_generate import generate_with

# Where the heads are, unless the call says: a copy of this repository loads its own.
REPOSITORY = "{source}"


def generate(model, *args, **kwargs):
    source = sys._getframe(1).f_locals.get("custom_generate") or REPOSITORY
    return generate_with(source, __file__, model, *args, **kwargs)
'''
REQUIREMENTS = "hf-specheads>={version}\n"
# Files of an earlier push that are deleted if this push does not write them: shards, figures, adapter, generated code.
REPLACED = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", *FIGURES.values(),
            "target_adapter/*", f"{CUSTOM_GENERATE}/*")  # fmt: skip
FOLDER_FACTS = {"name", "config", "num_parameters", "figures", "custom_generate"}  # always taken from the folder
CARD_ARGUMENTS = {field.name for field in dataclasses.fields(CardFacts)} - FOLDER_FACTS


def push_heads(
    heads: PreTrainedModel,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    custom_generate: bool = False,
    base_model: str | None = None,
    facts_from: str | os.PathLike[str] | None = None,
    **card: Any,
) -> CommitInfo:
    """Uploads draft heads to the Hub; see [`DraftHead.push_to_hub`]."""
    refuse_unknown_facts(card)
    api = HfApi(token=token, library_name="hf-specheads")
    with tempfile.TemporaryDirectory() as temporary:
        folder, options = Path(temporary), {"base_model": base_model, "facts_from": facts_from}
        card = save_with_facts(heads, folder, max_shard_size=max_shard_size, **options, **card)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
        if custom_generate:
            write_custom_generate(folder, repo_id)
        complete_folder(folder, repo_id, api, revision=revision, **card)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or "Upload draft heads",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=list(REPLACED),
        )


def write_repository(
    heads: PreTrainedModel,
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    max_shard_size: int | str = "50GB",
    custom_generate: bool = False,
    base_model: str | None = None,
    facts_from: str | os.PathLike[str] | None = None,
    **card: Any,
) -> Path:
    """Writes what [`push_heads`] would upload into a folder, without accessing the Hub.

    Args:
        heads: Draft heads to write.
        folder: Destination; created if it does not exist. Text that the user wrote into its README.md is kept.
        repo_id: Repository that the folder will be uploaded to, for the card and `custom_generate`.
        max_shard_size, custom_generate, base_model, facts_from, **card: As for [`DraftHead.push_to_hub`].

    Returns:
        The folder.

    Raises:
        ValueError: If a fact is unknown.
    """
    refuse_unknown_facts(card)
    folder, options = Path(folder), {"base_model": base_model, "facts_from": facts_from}
    card = save_with_facts(heads, folder, max_shard_size=max_shard_size, **options, **card)
    if custom_generate:
        write_custom_generate(folder, repo_id)
    complete_folder(folder, repo_id, None, **card)
    return folder


def refuse_unknown_facts(card: dict[str, Any]) -> None:
    """Refuses facts that model cards do not have."""
    if unknown := sorted(set(card) - CARD_ARGUMENTS):
        raise ValueError(f"unknown fact(s) {unknown} for the model card; known facts: {sorted(CARD_ARGUMENTS)}.")


def save_with_facts(
    heads: PreTrainedModel,
    folder: Path,
    *,
    max_shard_size: int | str,
    base_model: str | None,
    facts_from: str | os.PathLike[str] | None,
    **card: Any,
) -> dict[str, Any]:
    """Saves heads together with facts of training and evaluation, without local paths.

    The facts are the given ones, or else those in the folder that the heads came from.

    Returns:
        The remaining arguments of `card`, which are not stored in files.
    """
    source, card_path = facts_from or heads.name_or_path, folder / "README.md"
    had_card = card_path.is_file()
    heads.save_pretrained(folder, max_shard_size=max_shard_size)
    if not had_card:
        card_path.unlink()  # the card is rendered later, when all facts are known
    name_target(folder / "config.json", base_model)
    if source and os.path.isdir(source):
        _copy_facts(Path(source), folder)
    for name, field in ((TRAINING_FACTS, "training"), (EVAL_RESULTS, "evaluations")):
        facts, path = card.pop(field, None), folder / name
        if facts is None and path.is_file():
            facts = json.loads(path.read_text(encoding="utf-8"))
        if facts is not None:
            plain = json.loads(json.dumps(facts, default=str))
            path.write_text(json.dumps(without_places(plain), indent=1) + "\n", encoding="utf-8")
    return card


def complete_folder(
    folder: Path, repo_id: str, api: HfApi | None, *, revision: str | None = None, **card: Any
) -> Path:
    """Draws the figures of a folder of heads and writes its card.

    The card keeps what users wrote into earlier cards: the one on the Hub, which takes precedence, and the folder's
    README.

    Args:
        folder: Folder with config, weights and facts.
        repo_id: Repository that the folder will be pushed to.
        api: Client for fetching the card on the Hub and the target's licence; `None` for no network access.
        revision: Branch that will be pushed to.
        **card: Fields of [`CardFacts`].

    Returns:
        Path of the card.
    """
    if can_draw():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        evaluations = card.get("evaluations") or read_evaluations(folder / EVAL_RESULTS)
        draw_figures(folder, evaluations, read_history(folder / TRAINING_FACTS), str(config.get("method", "")))
    else:
        logger.warning("no figures in the model card: they need matplotlib (`pip install matplotlib`).")
    facts = collect_facts(folder, **{**card, "name": repo_id})
    if facts.target_license is None and (licence := target_licence(facts, api)):
        facts.target_license = f"The licence of the target, {target_link(facts)}, is `{licence}`."
    path = folder / "README.md"
    earlier = [published_card(api, repo_id, revision) if api is not None else None, path]
    texts = [file.read_text(encoding="utf-8") for file in earlier if file is not None and file.is_file()]
    path.write_text(render_card(facts, *texts), encoding="utf-8")
    return path


def published_card(api: HfApi, repo_id: str, revision: str | None = None) -> Path | None:
    """Downloads the current README of a repository; `None` if it has none.

    Raises:
        LocalEntryNotFoundError: If the Hub does not answer, because a card that may exist must not be overwritten.
    """
    try:
        return Path(api.hf_hub_download(repo_id, "README.md", revision=revision))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        return None


def target_licence(facts: CardFacts, api: HfApi | None) -> str | None:
    """Reads the licence id from the target's card, on the Hub or in its folder; `None` if it cannot be found."""
    name = (facts.config.get("target") or {}).get("name")
    if not isinstance(name, str):
        return None
    try:
        if api is not None and is_hub_id(name) and not os.path.isdir(name):
            metadata = api.model_info(name).card_data
        else:
            metadata = ModelCard.load(Path(name) / "README.md").data
    except (HfHubHTTPError, OSError, ValueError, TypeError):
        return None
    licence = None if metadata is None else metadata.get("license")
    return licence if isinstance(licence, str) else None


def name_target(config: Path, base_model: str | None) -> None:
    """Writes the target's Hub id into the config to be pushed; of a local folder, only the last part is kept."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    target = dict(fields.get("target") or {})
    name = target.get("name")
    if name is not None and (os.path.isdir(name) or not is_hub_id(name)):
        name = Path(name).name
    if not (base_model or name):
        return
    fields["target"] = target | {"name": base_model or name}
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_facts(source: Path, folder: Path) -> None:
    """Copies facts of training and evaluation, and the card, from the folder that the heads came from."""
    for name in (TRAINING_FACTS, EVAL_RESULTS, "README.md"):
        kept = name == "README.md" and (folder / name).is_file()
        if (source / name).is_file() and source.resolve() != folder.resolve() and not kept:
            shutil.copyfile(source / name, folder / name)


def write_custom_generate(folder: str | Path, source: str) -> list[Path]:
    """Writes `custom_generate/generate.py` and `custom_generate/requirements.txt` into a folder of heads.

    Args:
        folder: Folder as written by `save_pretrained`.
        source: Repository that the folder is pushed to.

    Returns:
        The files that were written.
    """
    inside = Path(folder) / CUSTOM_GENERATE
    inside.mkdir(parents=True, exist_ok=True)
    code, requirements = inside / CUSTOM_CODE, inside / "requirements.txt"
    code.write_text(CODE.format(source=source), encoding="utf-8")
    requirements.write_text(REQUIREMENTS.format(version=__version__), encoding="utf-8")
    return [code, requirements]
