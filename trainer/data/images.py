"""Chats with images as examples: the processor reads text and pictures together.

Rows have `messages` whose content may be a list of parts, `{"type": "text", "text": ...}` and `{"type": "image"}`. A
part names its image itself (`image`, `url`, `path` or `base64`), or the row has an `images` column with the images
in order. Token ids and loss masks are made when the data are prepared; pixels are made again whenever an example is
read, because a data set of pixels would be a hundred times larger than its pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_utils import load_image

from .batches import PaddedCollator
from .chats import ExampleError, Row, Segment, chat_problem, chat_segments
from .columns import messages_of, tools_of

IMAGE_FIELDS = ("image", "url", "path", "base64")  # of a part, as chat templates of transformers know them
COLUMNS = ("messages", "conversations")
# Attributes under which processors keep the text that a chat template writes for an image.
PLACEHOLDERS = ("boi_token", "image_token", "start_of_image_token")


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer: itself, or the one inside a processor."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def reads_images(processing_class: Any, kind: str) -> TypeGuard[ProcessorMixin]:
    """Whether data that are read by a column `kind` may hold images: chats may, for a processor."""
    return isinstance(processing_class, ProcessorMixin) and kind in COLUMNS


def shows_images(dataset: Any) -> bool:
    """Whether a data set has images: a column of them, or a part of its first chat."""
    names = list(getattr(dataset, "column_names", None) or ())
    if "images" in names or not any(name in COLUMNS for name in names):
        return "images" in names
    messages = next(iter(dataset)).get("messages") or ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def image_messages(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages of a row, contents as parts, and their images in order (pictures, or where to load them from).

    Raises:
        ExampleError: if images and the places for them do not match.
    """
    given: Any = row.get("messages") if row.get("messages") is not None else messages_of(row.get("conversations"))
    waiting = list(row.get("images") or [])
    if problem := chat_problem(given, images=True):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got {problem}.")
    messages: list[dict[str, Any]] = [{**message, "content": _parts(message.get("content"))} for message in given]
    places = [part for message in messages for part in message["content"] or () if part.get("type") == "image"]
    if waiting and not places:  # images without a place stand in front of the first question
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        places = [{"type": "image"} for _ in waiting]
        first["content"] = [*places, *(first["content"] or ())]
    images = []
    for part in places:
        named = next((part[name] for name in IMAGE_FIELDS if part.get(name) is not None), None)
        if named is None and not waiting:
            raise ExampleError(f"a chat has {len(places)} images, and `images` has {len(row.get('images') or [])}.")
        images.append(waiting.pop(0) if named is None else named)
        for name in IMAGE_FIELDS:  # templates are asked for text alone
            part.pop(name, None)
    if waiting:
        raise ExampleError(f"a chat has {len(places)} images, and `images` has {len(row.get('images') or [])}.")
    return messages, images


def _parts(content: Any) -> list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return None if content is None else [{"type": "text", "text": content}]
    if not all(isinstance(part, Mapping) for part in content):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got parts {content!r}.")
    # Data sets in columns give every part the fields of all.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


