"""Compiled rounds: the same tokens, and nothing is compiled again after the first rounds."""

from __future__ import annotations

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.heads import random_heads
from support.stubs import counted
from support.targets import own_target, plain, prompt, shared_target
from support.trees import TREES

from hf_specheads import UnsupportedGenerationError
from hf_specheads.generation.compiled import SMALLEST_BUCKET, bucket

NEW = 24
OTHERS = ("poss", "poss-lora", "eagle3", "medusa", "hydra", "draft-lm")


@pytest.fixture
def target():
    return own_target("llama")


@pytest.mark.parametrize(
    ("method", "kind"), [("eagle", kind) for kind in TREES] + [(m, k) for m in OTHERS for k in ("chain", "dynamic")]
)
def test_two_graphs_serve_every_round_of_every_call(method, kind, target):
    heads = random_heads(target, method, TREES[kind])
    graphs = counted(target, heads)
    for length in (19, 7, 30):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
        assert len(graphs) == 2, "one draft step, one verifying forward"


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2"])
def test_families(family):
    target = own_target(family)
    heads = random_heads(target)
    graphs = counted(target, heads)
    ids = prompt()
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert len(graphs) == 2


def test_a_batch(target):
    inputs, alone = batch_of((9, 4, 14))
    heads = random_heads(target, "poss")
    graphs = counted(target, heads)
    texts = alone_texts(target, alone)
    known = []
    for _ in range(2):
        assert_rows(greedy(target, inputs, assistant_model=heads), 14, texts)
        known.append(len(graphs))
    assert known[0] == known[1] <= 2 * 3, "two graphs per number of rows that are left"


def test_sampling_with_a_seed(target):
    heads, ids = random_heads(target, "poss"), prompt()
    graphs = counted(target, heads)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    torch.manual_seed(4)
    expected = target.generate(ids, **options)
    torch.manual_seed(4)
    assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)
    assert len(graphs) == 2
    plain(target, ids, NEW, assistant_model=heads)
    assert len(graphs) == 2, "greedy decoding takes the same graphs"


def test_a_longer_budget_is_another_capacity(target):
    heads = random_heads(target, kind="chain")
    graphs = counted(target, heads)
    ids = prompt()
    assert bucket(1) == SMALLEST_BUCKET and bucket(SMALLEST_BUCKET + 1) == 2 * SMALLEST_BUCKET
    for new, wanted in ((20, 2), (SMALLEST_BUCKET, 4), (24, 4)):
        target.generation_config.max_length = None
        got = plain(target, ids, new, assistant_model=heads) if new < 100 else None
        if got is None:  # compiled for the budget, ended long before it
            expected = plain(target, ids, 30)
            eos = {"eos_token_id": int(expected[0, -1]), "pad_token_id": 0}
            got, expected = plain(target, ids, new, assistant_model=heads, **eos), plain(target, ids, new, **eos)
            assert torch.equal(got, expected)
        assert len(graphs) == wanted


def test_what_cannot_be_compiled_is_refused():
    target = shared_target("llama")
    heads = random_heads(target, stop_below=0.1)
    heads.compiled = True
    with pytest.raises(UnsupportedGenerationError, match="stop_below"):
        plain(target, prompt(), NEW, assistant_model=heads)
    bloom = shared_target("bloom")
    heads = random_heads(bloom, kind="chain")
    heads.compiled = True
    with pytest.raises(UnsupportedGenerationError, match="compiled"):
        plain(bloom, prompt(), NEW, assistant_model=heads)
