"""Recipes: a YAML file describes target, draft heads, data and training arguments; `key=value` overrides it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from .data.sources import DataSource, RecipeError

SCALARS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads numbers such as 3e-5 as strings
TYPES = {"target": str, "method": str, "heads": dict, "from_heads": str, "from_positions_per_specialist": int,
         "target_revision": str, "target_options": dict, "target_dtype": str, "heads_dtype": str,
         "eval_examples": int, "resume": bool, "training": dict}  # fmt: skip


@cache
def training_arguments() -> dict[str, Any]:
    """Returns the types of all training arguments by name, those of joint training included."""
    from .joint import JointTrainingArguments

    hints = get_type_hints(JointTrainingArguments)
    return {f.name: hints[f.name] for f in dataclasses.fields(JointTrainingArguments) if f.init}


@cache
def joint_arguments() -> frozenset[str]:
    """Returns the arguments that only joint training has; a recipe with one of them also trains an adapter."""
    from .arguments import DraftHeadTrainingArguments

    return frozenset(training_arguments()) - {f.name for f in dataclasses.fields(DraftHeadTrainingArguments)}


@dataclass
class Recipe:
    """A training run of `python -m hf_specheads.trainer`.

    Attributes:
        target: Hub id or folder of the target.
        train_data: Training data. A list of sources is mixed; either all of them have a `weight` or none.
        method: Method of the draft heads, e.g. `"eagle"`, `"hass"` or `"poss"`; see `hf_specheads.heads.auto.METHODS`.
        heads: Fields of the draft heads' config, e.g. `num_specialists`, `positions_per_specialist`, `tree_config`.
            With `draft_vocab_size` alone (EAGLE-3), the draft vocabulary consists of the tokens that are supervised
            most often in the training data.
        from_heads: Hub id or folder of draft heads to start from (every specialist starts as a copy of their layer).
        from_positions_per_specialist: `positions_per_specialist` of `from_heads` in PosS's own layout, which does not
            record it.
        target_revision: Revision of a target on the Hub.
        target_dtype: `"auto"`, or the name of a torch dtype.
        target_options: Further arguments of the target's `from_pretrained`: `device_map` (several devices of one
            process), `attn_implementation`, `trust_remote_code`, `max_memory`, `tp_plan`; `quantization_config` as a
            mapping with `quant_method` (`bitsandbytes`, `torchao`, ...), as in a `config.json`.
        heads_dtype: Dtype of the draft heads' weights during training, as the name of a torch dtype.
        eval_data: Evaluation data. Default: the first `eval_examples` examples of `train_data`, which are then not
            trained on.
        eval_examples: Number of evaluation examples. Without `eval_data`, 0 turns evaluation off.
        resume: Whether to resume from the newest checkpoint in `output_dir`, if there is one.
        training: Fields of [`DraftHeadTrainingArguments`], or of [`JointTrainingArguments`] to train an adapter of the
            target together with the draft heads.
    """

    target: str
    train_data: DataSource | list[DataSource]
    method: str = "poss"
    heads: dict[str, Any] = field(default_factory=dict)
    from_heads: str | None = None
    from_positions_per_specialist: int | None = None
    target_revision: str | None = None
    target_dtype: str = "auto"
    target_options: dict[str, Any] = field(default_factory=dict)
    heads_dtype: str = "float32"
    eval_data: DataSource | None = None
    eval_examples: int = 128
    resume: bool = True
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def train_sources(self) -> list[DataSource]:
        """Sources of the training data, as a list."""
        return self.train_data if isinstance(self.train_data, list) else [self.train_data]

    @property
    def trains_target(self) -> bool:
        """Whether an adapter of the target is trained together with the draft heads."""
        return not joint_arguments().isdisjoint(self.training)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Builds a recipe from plain values.

        Raises:
            RecipeError: for a missing or unknown key, which the message names, or a value of the wrong type.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise RecipeError(f"unknown recipe key(s) {unknown}; known are {sorted(known)} and, under `training`, "
                              "the fields of DraftHeadTrainingArguments.")  # fmt: skip
        for name in ("target", "train_data"):
            if not values.get(name):
                raise RecipeError(f"the recipe has no `{name}`; write it into the file or pass {name}=...")
        values = {name: _of_type(name, value, TYPES.get(name)) for name, value in values.items() if value is not None}
        sources: dict[str, Any] = {"eval_data": _source(values.get("eval_data"))}
        mixed = values["train_data"]
        sources["train_data"] = [_source(each) for each in mixed] if isinstance(mixed, list) else _source(mixed)
        training = dict(values.get("training") or {})
        if unknown := sorted(set(training) - set(training_arguments())):
            raise RecipeError(
                f"unknown training argument(s) {unknown}; see DraftHeadTrainingArguments and JointTrainingArguments."
            )
        training = {name: _of_type(name, value, training_arguments()[name]) for name, value in training.items()}
        return cls(
            **{
                **values,
                **sources,
                "training": training,
                "heads": dict(values.get("heads") or {}),
                "target_options": dict(values.get("target_options") or {}),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the recipe as plain values, as in a recipe file."""
        return dataclasses.asdict(self)


