"""The hook: ours for draft heads, untouched for all else; through pipelines, adapters, compilers, offloading."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.heads import random_heads
from support.stubs import StubHead
from support.targets import own_target, plain, prompt, shared_target
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel, pipeline
from transformers.modeling_outputs import BaseModelOutputWithPast

import hf_specheads
from hf_specheads import dispatch
from hf_specheads.cache.names import CACHE_NAME

WRAPPED = sorted(dispatch.EXPECTED_PARAMETERS)
NEW, FEW = 24, 8


@pytest.fixture
def without_dispatch():
    """transformers as it is without our import."""
    dispatch.uninstall()
    yield
    dispatch.install()


def methods() -> dict[str, Any]:
    return {name: getattr(GenerationMixin, name) for name in WRAPPED}


# ---------------------------------------------------------------------- installing


def test_importing_installs_and_installing_again_changes_nothing():
    before = methods()
    assert all(hasattr(method, "_specheads_original") for method in before.values())
    dispatch.install()
    dispatch.install()
    assert methods() == before
    assert not any(hasattr(method._specheads_original, "_specheads_original") for method in before.values())


def test_uninstalling_restores_the_originals_and_can_be_repeated():
    originals = {name: method._specheads_original for name, method in methods().items()}
    try:
        dispatch.uninstall()
        dispatch.uninstall()
        assert methods() == originals
    finally:
        dispatch.install()


@pytest.mark.parametrize("name", ["org/heads", Path("my heads")])
def test_a_name_instead_of_heads_is_refused_with_the_call_that_loads_them(name):
    target = shared_target("llama")
    with pytest.raises(TypeError, match=rf"is a name, .* `assistant_model=load_heads\('{name}'\)`"):
        plain(target, prompt(), 4, assistant_model=name)


def test_signatures_stay_visible():
    """`generate` inspects the signature of the decoding method."""
    for method in methods().values():
        assert inspect.signature(method) == inspect.signature(method._specheads_original)


def test_an_older_transformers_is_refused(without_dispatch, monkeypatch):
    before = methods()
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.22.9")
        with pytest.raises(ImportError, match=r"needs transformers >= 5\.23\.0, found 5\.22\.9"):
            dispatch.install()
    assert methods() == before


def test_a_changed_signature_is_refused_before_anything_is_wrapped(without_dispatch, monkeypatch):
    before = methods()
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "_validate_generation_mode", lambda self, generation_mode: None)
        with pytest.raises(ImportError, match=r"_validate_generation_mode \(missing \['generation_config'"):
            dispatch.install()
    assert methods() == before


# ---------------------------------------------------------------------- everything else goes on untouched


class TinyDFlash(PreTrainedModel):
    """As much of a DFlash drafter as transformers' generator calls: proposes what the embeddings say."""

    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls = 0

    def forward(self, noise_embeds, context_hidden_states, **kwargs):
        self.calls += 1
        rows = context_hidden_states.shape[1] + noise_embeds.shape[1]
        kwargs[CACHE_NAME].update(*(torch.zeros(1, 1, rows, 2) for _ in range(2)), 0)
        return BaseModelOutputWithPast(last_hidden_state=noise_embeds)


def dflash_drafter() -> TinyDFlash:
    config = LlamaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config.target_layer_ids, config.block_size, config.mask_token_id = [1], 3, 0
    return TinyDFlash(config)


def other_calls() -> dict[str, dict[str, Any]]:
    """Fresh arguments per call: some assistants are adapted by the call."""
    small = own_target("llama", seed=1, num_hidden_layers=1)
    small.generation_config.num_assistant_tokens = 4
    return {
        "no assistant": {},
        "sampling": {"do_sample": True, "top_k": 20},
        "beams": {"num_beams": 3},
        "ordinary assistant": {"assistant_model": small},
        "ordinary assistant, sampling": {"assistant_model": small, "do_sample": True},
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "early exit": {"assistant_early_exit": 1},
        "dflash": {"assistant_model": dflash_drafter(), "speculation_type": "dflash"},
    }


def outcome(name: str) -> Any:
    target = shared_target("llama")
    torch.manual_seed(4)
    options = {"max_new_tokens": NEW, "do_sample": False} | other_calls()[name]
    ids = prompt(24).repeat(1, 2)  # repeats itself, so that prompt lookup finds something
    try:
        return target.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", list(other_calls()))
def test_other_calls_are_as_without_our_import(name):
    ours = outcome(name)
    dispatch.uninstall()
    try:
        theirs = outcome(name)
    finally:
        dispatch.install()
    assert ours == theirs
    assert isinstance(ours, list), f"this call fails without us as well, so it shows nothing: {ours}"


