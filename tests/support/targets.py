"""Tiny random targets, one per family. Sizes are odd on purpose, and weights large enough for varied greedy text."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 99
# The three differ in grouped keys, a sliding window, and partial rotary positions without a gated MLP.
DIFFERENT_FAMILIES = ("llama", "mistral", "gpt-neox")
WINDOW = 12  # shorter than every prompt below, so that sliding windows take effect from the first token on

_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_GQA = {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}
_GPT2_LIKE = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GEMMA = _LLAMA_LIKE | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}

# name -> (model_type, config fields)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "llama-tied": ("llama", _LLAMA_LIKE | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen2-window": (
        "qwen2",
        _LLAMA_LIKE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", _LLAMA_LIKE | {"head_dim": 8}),
    "mistral": ("mistral", _LLAMA_LIKE | {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ("phi", _LLAMA_LIKE | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", _LLAMA_LIKE | {"sliding_window": WINDOW}),
    "mixtral": (
        "mixtral",
        _LLAMA_LIKE
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None, "intermediate_size": 40},
    ),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "gpt-oss": (
        "gpt_oss",
        _LLAMA_LIKE
        | {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 3, "num_experts_per_tok": 2,
           "intermediate_size": 40},
    ),
    "gpt-neox": ("gpt_neox", _NO_GQA),
    "gpt2": ("gpt2", _GPT2_LIKE),
    "gpt2-untied": ("gpt2", _GPT2_LIKE | {"tie_word_embeddings": False}),
    "opt": (
        "opt",
        {k: v for k, v in _NO_GQA.items() if k not in ("intermediate_size", "initializer_range")}
        | {"ffn_dim": 37, "word_embed_proj_dim": 32, "init_std": 0.3},
    ),
    # Targets that only take chains.
    "bloom": (
        "bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama4": (
        "llama4_text",
        _LLAMA_LIKE | {"head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 37},
    ),
    "lfm2": ("lfm2", _LLAMA_LIKE | {"full_attn_idxs": [1]}),
}  # fmt: skip


def _config(family: str, attention: str | None, overrides: dict[str, Any]) -> Any:
    model_type, fields = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(fields | overrides))
    if attention is not None:
        config._attn_implementation = attention
    return config


_SHARED: set[int] = set()  # ids of the targets that `_build` keeps


@functools.cache
def _build(family: str, seed: int, attention: str | None, overrides: tuple) -> PreTrainedModel:
    torch.manual_seed(seed)
    target = AutoModelForCausalLM.from_config(_config(family, attention, dict(overrides))).eval()
    # Random text hits the end-of-sequence token by chance. Tests that need one name it themselves.
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    _SHARED.add(id(target))
    return target


def shared_target(family: str = "llama", *, seed: int = 0, attention: str | None = None, **overrides: Any):
    """Returns a target that is built once per session. It must not be changed."""
    return _build(family, seed, attention, tuple(sorted(overrides.items())))


def own_target(family: str = "llama", *, seed: int = 0, attention: str | None = None, **overrides: Any):
    """Returns a private copy of a target, which a test may wrap, compile or change."""
    return copy.deepcopy(shared_target(family, seed=seed, attention=attention, **overrides))


def deep_target(*, own: bool = False) -> PreTrainedModel:
    """Returns a Llama of eight layers, so that EAGLE-3's usual levels exist; with `own`, a private copy."""
    return (own_target if own else shared_target)("llama", num_hidden_layers=8)


def training_target(seed: int = 0) -> PreTrainedModel:
    """Returns a private Llama to train heads for: usual small weights, but an `lm_head` whose distributions are not
    flat."""
    target = own_target("llama", seed=seed, initializer_range=0.02)
    with torch.no_grad():
        target.lm_head.weight.mul_(20)
    return target


def prompt(length: int = 19, *, seed: int = 7, vocab: int = VOCAB) -> torch.Tensor:
    """Makes a prompt int64 [1, length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (1, length), generator=generator)


def plain(target: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int = 40, **options: Any) -> torch.Tensor:
    """Generates greedily with an explicit attention mask. For a shared target without options, this runs once per
    session."""
    if not options and id(target) in _SHARED:
        return _text_of(target, tuple(map(tuple, input_ids.tolist())), new_tokens).clone()
    return _generated(target, input_ids, new_tokens, **options)


@functools.cache
def _text_of(target: PreTrainedModel, rows: tuple[tuple[int, ...], ...], new_tokens: int) -> torch.Tensor:
    return _generated(target, torch.tensor(rows), new_tokens)


def _generated(target: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(input_ids)
    return target.generate(input_ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)