def _of_type(name: str, value: Any, hint: Any) -> Any:
    """Checks the type of a value, and converts values that YAML reads as another type (`no`, `1e1`).

    Raises:
        RecipeError: for a value of the wrong type.
    """
    if value is False and name.endswith("_strategy"):
        return "no"  # YAML 1.1 reads an unquoted `no` as false
    kinds = set(get_args(hint) or (hint,)) - {NoneType}
    if not kinds or kinds - SCALARS.keys() or value is None:
        return value  # only scalars are checked here; the consumer of any other value checks it
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) in kinds or (float in kinds and type(value) is int):
        return value
    expected = " or ".join(sorted(SCALARS[kind] for kind in kinds))
    quoted = (
        "; YAML reads yes, no, on and off as true and false, put quotes around them" if value in (True, False) else ""
    )
    raise RecipeError(f"`{name}` must be {expected}, got {value!r}{quoted}.")


def _source(value: Any) -> DataSource | None:
    if value is None or isinstance(value, DataSource):
        return value
    try:
        return DataSource(**({"path": value} if isinstance(value, str) else value))
    except TypeError as error:  # `value` is no mapping, or has unknown keys
        raise RecipeError(f"data must be a path or a mapping with `path`, `name`, `split`; got {value!r}.") from error


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from a YAML file and applies `key=value` overrides.

    Args:
        path: YAML file, name of a recipe that comes with the package (`poss3`), or `None` for no file.
        overrides: `key=value` strings whose values are YAML. `a.b=value` sets a field of a mapping. A key that is a
            training argument and no recipe key is set in `training`, so that `learning_rate=1e-4` works.

    Raises:
        RecipeError: for a file that is missing or holds no mapping, an override without `=`, or an unknown key.
    """
    values = _read_yaml(_find(path)) if path is not None else {}
    recipe_keys = {f.name for f in dataclasses.fields(Recipe)}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise RecipeError(f"changes to a recipe are written key=value, got {override!r}.")
        names = key.split(".")
        if names[0] not in recipe_keys and names[0] in training_arguments():
            names.insert(0, "training")
        elif names[0] not in recipe_keys:
            raise RecipeError(f"{key!r} is neither a recipe key {sorted(recipe_keys)} nor a training argument.")
        _set(values, names, _value(text, override), override)
    return Recipe.from_dict(values)


def shipped_recipes() -> dict[str, Path]:
    """Returns the files of the recipes that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def _find(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    if str(path) in shipped_recipes():
        return shipped_recipes()[str(path)]
    raise RecipeError(f"no recipe file {str(path)!r}; the recipes of the package are {list(shipped_recipes())}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold a mapping of recipe keys, got {type(values).__name__}.")
    return _numbers(values)


def _value(text: str, override: str) -> Any:
    try:
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise RecipeError(f"the value of {override!r} is not valid YAML; put quotes around it.") from error


def _numbers(value: Any) -> Any:
    """Turns strings such as `3e-5`, which YAML does not read as numbers, into floats, at any depth."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def _set(values: dict[str, Any], names: list[str], value: Any, override: str) -> None:
    for name in names[:-1]:
        inner = values.get(name)
        if isinstance(inner, str) and name.endswith("_data"):
            inner = {"path": inner}
        if not isinstance(inner, dict | None):
            raise RecipeError(f"{override!r} sets a field of `{name}`, which is {inner!r} and not a mapping.")
        values[name] = dict(inner or {})
        values = values[name]
    values[names[-1]] = value
