"""Multimodal targets whose prompts may hold images.

Images are read by the prompt's forward, which transformers itself prepares; the verifying forwards after it get
tokens, positions (several axes of them where the target's rotary embedding has some) and masks. That this gives plain
decoding's text is tested per family (`tests/claims/test_images.py`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

IMAGES_SERVED = frozenset({
    "gemma3", "idefics3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm",
})  # fmt: skip
# Arguments with which images come; only the prompt's forward gets them, or heeds them.
IMAGE_ARGUMENTS = frozenset({"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"})
# Those that tell the tokens of images from those of text, which are 0.
TOKEN_TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})


def serves_images(target: PreTrainedModel) -> bool:
    """Whether prompts of a target may hold images."""
    return target.config.model_type in IMAGES_SERVED


def read_by_the_prompt(target: PreTrainedModel, arguments: dict[str, Any]) -> set[str]:
    """Names of arguments that say something about the images of a prompt and nothing about what is generated: the
    prompt has to end with text."""
    if not serves_images(target):
        return set()
    found = {name for name in IMAGE_ARGUMENTS if arguments.get(name) is not None}
    encoded = arguments.get("mm_encoder_outputs") or {}
    if encoded and encoded.keys() <= {"image"}:
        found.add("mm_encoder_outputs")
    types = {name: arguments.get(name) for name in TOKEN_TYPES}
    return found | {name for name, value in types.items() if value is not None and not bool(value[..., -1].any())}
