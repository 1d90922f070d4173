"""Best-fit packing of several examples into each row of a data set: few rows, little padding, equal in every epoch."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Examples: TypeAlias = "Dataset | IterableDataset"  # a data set or a stream

ROWS_AT_ONCE = 10_000  # examples of a data set that are packed together
ROWS_OF_A_STREAM = 512  # examples of a stream that are packed together


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assigns examples to rows, the longest first, each to the row in which it leaves the least space.

    Args:
        lengths: Lengths of the examples; longer ones than `capacity` count as `capacity`.
        capacity: Length of a row.

    Returns:
        Indices of the examples of every row, ordered by the first example of each row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (space left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = min(lengths[index], capacity)
        place = bisect.bisect_left(free, (length, -1))
        if place == len(free):
            space, row = capacity, len(rows)
            rows.append([])
        else:
            space, row = free.pop(place)
        rows[row].append(index)
        bisect.insort(free, (space - length, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


def pack_dataset(dataset: Examples, max_length: int) -> Examples:
    """Packs the examples of a prepared data set or stream into rows of up to `max_length` tokens.

    Adds the column `lengths`, the lengths of the examples in a row, from which the collator separates them. Examples
    longer than `max_length` are cut.
    """
    options: dict[str, Any] = {"batched": True, "remove_columns": dataset.column_names or ["input_ids", "loss_mask"]}
    options["fn_kwargs"] = {"capacity": max_length}
    if not hasattr(dataset, "__len__"):
        return dataset.map(_pack, batch_size=ROWS_OF_A_STREAM, **options)
    name = f"packed {max_length} {getattr(dataset, '_fingerprint', '')}"
    fingerprint = hashlib.sha256(name.encode()).hexdigest()[:16]
    return dataset.map(_pack, batch_size=ROWS_AT_ONCE, new_fingerprint=fingerprint, desc="packing", **options)


def _pack(batch: Mapping[str, list], capacity: int) -> dict[str, list]:
    ids, masks = batch["input_ids"], batch["loss_mask"]
    rows = best_fit([len(example) for example in ids], capacity)
    # The first token of an example is never supervised, because no row predicts it.
    masks = [[0, *mask[1:capacity]] for mask in masks]
    return {
        "input_ids": [[token for index in row for token in ids[index][:capacity]] for row in rows],
        "loss_mask": [[bit for index in row for bit in masks[index]] for row in rows],
        "lengths": [[min(len(ids[index]), capacity) for index in row] for row in rows],
    }
