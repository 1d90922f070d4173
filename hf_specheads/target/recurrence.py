"""Recurrent targets, which keep a state of the text beside or instead of keys and values: which of them can verify.

A verifying forward runs over several tokens, starting from a state. Whether this gives the same result as one forward
per token depends on the model family: some start their scan from zeros whenever there are several tokens, others use
another formula for several tokens. So families are listed: those shown to be exact (`tests/claims/test_recurrent.py`
compares logits and states), and those shown not to be, with the reason.
"""

from __future__ import annotations

from transformers import PreTrainedModel

# Families, by `model_type` of the language model's config, that read several tokens as they read single ones.
CONTINUE_FROM_STATES = frozenset({
    "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "granitemoehybrid", "kimi_linear", "mamba2", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "zaya",
})  # fmt: skip
_FROM_ZEROS = "its scan over several tokens begins from zeros, not from the state"
_CLAMPED = "it clamps time steps in a forward over several tokens and not in one over a single one"
DO_NOT_CONTINUE = {
    "falcon_mamba": _FROM_ZEROS,
    "jamba": _FROM_ZEROS,
    "mamba": _FROM_ZEROS,
    "nemotron_h": _CLAMPED,
    "recurrent_gemma": "its recurrent state lies in its modules, not in the cache",
    "rwkv": "its state is no transformers cache",
    "xlstm": "its state is no transformers cache",
    "zamba": _FROM_ZEROS,
    "zamba2": _CLAMPED,
}
# Families that also read the padding of a prompt. With padding, they read several tokens differently from single ones.
COUNT_PADDING = frozenset({"deepseek_v4"})


def is_recurrent(target: PreTrainedModel) -> bool:
    """Whether a target keeps a state from which rejected tokens cannot be removed."""
    return bool(getattr(target, "_is_stateful", False))


def counts_padding(target: PreTrainedModel) -> bool:
    """Whether verification after a prompt with padding differs from plain decoding."""
    return target.config.get_text_config(decoder=True).model_type in COUNT_PADDING


def recurrence_problem(target: PreTrainedModel) -> str | None:
    """Says why chains cannot be verified with a recurrent target; `None` if they can or the target has no state."""
    if not is_recurrent(target):
        return None
    family = target.config.get_text_config(decoder=True).model_type
    if family in CONTINUE_FROM_STATES:
        return None
    return DO_NOT_CONTINUE.get(family, "nobody has shown that it verifies several tokens as it decodes them")
