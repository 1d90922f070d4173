"""What users, documents and repositories on the Hub import: a name that goes missing here breaks somebody's code."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

import hf_specheads
import hf_specheads.trainer
from hf_specheads import heads
from hf_specheads.heads.auto import METHODS

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
PACKAGE = [
    "AutoDraftHead",
    "Diagnosis",
    "Difference",
    "DFlash2Head",
    "DFlash2HeadConfig",
    "DFlashHead",
    "DFlashHeadConfig",
    "DSparkHead",
    "DSparkHeadConfig",
    "DominoHead",
    "DominoHeadConfig",
    "DraftHead",
    "DraftHeadCandidateGenerator",
    "DraftHeadConfig",
    "DraftLanguageModel",
    "DraftLanguageModelConfig",
    "DraftTreeConfig",
    "Eagle3Head",
    "Eagle3HeadConfig",
    "EagleHead",
    "EagleHeadConfig",
    "ExportError",
    "Exported",
    "FinishedText",
    "GenerationStats",
    "HeadLoadError",
    "HydraHead",
    "HydraHeadConfig",
    "LookupHead",
    "LookupHeadConfig",
    "MedusaHead",
    "MedusaHeadConfig",
    "MtpHead",
    "MtpHeadConfig",
    "OptimalTree",
    "PEagleHead",
    "PEagleHeadConfig",
    "PossEagle3Head",
    "PossEagle3HeadConfig",
    "PossHead",
    "PossHeadConfig",
    "PossLoraHead",
    "PossLoraHeadConfig",
    "TuningResult",
    "UnsupportedGenerationError",
    "WrongTargetError",
    "__version__",
    "diagnose",
    "explain_difference",
    "export_heads",
    "generate_stream",
    "load_heads",
    "search_tree",
    "speculative_generate",
    "tune",
    "tune_vocabulary",
]
TRAINER = [
    "DraftHeadTrainer",
    "DraftHeadTrainingArguments",
    "JointTrainer",
    "JointTrainingArguments",
    "PackedCollator",
    "PaddedCollator",
    "PassLosses",
    "Unroll",
    "frequent_tokens",
    "prepare_dataset",
    "unroll_losses",
]
# Deep paths that documents, messages and `custom_generate` folders on the Hub name.
DEEP = [
    "custom_generate.generate_with",
    "draft_vocabulary.count_tokens",
    "draft_vocabulary.most_frequent",
    "errors.ExportError",
    "errors.HeadLoadError",
    "errors.UnsupportedGenerationError",
    "errors.WrongTargetError",
    "generation.speculative_generate",
    "metrics.GenerationStats",
    "metrics.acceptance_length",
    "metrics.position_acceptance",
    "tree.EAGLE_CHOICES",
    "tuning.tune",
    "unroll.TrainingRows",
]


@pytest.mark.parametrize(("module", "names"), [(hf_specheads, PACKAGE), (hf_specheads.trainer, TRAINER)])
def test_public_names_are_these(module, names: list[str]) -> None:
    assert sorted(module.__all__) == sorted(names)
    assert all(hasattr(module, name) for name in names)


def test_the_star_brings_the_public_names() -> None:
    found: dict[str, object] = {}
    exec("from hf_specheads import *", found)
    assert set(PACKAGE) <= found.keys()


@pytest.mark.parametrize("path", DEEP)
def test_deep_paths_lead_to_something(path: str) -> None:
    module, _, name = f"hf_specheads.{path}".rpartition(".")
    assert getattr(importlib.import_module(module), name) is not None


def test_deep_functions_are_no_modules_of_the_same_name() -> None:
    assert hf_specheads.tune is importlib.import_module("hf_specheads.tuning").tune
    assert callable(hf_specheads.tune)


def test_every_method_has_its_class_and_configuration_among_the_public_names() -> None:
    expected = {name for head in METHODS.values() for name in (head.__name__, head.config_class.__name__)}
    assert set(heads.__all__) == expected


def test_the_console_script() -> None:
    scripts = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"specheads": "hf_specheads.cli:main"}
    module, _, name = scripts["specheads"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