class ImageReader:
    """Makes examples of chats with images.

    Args:
        processor: The target's, with a chat template.
        max_length: Longest example in tokens, those of images included; longer ones are cut behind their images.
        template_kwargs: For the chat template.
    """

    def __init__(self, processor: ProcessorMixin, max_length: int, template_kwargs: Mapping[str, Any] | None = None):
        self.processor, self.max_length = processor, max_length
        self.template_kwargs = dict(template_kwargs or {})

    def rows(self, row: Mapping[str, Any]) -> list[Row]:
        """Ids and loss mask of every example of a row, whole; see [`chats.tokenize_chat`].

        Raises:
            ExampleError: for a chat that cannot be read.
        """
        segments, images = self._segments(row)
        return [self._encoded(example, images) for example in segments]

    def inputs(self, row: Mapping[str, Any], reply: int, length: int) -> dict[str, torch.Tensor]:
        """What the target's forward gets besides ids and mask: pixels, their sizes, and token types [1, length].

        Args:
            row: With the chat.
            reply: Which example of the row.
            length: Tokens of the example, after the cut.
        """
        segments, images = self._segments(row)
        inputs = dict(self._processed(_text(segments[reply]), images))
        ids = inputs.pop("input_ids")
        del inputs["attention_mask"]
        return {name: value[:, :length] if value.shape == ids.shape else value for name, value in inputs.items()}

    def prompt(self, row: Mapping[str, Any], reply: int) -> dict[str, torch.Tensor]:
        """Arguments of `generate` for what stands before the first supervised token of an example."""
        segments, images = self._segments(row)
        first = next(place for place, segment in enumerate(segments[reply]) if segment.generated)
        asked = segments[reply][:first]
        return dict(self._processed(_text(asked), images))

    def last_image(self, ids: Sequence[int]) -> int:
        """Place of the last token of an image, -1 without one."""
        token = getattr(self.processor, "image_token_id", None)
        return max((place for place, found in enumerate(ids) if found == token), default=-1)

    def _segments(self, row: Mapping[str, Any]) -> tuple[list[list[Segment]], list[Any]]:
        messages, images = image_messages(row)
        own = {name: value for name, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
        kwargs = {**self.template_kwargs, **own}
        segments = chat_segments(messages, self.processor, tools_of(row), kwargs)
        if images and not any(self._shown(_text(example), len(images)) for example in segments):
            known = [getattr(self.processor, name, None) for name in PLACEHOLDERS]
            raise ExampleError(f"the chat template writes none of {[t for t in known if t]} for an image.")
        return segments, images

    def _encoded(self, segments: Sequence[Segment], images: Sequence[Any]) -> Row:
        """Ids and loss mask. Ids are those of the whole text; a segment's end lies where the tokens of all up to it
        end, as when serving reads them for a prompt."""
        ids = self._processed(_text(segments), images)["input_ids"][0].tolist()
        mask: list[int] = []
        for place, segment in enumerate(segments, start=1):
            end = len(ids) if place == len(segments) else self._length(_text(segments[:place]), images)
            mask += [int(segment.generated)] * (end - len(mask))
        return ids, mask

    def _length(self, text: str, images: Sequence[Any]) -> int:
        """Tokens of the beginning of a chat."""
        return int(self._processed(text, images)["input_ids"].shape[1]) if text else 0

    def _shown(self, text: str, most: int) -> int:
        """How many images a text shows, of `most`."""
        known = [getattr(self.processor, name, None) for name in PLACEHOLDERS]
        counts = [text.count(token) for token in known if isinstance(token, str)]
        return next((count for count in counts if 0 < count <= most), 0)

    def _processed(self, text: str, images: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """What the processor makes of a text and as many of the images, in order, as it shows."""
        if not (shown := self._shown(text, len(images))):
            read = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")  # type: ignore[attr-defined]
            return {name: read[name] for name in ("input_ids", "attention_mask")}
        try:
            pictures = [load_image(image) for image in images[:shown]]
            return self.processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
        except (OSError, ValueError, TypeError) as error:
            raise ExampleError(f"the images of a chat cannot be read: {error}") from error


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)


class ImageChats(TorchDataset):
    """Prepared chats with images: `input_ids`, `loss_mask`, and `image_inputs` for the target's forward.

    Args:
        rows: The data set as it came.
        reader: Of its rows.
        examples: `input_ids`, `loss_mask`, `row` and `reply` of every example.
    """

    def __init__(self, rows: Any, reader: ImageReader, examples: Any):
        self.rows, self.reader, self.examples = rows, reader, examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[int(index)]
        ids, mask = example["input_ids"], example["loss_mask"]
        inputs = self.reader.inputs(self.rows[example["row"]], example["reply"], len(ids))
        return {"input_ids": ids, "loss_mask": mask, "image_inputs": inputs}

    def prompts(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Arguments of `generate` for the first examples: their chats up to the first reply."""
        chosen = [self.examples[index] for index in range(min(count, len(self)))]
        return [self.reader.prompt(self.rows[example["row"]], example["reply"]) for example in chosen]


def ids_of(dataset: Any) -> Any:
    """The same examples without what images make of them."""
    return dataset.examples if isinstance(dataset, ImageChats) else dataset


class ImageCollator(PaddedCollator):
    """Padded sequences, and `image_inputs`: one mapping per sequence, empty for chats without an image."""

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__(examples)
        return {**batch, "image_inputs": [dict(example.get("image_inputs") or {}) for example in examples]}
