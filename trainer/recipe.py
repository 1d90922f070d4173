"""Recipes: one YAML file says target, heads, data and training arguments; `key=value` changes it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .arguments import DraftHeadTrainingArguments
from .joint import JointTrainingArguments
from .trainer import DraftHeadTrainer

TRAINING_ARGUMENTS = {f.name for f in dataclasses.fields(JointTrainingArguments) if f.init}
# Arguments that only joint training knows; a recipe that gives one trains an adapter of the target too.
JOINT_ARGUMENTS = TRAINING_ARGUMENTS - {f.name for f in dataclasses.fields(DraftHeadTrainingArguments)}
EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")  # YAML 1.1 reads 3e-5 as a string
DATA_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


class RecipeError(ValueError):
    """A recipe, or a `key=value`, that does not say what to train."""


@dataclass
class DataSource:
    """Where examples come from.

    Attributes:
        path: A file (.jsonl, .json, .parquet, .csv, or .txt with one text per file), a folder written by
            `Dataset.save_to_disk`, or a dataset's name on the Hub.
        name: Configuration of a Hub dataset.
        split: Split to read, slices such as `train[:1%]` included.
        revision: Revision of a Hub dataset.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None

    def load(self) -> Any:
        """The `datasets.Dataset`."""
        from datasets import load_dataset, load_from_disk

        local = Path(self.path)
        if local.is_dir() and (local / "state.json").exists():
            return load_from_disk(self.path)
        if local.suffix in DATA_LOADERS:
            options = {"sample_by": "document"} if local.suffix == ".txt" else {}
            return load_dataset(DATA_LOADERS[local.suffix], data_files=self.path, split=self.split, **options)
        return load_dataset(self.path, self.name, split=self.split, revision=self.revision)


@dataclass
class Recipe:
    """Everything `python -m hf_specheads.trainer` needs to know.

    Attributes:
        target: Hub id or folder of the target.
        train_data: What to train on.
        method: `"eagle"`, `"hass"` or `"poss"`.
        heads: Fields of the heads' config, e.g. `num_specialists`, `positions_per_specialist`, `tree_config`. With
            `draft_vocab_size` alone (EAGLE-3), the draft vocabulary is what the training data supervises most often.
        from_heads: Hub id or folder of heads to start from (all specialists start as its layer).
        from_positions_per_specialist: For `from_heads` in PosS's own layout, which does not say it.
        target_revision: Revision of a target on the Hub.
        target_dtype: `"auto"`, or a torch dtype's name.
        heads_dtype: Type of the heads' weights while training, a torch dtype's name.
        eval_data: What to evaluate on; default, the first `eval_examples` of `train_data`, then not trained on.
        eval_examples: Number of evaluation examples; 0 turns evaluation off.
        resume: Go on from the newest checkpoint in `output_dir`, if there is one.
        training: Fields of [`DraftHeadTrainingArguments`], or of [`JointTrainingArguments`] to train an adapter of the
            target together with the heads.
    """

    target: str
    train_data: DataSource
    method: str = "poss"
    heads: dict[str, Any] = field(default_factory=dict)
    from_heads: str | None = None
    from_positions_per_specialist: int | None = None
    target_revision: str | None = None
    target_dtype: str = "auto"
    heads_dtype: str = "float32"
    eval_data: DataSource | None = None
    eval_examples: int = 128
    resume: bool = True
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def trains_target(self) -> bool:
        """Whether an adapter of the target is trained together with the heads."""
        return not JOINT_ARGUMENTS.isdisjoint(self.training)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """From plain values.

        Raises:
            RecipeError: for a missing or unknown key, naming it.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise RecipeError(f"unknown recipe key(s) {unknown}; known are {sorted(known)} and, under `training`, "
                              "the fields of DraftHeadTrainingArguments.")  # fmt: skip
        for name in ("target", "train_data"):
            if not values.get(name):
                raise RecipeError(f"the recipe does not say `{name}`; write it into the file or pass {name}=...")
        sources = {name: _source(values.get(name)) for name in ("train_data", "eval_data")}
        training = dict(values.get("training") or {})
        if unknown := sorted(set(training) - TRAINING_ARGUMENTS):
            raise RecipeError(
                f"unknown training argument(s) {unknown}; see DraftHeadTrainingArguments and JointTrainingArguments."
            )
        return cls(**{**values, **sources, "training": training, "heads": dict(values.get("heads") or {})})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a recipe file would hold them."""
        return dataclasses.asdict(self)


