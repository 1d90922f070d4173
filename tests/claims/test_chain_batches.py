"""Batches of targets that only take chains, including recurrent ones: every row equals plain decoding."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from support.batches import LENGTHS, MIXED, NEW, batch_of, greedy
from support.distributions import PROMPT, chi_square, critical_value, target_distribution
from support.families import tiny_target
from support.heads import random_heads
from support.stubs import CountForwards, StubHead

from hf_specheads import UnsupportedGenerationError
from hf_specheads.cache import recurrent
from hf_specheads.target.recurrence import CONTINUE_FROM_STATES, COUNT_PADDING

CHAIN: dict[str, Any] = {"kind": "chain", "depth": 4}
# In addition to recurrent targets: position biases, convolutions, a target's own masks, chunked and sparse attention.
OTHERS = ("bloom", "lfm2", "gpt_neo", "llama4_text", "glm_moe_dsa")
IN_THE_DEFAULT_RUN = ("qwen3_next", "mamba2", "bloom", "lfm2")
SMALL: dict[str, dict[str, Any]] = {
    "mamba2": {"num_hidden_layers": 2, "state_size": 16},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
SHAPES = ("qwen3_next", "mamba2")


@functools.cache
def target_of(model_type: str):
    return tiny_target(model_type, **SMALL.get(model_type, {}))


def oracle(target, inputs, texts: torch.Tensor, ranks=MIXED, **tree: Any) -> StubHead:
    return StubHead.of_batch(target, inputs, texts, ranks, **(CHAIN | tree))


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in IN_THE_DEFAULT_RUN else pytest.mark.slow)
        for name in sorted({*CONTINUE_FROM_STATES, *OTHERS})
    ],
)
def test_rows_are_those_of_plain_decoding(model_type):
    target = target_of(model_type)
    inputs, _ = batch_of((19, 19, 19) if model_type in COUNT_PADDING else LENGTHS, vocab=90)
    expected = greedy(target, inputs)
    for ranks in (MIXED, (0,), (None,)):
        heads = oracle(target, inputs, expected, ranks)
        with CountForwards(target) as forwards:
            assert torch.equal(greedy(target, inputs, assistant_model=heads), expected), ranks
        assert forwards.count == heads.last_stats.target_forwards
        assert (forwards.count < NEW - 5) is (ranks != (None,))


def test_rows_that_end_leave_the_batch():
    target = target_of("qwen3_next")
    inputs, _ = batch_of(vocab=90)
    full = greedy(target, inputs)
    options = {"eos_token_id": [int(full[0, 19 + 3]), int(full[1, 19 + 11])], "pad_token_id": 0}
    expected = greedy(target, inputs, **options)
    assert len({int((row == 0).sum()) for row in expected}) > 2
    sizes: list[int] = []
    hook = target.model.embed_tokens.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    try:
        heads = oracle(target, inputs, full)
        assert torch.equal(greedy(target, inputs, assistant_model=heads, **options), expected)
    finally:
        hook.remove()
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 4 > sizes[-1]


@pytest.mark.parametrize("model_type", SHAPES)
def test_a_row_that_is_always_right_waits_for_one_that_is_never(model_type):
    target = target_of(model_type)
    inputs, _ = batch_of((9, 9), vocab=90)
    expected = greedy(target, inputs, max_new_tokens=60)
    heads = oracle(target, inputs, expected, (0,))
    known = heads._token
    heads._token = lambda row, index: None if row == 1 else known(row, index)
    widths: list[int] = []
    hook = target.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: widths.append(args[0].shape[1])
    )
    try:
        assert torch.equal(greedy(target, inputs, assistant_model=heads, max_new_tokens=60), expected)
    finally:
        hook.remove()
    always, never = heads.last_stats.num_accepted
    assert max(always) == 4 and max(never) <= 1 and 0 in always[-8:], "nobody waits"
    assert max(widths) <= recurrent.MOST_AHEAD + recurrent.MOST_WAITING + 5
    assert len(widths) == heads.last_stats.target_forwards > 1 + len(never), "never caught up with"


@pytest.mark.parametrize("model_type", [*SHAPES, "bloom"])
def test_heads_without_a_chosen_tree_draft_chains(model_type):
    target = target_of(model_type)
    inputs, _ = batch_of((9, 5), vocab=90)
    heads = random_heads(target, "eagle")
    heads.forget_tree()
    assert torch.equal(greedy(target, inputs, assistant_model=heads), greedy(target, inputs))
    assert heads.last_stats.rounds > 0


@pytest.mark.parametrize("children", ["top_k", pytest.param("sampled", marks=pytest.mark.slow)])
def test_rows_are_sampled_from_the_targets_distribution(children):
    target, samples, length = tiny_target("qwen3_next", scale=0.2, vocab_size=5, **SMALL["qwen3_next"]), 300, 4
    heads = random_heads(target, "eagle", kind="chain", depth=2, children=children)
    heads.adaptive = False
    torch.manual_seed(5)
    got = target.generate(
        PROMPT.expand(samples, -1), attention_mask=torch.ones(samples, PROMPT.shape[1]), max_new_tokens=length,
        do_sample=True, top_k=0, temperature=0.8, assistant_model=heads,
    )  # fmt: skip
    counts = Counter(tuple(row) for row in got[:, PROMPT.shape[1] :].tolist())
    statistic, freedom = chi_square(counts, target_distribution(target, {"temperature": 0.8}, length), samples)
    assert freedom >= 4 and statistic < critical_value(freedom)
    accepted = [number for row in heads.last_stats.num_accepted for number in row]
    assert 0 in accepted and max(accepted) == 2


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("model_type", "given"), [("qwen3_next", "chunks"), ("qwen3_next", "embeddings"), ("mamba2", "embeddings")]
)
@pytest.mark.parametrize("lengths", [(19,), (19, 4, 12)], ids=str)
def test_prompts_in_chunks_and_as_embeddings(model_type, given, lengths):
    target = target_of(model_type)
    inputs, _ = batch_of(lengths, vocab=90)
    options = {"prefill_chunk_size": 7} if given == "chunks" else {}
    if given == "embeddings":
        inputs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids")).detach()
    heads = random_heads(target, "eagle", **CHAIN)
    expected = greedy(target, inputs, **options)
    assert torch.equal(greedy(target, inputs, assistant_model=heads, **options), expected)
    assert heads.last_stats.rounds > 0


@pytest.mark.parametrize("model_type", SHAPES)
def test_offloaded_targets(model_type, tmp_path):
    """The weights are on disk and loaded for each forward. Such a target reports no real device."""
    target = copy.deepcopy(target_of(model_type))
    inputs, _ = batch_of((9, 4), vocab=90)
    expected = greedy(target, inputs)
    base = "backbone" if model_type == "mamba2" else "model"
    parts = [name for name, _ in target.get_submodule(base).named_children()]
    devices = {f"{base}.{name}": "disk" if name != "rotary_emb" else "cpu" for name in parts} | {"lm_head": "disk"}
    target = dispatch_model(target, devices, offload_dir=str(tmp_path), main_device="cpu", force_hooks=True)
    assert target.device.type == "meta"
    for rows in (2, 1):
        some = {name: tensor[:rows] for name, tensor in inputs.items()}
        heads = oracle(target, some, expected[:rows])
        assert torch.equal(greedy(target, some, assistant_model=heads), expected[:rows])


# ---------------------------------------------------------------------- refused
def test_padding_that_is_taken_in_is_refused():
    """Targets that take in padding are refused, for one sequence as for several. The control shows that padding
    changes their text."""
    target = target_of("deepseek_v4")
    for lengths in ((19, 16), (16,)):
        inputs, _ = batch_of(lengths, vocab=90)
        if len(lengths) == 1:
            inputs = {name: torch.nn.functional.pad(value, (3, 0)) for name, value in inputs.items()}
        expected = greedy(target, inputs)
        heads = oracle(target, inputs, expected)
        with (
            CountForwards(target) as forwards,
            pytest.raises(UnsupportedGenerationError, match="prompts with padding"),
        ):
            greedy(target, inputs, assistant_model=heads)
        assert forwards.count == 0


def test_why_padding_is_refused(monkeypatch):
    target = target_of("deepseek_v4")
    inputs, _ = batch_of((19, 16), vocab=90)
    expected = greedy(target, inputs)
    monkeypatch.setattr("hf_specheads.generation.refusals.counts_padding", lambda target: False)
    assert not torch.equal(greedy(target, inputs, assistant_model=oracle(target, inputs, expected)), expected)


# ---------------------------------------------------------------------- planted
@pytest.mark.parametrize("bug", ["states are not restored", "nothing waits", "all begin where the last one does"])
def test_planted_bugs(bug, monkeypatch):
    target = target_of("qwen3_next")
    inputs, _ = batch_of(vocab=90)
    expected = greedy(target, inputs)
    if bug == "states are not restored":
        monkeypatch.setattr(recurrent, "restore", lambda layer, contents: None)
    elif bug == "nothing waits":
        catch_up = recurrent.RecurrentCache._catch_up
        monkeypatch.setattr(recurrent, "MOST_WAITING", 2)

        def forgets(self, waiting: torch.Tensor, tokens: int) -> torch.Tensor:
            return catch_up(self, waiting, tokens).roll(1, dims=1)

        monkeypatch.setattr(recurrent.RecurrentCache, "_catch_up", forgets)
    else:
        monkeypatch.setattr(recurrent, "at_rows", lambda outputs, rows: recurrent.at_last_rows(outputs, rows.shape[1]))
    heads = oracle(target, inputs, expected)
    assert not torch.equal(greedy(target, inputs, assistant_model=heads), expected)
