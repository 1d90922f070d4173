"""Data sets of any known columns as examples `{"input_ids", "loss_mask"}`, and an account of what became of rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..arguments import DraftHeadTrainingArguments
from .chats import ExampleError
from .columns import Tokenizing, rows_of
from .images import ImageChats, ImageReader, reads_images, tokenizer_of
from .packing import Examples, pack_dataset
from .sources import KINDS_OF_DATA, kind_of, wrong_encoding

Noted = tuple[list[int], list[int], int, str | None]  # ids, loss mask, what became of it, why it cannot be read
WHOLE, CUT, UNSUPERVISED, BAD = range(4)  # what became of an example
ROWS_PER_PROCESS = 2000  # fewer are not worth the start of another process
VERSION = 2  # of what examples are; part of the name under which they are cached
_prepared: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # data sets made here, and their `max_length`


@dataclass
class DataReport:
    """What became of the rows of a data set.

    Attributes:
        rows: Read.
        examples: To train on; a chat may give several, and a long text does.
        cut: Examples that were longer than `max_length`.
        unsupervised: Rows left out because nothing in them is supervised (within `max_length`).
        bad: Rows left out because they cannot be read.
        first_problem: Why the first of them cannot.
        streamed: Whether they are counted as they are read.
    """

    rows: int = 0
    examples: int = 0
    cut: int = 0
    unsupervised: int = 0
    bad: int = 0
    first_problem: str | None = None
    streamed: bool = False

    def count(self, notes: Sequence[int], problems: Sequence[str | None]) -> None:
        """Adds examples by their notes."""
        self.examples += sum(note <= CUT for note in notes)
        self.cut += sum(note == CUT for note in notes)
        self.unsupervised += sum(note == UNSUPERVISED for note in notes)
        self.bad += sum(note == BAD for note in notes)
        self.first_problem = self.first_problem or next((p for p in problems if p), None)

    def __str__(self) -> str:
        if self.streamed and not self.rows:
            return "a stream; what is cut or left out is counted as it is read"
        words = f"{self.rows} rows, {self.examples} examples, {self.cut} cut at max_length"
        words += f", left out {self.unsupervised} without supervised tokens and {self.bad} that cannot be read"
        return words + (f" (the first: {self.first_problem})" if self.first_problem else "")


def prepare_dataset(
    dataset: Examples,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
    max_length: int,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    report: DataReport | None = None,
) -> Any:
    """Tokenizes a dataset, once; what holds `input_ids` already is only checked and completed.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset` with one of the columns `messages`, `conversations`
            (ShareGPT), `prompt` and `completion`, `text`, or `input_ids` (with `loss_mask` or `labels`; these count
            before a chat beside them), or a torch dataset whose items hold `input_ids` (left as it is: the collators
            complete it).
        tokenizer: Needed for all but `input_ids`. With a processor, chats may hold images; see [`images`].
        max_length: Longest example in tokens: chats and ids are cut there, texts are split.
        template_kwargs: For the chat template, e.g. `{"enable_thinking": False}`.
        num_proc: Processes, default as many as there are cores and work for.
        report: Filled with what became of the rows.

    Raises:
        ValueError: for a dataset without one of the columns, a missing tokenizer or an empty result.
    """
    if dataset is None or not hasattr(dataset, "column_names"):
        return dataset
    if _prepared.get(dataset) == max_length:
        return dataset
    report = DataReport() if report is None else report
    names = dataset.column_names or list(next(iter(dataset)))
    kind = kind_of(names)
    if kind is None:
        raise ValueError(f"the dataset has the columns {names}, but one of {KINDS_OF_DATA} is needed; rename one.")
    if kind != "input_ids" and tokenizer is None:
        raise ValueError(f"a dataset with a `{kind}` column needs a tokenizer; pass `processing_class`.")
    if reads_images(tokenizer, kind):
        return _with_images(dataset, ImageReader(tokenizer, max_length, template_kwargs), num_proc, report)
    how = Tokenizing(tokenizer_of(tokenizer), max_length, dict(template_kwargs or {}))
    if not hasattr(dataset, "__len__"):
        return _streamed(dataset, names, kind, how, report)
    prepared = dataset.map(
        _convert,
        batched=True,
        remove_columns=names,
        fn_kwargs={"kind": kind, "how": how},
        num_proc=num_proc or _processes(len(dataset)),
        new_fingerprint=_fingerprint(dataset, kind, how),
        desc="tokenizing",
    )
    return known_as_prepared(_kept(dataset, prepared, max_length, report), max_length)


def _kept(dataset: Examples, prepared: Any, max_length: int, report: DataReport) -> Any:
    """The examples that can be trained on, after an account of all."""
    notes, problems = prepared["note"][:], prepared["problem"][:]
    report.rows += len(dataset)
    report.count(notes, problems)
    if report.examples == 0:
        reason = f" (the first that cannot be read: {report.first_problem})" if report.first_problem else ""
        raise ValueError(
            f"no example of the {len(dataset)} in the dataset has a supervised token within max_length={max_length}; "
            f"check the chat template, or raise max_length.{reason}"
        )
    if report.unsupervised or report.bad:
        prepared = prepared.select([index for index, note in enumerate(notes) if note <= CUT])
    return prepared.remove_columns(["note", "problem"])


def _with_images(dataset: Any, reader: ImageReader, num_proc: int | None, report: DataReport) -> ImageChats:
    """Chats for a processor. Only ids and masks are kept: pixels are made when an example is read.

    Raises:
        ValueError: for a stream.
    """
    if not hasattr(dataset, "__len__"):
        raise ValueError("chats for a processor cannot be streamed; load the data set as a whole (streaming=False).")
    prepared = dataset.map(
        _convert_with_images,
        with_indices=True,
        batched=True,
        batch_size=64,
        remove_columns=dataset.column_names,
        fn_kwargs={"reader": reader},
        num_proc=num_proc or _processes(len(dataset)),
        load_from_cache_file=False,  # processors have no fingerprint that is the same in every process
        desc="reading chats with images",
    )
    return ImageChats(dataset, reader, _kept(dataset, prepared, reader.max_length, report))


def _convert_with_images(batch: Mapping[str, list], indices: Sequence[int], reader: ImageReader) -> dict[str, list]:
    """As [`_convert`], with the row and the place in it of every example."""
    made: dict[str, list] = {name: [] for name in ("input_ids", "loss_mask", "note", "problem", "row", "reply")}
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        for reply, noted in enumerate(_noted_with_images(dict(zip(batch, values, strict=True)), reader)):
            for name, value in zip(made, (*noted, index, reply), strict=True):
                made[name].append(value)
    return made


def _noted_with_images(row: Mapping[str, Any], reader: ImageReader) -> list[Noted]:
    """Every reply's example, in order: one that is cut must be cut behind its images."""
    try:
        examples = reader.rows(row)
    except ExampleError as error:
        return [([], [], BAD, str(error))]
    limit = reader.max_length
    noted: list[Noted] = []
    for ids, mask in examples:
        if (last := reader.last_image(ids)) >= limit:
            noted.append(([], [], BAD, f"an image ends at token {last + 1}, and max_length is {limit}"))
        elif not any(mask[1:limit]):
            noted.append(([], [], UNSUPERVISED, None))
        else:
            noted.append((ids[:limit], mask[:limit], CUT if len(ids) > limit else WHOLE, None))
    return noted or [([], [], UNSUPERVISED, None)]


def prepare_for(
    args: DraftHeadTrainingArguments,
    dataset: Examples | dict[str, Examples] | None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
    report: DataReport | None = None,
    pack: bool = False,
) -> Any:
    """A data set, or each of a dict of them, as training arguments ask for it; see [`prepare_dataset`].

    Args:
        args: Of the training.
        dataset: Any; what is no data set stays as it is.
        tokenizer: The target's.
        report: Is told what was left out.
        pack: Whether several examples may share a row, by the strategy of `args`.
    """
    if isinstance(dataset, dict):
        return {name: prepare_for(args, one, tokenizer, report, pack) for name, one in dataset.items()}
    kwargs, processes = args.chat_template_kwargs, args.dataset_num_proc
    prepared = prepare_dataset(
        dataset, tokenizer, args.max_length, template_kwargs=kwargs, num_proc=processes, report=report
    )
    packs = pack and args.packing_strategy == "best_fit" and hasattr(prepared, "column_names")
    return pack_dataset(prepared, args.max_length) if packs else prepared


def known_as_prepared(dataset: Examples, max_length: int) -> Examples:
    """The same data set, which [`prepare_dataset`] will leave as it is: for mixtures of prepared ones."""
    _prepared[dataset] = max_length
    return dataset


def _streamed(dataset: Any, names: list[str], kind: str, how: Tokenizing, report: DataReport) -> Any:
    report.streamed = True

    def convert(batch: Mapping[str, list]) -> dict[str, list]:
        made = _convert(batch, kind, how)
        report.rows += len(next(iter(batch.values())))
        report.count(made["note"], made["problem"])
        kept = [index for index, note in enumerate(made["note"]) if note <= CUT]
        return {name: [made[name][index] for index in kept] for name in ("input_ids", "loss_mask")}

    return known_as_prepared(dataset.map(convert, batched=True, batch_size=64, remove_columns=names), how.max_length)


def _convert(batch: Mapping[str, list], kind: str, how: Tokenizing) -> dict[str, list]:
    """Examples of a batch of rows; a row that gives none leaves an empty one that says why."""
    made: dict[str, list] = {"input_ids": [], "loss_mask": [], "note": [], "problem": []}
    try:
        rows = list(zip(*batch.values(), strict=True))
    except UnicodeDecodeError as error:  # files are read without a look at this
        raise ValueError(f"the data hold {wrong_encoding(error)}.") from error
    for values in rows:
        for ids, mask, note, problem in _noted(dict(zip(batch, values, strict=True)), kind, how):
            for name, value in zip(made, (ids, mask, note, problem), strict=True):
                made[name].append(value)
    return made


def _noted(row: Mapping[str, Any], kind: str, how: Tokenizing) -> list[Noted]:
    try:
        examples = rows_of(row, kind, how)
    except ExampleError as error:
        return [([], [], BAD, str(error))]
    limit, kept = how.max_length, [example for example in examples if any(example[1][1 : how.max_length])]
    noted: list[Noted] = [(ids[:limit], mask[:limit], CUT if len(ids) > limit else WHOLE, None) for ids, mask in kept]
    return noted or [([], [], UNSUPERVISED, None)]  # a trainable row is a supervised token after the first


def _processes(rows: int) -> int | None:
    processes = min(os.cpu_count() or 1, rows // ROWS_PER_PROCESS)
    return processes if processes > 1 else None


def _fingerprint(dataset: Any, kind: str, how: Tokenizing) -> str:
    """Under which examples are cached: the same in every process and run, which pickled tokenizers are not."""
    tokenizer = how.tokenizer
    told = [VERSION, getattr(dataset, "_fingerprint", ""), kind, how.max_length, dict(how.template_kwargs)]
    if tokenizer is not None:
        told += [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


def marked_example(example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, longest: int = 600) -> str:
    """An example as text, with what is supervised in `[[ ]]`; as token ids without a tokenizer."""
    ids, mask = list(example["input_ids"]), list(example["loss_mask"])
    runs: list[tuple[int, list[int]]] = []
    for token, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != supervised:
            runs.append((supervised, []))
        runs[-1][1].append(int(token))
    words = [str(run) if tokenizer is None else tokenizer.decode(run) for _, run in runs]
    text = "".join(f"[[{word}]]" if made else word for (made, _), word in zip(runs, words, strict=True))
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


def endless(stream: Any) -> Any:
    """A prepared stream that begins anew at its end. As one long epoch it can be gone on with anywhere: Trainer counts
    the batches to pass over from the start of the epoch it believes in, and knows no epochs of a stream.

    Raises:
        ValueError: for a stream without an example, which would never end beginning.
    """
    if next(iter(stream), None) is None:
        raise ValueError("no example of the training stream is left; check `max_length` and what is supervised in it.")
    return stream.repeat(None)
