"""Medusa heads: drafting, trees, sizes, and generation against recordings of the authors' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import generate, recorded_pair, recording, token_paths
from support.targets import own_target, plain, prompt, shared_target
from support.trees import path_of
from torch import nn

from hf_specheads import AutoDraftHead, MedusaHead, MedusaHeadConfig, load_heads
from hf_specheads.cache.draft import DraftCache
from hf_specheads.errors import UnsupportedGenerationError, WarmStartError
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.target.projection import output_weight
from hf_specheads.tree.published import MEDUSA_CHOICES
from hf_specheads.unroll.rows import TrainingRows

VARIANTS = [{}, {"lm_head": "target"}, {"num_blocks": 3}, {"num_blocks": 2, "tied_blocks": False, "num_heads": 5}]


def random_medusa(target: Any, seed: int = 3, **options: Any) -> MedusaHead:
    """Heads that differ from one another and from the target's `lm_head`."""
    heads = AutoDraftHead.from_target(target, "medusa", **options).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads


# ---------------------------------------------------------------------- what the heads compute
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_fresh_heads_say_what_the_target_says(options: dict) -> None:
    """Zero blocks are the identity, and own projections start as the target's `lm_head`."""
    target = own_target("llama")
    heads = AutoDraftHead.from_target(target, "medusa", **options).bind(target)
    features = torch.randn(2, 3, 32)
    for position in range(heads.config.num_heads):
        torch.testing.assert_close(heads.position_logits(features, position), target.lm_head(features))
    assert all(not block.weight.any() for blocks in heads.blocks for block in blocks)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_blocks_and_projections(options: dict) -> None:
    target = own_target("llama")
    heads = random_medusa(target, **options).bind(target)
    config, features = heads.config, torch.randn(2, 3, 32)
    for position in range(config.num_heads):
        expected = features
        for index in range(config.num_blocks):
            block = heads.blocks[position][0 if config.tied_blocks else index]
            expected = expected + nn.functional.silu(expected @ block.weight.T + block.bias)
        weight = target.lm_head.weight if config.lm_head == "target" else heads.lm_heads[position].weight
        torch.testing.assert_close(heads.position_logits(features, position), expected @ weight.T)
    stored = 1 if config.tied_blocks else config.num_blocks
    assert all(len(blocks) == stored for blocks in heads.blocks)
    assert heads.max_draft_positions == heads.default_passes == config.num_heads


def test_every_node_of_a_level_gets_the_same_children() -> None:
    target = shared_target("llama")
    heads = random_medusa(target).bind(target)
    heads.tree_config = heads.published_tree
    features, cache = torch.randn(1, 6, 32), heads.new_draft_cache()
    tree = grow_tree(heads, cache, heads.tree_config, torch.arange(3, 10)[None], features, depth=4)
    assert isinstance(cache, DraftCache) and not cache.layers and cache.committed == 6
    ranked = [heads.position_logits(features[:, -1], i)[0].argsort(descending=True) for i in range(4)]
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    paths = sorted(MEDUSA_CHOICES, key=lambda path: (len(path), path))
    assert tree.num_nodes == 64 and tokens[0] == 9
    for node, path in enumerate(paths, start=1):
        ours = [tokens[n] for n in path_of(parents, node)][1:]
        assert ours == [int(ranked[level][rank]) for level, rank in enumerate(path)]


def test_unroll_reads_one_head_per_pass_at_unchanged_rows() -> None:
    target = shared_target("llama")
    heads = random_medusa(target)
    features = torch.randn(2, 5, 32)
    rows = TrainingRows(
        features=features, token_ids=None, next_token_ids=torch.ones(2, 5, dtype=torch.long),
        documents=torch.zeros(2, 5, dtype=torch.long), position_ids=torch.arange(5).expand(2, -1),
        embed=target.get_input_embeddings(), lm_head=target.lm_head,
    )  # fmt: skip
    heads.bind(target)
    for index, drafted in enumerate(heads.unroll(rows, 4)):
        assert drafted.offset == index and drafted.features is None
        torch.testing.assert_close(drafted.logits(drafted.hidden), heads.position_logits(features, index))
    assert index == 3


