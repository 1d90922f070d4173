"""Hydra and Hydra++ heads: what they compute, trees, generation, refusals and weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.targets import own_target, plain, prompt, shared_target
from support.trees import path_of
from torch import nn
from transformers import LlamaConfig, LlamaModel

from hf_specheads import AutoDraftHead, HydraHead, WrongTargetError, load_heads
from hf_specheads.errors import UnsupportedGenerationError, WarmStartError
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.unroll.rows import TrainingRows, row_positions

VARIANTS = [
    {},
    {"lm_head": "target", "num_blocks": 3},
    {"grounded": False, "num_blocks": 2},
    {"num_blocks": 3, "tied_blocks": False, "num_heads": 3},
    {"head_arch": "prefix-mlp", "num_blocks": 3},
    {"head_arch": "prefix-mlp", "num_blocks": 2, "grounded": False, "tied_blocks": False, "lm_head": "target"},
]
PLUS = {"head_arch": "prefix-mlp", "num_blocks": 3}


def random_hydra(target: Any, seed: int = 3, **options: Any) -> HydraHead:
    """Heads that differ from one another and from the target's `lm_head`."""
    heads = AutoDraftHead.from_target(target, "hydra", **options).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return heads.bind(target)


def training_rows(target: Any, ids: torch.Tensor, documents: torch.Tensor | None = None, **options: Any):
    """Rows of token ids [B, T + 1] with random features."""
    batch, rows = ids.shape[0], ids.shape[1] - 1
    documents = torch.zeros(batch, rows, dtype=torch.long) if documents is None else documents
    return TrainingRows(
        features=torch.randn(batch, rows, 32), token_ids=ids[:, :-1], next_token_ids=ids[:, 1:], documents=documents,
        position_ids=row_positions(documents), embed=target.get_input_embeddings(), lm_head=target.lm_head, **options,
    )  # fmt: skip


# ---------------------------------------------------------------------- what the heads compute
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_fresh_heads_end_in_the_targets_lm_head(options: dict) -> None:
    """Only the first block of grounded heads is not the identity."""
    target = own_target("llama")
    heads = AutoDraftHead.from_target(target, "hydra", **options).bind(target).eval()
    for position in range(heads.config.num_heads):
        inputs = torch.randn(2, 3, 32 + 32 * (position + 1) * heads.config.grounded)
        hidden = heads.blocks[position][0](inputs)
        assert not heads.config.grounded or hidden.std() > 0.01
        torch.testing.assert_close(heads.position_logits(inputs, position), target.lm_head(hidden))


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_blocks_and_projections(options: dict) -> None:
    target = own_target("llama")
    heads = random_hydra(target, **options)
    config = heads.config
    for position in range(config.num_heads):
        blocks = heads.blocks[position]
        expected = inputs = torch.randn(2, 3, 32 + 32 * (position + 1) * config.grounded)
        for index in range(config.num_blocks):
            block = blocks[min(index, int(config.grounded))] if config.tied_blocks else blocks[index]
            if index == 0 and config.grounded:
                inner, outer = block.linear, block.residual
                expected = inputs @ outer.weight.T + outer.bias
                expected = expected + nn.functional.silu(inputs @ inner.weight.T + inner.bias)
            else:
                expected = expected + nn.functional.silu(expected @ block.weight.T + block.bias)
        lm_head = target.lm_head if config.lm_head == "target" else heads.lm_heads[position]
        torch.testing.assert_close(heads.position_logits(inputs, position), lm_head(expected))
    stored = min(config.num_blocks, 1 + config.grounded) if config.tied_blocks else config.num_blocks
    assert all(len(blocks) == stored for blocks in heads.blocks)
    assert heads.max_draft_positions == heads.default_passes == config.num_heads


def llama_stack(heads: HydraHead) -> LlamaModel:
    """transformers' own one-layer Llama with the prefix layer's weights."""
    config = heads.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "rope_parameters")  # fmt: skip
    stack = LlamaModel(LlamaConfig(vocab_size=5, num_hidden_layers=1, **{n: getattr(config, n) for n in names}))
    weights = {f"layers.0.{key}": value for key, value in heads.prefix.state_dict().items() if key != "norm.weight"}
    weights |= {"norm.weight": heads.prefix.norm.weight, "embed_tokens.weight": torch.zeros(5, 32)}
    stack.load_state_dict(weights)
    return stack.eval()


