"""Fixtures of all tests: fixed seeds, no network, tiny models."""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads this when it is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers, and processes that tests start, share the cores. More threads would spin while they wait for a core.
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from support.clock import Clock
from support.covering import mark_the_rest
from support.hub.endpoint import HubEndpoint
from support.targets import own_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specheads import AutoDraftHead, DraftHead, EagleHead, PossHead
from hf_specheads.generation import loop
from hf_specheads.generation.compiled import kept
from hf_specheads.generation.streams import stream

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
for kind in (torch.cuda, torch.xpu, torch.mtia):
    # Seeding an absent device only queues the seed, together with a formatted stack trace. This is most of the cost of
    # `torch.manual_seed`.
    if not kind.is_available():
        kind.manual_seed_all = lambda seed: None

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs before pytest deselects cases by their marks. Moves tests that need the local Hub to the front: they then
    stay together when several workers share the run, and only one worker starts the process that talks to the Hub."""
    mark_the_rest(items)
    items.sort(key=lambda item: "hub" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Exempts modules and tests, which live until the end anyway, from further garbage collections."""
    gc.collect()
    gc.freeze()
    # pytest attaches its handlers to every logger that does not propagate, six times per test. torch has dozens of
    # those.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and name != "torch.__trace" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Starts every test from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def every_round_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes heads draft in every round. Drafts of tiny random models never pay, but tests need to see them
    verified."""
    monkeypatch.setattr(DraftHead, "adaptive", False)


@pytest.fixture(autouse=True)
def even_rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the engine's clock, except in tests marked `timing`. The engine chooses what to draft by measured
    times, which vary on a machine that runs other tests at the same time. With this clock, every part of every round
    takes equally long."""
    if request.node.get_closest_marker("timing"):
        return
    clock = Clock(1.0)
    for module in (loop, stream):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture(scope="session")
def kept_code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder in which a session keeps compiled steps, so that no session depends on another."""
    return str(tmp_path_factory.mktemp("kept"))


@pytest.fixture(autouse=True)
def code_of_this_session(kept_code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests reuse what earlier tests of this session have compiled, and nothing older."""
    monkeypatch.setattr(kept, "FOLDER", kept_code)


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the probe off, because tests count forwards and plant bugs that it would refuse. It has tests of its
    own."""
    monkeypatch.setattr(DraftHead, "probe", False)


@pytest.fixture(autouse=True)
def blocked_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes connections to other machines fail at once. Loopback stays open for the processes of one training."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise RuntimeError(f"tests must not use the network, tried {address!r}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def target() -> LlamaForCausalLM:
    """A tiny random Llama that only this test uses: vocabulary 99, width 32, two layers."""
    return own_target("llama")


@pytest.fixture
def eagle_heads(target: LlamaForCausalLM) -> EagleHead:
    """Random EAGLE heads for `target`."""
    return AutoDraftHead.from_target(target, "eagle").eval()


@pytest.fixture
def poss_heads(target: LlamaForCausalLM) -> PossHead:
    """Random POSS heads for `target`: two specialists of two positions."""
    return AutoDraftHead.from_target(
        target,
        "poss",
        num_specialists=2,
        positions_per_specialist=2,
        tree_config={"depth": 4, "top_k": 3, "total_tokens": 9},
    ).eval()


@functools.cache
def _shared_tokenizer() -> PreTrainedTokenizerFast:
    """99 words split at spaces: `w3` to `w98`, and three special tokens."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 99)}}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<pad>",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer that all tests share. A chat template that a test sets is removed after the test."""
    return _shared_tokenizer()


@pytest.fixture(autouse=True)
def _no_template_stays() -> Iterator[None]:
    yield
    _shared_tokenizer().chat_template = None


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubEndpoint]:
    """The local Hub of a session; tests use the fixture `hub`."""
    server = HubEndpoint(tmp_path_factory.mktemp("hub-home"))
    yield server
    server.close()


@pytest.fixture
def hub(hub_server: HubEndpoint) -> HubEndpoint:
    """An empty Hub on this machine, with real HTTP; see `support/hub/endpoint.py`."""
    hub_server.reset()
    return hub_server