# ---------------------------------------------------------------------- generation
TREES = [
    {},
    {"kind": "chain", "depth": 3},
    {"kind": "static", "choices": [[0], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [0, 0, 1]]},
    {"kind": "optimal", "choices": [[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]]},
    {"kind": "dynamic", "depth": 4, "top_k": 5, "total_tokens": 24},
]


def helpful_medusa(target: Any, ids: torch.Tensor, new: int) -> MedusaHead:
    """Heads fitted by least squares to three rows in five of the target's own greedy text: often right, not always."""
    heads = AutoDraftHead.from_target(target, "medusa")
    whole = plain(target, ids, new)
    features = target(whole, output_hidden_states=True).hidden_states[-1][0]
    with torch.no_grad():
        for index, lm_head in enumerate(heads.lm_heads):
            rows = torch.arange(whole.shape[1] - 2 - index)
            rows = rows[(rows % 5 != 1) & (rows % 5 != 2)]
            wanted = nn.functional.one_hot(whole[0, rows + 2 + index], heads.config.vocab_size).float()
            lm_head.weight.copy_(torch.linalg.lstsq(features[rows], wanted).solution.T)
    return heads.eval()


@pytest.mark.parametrize(
    ("family", "tree"),
    [("llama", tree) for tree in TREES] + [("mistral", TREES[0]), ("gpt2", TREES[4])],
    ids=lambda value: value if isinstance(value, str) else value.get("kind", "default"),
)
def test_text_is_the_targets_own(family: str, tree: dict) -> None:
    target, ids = shared_target(family), prompt()
    expected = plain(target, ids, 32)
    heads = helpful_medusa(target, ids, 32).with_tree(**tree)
    assert torch.equal(plain(target, ids, 32, assistant_model=heads), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2, "nothing was accepted; the test could not fail"
    assert min(heads.last_stats.num_accepted[0]) < 2, "nothing was rejected"


@pytest.mark.parametrize("options", VARIANTS[1:], ids=str)
def test_text_of_other_variants(options: dict) -> None:
    target, ids = shared_target("llama"), prompt()
    heads = random_medusa(target, **options)
    assert torch.equal(plain(target, ids, 16, assistant_model=heads), plain(target, ids, 16))


def test_chains_in_transformers_own_loop() -> None:
    target, ids = shared_target("llama"), prompt()
    heads = helpful_medusa(target, ids, 24).with_tree(kind="chain", depth=3)
    heads.loop = "transformers"
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), plain(target, ids, 24))
    assert max(heads.last_stats.num_accepted[0]) >= 2


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    target = shared_target("llama")
    heads = random_medusa(target, num_heads=2)
    assert heads.tree_config.depth == 2  # the default tree is cut
    with pytest.raises(UnsupportedGenerationError, match=r"draft 2 position\(s\), and the draft tree has depth 3"):
        plain(target, prompt(), 4, assistant_model=heads.with_tree(kind="chain", depth=3))


# ---------------------------------------------------------------------- recordings
def assert_same_rounds(stats: Any, case: dict[str, Any], count: int) -> None:
    assert stats.num_accepted[0][:count] == case["accept_lengths"][:count]
    for tree, recorded in zip(stats.trees[:count], case["rounds"][:count], strict=False):
        ours = token_paths(tree.token_ids[0].tolist(), tree.parents[0].tolist())
        assert ours == token_paths(recorded["tree"]["tokens"], recorded["tree"]["parents"])


def test_recorded_greedy_generation() -> None:
    case = recording("medusa_greedy")
    target, heads = recorded_pair("medusa_greedy", case)
    assert heads.config.num_heads == 5 and heads.config.lm_head == "own"
    wanted = case["target_greedy_ids"]
    assert generate(target, heads, case["prompt_ids"], len(wanted), do_sample=False) == wanted
    assert len(set(case["accept_lengths"])) >= 3 and len(case["rounds"]) == 8
    assert_same_rounds(heads.last_stats, case, len(case["accept_lengths"]) - 1)


def test_short_paths_are_not_padded_with_a_token() -> None:
    """The authors pad with token 0 and accept it by chance; their text leaves the target's, ours must not."""
    case = recording("medusa_greedy_padding_bug")
    target, heads = recorded_pair("medusa_greedy_padding_bug", case)
    wanted = case["target_greedy_ids"]
    assert case["output_ids"][: len(wanted)] != wanted and case["accepted_padding_rounds"] == [0]
    assert generate(target, heads, case["prompt_ids"], len(wanted), do_sample=False) == wanted
    assert heads.last_stats.num_accepted[0][0] == case["rounds"][0]["accept_length"] - 1


