"""Examples and batches: chat `messages`, plain `text` or token ids in; ids and a loss mask out.

An example is `{"input_ids": [...], "loss_mask": [...]}`, with 1 at every token the target would have generated: the
assistant's tokens of a chat, every token of a plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from .sources import COLUMNS

IGNORED_LABEL = -100
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ExampleError(ValueError):
    """An example, or a chat template, from which no supervised tokens can be told."""


# ---------------------------------------------------------------------- examples
def prepare_dataset(dataset: Any, tokenizer: PreTrainedTokenizerBase | None, max_length: int) -> Any:
    """Tokenizes a dataset, once; what holds `input_ids` already is only checked and completed.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset` with a `messages`, `text` or `input_ids` column, or a torch
            dataset whose items hold `input_ids` (left as it is: the collators complete it).
        tokenizer: Needed for `messages` and `text`.
        max_length: Longest example in tokens: chats and ids are cut there, texts are split.

    Raises:
        ValueError: for a dataset without one of the three columns, a missing tokenizer or an empty result.
    """
    if dataset is None or not hasattr(dataset, "column_names"):
        return dataset
    names = dataset.column_names or list(next(iter(dataset)))
    column = next((name for name in COLUMNS if name in names), None)
    if column is None:
        raise ValueError(f"the dataset has the columns {names}, but one of {list(COLUMNS)} is needed; rename one.")
    if column != "input_ids" and tokenizer is None:
        raise ValueError(f"a dataset with a `{column}` column needs a tokenizer; pass `processing_class`.")
    convert = {"messages": _chats, "text": _texts, "input_ids": _tokenized}[column]
    prepared = dataset.map(
        convert, batched=True, remove_columns=names, fn_kwargs={"tokenizer": tokenizer, "max_length": max_length}
    )
    if hasattr(prepared, "__len__") and len(prepared) == 0:
        raise ValueError(
            f"no example of the {len(dataset)} in the dataset has a supervised token within max_length={max_length}; "
            "check the chat template, or raise max_length."
        )
    return prepared


def _collect(examples: Sequence[tuple[list[int], list[int]]]) -> dict[str, list]:
    """A batch of examples; those without a trainable row (a supervised token after the first) are left out."""
    kept = [(ids, mask) for ids, mask in examples if any(mask[1:])]
    return {"input_ids": [ids for ids, _ in kept], "loss_mask": [mask for _, mask in kept]}


def _chats(batch: Mapping[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list]:
    tools = batch.get("tools") or [None] * len(batch["messages"])
    examples = [tokenize_chat(m, tokenizer, tools=t) for m, t in zip(batch["messages"], tools, strict=True)]
    return _collect([(ids[:max_length], mask[:max_length]) for ids, mask in examples])


def _texts(batch: Mapping[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list]:
    examples = []
    for text in batch["text"]:
        if not isinstance(text, str):
            raise ExampleError(f"every `text` of the data must be a string, got {text!r}.")
        ids = tokenize_text(text, tokenizer)
        pieces = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
        examples += [(piece, [1] * len(piece)) for piece in pieces]
    return _collect(examples)


def _tokenized(batch: Mapping[str, list], tokenizer: object, max_length: int) -> dict[str, list]:
    names = [name for name in ("input_ids", "loss_mask", "labels") if name in batch]
    rows = (dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True))
    examples = [complete_example(row) for row in rows]
    return _collect([(ids[:max_length], mask[:max_length]) for ids, mask in examples])


def complete_example(example: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a tokenized item: `loss_mask` as given, else from `labels` (-100: not supervised), else 1s.

    Raises:
        ExampleError: if the lengths differ.
    """
    ids = [int(i) for i in example["input_ids"]]
    if example.get("loss_mask") is not None:
        mask = [int(bool(m)) for m in example["loss_mask"]]
    elif example.get("labels") is not None:
        mask = [int(label != IGNORED_LABEL) for label in example["labels"]]
    else:
        mask = [1] * len(ids)
    if len(mask) != len(ids):
        raise ExampleError(f"an example has {len(ids)} `input_ids` but a mask of length {len(mask)}; make them equal.")
    return ids, mask


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text with the tokenizer's own special tokens, and its end-of-sequence token last."""
    ids = list(tokenizer(text)["input_ids"])
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def chat_problem(messages: Any) -> str | None:
    """What is wrong with the messages of a chat, `None` if nothing is."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"{messages!r}"
    wrong = (message for message in messages if not isinstance(message, Mapping) or "role" not in message)
    return next((f"{message!r}" for message in wrong), None if len(messages) else "an empty list")


def tokenize_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, tools: list | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a chat and its loss mask: 1 at the tokens the assistant generated, its end of turn included.

    Templates with `{% generation %}` markers say so themselves. For the others the template is rendered up to and
    including each reply: the tokens a reply adds to its prompt are supervised.

    Raises:
        ExampleError: if the template has no markers and renders a chat's beginning differently once more follows (as
            templates do that drop earlier reasoning), or the tokenizer has no chat template at all.
    """
    if problem := chat_problem(messages):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got {problem}.")
    template = tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else None
    if template is None:
        raise ExampleError(
            f"{type(tokenizer).__name__} has no chat template, so `messages` cannot be tokenized; set "
            "`tokenizer.chat_template`, or use a `text` column."
        )
    render: Callable[..., Any] = partial(tokenizer.apply_chat_template, tools=tools, tokenize=True, return_dict=True)
    if GENERATION_MARKER.search(template):
        encoded = render(messages, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    def ids_of(upto: int, prompt: bool) -> list[int]:
        return list(render(messages[:upto], add_generation_prompt=prompt)["input_ids"])

    ids = ids_of(len(messages), prompt=False)
    mask = [0] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = ids_of(index, prompt=True), ids_of(index + 1, prompt=False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise ExampleError(
                f"the chat template has no {{% generation %}} markers and renders the chat up to message {index} "
                "differently once later messages follow, so the assistant's tokens cannot be told; wrap the "
                "assistant's text in {% generation %} ... {% endgeneration %} in `tokenizer.chat_template`."
            )
        mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return ids, mask


# ---------------------------------------------------------------------- batches
class PaddedCollator:
    """One example per sequence, padded on the right.

    Makes `input_ids`, `attention_mask`, `loss_mask`, int64 [B, T]. `loss_mask` is 0 at the first token of an example,
    which no row predicts, so its sum is the number of supervised rows.

    Args:
        pad_token_id: Id in the padding.
        max_length: Longest sequence in tokens; longer examples are cut.
    """

    def __init__(self, pad_token_id: int, max_length: int):
        self.pad_token_id = pad_token_id
        self.max_length = max_length

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.batch([[example] for example in self.complete(examples)])

    def complete(self, examples: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
        """Ids and loss mask of every item, cut to `max_length`."""
        pairs = (complete_example(example) for example in examples)
        return [(ids[: self.max_length], mask[: self.max_length]) for ids, mask in pairs]

    def batch(self, sequences: list[list[tuple[list[int], list[int]]]]) -> dict[str, torch.Tensor]:
        """Sequences of one or more (ids, loss mask) each, padded to the longest."""
        length = max(sum(len(ids) for ids, _ in sequence) for sequence in sequences)
        shape = (len(sequences), length)
        input_ids = torch.full(shape, self.pad_token_id)
        attention_mask, loss_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for index, sequence in enumerate(sequences):
            start = 0
            for ids, mask in sequence:
                end = start + len(ids)
                input_ids[index, start:end] = torch.tensor(ids)
                attention_mask[index, start:end] = 1
                loss_mask[index, start + 1 : end] = torch.tensor(mask[1:])
                start = end
        return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}


class PackedCollator(PaddedCollator):
    """Several examples per sequence of up to `max_length` tokens, first fit in the order given.

    Adds `document_ids` (-1 on padding) and `position_ids` (from 0 in every example), int64 [B, T].
    """

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        sequences: list[list[tuple[list[int], list[int]]]] = []
        for example in self.complete(examples):
            lengths = (sum(len(ids) for ids, _ in sequence) for sequence in sequences)
            fitting = (i for i, length in enumerate(lengths) if length + len(example[0]) <= self.max_length)
            index = next(fitting, None)
            if index is None:
                sequences.append([example])
            else:
                sequences[index].append(example)
        batch = self.batch(sequences)
        document_ids = torch.full_like(batch["input_ids"], -1)
        position_ids = torch.zeros_like(document_ids)
        for index, sequence in enumerate(sequences):
            start = 0
            for document, (ids, _) in enumerate(sequence):
                document_ids[index, start : start + len(ids)] = document
                position_ids[index, start : start + len(ids)] = torch.arange(len(ids))
                start += len(ids)
        return {**batch, "document_ids": document_ids, "position_ids": position_ids}


def default_collator(
    tokenizer: PreTrainedTokenizerBase | None, max_length: int, packing: bool
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]:
    """The collator for `packing`; pads with the tokenizer's padding token, else its end token, else id 0."""
    candidates = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0)
    pad = next(token for token in candidates if token is not None)
    return (PackedCollator if packing else PaddedCollator)(pad, max_length)


# ---------------------------------------------------------------------- prompts
def cut_prompts(dataset: TorchDataset, count: int, prompt_length: int) -> list[list[int]]:
    """Prompts for evaluation: a chat up to its first reply, or the beginning of a text.

    Args:
        dataset: Prepared examples, see [`prepare_dataset`].
        count: How many prompts, taken from the front.
        prompt_length: Longest prompt cut from a text that is supervised from the start, in tokens; at most half of it.

    Returns:
        Token ids per prompt; examples that leave no prompt are passed over.
    """
    prompts: list[list[int]] = []
    # A torch dataset without `__iter__` is iterated by index.
    for example in cast("Iterable[Mapping[str, Any]]", dataset):
        if len(prompts) >= count:
            break
        ids, mask = complete_example(example)
        first = mask.index(1) if 1 in mask else len(ids)
        prompt = ids[:first] if first > 1 else ids[: min(prompt_length, len(ids) // 2)]
        if 0 < len(prompt) < len(ids):
            prompts.append(prompt)
    return prompts