@torch.no_grad()
def test_the_prefix_layer_is_a_whole_llama_stack() -> None:
    """Every row of it, however the rows are spread over rounds."""
    heads = random_hydra(shared_target("llama"), **PLUS)
    features, tokens = torch.randn(1, 9, 32), torch.arange(3, 13)[None]
    expected = llama_stack(heads)(inputs_embeds=features).last_hidden_state
    cache, done = heads.new_draft_cache(), 0
    for rows in (5, 1, 3):
        state, _ = heads.start_draft(cache, tokens[:, done : done + rows + 1], features[:, done : done + rows])
        done += rows
        torch.testing.assert_close(state[:, 0, :32], expected[:, done - 1], rtol=1e-4, atol=1e-5)
        assert cache.layers[0].get_seq_length() == cache.committed == done


@torch.no_grad()
def test_padding_is_not_seen_by_the_prefix_layer() -> None:
    heads = random_hydra(shared_target("llama"), **PLUS)
    features, tokens = torch.randn(1, 7, 32), torch.arange(3, 11)[None]
    bare, padded = heads.new_draft_cache(), heads.new_draft_cache()
    padded.begin_round(torch.tensor([[False, False, False, True, True, True]]), [3])
    filler, pad = torch.randn(1, 3, 32), torch.zeros(1, 3, dtype=torch.long)
    heads.start_draft(bare, tokens[:, :4], features[:, :3])
    heads.start_draft(padded, torch.cat([pad, tokens[:, :4]], 1), torch.cat([filler, features[:, :3]], 1))
    ours = heads.start_draft(padded, tokens[:, 3:], features[:, 3:])
    theirs = heads.start_draft(bare, tokens[:, 3:], features[:, 3:])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_drafting_says_what_the_unroll_says(options: dict) -> None:
    """Every row of two documents, drafted step by step with the data's own tokens."""
    target = shared_target("llama")
    heads = random_hydra(target, **options)
    ids = torch.randint(3, 99, (1, 12))
    documents = torch.tensor([[0] * 6 + [1] * 5])
    rows = training_rows(target, ids, documents)
    count = heads.config.num_heads
    unrolled = [drafted.logits(drafted.hidden)[0] for drafted in heads.unroll(rows, count)]
    compared = 0
    for first, end in ((0, 6), (6, 11)):
        cache = heads.new_draft_cache()
        for row in range(first, end):
            state, logits = heads.start_draft(cache, ids[:, row : row + 2], rows.features[:, row : row + 1])
            for position in range(min(count, end - row)):
                if position:
                    token = ids[:, row + 1 + position][None]
                    state, logits = heads.extend_draft(cache, position, token, state, torch.ones(1, 1, position) > 0)
                torch.testing.assert_close(logits[0, 0], unrolled[position][row], rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared >= 11 * count - 2 * count * (count - 1) // 2


def test_offsets_and_one_backward_per_pass() -> None:
    """Gradients through the prefix layer are gathered over the passes."""
    target = shared_target("llama")
    heads = random_hydra(target, **PLUS)
    rows = training_rows(target, torch.randint(3, 99, (2, 9)))
    wanted = []
    for drafted in heads.unroll(rows, 4):
        assert drafted.offset == len(wanted) and drafted.features is drafted.hidden
        wanted.append(drafted.logits(drafted.hidden).square().mean())
    torch.stack(wanted).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    separate = TrainingRows(**{**vars(rows), "separate_backward": True})
    for drafted in heads.unroll(separate, 4):
        drafted.logits(drafted.hidden).square().mean().backward()
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert heads.prefix.self_attn.q_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("head_arch", ["mlp", "prefix-mlp"])
def test_dropout_only_in_training(head_arch: str) -> None:
    target = shared_target("llama")
    heads = random_hydra(target, dropout=0.5, head_arch=head_arch)
    inputs = torch.randn(2, 64)
    assert torch.equal(heads(inputs, 0), heads(inputs, 0))
    heads.train()
    assert not torch.equal(heads(inputs, 0), heads(inputs, 0))


def test_a_nodes_children_follow_from_its_whole_path() -> None:
    target = shared_target("llama")
    heads = random_hydra(target)
    heads.tree_config = heads.published_tree
    for blocks in heads.blocks:
        blocks[0].residual.weight.data[:, 32:] *= 4  # tokens that weigh more
    features, cache = torch.randn(1, 6, 32), heads.new_draft_cache()
    tree = grow_tree(heads, cache, heads.tree_config, torch.arange(3, 10)[None], features, depth=4)
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    assert tree.num_nodes == 64 and tokens[0] == 9 and not cache.layers and cache.committed == 6
    embed = target.get_input_embeddings()
    with torch.no_grad():
        for node in range(1, 64):
            path = [tokens[n] for n in path_of(parents, node)]
            inputs = torch.cat([features[0, -1], embed(torch.tensor(path[:-1])).flatten()])
            ranked = heads.position_logits(inputs, len(path) - 2).argsort(descending=True)
            siblings = [tokens[n] for n in range(node) if parents[n] == parents[node]]
            assert path[-1] == ranked[len(siblings)]
    favourites = [next(tokens[n] for n in range(64) if parents[n] == node) for node in range(1, 10)]
    assert len(set(favourites)) >= 3, "every node of a level got the same children"


# ---------------------------------------------------------------------- generation
TREES = [
    {},
    {"kind": "chain", "depth": 3},
    {"kind": "static", "choices": [[0], [2], [0, 0], [0, 1], [2, 0], [0, 0, 1]]},
    {"kind": "optimal", "choices": [[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0]]},
    {"kind": "dynamic", "depth": 4, "top_k": 5, "total_tokens": 24},
]


@torch.no_grad()
def helpful_hydra(target: Any, ids: torch.Tensor, new: int, **options: Any) -> HydraHead:
    """Random heads whose projections are fitted to part of the target's own greedy text, so that drafts are taken."""
    heads = random_hydra(target, **options)
    whole = plain(target, ids, new)
    states = target(whole, output_hidden_states=True).hidden_states[heads.feature_layers[0]]
    rows = training_rows(target, whole)
    rows = TrainingRows(**{**vars(rows), "features": states[:, :-1]})
    for index, drafted in enumerate(heads.unroll(rows, heads.config.num_heads)):
        labels = whole[0, 2 + index :]
        wanted = nn.functional.one_hot(labels, heads.config.vocab_size).float()
        hidden = drafted.hidden[0, : len(labels)]
        solved = torch.linalg.lstsq(
            torch.cat([hidden, torch.ones(len(hidden), 1)], 1), wanted, driver="gelsd"
        ).solution
        heads.lm_heads[index].weight.copy_(solved[:-1].T)
        heads.lm_heads[index].bias.copy_(solved[-1])
    return heads


KINDS = {"hydra": {}, "hydra++": PLUS, "offset": {"hidden_state_offset": 1}}


@functools.cache
def fitted(family: str, kind: str) -> tuple[Any, HydraHead, torch.Tensor, torch.Tensor]:
    """Target, helpful heads, prompt and the text of 24 tokens."""
    target, ids = shared_target(family), prompt()
    return target, helpful_hydra(target, ids, 24, **KINDS[kind]), ids, plain(target, ids, 24)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.get("kind", "default"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_text_is_the_targets_own(family: str, kind: str, tree: dict) -> None:
    target, heads, ids, expected = fitted(family, kind)
    heads = heads.with_tree(**tree)
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2, "nothing was accepted; the test could not fail"
    assert min(heads.last_stats.num_accepted[0]) < heads.tree_config.depth, "nothing was rejected"


@pytest.mark.parametrize("options", VARIANTS[1:], ids=str)
def test_text_of_other_variants(options: dict) -> None:
    target, ids = shared_target("llama"), prompt()
    heads = random_hydra(target, **options)
    assert torch.equal(plain(target, ids, 16, assistant_model=heads), plain(target, ids, 16))


@pytest.mark.parametrize("kind", ["hydra++", "offset"])
def test_a_chunked_prefill_drafts_the_same(kind: str) -> None:
    target, heads, ids, expected = fitted("llama", kind)
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), expected)
    rounds = heads.last_stats.num_accepted
    chunked = plain(target, ids, 24, assistant_model=heads, prefill_chunk_size=5)
    assert torch.equal(chunked, expected) and heads.last_stats.num_accepted == rounds


