"""Compiled rounds give the same tokens, and nothing is compiled again after the first rounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.clock import Clock
from support.heads import random_heads
from support.stubs import counted
from support.targets import own_target, plain, prompt, shared_target
from support.trees import TREES
from transformers import CompileConfig, DynamicCache

from hf_specheads import DraftLanguageModel, UnsupportedGenerationError
from hf_specheads.generation import loop
from hf_specheads.generation.compiled import steps
from hf_specheads.generation.compiled.rounds import SMALLEST_BUCKET, CompiledRounds, bucket

NEW = 24
OTHERS = ("poss", "poss-lora", "eagle3", "medusa", "hydra", "draft-lm", "dflash", "jetspec", "dspark", "dflash2",
          "domino", "peagle", "mtp")  # fmt: skip
# in the default run in addition to EAGLE, which has one step per level: Medusa drafts all levels in one step
KINDS_OF_STEPS = ("medusa",)
SLOW = pytest.mark.slow


@pytest.fixture
def target():
    return own_target("llama")


@pytest.mark.parametrize(
    ("method", "kind"),
    [pytest.param("eagle", kind, marks=[] if kind == "dynamic" else SLOW) for kind in TREES]
    + [pytest.param(method, "dynamic", marks=[] if method in KINDS_OF_STEPS else SLOW) for method in OTHERS]
    + [pytest.param(method, "chain", marks=SLOW) for method in OTHERS],
)
def test_two_graphs_serve_every_round_of_every_call(method, kind, target, monkeypatch, recwarn):
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    heads = random_heads(target, method, TREES[kind])
    graphs = counted(target, heads)
    links = kind == "chain" and heads.link_layers is not None
    later = links + (
        links and len(heads.link_layers) > 1
    )  # links with which specialists start, from the second call on
    for call, length in enumerate((19, 7, 30)):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
        assert len(graphs) == 2 + (later if call else 0), (
            "one draft step, or a further, a first and a later specialist's first link; one verifying forward"
        )
    assert not [warning for warning in recwarn if "ynamo" in str(warning.message)], "nothing a user can mend"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2"])
def test_families(family):
    target = own_target(family)
    heads = random_heads(target)
    graphs = counted(target, heads)
    ids = prompt()
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert len(graphs) == 2


@pytest.mark.slow  # runs a C++ compiler for half a minute per case
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "mixtral"])
def test_generated_code(family):
    """Runs the code that the default backend generates for users. Other tests run the graphs as they were traced."""
    torch._dynamo.reset()
    target = own_target(family)
    heads = random_heads(target)
    heads.compiled = True
    for length in (19, 30):
        ids = prompt(length, seed=length)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))


def test_a_batch(target):
    inputs, alone = batch_of((9, 4))
    heads = random_heads(target, "poss")
    graphs = counted(target, heads)
    texts = alone_texts(target, alone)
    known = []
    for _ in range(2):
        assert_rows(greedy(target, inputs, assistant_model=heads), 9, texts)
        known.append(len(graphs))
    assert known[0] == known[1] <= 2 * 2, "two graphs per number of rows that are left"


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_longer_budget_is_another_capacity(target):
    heads = random_heads(target, kind="chain")
    graphs = counted(target, heads)
    ids = prompt()
    assert bucket(1) == SMALLEST_BUCKET and bucket(SMALLEST_BUCKET + 1) == 2 * SMALLEST_BUCKET
    for new, wanted in ((20, 2), (SMALLEST_BUCKET, 5), (24, 6)):
        target.generation_config.max_length = None
        got = plain(target, ids, new, assistant_model=heads) if new < 100 else None
        if got is None:  # only compiles for the budget, and ends long before it
            expected = plain(target, ids, 30)
            eos = {"eos_token_id": int(expected[0, -1]), "pad_token_id": 0}
            got, expected = plain(target, ids, new, assistant_model=heads, **eos), plain(target, ids, new, **eos)
            assert torch.equal(got, expected)
        assert len(graphs) == wanted


@pytest.mark.slow
def test_a_cache_that_holds_tokens():
    """Tokens in the cache take slots, too, so the capacity must include them."""
    target = own_target("llama", max_position_embeddings=1024)
    heads = random_heads(target, "poss")
    graphs = counted(target, heads)
    cache = DynamicCache(config=target.config)
    first = plain(target, prompt(SMALLEST_BUCKET - 40), 4, past_key_values=cache)
    ids = torch.cat([first, prompt(5)], dim=1)
    expected = plain(target, ids, 60)
    assert torch.equal(plain(target, ids, 60, past_key_values=cache, assistant_model=heads), expected)
    assert len(graphs) == 2 and cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.slow
@pytest.mark.parametrize("with_ids", [True, False])
def test_a_prompt_as_embeddings(with_ids):
    target = own_target("llama", max_position_embeddings=1024)
    heads, ids = random_heads(target), prompt(SMALLEST_BUCKET - 6)
    counted(target, heads)
    inputs = {"inputs_embeds": target.get_input_embeddings()(ids).detach(), "attention_mask": torch.ones_like(ids)}
    inputs |= {"input_ids": ids} if with_ids else {}
    expected = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=heads), expected)


@pytest.mark.slow
def test_more_shapes_than_graphs_run_uncompiled_and_pairs_do_not_count_each_others(target, monkeypatch):
    monkeypatch.setattr(steps, "MOST_GRAPHS", 2)
    warnings: list[str] = []
    monkeypatch.setattr(steps.logger, "warning_once", warnings.append)
    other = own_target("llama", seed=1)
    for each, heads in ((target, random_heads(target)), (target, random_heads(target)), (other, random_heads(other))):
        graphs = counted(each, heads)
        expected = plain(each, prompt(), 12)
        for depth in (2, 3, 4):
            heads.tree_config = heads.tree_config.replace(depth=depth)
            assert torch.equal(plain(each, prompt(), 12, assistant_model=heads), expected)
            assert len(graphs) == 1 + min(depth - 1, 2), (
                "two draft steps and what verifies all, whatever other pairs do"
            )
    assert set(warnings) == {steps.TOO_MANY}


def plain_share(monkeypatch) -> float:
    """Returns the share of plain steps in calls whose drafts are always right: four calls, after a first one that does
    not count. The clock includes compile times."""
    target = own_target("llama", num_hidden_layers=1)  # tracing time grows with the number of layers
    heads = DraftLanguageModel.from_model(target, tree_config={"kind": "chain", "depth": 4})
    heads.compiled = heads.adaptive = True
    clock = Clock(1.0)
    torch._dynamo.reset()

    def slow_backend(graph, inputs):
        clock.now += 41.0
        return graph.forward

    target.generation_config.compile_config = CompileConfig(backend=slow_backend, mode=None)
    monkeypatch.setattr(loop, "time", clock)
    steps = []
    for seed in range(5):
        ids = prompt(seed=seed)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
        steps.append((heads.last_stats.plain_steps, heads.last_stats.rounds))
    later = steps[1:]
    return sum(plain for plain, _ in later) / sum(plain + rounds for plain, rounds in later)


def test_compiling_is_no_cost_of_a_round(monkeypatch):
    assert plain_share(monkeypatch) < 0.2


def test_a_round_that_takes_as_long_as_compiling_decides_nothing(monkeypatch):
    """Control: even a compile time that is counted as a round must not decide. It once raised the mean of all rounds,
    and whole calls went without drafts."""
    monkeypatch.setattr(
        CompiledRounds, "compiles", property(lambda self: False, lambda self, value: None), raising=False
    )
    assert plain_share(monkeypatch) < 0.2


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


EXIT = """
from support.heads import random_heads
from support.targets import own_target, plain, prompt
from transformers import CompileConfig

target = own_target("llama")
target.generation_config.compile_config = CompileConfig(backend="eager", mode=None)
heads = random_heads(target, kind="chain", depth=2)
heads.compiled, heads.adaptive = True, False
plain(target, prompt(), 8, assistant_model=heads)
print("compiled", len(next(iter(heads.memory[target].values()))._steps))
"""


def test_a_process_ends_in_silence():
    """torch 2.14 prints a traceback if compiled code is destroyed after its own modules at the end of a process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.stdout.startswith("compiled ") and done.stdout.split()[1] > "0", done.stderr
    assert "Exception ignored" not in done.stderr