def _source(value: Any) -> DataSource | None:
    if value is None or isinstance(value, DataSource):
        return value
    try:
        return DataSource(**({"path": value} if isinstance(value, str) else value))
    except TypeError as error:
        raise RecipeError(f"data must be a path or a mapping with `path`, `name`, `split`; got {value!r}.") from error


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file and `key=value` changes.

    Args:
        path: The file, a bare name of the recipes that come with the package (`poss3`), or `None` for no file.
        overrides: `key=value`, values in YAML. `a.b=value` goes into a mapping; a key that is a training argument and
            no recipe key goes into `training`, so that `learning_rate=1e-4` does what it says.

    Raises:
        RecipeError: for a file that is missing or no mapping, a change without `=`, or an unknown key.
    """
    values = _read_yaml(_find(path)) if path is not None else {}
    recipe_keys = {f.name for f in dataclasses.fields(Recipe)}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise RecipeError(f"changes to a recipe are written key=value, got {override!r}.")
        names = key.split(".")
        if names[0] not in recipe_keys and names[0] in TRAINING_ARGUMENTS:
            names.insert(0, "training")
        elif names[0] not in recipe_keys:
            raise RecipeError(f"{key!r} is neither a recipe key {sorted(recipe_keys)} nor a training argument.")
        _set(values, names, _numbers(yaml.safe_load(text)), override)
    return Recipe.from_dict(values)


def describe(trainer: DraftHeadTrainer, recipe: Recipe, checkpoint: str | None) -> str:
    """What was decided, one line per fact."""
    args, config = trainer.args, trainer.model.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    train, evaluation = _length(trainer.train_dataset), _length(trainer.eval_dataset)
    weights = " + ".join(f"{weight} {name}" for name, weight in args.loss_weights.items() if weight)
    sizes = f"{(config.target or {}).get('model_type')}, H = {config.feature_size}, V = {config.vocab_size}"
    specialists = getattr(config, "num_specialists", 1)
    rows = [
        ("target", f"{recipe.target} ({sizes})"),
        ("heads", f"{config.method}, {specialists} specialist(s), {parameters / 1e6:.2f} M parameters, "
                  f"{trainer.model.dtype}, from {recipe.from_heads or 'random weights'}"),
        ("passes", f"{trainer.num_passes}, {args.backward} backward, {args.pass_reduction} over passes"),
        ("loss", f"{weights}, times {args.pass_decay} per position" if args.pass_decay != 1 else weights),
        ("noise", f"U(-{args.feature_noise}, {args.feature_noise}), scaling {args.feature_noise_scaling}"
                  + (f"; NEFTune alpha {args.embedding_noise} on embeddings" if args.embedding_noise else "")),
        ("masks", "the authors' zero-logit masks (parity only)" if args.upstream_masking else "as in drafting"),
        ("data", f"{train} examples to train on, {evaluation} to evaluate on, "
                 f"{'packed' if args.packing else 'padded'} to at most {args.max_length} tokens"),
        ("step", f"{per_step} examples on {args.world_size} process(es), device {args.device}"),
        ("length", f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs} epochs"),
        ("output", f"{args.output_dir}" + (f", resuming {checkpoint}" if checkpoint else "")),
    ]  # fmt: skip
    if isinstance(args, JointTrainingArguments):
        adapter = f"rank {args.target_lora_rank}, learning rate {args.target_learning_rate}, from step "
        rows.insert(1, ("adapter", f"{adapter}{args.heads_warmup_steps}, of the target"))
    return "\n".join(f"{name:>8}: {value}" for name, value in rows)


def _length(dataset: Any) -> int:
    return len(dataset) if dataset is not None else 0


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def _find(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    if str(path) in shipped_recipes():
        return shipped_recipes()[str(path)]
    raise RecipeError(f"no recipe file {str(path)!r}; those that come with the package are {list(shipped_recipes())}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold a mapping of recipe keys, got {type(values).__name__}.")
    return _numbers(values)


def _numbers(value: Any) -> Any:
    """Turns `3e-5`, which YAML leaves a string, into a number, at any depth."""
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
            raise RecipeError(f"{override!r} sets a field of `{name}`, which is {inner!r} and no mapping.")
        values[name] = dict(inner or {})
        values = values[name]
    values[names[-1]] = value
