"""Observers of rounds see every token and every node, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.heads import random_heads
from support.stubs import CountForwards
from support.targets import own_target, plain, prompt, shared_target

from hf_specheads import DraftHead, DraftLanguageModel, UnsupportedGenerationError
from hf_specheads.generation.observer import Round
from hf_specheads.metrics import GenerationStats

NEW = 24
CHAIN = {"kind": "chain", "depth": 3}


def generated(heads: DraftHead, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Generates a text."""
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return shared_target().generate(ids, assistant_model=heads, **options)


def observed(heads: DraftHead, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, list[Round]]:
    """Generates a text with an observer, and returns the text and the observed rounds."""
    rounds: list[Round] = []
    heads.on_round = rounds.append
    try:
        return generated(heads, ids, **options), rounds
    finally:
        heads.on_round = None


def counts(stats: GenerationStats) -> tuple[Any, ...]:
    return stats.num_accepted, stats.offered, stats.target_forwards, stats.draft_forwards, stats.host_syncs


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [{}, CHAIN, {"lookup": 2}], ids=["dynamic", "chain", "lookup"])
def test_it_sees_every_token_and_changes_nothing(tree: dict[str, Any], options: dict[str, Any]) -> None:
    heads, ids = random_heads(shared_target(), **tree), prompt()
    torch.manual_seed(5)
    expected = generated(heads, ids, **options)
    unseen = counts(heads.last_stats)
    torch.manual_seed(5)
    text, rounds = observed(heads, ids, **options)
    assert torch.equal(text, expected)
    assert counts(heads.last_stats) == unseen, "no forward and no wait more than without an observer"
    seen = [token for one in rounds for token in one.token_ids()]
    assert seen == text[0, ids.shape[1] :].tolist()
    assert rounds[0].tree is None and all(one.tree is not None for one in rounds[1:])
    assert all(one.seconds > 0 for one in rounds)
    drafted = [len(one.accepted[0].token_ids) - 1 for one in rounds[1:] if one.tree.num_nodes > 1]
    stats = heads.last_stats
    assert drafted == [n for n, depth in zip(stats.num_accepted[0], stats.offered[0], strict=True) if depth]


def test_nodes_tell_the_tree_and_the_accepted_path() -> None:
    heads, ids = random_heads(shared_target(), lookup=3), prompt().repeat(1, 4)
    text, rounds = observed(heads, ids)
    done = ids.shape[1]
    accepted = 0
    for one in rounds:
        new, nodes = one.token_ids(), one.nodes()
        if nodes:
            assert nodes[0].token_id == text[0, done - 1] and nodes[0].parent == -1 and nodes[0].accepted
            assert all(nodes[node.parent].depth == node.depth - 1 for node in nodes[1:])
            assert all(0 <= node.probability <= 1 for node in nodes)
            path = [node for node in nodes[1:] if node.accepted]
            assert [node.depth for node in path] == list(range(1, len(path) + 1))
            assert [node.token_id for node in path] == new[: len(path)] and len(path) == one.num_drafted()
            accepted += len(path)
        done += len(new)
    assert accepted > 0, "nothing was accepted, so that nothing was tested"


def test_probabilities_are_those_of_the_draft_given_the_parent() -> None:
    heads, ids = random_heads(shared_target(), top_k=3, total_tokens=13, depth=2), prompt()
    _, rounds = observed(heads, ids)
    tree = rounds[1].tree
    nodes = rounds[1].nodes()
    for node, score in zip(nodes[1:], tree.scores[0, 1:].tolist(), strict=True):
        product, up = 1.0, node
        while up.parent >= 0:
            product, up = product * up.probability, nodes[up.parent]
        assert product == pytest.approx(torch.tensor(score).exp().item(), rel=1e-4)


def test_a_text_that_ends_within_a_path_has_a_drafted_last_token() -> None:
    """The path continues, and no token of the target's own follows."""
    heads, ids = DraftLanguageModel.from_model(shared_target()).with_tree(kind="chain", depth=4), prompt()
    rounds: list[Round] = []
    heads.on_round = rounds.append
    text = plain(shared_target(), ids, 8)[0, ids.shape[1] :].tolist()
    assert text.index(text[-1]) == 7
    # These heads draft the target's text. The rounds emit 1 + 5 tokens, then 2 of 5.
    plain(shared_target(), ids, 20, assistant_model=heads, eos_token_id=text[-1])
    last = rounds[-1]
    assert last.accepted[0].cut
    path = [node.token_id for node in last.nodes()[1:] if node.accepted]
    assert path == last.token_ids() and last.num_drafted() == len(path) == 2


def test_sequences_of_a_batch_are_seen_apart() -> None:
    heads = random_heads(shared_target())
    ids = torch.cat([prompt(seed=1), prompt(seed=2)])
    text, rounds = observed(heads, ids)
    for sequence in (0, 1):
        seen = [token for one in rounds for token in one.token_ids(sequence)]
        assert seen == text[sequence, ids.shape[1] :].tolist()[: len(seen)] and len(seen) == NEW
        roots = [one.nodes(sequence)[0].token_id for one in rounds[1:] if sequence in one.accepted]
        done, expected = 0, []
        for one in rounds:
            if one.tree is not None and sequence in one.accepted:
                expected.append(seen[done - 1])
            done += len(one.token_ids(sequence))
        assert roots == expected


def test_plain_steps_are_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftHead, "adaptive", True)
    heads, ids = random_heads(shared_target()), prompt()
    text, rounds = observed(heads, ids)
    steps = [one for one in rounds if one.tree is not None and one.tree.num_nodes == 1]
    assert len(steps) >= heads.last_stats.plain_steps > 0
    assert [token for one in rounds for token in one.token_ids()] == text[0, ids.shape[1] :].tolist()


def test_an_observer_may_end_the_call() -> None:
    class Enough(Exception):
        pass

    def stop(one: Round) -> None:
        if one.tree is not None:
            raise Enough

    target, heads, ids = own_target(), random_heads(shared_target()), prompt()
    heads.on_round = stop
    with CountForwards(target) as counted, pytest.raises(Enough):
        plain(target, ids, NEW, assistant_model=heads)
    assert counted.count == 2
    heads.on_round = None
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))


def test_copies_are_watched_as_well_and_nothing_is_saved(tmp_path) -> None:
    heads, seen = random_heads(shared_target()), []
    heads.on_round = seen.append
    plain(shared_target(), prompt(), 6, assistant_model=heads.with_tree(**CHAIN))
    assert seen
    heads.save_pretrained(tmp_path)
    assert "on_round" not in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_the_loop_of_transformers_has_no_observer() -> None:
    heads = random_heads(shared_target(), **CHAIN)
    heads.loop, heads.on_round = "transformers", print
    with pytest.raises(UnsupportedGenerationError, match="own loop does not report its rounds"):
        plain(shared_target(), prompt(), 6, assistant_model=heads)
