"""Processors of images and text for the tiny targets of `support.images`, without files."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from .images import IMAGE_TOKEN, IMAGE_TOKENS, PATCH, SIZE

FIRST_SPECIAL = 93
SPECIAL = ("<boi>", "<eoi>", "<start>", "<end>", "<video>", "<image>")  # the last one is `IMAGE_TOKEN`
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}#{% endfor %}"
)
_SQUARE = {"size": {"height": SIZE, "width": SIZE}}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of bytes and the tokens around images."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: FIRST_SPECIAL - 3]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: index for index, letter in enumerate(letters, start=3)}
    vocab |= {token: index for index, token in enumerate(SPECIAL, start=FIRST_SPECIAL)}
    assert vocab["<image>"] == IMAGE_TOKEN
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "video_token": "<video>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", eos_token="</s>", padding_side="left",
        additional_special_tokens=list(SPECIAL), extra_special_tokens=special,
    )  # fmt: skip


def image_processor(model_type: str) -> Any:
    """Makes the processor of `llava` or `gemma3`, with images of four tokens. (Processors of other families need
    torchvision.)"""
    tokenizer = _tokenizer()
    if model_type == "llava":
        pixels = CLIPImageProcessor(size={"height": SIZE, "width": SIZE}, do_center_crop=False)
        # The class embedding counts as one additional token, which the `default` strategy removes.
        options = {"patch_size": 2 * PATCH, "vision_feature_select_strategy": "default"}
        return LlavaProcessor(
            pixels, tokenizer, num_additional_image_tokens=1, chat_template=TEMPLATE.replace("IMAGE", "<image>"),
            **options,
        )  # fmt: skip
    template = TEMPLATE.replace("IMAGE", "<boi>")
    return Gemma3Processor(Gemma3ImageProcessor(**_SQUARE), tokenizer, template, image_seq_length=IMAGE_TOKENS)


def picture(seed: int = 0) -> Image.Image:
    """Makes a picture of random colours."""
    pixels = torch.randint(0, 256, (SIZE, SIZE, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