def test_chains_in_transformers_own_loop() -> None:
    target, heads, ids, expected = fitted("llama", "hydra++")
    heads = heads.with_tree(kind="chain", depth=3)
    heads.loop = "transformers"
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2


def test_a_left_padded_prompt() -> None:
    target, heads, ids, expected = fitted("llama", "hydra++")
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), expected)
    rounds = heads.last_stats.num_accepted
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    out = target.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=24, do_sample=False,
                          assistant_model=heads)  # fmt: skip
    assert torch.equal(out[:, 4:], expected) and heads.last_stats.num_accepted == rounds


# ---------------------------------------------------------------------- refusals
def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    target = shared_target("llama")
    heads = random_hydra(target, num_heads=2)
    assert heads.tree_config.depth == 2  # the default tree is cut
    with pytest.raises(UnsupportedGenerationError, match=r"draft 2 position\(s\), and the draft tree has depth 3"):
        plain(target, prompt(), 4, assistant_model=heads.with_tree(kind="chain", depth=3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, "`num_heads` must be between 1"),
        ({"num_blocks": 0}, "`num_blocks` must be between 1"),
        ({"lm_head": "mine"}, r"`lm_head` must be one of \['own', 'target'\], got 'mine'"),
        ({"head_arch": "cross-attn"}, r"`head_arch` must be one of \['mlp', 'prefix-mlp'\], got 'cross-attn'"),
        ({"hidden_state_offset": -1}, "`hidden_state_offset` must be between 0"),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1"),
        ({"hidden_size": 16}, r"`hidden_size` \(16\) must equal `feature_size` \(32\)"),
        ({"head_arch": "prefix-mlp", "head_dim": 7}, "`head_dim` must be even"),
        ({"head_arch": "prefix-mlp", "num_key_value_heads": 3}, "must be a multiple"),
        ({"head_arch": "prefix-mlp", "hidden_act": "magic"}, "`hidden_act` must be an activation"),
    ],
)
def test_impossible_configs_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoDraftHead.from_target(shared_target("llama"), "hydra", **options)


