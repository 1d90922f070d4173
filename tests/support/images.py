"""Tiny random multimodal targets, and prompts with an image of four tokens each."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from .families import tiny_target
from .targets import prompt

IMAGE_TOKEN, IMAGE_TOKENS = 98, 4
SIZE, PATCH = 64, 16  # 16 patches, from which every family here makes four tokens
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_VISION = {"image_size": SIZE, "patch_size": PATCH}
_IDS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
_QWEN = {
    "vision_config": {"patch_size": PATCH, "out_hidden_size": 32},
    "text_config": {"rope_parameters": _MROPE},
    **_IDS,
}
_DEEP = _QWEN | {"vision_config": {"patch_size": PATCH, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1, 2],
                                   "num_position_embeddings": 16}}  # fmt: skip
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8,
           "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}}  # fmt: skip
_PACKED = {"vision_config": _VISION, "scale_factor": 2, "image_token_id": IMAGE_TOKEN}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _VISION, "mm_tokens_per_image": IMAGE_TOKENS, "image_token_index": IMAGE_TOKEN,
               "image_token_id": IMAGE_TOKEN},
    "idefics3": _PACKED,
    "internvl": {"vision_config": {"image_size": (SIZE, SIZE), "patch_size": (PATCH, PATCH)},
                 "image_token_id": IMAGE_TOKEN, "image_seq_length": IMAGE_TOKENS},
    "llava": {"vision_config": _VISION | {"patch_size": 32}, "image_token_index": IMAGE_TOKEN,
              "image_token_id": IMAGE_TOKEN},
    "mistral3": {"vision_config": _VISION | {"head_dim": 8}, "spatial_merge_size": 2, "image_token_index": IMAGE_TOKEN,
                 "image_token_id": IMAGE_TOKEN},
    "qwen2_5_vl": _QWEN | {"vision_config": _QWEN["vision_config"] | {"window_size": 4 * PATCH}},
    "qwen2_vl": {"vision_config": {"patch_size": PATCH, "hidden_size": 32}, "text_config": {"rope_parameters": _MROPE},
                 **_IDS},
    "qwen3_5": _DEEP | {"text_config": _HYBRID},
    "qwen3_vl": _DEEP,
    "smolvlm": _PACKED,
}  # fmt: skip


def image_target(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A tiny random target of a family."""
    target = tiny_target(model_type, auto=AutoModelForImageTextToText, **(OVERRIDES[model_type] | overrides))
    for name, weight in target.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # a bare parameter in Gemma, initialised to zero
            torch.nn.init.normal_(weight, std=0.3)
    return target


def image_inputs(target: PreTrainedModel, lengths: tuple[int, ...] = (15,), seed: int = 0) -> dict[str, torch.Tensor]:
    """Makes prompts with one image each, padded on the left: text, the image's tokens, text."""
    generator, kind, batch = torch.Generator().manual_seed(seed), target.config.model_type, len(lengths)
    image = torch.full((1, IMAGE_TOKENS), IMAGE_TOKEN)
    texts = [prompt(n, seed=row, vocab=90) for row, n in enumerate(lengths)]
    texts = [torch.cat([text[:, :3], image, text[:, 3:]], dim=1) for text in texts]
    longest = max(text.shape[1] for text in texts)
    ids = torch.cat([torch.nn.functional.pad(text, (longest - text.shape[1], 0)) for text in texts])
    mask = torch.stack([(torch.arange(longest) >= longest - text.shape[1]).long() for text in texts])
    inputs = {"input_ids": ids, "attention_mask": mask}
    pixels = torch.randn(batch, 3, SIZE, SIZE, generator=generator)
    if kind.startswith("qwen"):
        inputs["pixel_values"] = torch.randn(16 * batch, 3 * 2 * PATCH * PATCH, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        return inputs
    inputs["pixel_values"] = pixels[:, None] if kind in ("idefics3", "smolvlm") else pixels
    if kind == "mistral3":
        inputs["image_sizes"] = torch.tensor([[SIZE, SIZE]] * batch)
    if kind == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return inputs
