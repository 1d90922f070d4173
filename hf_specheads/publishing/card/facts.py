"""Collects the facts of a model card from files and arguments. Nothing is estimated."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from ...configuration import DraftHeadConfig
from ..figures import FIGURES


@dataclass(frozen=True)
class Published:
    """Published name of a method, and its papers as Markdown, for model cards."""

    name: str
    papers: tuple[str, ...] = ()


# Names of files in the folder of the weights.
TRAINING_FACTS, EVAL_RESULTS = "training_facts.json", "eval_results.json"
CUSTOM_GENERATE, CUSTOM_CODE = "custom_generate", "generate.py"
VERSIONED = ("hf-specheads", "transformers", "torch")


@dataclass
class CardFacts:
    """All facts of a card. Facts that are `None` or empty are left out of the card.

    Attributes:
        name: Name of the model, usually that of the repository.
        config: The model's `config.json`; its `model_type` distinguishes draft heads from a target.
        num_parameters: Number of parameters, counted in the weight files.
        training: Facts of the training run, as nested dicts of plain values.
        evaluations: Results as `specheads eval --json` writes them; each may have a `task` name.
        license: Licence id of these weights.
        target_license: Text on the licence of the target and of the training data, replacing the default text.
        datasets: Hub ids of data sets.
        language: Language codes; `code` for programs.
        limits: Known limits, one sentence each, in addition to those that follow from the config.
        tags: Tags in addition to those that follow from the config.
        commit: Commit of the training code.
        versions: Package versions of the training run, if known, otherwise those at rendering.
        figures: Paths of figures relative to the card, by title.
        custom_generate: Whether the repository contains `custom_generate/generate.py`.
    """

    name: str
    config: dict[str, Any]
    num_parameters: int | None = None
    training: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    license: str | None = None
    target_license: str | None = None
    datasets: list[str] | None = None
    language: list[str] | None = None
    limits: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    custom_generate: bool = False

    @property
    def is_heads(self) -> bool:
        """Whether the card describes draft heads; otherwise it describes a target."""
        return str(self.config.get("model_type", "")).startswith("specheads_")

    @property
    def method(self) -> str:
        """Method of the draft heads; empty for a target."""
        return str(self.config.get("method", "")) if self.is_heads else ""

    @property
    def config_class(self) -> type[DraftHeadConfig] | None:
        """Config class of the family, as registered with transformers; `None` for a target or an unknown family."""
        model_type = str(self.config.get("model_type"))
        if model_type not in CONFIG_MAPPING:
            return None
        config_class = CONFIG_MAPPING[model_type]
        return config_class if issubclass(config_class, DraftHeadConfig) else None

    @property
    def published(self) -> Published | None:
        """Published name and papers of the method; `None` if unknown."""
        head_class = MODEL_MAPPING.get(self.config_class, None) if self.config_class is not None else None
        methods: Mapping[str, Published] = getattr(head_class, "published", {})
        return methods.get(self.method)

    @property
    def method_name(self) -> str:
        """Name of the method in its paper."""
        return self.published.name if self.published is not None else self.method

    @property
    def target_name(self) -> str | None:
        """Name of the target that the heads were made for; of a local folder, only the last part."""
        name = (self.config.get("target") or {}).get("name")
        return name if is_hub_id(name) or not name else Path(name).name

    @property
    def target_on_hub(self) -> bool:
        """Whether the target's name is a Hub id and not a local folder of the same form."""
        return is_hub_id(self.target_name) and not os.path.isdir(self.target_name)


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the form `owner/name`."""
    return bool(name and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."))


def collect_facts(folder: str | Path, **known: Any) -> CardFacts:
    """Collects facts from the folder of a saved model.

    They come from `config.json`, the weights, `training_facts.json`, `eval_results.json` and the figures.

    Args:
        folder: Folder as written by `save_pretrained`.
        **known: Fields of [`CardFacts`] that the folder lacks, or that override those of the folder.

    Raises:
        FileNotFoundError: If there is no `config.json`.
    """
    folder = Path(folder)
    facts: dict[str, Any] = {
        "name": folder.resolve().name,
        "config": json.loads((folder / "config.json").read_text(encoding="utf-8")),
        "num_parameters": _count_parameters(folder),
        "versions": {package: importlib.metadata.version(package) for package in VERSIONED},
        "figures": {title: path for title, path in FIGURES.items() if (folder / path).exists()},
        "custom_generate": (folder / CUSTOM_GENERATE / CUSTOM_CODE).exists(),
    }
    if (folder / TRAINING_FACTS).exists():
        facts["training"] = json.loads((folder / TRAINING_FACTS).read_text(encoding="utf-8"))
        facts["versions"] = facts["training"].get("versions") or facts["versions"]
        facts["commit"] = facts["training"].get("commit")
    facts["evaluations"] = read_evaluations(folder / EVAL_RESULTS)
    return CardFacts(**{**facts, **known})


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Reads results of `specheads eval --json`, from a file with one result or a list; empty if there is no file."""
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    return results if isinstance(results, list) else [results]


def _count_parameters(folder: Path) -> int | None:
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as reader:
                total += sum(math.prod(reader.get_slice(key).get_shape()) for key in reader.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return None
    return total or None
