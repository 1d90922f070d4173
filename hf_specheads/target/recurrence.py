"""Targets that keep a state of the text so far beside or instead of keys and values, and which of them can verify.

A verifying forward runs over several tokens from a state. Whether that gives what as many forwards over one token give
is a matter of the family: some begin their scan from zeros whenever there are several tokens, others compute several
tokens by another formula. So families are listed, those that were shown to be right (`tests/claims/test_recurrent.py`
compares logits and states) and those that were shown not to be, with the reason.
"""

from __future__ import annotations

from transformers import PreTrainedModel

# `model_type` of the language model's config.
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
# They take in the padding of a prompt, and several tokens otherwise than single ones then.
COUNT_PADDING = frozenset({"deepseek_v4"})


def is_recurrent(target: PreTrainedModel) -> bool:
    """Whether a target keeps a state that rejected tokens cannot be taken out of again."""
    return bool(getattr(target, "_is_stateful", False))


def counts_padding(target: PreTrainedModel) -> bool:
    """Whether a prompt with padding is verified otherwise than it is decoded."""
    return target.config.get_text_config(decoder=True).model_type in COUNT_PADDING


def recurrence_problem(target: PreTrainedModel) -> str | None:
    """Why chains cannot be verified from the state of a recurrent target, or `None` if they can, or it has none."""
    if not is_recurrent(target):
        return None
    family = target.config.get_text_config(decoder=True).model_type
    if family in CONTINUE_FROM_STATES:
        return None
    return DO_NOT_CONTINUE.get(family, "nobody has shown that it verifies several tokens as it decodes them")
