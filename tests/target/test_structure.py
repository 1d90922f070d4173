"""What modules of a target do besides what its config says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from hf_specheads import EagleHead, generate_stream
from hf_specheads.target.structure import forward_parameters


def _behind_another_function(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """As tools do that watch a model: its forward replaced by a function that hands everything on."""
    forward: Callable[..., Any] = target.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    target.forward = watched  # type: ignore[method-assign]
    return target


def test_what_a_forward_takes_is_known_behind_another_function(target: LlamaForCausalLM) -> None:
    before = forward_parameters(target)
    assert "position_ids" in before
    assert before <= forward_parameters(_behind_another_function(target))


def test_what_is_not_taken_is_not_said_to_be() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    assert "position_ids" not in forward_parameters(bloom)


@pytest.mark.parametrize("batch", [1, 3])
def test_texts_of_a_target_behind_another_function(
    target: LlamaForCausalLM, eagle_heads: EagleHead, batch: int
) -> None:
    prompt = torch.randint(3, target.config.vocab_size, (batch, 9))
    mask = torch.ones_like(prompt)
    mask[0, : 0 if batch == 1 else 4] = 0
    _behind_another_function(target)
    call = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(prompt, **call)
    heads = eagle_heads.bind(target).with_tree(kind="dynamic", depth=3, top_k=2, total_tokens=6)
    assert torch.equal(target.generate(prompt, assistant_model=heads, **call), plain)
    assert heads.last_stats.rounds


def test_sampled_texts_of_a_target_behind_another_function(target: LlamaForCausalLM, eagle_heads: EagleHead) -> None:
    """The same seed, the same text."""
    prompt = torch.randint(3, target.config.vocab_size, (1, 9))
    call = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "top_k": 12, "pad_token_id": 0}
    _behind_another_function(target)
    heads = eagle_heads.bind(target).with_tree(kind="chain", depth=3)
    for seed in range(3):
        torch.manual_seed(seed)
        plain = target.generate(prompt, **call)
        torch.manual_seed(seed)
        assert torch.equal(target.generate(prompt, assistant_model=heads, **call), plain)
        assert heads.last_stats.rounds


def test_requests_to_a_target_behind_another_function(target: LlamaForCausalLM, eagle_heads: EagleHead) -> None:
    requests = [torch.randint(3, target.config.vocab_size, (length,)) for length in (9, 4, 12)]
    call = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    _behind_another_function(target)
    alone = {index: target.generate(prompt[None], **call)[0, len(prompt) :].tolist()
             for index, prompt in enumerate(requests)}  # fmt: skip
    heads = eagle_heads.bind(target).with_tree(kind="chain", depth=3)
    found = {one.index: one.token_ids for one in generate_stream(target, heads, requests, max_batch=2, **call)}
    assert found == alone and heads.last_stats.rounds