@pytest.mark.parametrize("assistant", [None, object()], ids=["none (MTP, prompt lookup)", "a foreign assistant"])
def test_arguments_of_other_calls_reach_the_original_as_they_are(assistant, without_dispatch, monkeypatch):
    """Also for modes too large to build here (MTP, Gemma 4 assistants): same arguments, same result."""
    received = {}

    def recorder(name: str) -> Any:
        def record(self, *args, **kwargs):
            received[name] = (self, args, kwargs)
            return f"result of {name}"

        record.__signature__ = inspect.signature(getattr(GenerationMixin, name))
        return record

    target, ids = object(), object()
    prepared = {"logits_processor": 1, "stopping_criteria": 2, "generation_config": 3, "use_mtp_cache": 4}
    mode = {"assistant_model": assistant, "streamer": 5}
    with monkeypatch.context() as patch:
        for name in WRAPPED:
            patch.setattr(GenerationMixin, name, recorder(name))
        dispatch.install()
        result = GenerationMixin._assisted_decoding(target, ids, assistant_model=assistant, **prepared)
        GenerationMixin._validate_generation_mode(target, "mode", "config", mode)
        GenerationMixin._get_candidate_generator(target, assistant_model=assistant, model_kwargs={}, **prepared)
    assert result == "result of _assisted_decoding"
    assert received == {
        "_assisted_decoding": (target, (ids,), {"assistant_model": assistant} | prepared),
        "_validate_generation_mode": (target, ("mode", "config", mode), {}),
        "_get_candidate_generator": (target, (), {"assistant_model": assistant, "model_kwargs": {}} | prepared),
    }


# ---------------------------------------------------------------------- ways to reach us


def stub_for(target, ids) -> StubHead:
    return StubHead(target, plain(target, ids, NEW), (0, 1, 0, None))


def test_pipeline(tokenizer):
    target = shared_target("llama")
    heads = random_heads(target)
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        setattr(heads.config, name, None)  # as in files of other libraries
    text = tokenizer.decode(prompt()[0])
    options = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **options)
    with_heads = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=heads)
    assert with_heads(text, **options) == expected
    assert heads.last_stats.rounds > 0


def test_custom_generate():
    target, ids = shared_target("llama"), prompt()
    stub = stub_for(target, ids)
    got = plain(target, ids, NEW, custom_generate=hf_specheads.speculative_generate, draft_head=stub)
    assert torch.equal(got, plain(target, ids, NEW))
    assert stub.last_stats.acceptance_length > 1.5


def test_without_the_dispatch_custom_generate_still_works(without_dispatch):
    target, ids = shared_target("llama"), prompt()
    stub = stub_for(target, ids)
    got = plain(target, ids, NEW, custom_generate=hf_specheads.speculative_generate, draft_head=stub)
    assert torch.equal(got, plain(target, ids, NEW))


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_chains_in_the_assisted_loop_of_transformers(family, seed):
    target, ids = shared_target(family), prompt(seed=seed)
    expected = plain(target, ids, NEW)
    for heads in (
        StubHead(target, expected, (0, 0, 1, 0), kind="chain", depth=4),
        random_heads(target, "poss", kind="chain"),
    ):
        heads.loop = "transformers"
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
        assert sum(n + 1 for n in heads.last_stats.num_accepted[0]) == NEW - 1


def test_both_loops_count_the_same_rounds():
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW)
    counts = []
    for loop in ("own", "transformers"):
        stub = StubHead(target, expected, (0, 0, 1, 0), kind="chain", depth=4)
        stub.loop = loop
        plain(target, ids, NEW, assistant_model=stub)
        counts.append((stub.last_stats.num_accepted, stub.last_stats.target_forwards, stub.last_stats.pos_acc))
    assert counts[0] == counts[1]


def test_lora_target():
    base, ids = own_target("llama"), prompt()
    untuned = plain(base, ids, NEW)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = get_peft_model(base, adapter).eval()
    expected = target.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(expected, untuned)
    for heads in (StubHead(base, expected, (0, 1, 0, None)), random_heads(base)):
        got = target.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, assistant_model=heads)
        assert torch.equal(got, expected)


def same_text_when_compiled(how: str, traced: list) -> None:
    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    target, ids = own_target("llama", num_hidden_layers=1), prompt()  # tracing takes its time per layer
    stub = stub_for(target, ids)
    expected = plain(target, ids, FEW)
    if how == "model.compile":
        target.compile(backend=backend)
    elif how == "forward":
        target.forward = torch.compile(target.forward, backend=backend)
    else:
        target = torch.compile(target, backend=backend)
    plain(target, ids, 3)  # compiled before the heads are first used
    assert torch.equal(plain(target, ids, FEW, assistant_model=stub), expected)


COMPILED = ("forward", "model.compile", "torch.compile")


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_target(how):
    """What compiling makes of a model, for us to look through: wrapped, with another `forward`; nothing is traced."""
    traced: list = []
    with torch.compiler.set_stance("force_eager"):
        same_text_when_compiled(how, traced)
    assert not traced


@pytest.mark.slow  # by default the same wrappers, untraced; what traces by default is tests/claims/test_compiled.py
@pytest.mark.parametrize("how", COMPILED)
def test_traced_target(how):
    traced: list = []
    torch._dynamo.reset()
    same_text_when_compiled(how, traced)
    torch._dynamo.reset()
    # `generate` of what `torch.compile` returns is the model's own: it calls itself uncompiled, with heads or without.
    assert bool(traced) == (how != "torch.compile")


def test_offloaded_target(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    target, ids = own_target("llama"), prompt()
    stub = stub_for(target, ids)
    expected = plain(target, ids, NEW)
    devices = {
        "model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "lm_head": "disk",
    }  # fmt: skip
    target = accelerate.dispatch_model(target, devices, offload_dir=str(tmp_path), main_device="cpu", force_hooks=True)
    assert target.lm_head.weight.device.type == "meta"
    for heads in (stub, random_heads(target)):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
