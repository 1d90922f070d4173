"""Calls that cannot be served exactly are refused in one sentence, before the target has run once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.heads import random_heads
from support.stubs import CountForwards
from support.targets import own_target, plain, prompt, shared_target
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from hf_specheads import AutoDraftHead, WrongTargetError
from hf_specheads.contract import LOOPS
from hf_specheads.errors import UnsupportedGenerationError
from hf_specheads.generation.verification.rules import RULES


def refusal(target, heads, error: type[Exception], ids=None, counted=None, **options: Any) -> str:
    """Returns the message of a refused call, and checks that no forward ran."""
    ids = prompt() if ids is None else ids
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False} | options
    with CountForwards(counted or target) as forwards, pytest.raises(error) as refused:
        target.generate(input_ids=ids, assistant_model=heads, **options)
    assert forwards.count == 0
    message = str(refused.value)
    assert "\n" not in message
    assert len(re.findall(r"[.!?](\s|$)", message)) <= 1, f"more than one sentence: {message}"
    return message


OPTIONS = {
    "beams": ({"num_beams": 3}, "beam search"),
    "sampled beams": ({"num_beams": 2, "do_sample": True}, "beam search"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
    "dola": ({"dola_layers": "low"}, "dola_layers='low'"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
    target = own_target("llama", attention="eager")
    options, words = OPTIONS[option]
    assert words in refusal(target, random_heads(target), UnsupportedGenerationError, **options)


def test_gradient_checkpointing_in_training_mode():
    """In this mode, layers drop the cache: plain decoding forgets its prompt, and rounds would fail within a
    forward."""
    target, ids = own_target("llama"), prompt()
    heads = random_heads(target)
    expected = plain(target, ids, 12)
    target.gradient_checkpointing_enable()
    target.train()
    assert "`target.eval()`" in refusal(target, heads, UnsupportedGenerationError)
    target.eval()
    assert torch.equal(plain(target, ids, 12, assistant_model=heads), expected)


def test_a_forward_argument_that_tree_nodes_cannot_get():
    """GPT-2 adds an embedding per token type. Without one per node, the text would silently change."""
    target, ids = shared_target("gpt2"), prompt()
    types = torch.full_like(ids, 5)
    assert "token_type_ids" in refusal(target, random_heads(target), UnsupportedGenerationError, token_type_ids=types)


def test_encoder_decoder():
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config).eval()
    assert "encoder-decoder" in refusal(target, random_heads(shared_target("llama")), UnsupportedGenerationError)


@pytest.mark.parametrize("config", [PrefixTuningConfig, PromptTuningConfig])
def test_prompt_learning_adapters(config):
    base = own_target("llama")
    heads = random_heads(base)
    target = get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    message = refusal(target, heads, UnsupportedGenerationError, counted=base)
    assert "prompt-learning" in message
    assert "TUNING" in message


def test_prompt_learning_adapters_are_refused_on_their_base_model_too():
    base = own_target("llama")
    heads = random_heads(base)
    target = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with CountForwards(base) as forwards, pytest.raises(UnsupportedGenerationError, match="prompt-learning"):
        target.generate(input_ids=prompt(), max_new_tokens=4, assistant_model=heads)
    assert forwards.count == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, "feature_size=32, but .* has feature_size=48"),
        ({"vocab_size": 120}, "vocab_size=99, but .* has vocab_size=120"),
    ],
    ids=["width", "vocabulary"],
)
def test_a_target_of_other_sizes(changes, words):
    heads = random_heads(shared_target("llama"))
    assert re.search(words, refusal(shared_target("llama", **changes), heads, WrongTargetError))


def test_a_target_with_other_weights():
    heads = random_heads(shared_target("llama"))
    heads.remember_target(shared_target("llama"))
    message = refusal(shared_target("llama", seed=5), heads, WrongTargetError)
    assert "fingerprint" in message
    heads.config.target = None  # the remedy that the message names
    plain_ids = shared_target("llama", seed=5).generate(prompt(), max_new_tokens=8, do_sample=False)
    with_heads = shared_target("llama", seed=5).generate(
        prompt(), max_new_tokens=8, do_sample=False, assistant_model=heads
    )
    assert torch.equal(plain_ids, with_heads)


def test_heads_bound_to_one_target_are_checked_against_the_next():
    first, second = shared_target("llama"), shared_target("llama", seed=5)
    heads = random_heads(first)
    heads.remember_target(first)
    first.generate(prompt(), max_new_tokens=4, do_sample=False, assistant_model=heads)
    refusal(second, heads, WrongTargetError)


@pytest.mark.parametrize(("setting", "known"), [("verification", RULES), ("loop", LOOPS)])
def test_settings_that_do_not_exist_are_refused_where_they_are_assigned(setting, known):
    heads = random_heads(shared_target("llama"))
    before = getattr(heads, setting)
    with pytest.raises(ValueError, match=rf"`heads.{setting}` must be one of .*, got 'hopeful'"):
        setattr(heads, setting, "hopeful")
    assert getattr(heads, setting) == before
    for name in known:
        setattr(heads, setting, name)
        assert getattr(heads.with_tree(), setting) == name


def test_trees_in_the_loop_of_transformers():
    target = shared_target("llama")
    heads = random_heads(target)
    heads.loop = "transformers"
    assert "chain" in refusal(target, heads, UnsupportedGenerationError)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rope_that_rescales_all_positions(rope_type):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0} | (factors if rope_type == "longrope" else {})
    target = target_with_rope(rope, limit=24 if rope_type == "dynamic" else 64)
    heads = random_heads(target)
    assert "rescales past 24 tokens" in refusal(target, heads, UnsupportedGenerationError)
    ids = prompt(10)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, **options, assistant_model=heads), target.generate(ids, **options))


def test_a_rescaling_rope_of_one_layer_type():
    ropes = {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ropes |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    target = target_with_rope(ropes, limit=24, family="gemma3")
    assert "rescales past 24 tokens" in refusal(target, random_heads(target), UnsupportedGenerationError)


def target_with_rope(rope: dict[str, Any], limit: int, family: str = "llama"):
    """Makes a target with these rope parameters. It is not shared, because a dictionary cannot be a hashable
    override."""
    like = own_target(family)
    like.config.rope_parameters, like.config.max_position_embeddings = rope, limit
    target = type(like)(like.config).eval()
    target.generation_config.eos_token_id = None
    return target


def test_an_attention_that_takes_no_tree_mask():
    target = own_target("llama")
    target.config._attn_implementation = "flash_attention_2"
    message = refusal(target, random_heads(target).with_tree(kind="dynamic"), UnsupportedGenerationError)
    assert "set_attn_implementation('sdpa')" in message


def test_positions_that_enter_as_biases():
    config = AutoConfig.for_model(
        "falcon", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    heads = AutoDraftHead.from_target(target, "eagle").with_tree(kind="dynamic")  # a tree of the user's choice
    assert "alibi" in refusal(target, heads, UnsupportedGenerationError)


def streams() -> bool:
    try:
        torch.Stream()
    except RuntimeError:
        return False
    return True


def test_the_same_refusals_without_the_dispatch():
    from hf_specheads import speculative_generate

    target = shared_target("llama")
    for options, words in OPTIONS.values():
        if "beam search" in words or "synced" in words:
            continue  # transformers itself decides on beams, and does not pass synced_gpus on
        if "offloaded" in words and not streams():
            # transformers itself makes no such cache with a CUDA build of torch on a machine without a device
            continue
        with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=re.escape(words)):
            target.generate(
                prompt(), max_new_tokens=4, custom_generate=speculative_generate, draft_head=random_heads(target),
                **({"do_sample": False} | options),
            )  # fmt: skip
        assert forwards.count == 0
