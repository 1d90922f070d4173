"""Turns chats with images into examples; the processor reads text and images together.

Rows have `messages` whose content may be a list of parts, `{"type": "text", "text": ...}` and `{"type": "image"}`. A
part names its image itself (`image`, `url`, `path` or `base64`), or the row has an `images` column with the images
in order. Token ids and loss masks are computed once, when the data are prepared. Pixels are computed whenever an
example is read, because a data set of pixels would be a hundred times larger than the image files.
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

IMAGE_FIELDS = ("image", "url", "path", "base64")  # fields of an image part in transformers' chat templates
COLUMNS = ("messages", "conversations")
# Attributes of processors that hold the text which a chat template writes for an image.
PLACEHOLDERS = ("boi_token", "image_token", "start_of_image_token")


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer: `processing_class` itself, or the tokenizer inside a processor."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def reads_images(processing_class: Any, kind: str) -> TypeGuard[ProcessorMixin]:
    """Whether data that are read from the column `kind` may hold images: chats may, if there is a processor."""
    return isinstance(processing_class, ProcessorMixin) and kind in COLUMNS


def shows_images(dataset: Any) -> bool:
    """Whether a data set has images: an `images` column, or an image part in its first chat."""
    names = list(getattr(dataset, "column_names", None) or ())
    if "images" in names or not any(name in COLUMNS for name in names):
        return "images" in names
    messages = next(iter(dataset)).get("messages") or ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def image_messages(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the messages of a row, with contents as parts, and its images in order (as images or as locations).

    Raises:
        ExampleError: if the number of images differs from the number of image parts.
    """
    given: Any = row.get("messages") if row.get("messages") is not None else messages_of(row.get("conversations"))
    waiting = list(row.get("images") or [])
    if problem := chat_problem(given, images=True):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got {problem}.")
    messages: list[dict[str, Any]] = [{**message, "content": _parts(message.get("content"))} for message in given]
    places = [part for message in messages for part in message["content"] or () if part.get("type") == "image"]
    if waiting and not places:  # without image parts, images go in front of the first question
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        places = [{"type": "image"} for _ in waiting]
        first["content"] = [*places, *(first["content"] or ())]
    images = []
    for part in places:
        named = next((part[name] for name in IMAGE_FIELDS if part.get(name) is not None), None)
        if named is None and not waiting:
            raise ExampleError(
                f"a chat has {len(places)} image parts, but `images` has {len(row.get('images') or [])}."
            )
        images.append(waiting.pop(0) if named is None else named)
        for name in IMAGE_FIELDS:  # templates only render text and must not load images
            part.pop(name, None)
    if waiting:
        raise ExampleError(f"a chat has {len(places)} image parts, but `images` has {len(row.get('images') or [])}.")
    return messages, images


def _parts(content: Any) -> list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return None if content is None else [{"type": "text", "text": content}]
    if not all(isinstance(part, Mapping) for part in content):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got parts {content!r}.")
    # Columnar data sets give every part the fields of all parts.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


class ImageReader:
    """Turns chats with images into examples.

    Args:
        processor: The target's processor, with a chat template.
        max_length: Longest example in tokens, image tokens included. Longer examples are cut after their images.
        template_kwargs: Arguments for the chat template.
    """

    def __init__(self, processor: ProcessorMixin, max_length: int, template_kwargs: Mapping[str, Any] | None = None):
        self.processor, self.max_length = processor, max_length
        self.template_kwargs = dict(template_kwargs or {})

    def rows(self, row: Mapping[str, Any]) -> list[Row]:
        """Returns token ids and loss mask of every example of a row, uncut; see [`chats.tokenize_chat`].

        Raises:
            ExampleError: for a chat that cannot be read.
        """
        segments, images = self._segments(row)
        return [self._encoded(example, images) for example in segments]

    def inputs(self, row: Mapping[str, Any], reply: int, length: int) -> dict[str, torch.Tensor]:
        """Returns the target's inputs besides ids and mask: pixels, image sizes, and token types [1, length].

        Args:
            row: Row with the chat.
            reply: Index of the example in the row.
            length: Number of tokens of the example, after the cut.
        """
        segments, images = self._segments(row)
        inputs = dict(self._processed(_text(segments[reply]), images))
        ids = inputs.pop("input_ids")
        del inputs["attention_mask"]
        return {name: value[:, :length] if value.shape == ids.shape else value for name, value in inputs.items()}

    def prompt(self, row: Mapping[str, Any], reply: int) -> dict[str, torch.Tensor]:
        """Returns arguments of `generate` for the part of an example before its first supervised token."""
        segments, images = self._segments(row)
        first = next(place for place, segment in enumerate(segments[reply]) if segment.generated)
        asked = segments[reply][:first]
        return dict(self._processed(_text(asked), images))

    def last_image(self, ids: Sequence[int]) -> int:
        """Returns the index of the last image token, -1 if there is none."""
        token = getattr(self.processor, "image_token_id", None)
        return max((place for place, found in enumerate(ids) if found == token), default=-1)

    def _segments(self, row: Mapping[str, Any]) -> tuple[list[list[Segment]], list[Any]]:
        messages, images = image_messages(row)
        own = {name: value for name, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
        kwargs = {**self.template_kwargs, **own}
        segments = chat_segments(messages, self.processor, tools_of(row), kwargs)
        if images and not any(self._shown(_text(example), len(images)) for example in segments):
            known = [getattr(self.processor, name, None) for name in PLACEHOLDERS]
            raise ExampleError(
                f"the chat template writes none of the placeholders {[t for t in known if t]} for an image."
            )
        return segments, images

    def _encoded(self, segments: Sequence[Segment], images: Sequence[Any]) -> Row:
        """Returns token ids and loss mask. The whole text is tokenized at once. A segment ends at the token count of
        the text up to its end, tokenized alone, as serving does for a prompt."""
        ids = self._processed(_text(segments), images)["input_ids"][0].tolist()
        mask: list[int] = []
        for place, segment in enumerate(segments, start=1):
            end = len(ids) if place == len(segments) else self._length(_text(segments[:place]), images)
            mask += [int(segment.generated)] * (end - len(mask))
        return ids, mask

    def _length(self, text: str, images: Sequence[Any]) -> int:
        """Returns the number of tokens of the beginning of a chat."""
        return int(self._processed(text, images)["input_ids"].shape[1]) if text else 0

    def _shown(self, text: str, most: int) -> int:
        """Returns how many images, at most `most`, the text has placeholders for."""
        known = [getattr(self.processor, name, None) for name in PLACEHOLDERS]
        counts = [text.count(token) for token in known if isinstance(token, str)]
        return next((count for count in counts if 0 < count <= most), 0)

    def _processed(self, text: str, images: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """Processes a text together with the first images, as many as the text has placeholders for."""
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
        rows: The original data set.
        reader: Reader of its rows.
        examples: Data set with `input_ids`, `loss_mask`, `row` and `reply` of every example.
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
        """Returns arguments of `generate` for the first `count` examples: their chats up to the first reply."""
        chosen = [self.examples[index] for index in range(min(count, len(self)))]
        return [self.reader.prompt(self.rows[example["row"]], example["reply"]) for example in chosen]


def ids_of(dataset: Any) -> Any:
    """Returns the examples of a data set as token ids and loss masks, without image inputs."""
    return dataset.examples if isinstance(dataset, ImageChats) else dataset


class ImageCollator(PaddedCollator):
    """Pads sequences, and adds `image_inputs`, one mapping per sequence, empty for chats without an image."""

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__(examples)
        return {**batch, "image_inputs": [dict(example.get("image_inputs") or {}) for example in examples]}
