"""Prompt lookup as heads: its distribution against naive counting, its caches, and files without weights."""

from __future__ import annotations

import pytest
import torch
from support.heads import random_heads
from support.targets import plain, prompt, shared_target
from transformers import AutoModel

from hf_specheads import AutoDraftHead, LookupHead, LookupHeadConfig, WrongTargetError, load_heads
from hf_specheads.heads.lookup import LONGER_COUNTS

NEW = 24


def heads_of(vocab_size: int = 7, longest: int = 3, shortest: int = 2) -> LookupHead:
    return LookupHead(LookupHeadConfig(vocab_size=vocab_size, longest_ngram=longest, shortest_ngram=shortest))


def naive(text: list[int], path: list[int], config: LookupHeadConfig) -> list[float]:
    """Weight of every token after a path, by the text's places one by one."""
    weights, words = [0.0] * config.vocab_size, text + path
    for place in range(len(text) - 1):
        agreeing = 0
        while agreeing < min(config.longest_ngram, place + 1) and text[place - agreeing] == words[-1 - agreeing]:
            agreeing += 1
        if agreeing >= config.shortest_ngram:
            recent = 0.5 + 0.5 * (place + 1) / len(text)
            weights[text[place + 1]] += LONGER_COUNTS ** (agreeing - config.longest_ngram) * recent
    return weights


@pytest.mark.parametrize("shortest", [1, 2])
def test_logits_count_the_places_that_agree(shortest):
    heads = heads_of(shortest=shortest)
    texts = torch.randint(0, 3, (4, 60), generator=torch.Generator().manual_seed(shortest))
    cache, taken, seen = heads.new_draft_cache(), 0, 0
    for root in (0, 1, 5, 6, 20, 59):
        last, logits = heads.start_draft(cache, texts[:, taken : root + 1], None)
        taken = root
        paths = torch.tensor([[[0], [1]]] * 4)
        states = last.expand(-1, 2, -1)
        deeper, after = heads.extend_draft(cache, 1, paths[..., 0], states, None)
        _, last_ones = heads.extend_draft(cache, 2, torch.tensor([[2, 2]] * 4), deeper, None)
        for row in range(4):
            text = texts[row, : root + 1].tolist()
            for found, path in ((logits[row, 0], []), (after[row, 1], [1]), (last_ones[row, 0], [0, 2])):
                expected = torch.tensor(naive(text, path, heads.config))
                assert torch.allclose(found.exp(), expected, atol=1e-6), (text, path)
                seen += int(expected.any())
    assert seen > 20


def test_ragged_rows_and_sequences_that_leave():
    heads = heads_of(shortest=1)
    cache = heads.new_draft_cache()
    cache.begin_round(torch.tensor([[True, True, True], [False, False, True]]), [3, 1])
    heads.start_draft(cache, torch.tensor([[1, 2, 1, 2], [9, 9, 3, 3]]) % 7, None)
    cache.begin_round(torch.tensor([[False, True], [True, True]]), [1, 2])
    _, logits = heads.start_draft(cache, torch.tensor([[5, 2, 1], [3, 4, 3]]), None)
    for row, text in enumerate(([1, 2, 1, 2, 1], [3, 3, 4, 3])):
        assert torch.allclose(logits[row, 0].exp(), torch.tensor(naive(text, [], heads.config)), atol=1e-6)
    cache.select_sequences([1])
    cache.begin_round()
    _, logits = heads.start_draft(cache, torch.tensor([[3, 3]]), None)
    assert torch.allclose(logits[0, 0].exp(), torch.tensor(naive([3, 3, 4, 3, 3], [], heads.config)), atol=1e-6)


def test_rounds_without_a_match_are_plain_steps():
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, "lookup", kind="chain", depth=3)
    heads.config.longest_ngram = heads.config.shortest_ngram = 60
    expected = plain(target, ids, NEW)
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
    stats = heads.last_stats
    assert stats.draft_forwards == 0 and stats.plain_steps == NEW - 1 and stats.target_forwards == NEW
    assert "nothing to copy" in stats.plain_because


def test_transformers_own_loop():
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, "lookup", kind="chain", depth=3)
    heads.loop = "transformers"
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert heads.last_stats.rounds > 0


def test_files_hold_a_config_and_no_weights(tmp_path):
    target = shared_target("llama")
    heads = AutoDraftHead.from_target(target, "lookup", shortest_ngram=1, tree_config={"kind": "chain", "depth": 3})
    heads.save_pretrained(tmp_path)
    for load in (load_heads, AutoModel.from_pretrained):
        again = load(tmp_path)
        assert isinstance(again, LookupHead) and again.config.shortest_ngram == 1
        assert again.tree_config.kind == "chain" and list(again.state_dict()) == []
    assert not list(tmp_path.glob("*.safetensors"))
    assert torch.equal(
        plain(target, prompt(), NEW, assistant_model=load_heads(tmp_path)), plain(target, prompt(), NEW)
    )


def test_any_target_of_the_vocabulary():
    heads = AutoDraftHead.from_target(shared_target("llama"), "lookup")
    heads.bind(shared_target("mistral"))
    with pytest.raises(WrongTargetError, match="vocabulary of 7"):
        heads_of().bind(shared_target("llama"))


def test_what_is_impossible():
    with pytest.raises(ValueError, match="shortest_ngram"):
        AutoDraftHead.from_target(shared_target("llama"), "lookup", shortest_ngram=4)
    assert "no weights to train" in heads_of().passes_problem(1)