def test_an_offset_below_the_embeddings_is_refused() -> None:
    target = shared_target("llama")
    heads = AutoDraftHead.from_target(target, "hydra", hidden_state_offset=3)
    with pytest.raises(WrongTargetError, match="3 layers below the final one, but the target has 2 layers"):
        heads.bind(target)


def test_every_head_must_have_a_pass() -> None:
    heads = random_hydra(shared_target("llama"))
    assert "trains 3 of 4 Hydra heads; set num_passes=4" in heads.passes_problem(3)
    assert heads.passes_problem(4) is None
    assert "more than the 4" in heads.passes_problem(5)


# ---------------------------------------------------------------------- weights
@pytest.mark.parametrize("options", [*VARIANTS, {"hidden_state_offset": 1, "dropout": 0.2}], ids=str)
def test_saved_heads_come_back_as_they_were(tmp_path: Path, options: dict) -> None:
    target = own_target("llama")
    heads = random_hydra(target, **options)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path)
    assert type(again) is HydraHead and again.tree_config == heads.tree_config
    assert again.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())
    assert all(getattr(again.config, name) == value for name, value in options.items())
    ids = prompt()
    assert torch.equal(plain(target, ids, 8, assistant_model=again), plain(target, ids, 8, assistant_model=heads))


def test_own_projections_start_as_the_targets() -> None:
    target = own_target("phi")  # its `lm_head` has a bias
    with torch.no_grad():
        target.lm_head.bias.normal_()
    heads = AutoDraftHead.from_target(target, "hydra", num_heads=2)
    assert all(torch.equal(lm_head.weight, target.lm_head.weight) for lm_head in heads.lm_heads)
    assert all(torch.equal(lm_head.bias, target.lm_head.bias) for lm_head in heads.lm_heads)


def test_warm_start() -> None:
    target = own_target("llama")
    heads = random_hydra(target, **PLUS)
    warm = AutoDraftHead.from_target(target, "hydra", from_heads=heads)
    assert warm.config.head_arch == "prefix-mlp"
    assert all(torch.equal(a, b) for a, b in zip(warm.parameters(), heads.parameters(), strict=True))
    with pytest.raises(WarmStartError, match="do not fit"):
        AutoDraftHead.from_target(target, "hydra", from_heads=heads, num_heads=3)
    with pytest.raises(WarmStartError, match="HydraHead"):
        AutoDraftHead.from_target(target, "hydra", from_heads=AutoDraftHead.from_target(target, "medusa"))