def test_recorded_typical_acceptance() -> None:
    """Up to the round in which the authors accept padding; after it their cache holds the wrong row."""
    case = recording("medusa_greedy", "case_typical_t07.json")
    target, heads = recorded_pair("medusa_greedy", case)
    heads.verification = "typical"
    settings = case["settings"]
    heads.posterior_threshold, heads.posterior_alpha = settings["posterior_threshold"], settings["posterior_alpha"]
    (padded,) = case["accepted_padding_rounds"]
    sampling = {"do_sample": True, "temperature": settings["temperature"], "top_k": 0}
    ids = generate(target, heads, case["prompt_ids"], 16, **sampling)
    assert_same_rounds(heads.last_stats, case, padded)
    before = sum(n + 1 for n in case["accept_lengths"][: padded + 1]) - 1  # without the padding token
    assert ids[:before] == case["output_ids"][:before] != case["target_greedy_ids"][:before]
    assert heads.last_stats.num_accepted[0][padded] == case["accept_lengths"][padded] - 1


# ---------------------------------------------------------------------- configuration, weights
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, "`num_heads` must be between 1"),
        ({"num_blocks": 0}, "`num_blocks` must be between 1"),
        ({"lm_head": "mine"}, r"`lm_head` must be one of \['own', 'target'\], got 'mine'"),
        ({"hidden_size": 16}, r"`hidden_size` \(16\) must equal `feature_size` \(32\)"),
    ],
)
def test_impossible_configs_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoDraftHead.from_target(shared_target("llama"), "medusa", **options)


def test_default_tree_is_as_deep_as_there_are_heads() -> None:
    assert len(MEDUSA_CHOICES) == 63
    sizes = {"vocab_size": 9, "hidden_size": 8, "feature_size": 8, "embedding_size": 8}
    for count, depth in ((1, 1), (3, 3), (4, 4), (5, 4)):
        tree = MedusaHead(MedusaHeadConfig(**sizes, num_heads=count)).published_tree
        assert tree.kind == "static" and tree.depth == depth
        assert tree.choices == tuple(path for path in MEDUSA_CHOICES if len(path) <= depth)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_saved_heads_come_back_as_they_were(tmp_path: Path, options: dict) -> None:
    target = own_target("llama")
    heads = random_medusa(target, **options)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path)
    assert type(again) is MedusaHead and again.tree_config == heads.tree_config
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())
    again.check_target(target)
    assert (again.lm_heads is None) == (options.get("lm_head") == "target")


def test_warm_start() -> None:
    target = own_target("llama")
    heads = random_medusa(target, num_heads=3)
    warm = AutoDraftHead.from_target(target, "medusa", from_heads=heads)
    assert warm.config.num_heads == 3
    assert all(torch.equal(a, b) for a, b in zip(warm.parameters(), heads.parameters(), strict=True))
    with pytest.raises(WarmStartError, match="do not fit"):
        AutoDraftHead.from_target(target, "medusa", from_heads=heads, num_heads=4)
    with pytest.raises(WarmStartError, match="MedusaHead"):
        AutoDraftHead.from_target(target, "medusa", from_heads=AutoDraftHead.from_target(target, "eagle"))


def test_weight_of_an_lm_head_that_hides_it() -> None:
    """Quantised and offloaded projections are asked instead of read."""

    class Hidden(nn.Module):
        def __init__(self, inner: nn.Linear):
            super().__init__()
            self.call = lambda features: inner(features) + 0.5

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.call(features)

    target = own_target("llama")
    weight = output_weight(target)
    assert weight.shape == (99, 32)
    target.lm_head = Hidden(target.lm_head)
    torch.testing.assert_close(output_weight(target), weight)


def test_every_head_must_have_a_pass() -> None:
    heads = random_medusa(shared_target("llama"))
    assert "trains 3 of 4 Medusa heads; set num_passes=4" in heads.passes_problem(3)
    assert heads.passes_problem(4) is None
    assert "more than the 4" in heads.passes_problem(5)
