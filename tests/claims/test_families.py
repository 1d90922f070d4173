"""Families of targets with draft heads: the same text, or a refusal in one sentence before the prompt's forward."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.families import NOT_BUILT, REPRESENTATIVE, families, image_text_families, tiny_target, varied_target
from support.heads import random_heads
from support.stubs import CountForwards
from transformers import AutoModelForImageTextToText, WhisperConfig, WhisperForConditionalGeneration

from benchmarks.targets.families import (
    IDENTICAL,
    IMAGE_TEXT,
    KINDS,
    LENGTHS,
    NO_IMAGE,
    REFUSED,
    WITHOUT,
    generate,
    grow_uncompiled,
    inputs_of,
    measure_family,
    oracle,
    outcome_of,
)
from hf_specheads import AutoDraftHead, DraftHead, UnsupportedGenerationError, WrongTargetError
from hf_specheads.errors import HeadConfigError
from hf_specheads.generation.compiled.rounds import CompiledRounds
from hf_specheads.heads.auto import METHODS

SERVED = {
    "all": {"tree", "chain", "batch", "own cache"},
    "alone": {"tree", "chain"},
    "chain": {"chain", "batch"},
    "none": set(),
}
IN_THE_DEFAULT_RUN = ("mistral", "gemma4_text", "deepseek_v3", "bert", "bloom", "qwen3_next", "git", "mllama", "jamba")
SLOW = pytest.mark.slow
TEXT_ONLY = ("gemma3", "qwen2_5_vl")
MORE_TEXT_ONLY = ("llava", "qwen2_vl", "qwen3_vl", "mistral3", "idefics3", "internvl")
COUNTS_SLOTS = "exaone4_5"  # this family ignores the positions that `generate` computes without padding


@pytest.fixture(autouse=True)
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftHead, "probe", True)


def text_target(model_type: str):
    return varied_target(model_type, lambda target: generate(target, inputs_of(LENGTHS[:1]))[0, LENGTHS[0] :])


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in IN_THE_DEFAULT_RUN else SLOW) for name in REPRESENTATIVE]
)
def test_a_dozen_families(model_type):
    target = text_target(model_type)
    for kind in ("tree", "chain", "batch"):
        found = outcome_of(kind, target)
        expected = IDENTICAL if kind in SERVED[REPRESENTATIVE[model_type]] else REFUSED
        assert found["outcome"] in (expected, WITHOUT), (kind, found)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*families(), *(IMAGE_TEXT + name for name in image_text_families())])
def test_every_family(model_type):
    row = measure_family(model_type)
    for kind in KINDS if "class" in row else ():
        assert row[kind]["outcome"] in (IDENTICAL, REFUSED, WITHOUT, NO_IMAGE), (kind, row[kind])


@pytest.mark.parametrize(
    "model_type", [*TEXT_ONLY, COUNTS_SLOTS, *(pytest.param(name, marks=SLOW) for name in MORE_TEXT_ONLY)]
)
def test_multimodal_targets_with_text_only(model_type):
    target = tiny_target(model_type, auto=AutoModelForImageTextToText)
    assert {kind: outcome_of(kind, target)["outcome"] for kind in ("tree", "batch")} == {
        "tree": IDENTICAL,
        "batch": IDENTICAL,
    }


@pytest.mark.parametrize(
    ("model_type", "words"), [("paligemma", "both directions"), ("mllama", "cross_attention_layers")]
)
def test_multimodal_targets_that_are_refused(model_type, words):
    target = tiny_target(model_type, auto=AutoModelForImageTextToText)
    inputs = inputs_of(LENGTHS[:1])
    heads = oracle(target, inputs, inputs["input_ids"])
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=words):
        generate(target, inputs, assistant_model=heads)
    assert forwards.count == 0


IN_THE_DEFAULT_RUN_TOO = {
    "gemma3_text": ("mtp",),  # rotary embeddings per kind of layer
    "olmo3": ("mtp",),
    "granitemoehybrid": ("mtp",),  # no rotary embeddings
    "deepseek_v32": ("mtp",),  # layers with an indexer
    "hy_v4": ("mtp",),  # layers with several streams
    "modernbert-decoder": ("mtp",),  # unusual configs
    "prophetnet": ("mtp",),
    "reformer": ("dflash",),
    "gemma2": ("mtp",),  # attention other than torch's
    "gpt_oss": ("mtp",),
    "qwen4_exp_text": ("eagle", "eagle3", "dflash"),  # hidden states that are wider between layers
}


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        pytest.param(family, method, marks=[] if method in IN_THE_DEFAULT_RUN_TOO.get(family, ()) else SLOW)
        for family in families()
        if family not in NOT_BUILT
        for method in METHODS
    ],
)
def test_every_method_on_every_family(model_type, method):
    """Heads made for a target draft for it, or are refused with our own error, when they are made or before any
    forward."""
    target, inputs = tiny_target(model_type), inputs_of(LENGTHS[:1])
    try:
        heads = random_heads(target, method)
        found = generate(target, inputs, assistant_model=heads)
    except (WrongTargetError, UnsupportedGenerationError, HeadConfigError):
        return
    except ValueError as error:
        assert str(error).startswith("invalid "), "of sizes that such heads cannot have"
        return
    assert heads.last_stats.rounds > 0
    assert torch.equal(found, generate(target, inputs))


@pytest.mark.parametrize("limit", [8, 48])
def test_contexts_of_which_sparse_attention_sees_a_part(limit):
    """In longer contexts, attention selects `index_topk` tokens, and ties are broken differently in forwards over
    several tokens."""
    target = tiny_target("glm_moe_dsa", index_topk=limit)
    inputs = inputs_of(LENGTHS[:1])
    heads = oracle(target, inputs, inputs["input_ids"], kind="chain", depth=3)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="index_topk"):
        generate(target, inputs, assistant_model=heads)
    assert forwards.count == 0


def test_heads_for_targets_whose_layers_differ():
    """Gemma 4 has wider attention heads in some layers, which its config only states per layer."""
    target = text_target("gemma4_text")
    heads = AutoDraftHead.from_target(target, "eagle").eval()
    inputs = inputs_of(LENGTHS)
    assert torch.equal(generate(target, inputs, assistant_model=heads), generate(target, inputs))


def test_whisper_is_refused_in_our_words():
    """Whisper writes into the assistant's generation config before anything else."""
    config = WhisperConfig(
        vocab_size=99, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=1500,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    target = WhisperForConditionalGeneration(config).eval()
    heads = AutoDraftHead.from_target(tiny_target("llama"), "eagle")
    with pytest.raises(UnsupportedGenerationError, match="encoder-decoder"):
        target.generate(torch.zeros(1, 8, 3000), assistant_model=heads, max_new_tokens=4)


def test_drafts_that_are_looked_up_are_asked_as_compiled_ones() -> None:
    """The function replaces the compiled one in the benchmark of compiled rounds, which is too slow for the default
    run. Their signatures must match."""
    ours, theirs = (list(inspect.signature(one).parameters)[1:] for one in (grow_uncompiled, CompiledRounds.grow))
    assert ours == theirs
