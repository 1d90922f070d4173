"""Turns data sets with any of the known columns into examples `{"input_ids", "loss_mask"}`, and reports what was cut
or left out."""

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

Noted = tuple[list[int], list[int], int, str | None]  # token ids, loss mask, note, why the row cannot be read
WHOLE, CUT, UNSUPERVISED, BAD = range(4)  # notes of examples; only `WHOLE` and `CUT` are trained on
ROWS_PER_PROCESS = 2000  # with fewer rows, starting another process costs more than it saves
VERSION = 2  # version of the example format, part of the cache fingerprint
_prepared: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # data sets prepared here -> their `max_length`


@dataclass
class DataReport:
    """Counts of what happened to the rows of a data set.

    Attributes:
        rows: Rows read.
        examples: Examples to train on. A chat may give several, and so does a text longer than `max_length`.
        cut: Examples that were longer than `max_length` and were cut.
        unsupervised: Rows left out because no token within `max_length` is supervised.
        bad: Rows left out because they cannot be read.
        first_problem: Why the first unreadable row cannot be read.
        streamed: Whether the data set is a stream, whose rows are counted as they are read.
    """

    rows: int = 0
    examples: int = 0
    cut: int = 0
    unsupervised: int = 0
    bad: int = 0
    first_problem: str | None = None
    streamed: bool = False

    def count(self, notes: Sequence[int], problems: Sequence[str | None]) -> None:
        """Adds the notes and problems of some examples to the counts."""
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
    """Tokenizes a data set. Rows that already hold `input_ids` are only checked and completed, and data sets that were
    prepared before are returned as they are.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset` with the columns `messages`, `conversations` (ShareGPT),
            `prompt` and `completion`, `text`, or `input_ids` (optionally with `loss_mask` or `labels`). `input_ids`
            with `loss_mask` take precedence over a chat in the same row. A torch dataset whose items hold `input_ids`
            is returned as it is, because the collators complete its items.
        tokenizer: Required unless the data hold `input_ids`. With a processor, chats may hold images; see [`images`].
        max_length: Longest example in tokens. Chats and ids are cut, texts are split.
        template_kwargs: Arguments for the chat template, e.g. `{"enable_thinking": False}`.
        num_proc: Number of processes. Default: chosen from the number of cores and of rows.
        report: Report to add the counts to.

    Raises:
        ValueError: for a data set without any of these columns, a missing tokenizer, or a result without examples.
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
    """Counts all examples in the report, and keeps those that can be trained on."""
    notes, problems = prepared["note"][:], prepared["problem"][:]
    report.rows += len(dataset)
    report.count(notes, problems)
    if report.examples == 0:
        reason = f" (the first that cannot be read: {report.first_problem})" if report.first_problem else ""
        raise ValueError(
            f"none of the {len(dataset)} rows of the dataset has a supervised token within max_length={max_length}; "
            f"check the chat template, or raise max_length.{reason}"
        )
    if report.unsupervised or report.bad:
        prepared = prepared.select([index for index, note in enumerate(notes) if note <= CUT])
    return prepared.remove_columns(["note", "problem"])


def _with_images(dataset: Any, reader: ImageReader, num_proc: int | None, report: DataReport) -> ImageChats:
    """Prepares chats for a processor. Only token ids and masks are stored; pixels are computed when an example is
    read.

    Raises:
        ValueError: for a stream.
    """
    if not hasattr(dataset, "__len__"):
        raise ValueError("chats that a processor reads cannot be streamed; load the whole data set (streaming=False).")
    prepared = dataset.map(
        _convert_with_images,
        with_indices=True,
        batched=True,
        batch_size=64,
        remove_columns=dataset.column_names,
        fn_kwargs={"reader": reader},
        num_proc=num_proc or _processes(len(dataset)),
        load_from_cache_file=False,  # a processor's fingerprint differs from process to process
        desc="reading chats with images",
    )
    return ImageChats(dataset, reader, _kept(dataset, prepared, reader.max_length, report))


def _convert_with_images(batch: Mapping[str, list], indices: Sequence[int], reader: ImageReader) -> dict[str, list]:
    """Converts like [`_convert`], and adds each example's row index and its index among the examples of the row."""
    made: dict[str, list] = {name: [] for name in ("input_ids", "loss_mask", "note", "problem", "row", "reply")}
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        for reply, noted in enumerate(_noted_with_images(dict(zip(batch, values, strict=True)), reader)):
            for name, value in zip(made, (*noted, index, reply), strict=True):
                made[name].append(value)
    return made


def _noted_with_images(row: Mapping[str, Any], reader: ImageReader) -> list[Noted]:
    """Returns the examples of a row in order. An example that would be cut before the end of its images is `BAD`."""
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
    """Prepares a data set, or each data set of a dict, according to training arguments; see [`prepare_dataset`].

    Args:
        args: Training arguments.
        dataset: Data set, or dict of data sets. Anything else is returned as it is.
        tokenizer: The target's tokenizer or processor.
        report: Report to add the counts to.
        pack: Whether to pack the data set if the packing strategy of `args` is `"best_fit"`.
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
    """Marks a data set, such as a mixture of prepared ones, so that [`prepare_dataset`] returns it as it is."""
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
    """Converts a batch of rows to examples. A row without examples gives an empty one whose note says why."""
    made: dict[str, list] = {"input_ids": [], "loss_mask": [], "note": [], "problem": []}
    try:
        rows = list(zip(*batch.values(), strict=True))
    except UnicodeDecodeError as error:  # `datasets` loads files without checking their encoding
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
    return noted or [([], [], UNSUPERVISED, None)]  # no row predicts an example's first token, so it does not count


def _processes(rows: int) -> int | None:
    processes = min(os.cpu_count() or 1, rows // ROWS_PER_PROCESS)
    return processes if processes > 1 else None


def _fingerprint(dataset: Any, kind: str, how: Tokenizing) -> str:
    """Returns the cache fingerprint of the examples. Unlike the pickle of a tokenizer, it is the same in every process
    and run."""
    tokenizer = how.tokenizer
    told = [VERSION, getattr(dataset, "_fingerprint", ""), kind, how.max_length, dict(how.template_kwargs)]
    if tokenizer is not None:
        told += [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


def marked_example(example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, longest: int = 600) -> str:
    """Returns an example as text, with supervised parts in `[[ ]]`; without a tokenizer, as token ids."""
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
    """Repeats a prepared stream forever. Training on one endless epoch can resume anywhere: on resuming, Trainer skips
    batches from the start of the current epoch, but it does not know where the epochs of a stream begin.

    Raises:
        ValueError: for a stream without examples, whose repetition would never yield anything.
    """
    if next(iter(stream), None) is None:
        raise ValueError(
            "the training stream has no example to train on; check `max_length` and the supervised tokens."
        )
    return stream.repeat(None)
