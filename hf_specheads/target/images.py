"""Multimodal targets whose prompts may hold images.

Images are read by the prompt's forward, which transformers itself prepares. The verifying forwards after it get only
tokens, positions (with several axes if the target's rotary embedding has them) and masks. Tests check for each model
family that the text is that of plain decoding (`tests/claims/test_images.py`).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

IMAGES_SERVED = frozenset({
    "gemma3", "idefics3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm",
})  # fmt: skip
# Arguments that carry images. Only the prompt's forward receives or uses them.
IMAGE_ARGUMENTS = frozenset({"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"})
# Arguments that mark each token as image or text; text tokens are 0.
TOKEN_TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})


def serves_images(target: PreTrainedModel) -> bool:
    """Whether prompts of a target may hold images."""
    return target.config.model_type in IMAGES_SERVED


def read_by_the_prompt(target: PreTrainedModel, arguments: dict[str, Any]) -> set[str]:
    """Returns the names of arguments that describe only the images of a prompt, not the generated tokens.

    Token types are among them only if the prompt ends with text.
    """
    if not serves_images(target):
        return set()
    found = {name for name in IMAGE_ARGUMENTS if arguments.get(name) is not None}
    encoded = arguments.get("mm_encoder_outputs") or {}
    if encoded and encoded.keys() <= {"image"}:
        found.add("mm_encoder_outputs")
    types = {name: arguments.get(name) for name in TOKEN_TYPES}
    return found | {name for name, value in types.items() if value is not None and not bool(value[..., -1].any())}
