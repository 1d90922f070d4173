"""Sources of a recipe's models and data. Wrong paths are reported before anything is loaded or downloaded."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .packing import Examples
from .shards import kind_of_folder

if TYPE_CHECKING:
    from .stored_features import StoredFeatures

KINDS_OF_DATA = ["messages", "conversations", "prompt and completion", "text", "input_ids"]
DATA_LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
HEADS_PREFIX = "specheads_"  # prefix of the `model_type` of draft heads


def kind_of(names: Sequence[str]) -> str | None:
    """Returns the column that data are read from, `None` if none of the columns is known."""
    if {"input_ids", "loss_mask"} <= set(names):  # exact ids of generated text; a chat beside them is for readers
        return "input_ids"
    if {"prompt", "completion"} <= set(names):
        return "prompt"
    return next((name for name in ("messages", "conversations", "text", "input_ids") if name in names), None)


class RecipeError(ValueError):
    """A recipe, or a `key=value` override, that is wrong or incomplete."""


def is_path(name: str) -> bool:
    """Whether a name is a local path: it exists here, or it cannot be a Hub id `owner/name`."""
    return Path(name).exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name


def refuse_wrong_model(key: str, name: str, *, heads: bool) -> None:
    """Refuses a folder that does not exist or does not hold the expected kind of model. Hub ids are not checked.

    Args:
        key: Key of the recipe.
        name: Folder or Hub id.
        heads: Whether draft heads are expected rather than a target.

    Raises:
        RecipeError: naming key and folder.
    """
    folder = Path(name)
    if not is_path(name):
        return
    if not folder.is_dir():
        raise RecipeError(f"`{key}` is {name!r}, and there is no such folder; pass a model's folder or its Hub id.")
    config = folder / "config.json"
    if heads:
        return  # draft heads come in many layouts, which only `load_heads` can recognise
    if not config.is_file():
        raise RecipeError(f"`{key}` is the folder {name!r}, which holds no config.json; pass a model's folder.")
    try:
        model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise RecipeError(f"{config} is not the configuration of a model: {error}") from error
    if str(model_type).startswith(HEADS_PREFIX):
        raise RecipeError(
            f"`{key}` is {name!r}, a folder of draft heads ({model_type}); pass the model that they draft for. "
            "Draft heads to start from are passed as from_heads=..."
        )


@dataclass
class DataSource:
    """A source of examples.

    Attributes:
        path: A file (.jsonl, .json, .parquet, .csv, or .txt with one text per file), a folder written by
            `Dataset.save_to_disk`, `specheads regenerate` or `specheads features`, or the Hub id of a data set.
        name: Configuration of a Hub data set.
        split: Split to read; may be a slice such as `train[:1%]`.
        revision: Revision of a Hub data set.
        weight: Relative weight of this source in a mixture. Without weights, the sources are concatenated.
        streaming: Whether to read examples when they are needed (an `IterableDataset`), without a copy in the cache.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    weight: float | None = None
    streaming: bool = False

    def refuse_wrong_path(self) -> None:
        """Refuses a local path that does not exist, and an empty file.

        Raises:
            RecipeError: naming the path.
        """
        if not isinstance(self.path, str):
            raise RecipeError(f"`path` of data must be a text, got {self.path!r}.")
        if "://" in self.path:
            return
        is_file = Path(self.path).suffix in DATA_LOADERS
        if (is_file or is_path(self.path)) and not (Path(self.path).exists() or glob.glob(self.path)):
            raise RecipeError(f"there is no file or folder {self.path!r} to read data from.")
        if is_file and Path(self.path).is_file() and not Path(self.path).stat().st_size:
            raise RecipeError(f"the data file {self.path!r} is empty.")

    def load(self) -> Examples | StoredFeatures:
        """Loads the data set, or the stored features if the path is a folder of them.

        Raises:
            RecipeError: naming the path, if it cannot be read or has no known column.
        """
        if kind_of_folder(self.path) == "features":
            return self._stored_features()
        dataset = self.load_raw()
        names = dataset.column_names or list(next(iter(dataset)))
        if kind_of(names) is None:
            raise RecipeError(
                f"data {self.path!r} has the columns {names}, and one of {KINDS_OF_DATA} is needed; rename one."
            )
        return dataset

    def _stored_features(self) -> Any:
        from .stored_features import StoredFeatures

        try:
            return StoredFeatures(self.path)
        except (OSError, ValueError, KeyError) as error:
            raise RecipeError(f"data {self.path!r} cannot be read: {error}") from error

    def load_raw(self) -> Examples:
        """Loads the data set without checking its columns.

        Raises:
            RecipeError: naming the path, if it cannot be read or is empty.
        """
        self.refuse_wrong_path()
        try:
            dataset = self._load()
        except Exception as error:  # datasets raises errors of many classes for wrong files, splits and names
            raise RecipeError(f"data {self.path!r} cannot be read: {self._reason(error)}") from error
        if not self.streaming and len(dataset) == 0:
            raise RecipeError(f"data {self.path!r} holds no example in the split {self.split!r}.")
        return dataset

    def _load(self) -> Any:
        from datasets import load_dataset, load_from_disk

        local = Path(self.path)
        if local.is_dir() and (local / "state.json").exists():
            stored = load_from_disk(self.path)
            return stored.to_iterable_dataset() if self.streaming else stored
        if local.is_dir() and kind_of_folder(local) == "regeneration":
            files = sorted(str(path) for path in local.glob("shard-?????.jsonl") if path.stat().st_size)
            return load_dataset("json", data_files=files, split=self.split, streaming=self.streaming)
        if local.suffix in DATA_LOADERS:
            options = {"sample_by": "document"} if local.suffix == ".txt" else {}
            kind = DATA_LOADERS[local.suffix]
            return load_dataset(kind, data_files=self.path, split=self.split, streaming=self.streaming, **options)
        return load_dataset(self.path, self.name, split=self.split, revision=self.revision, streaming=self.streaming)

    def _reason(self, error: Exception) -> str:
        """Explains why data cannot be read: the first invalid line of a JSON lines file, else the error itself."""
        if Path(self.path).suffix == ".jsonl" and Path(self.path).is_file():
            with open(self.path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip() and (problem := json_problem(line)):
                        return f"line {number} is {problem}."
        cause = error.__cause__ or error
        place = getattr(cause, "filename", None)
        if (
            isinstance(cause, OSError)
            and place
            and not Path(place).resolve().is_relative_to(Path(self.path).resolve())
        ):
            return f"{cause}. datasets keeps its copies under HF_HOME; set that to a folder that can be written."
        return f"{cause}"


def json_problem(line: bytes) -> str | None:
    """Returns why a line is not a JSON object, `None` if it is one."""
    try:
        entry = json.loads(line)
    except UnicodeDecodeError as error:
        return wrong_encoding(error)
    except ValueError as error:
        return f"not valid JSON ({error})"
    return None if isinstance(entry, dict) else f"no JSON object but {type(entry).__name__}"


def wrong_encoding(error: UnicodeDecodeError) -> str:
    """Describes the problem of a file that is not encoded in UTF-8."""
    return f"text that is no UTF-8 ({error}); convert the file, e.g. with iconv"
