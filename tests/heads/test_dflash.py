"""Block drafters: who sees whom, the same in drafting and training, and the best tree from independent slots."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.heads import random_heads, scrambled_heads
from support.layouts import DFLASH, LAYOUTS, QWEN3_CONFIG, dflash_tensors
from support.targets import deep_target, plain, prompt, shared_target

from hf_specheads import AutoDraftHead, DFlashHeadConfig, DraftHead, DraftTreeConfig, HeadLoadError, load_heads
from hf_specheads.errors import CheckpointKeysError, HeadConfigError
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.heads.block_config import spread_layers
from hf_specheads.unroll.rows import TrainingRows, row_positions

SIZE, LENGTH = 5, 22
VARIANTS: dict[str, dict[str, Any]] = {
    "both ways": {},
    "anchor drafts": {"anchor_slot": "drafts"},
    "causal": {"causal": True},
    "window": {"sliding_layers": (0,), "sliding_window": 6},
    "narrow window": {"sliding_layers": (0, 1), "sliding_window": 3},
    "causal window": {"sliding_layers": (1,), "sliding_window": 6, "sliding_causal": True},
    "window from the root": {"sliding_layers": (0,), "sliding_window": 6, "window_from": "anchor"},
}


def heads_of(variant: str, **options: Any) -> DraftHead:
    options = {"num_hidden_layers": 2, "block_size": SIZE, **VARIANTS[variant], **options}
    return scrambled_heads(deep_target(), "dflash", **options).bind(deep_target())


def rows_of(heads: DraftHead, anchors: list[list[int]], documents: torch.Tensor | None = None) -> TrainingRows:
    """Two sequences of random features and tokens."""
    generator = torch.Generator().manual_seed(1)
    width = len(heads.feature_layers) * heads.config.feature_size
    documents = torch.zeros(2, LENGTH, dtype=torch.long) if documents is None else documents
    return TrainingRows(
        features=torch.randn(2, LENGTH, width, generator=generator),
        token_ids=None,
        next_token_ids=torch.randint(90, (2, LENGTH), generator=generator),
        documents=documents,
        position_ids=row_positions(documents),
        embed=deep_target().get_input_embeddings(),
        lm_head=deep_target().lm_head,
        anchors=torch.tensor(anchors),
    )


ANCHORS = [[2, 9, 10, 21], [0, 4, 15, -1]]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_training_sees_what_drafting_sees(variant: str) -> None:
    """Every block under training has the states of a round that starts there, alone, with its context in the cache
    (taken in at once, or in two rounds): no block sees another, nor context after its anchor."""
    heads = heads_of(variant)
    rows = rows_of(heads, ANCHORS)
    trained = heads.drafted_slots(rows)
    for sequence, column in itertools.product(range(2), range(4)):
        anchor = ANCHORS[sequence][column]
        if anchor < 0:
            continue
        cache, features = heads.new_draft_cache(), rows.features[sequence : sequence + 1]
        ids = torch.cat([torch.zeros(1, 1, dtype=torch.long), rows.next_token_ids[sequence : sequence + 1]], dim=1)
        if middle := anchor // 2:
            heads.draft_block(cache, ids[:, : middle + 1], features[:, :middle])
        drafted = heads.draft_block(cache, ids[:, middle : anchor + 2], features[:, middle : anchor + 1])
        torch.testing.assert_close(trained[sequence, column], drafted[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_block_sees_another() -> None:
    """Changing a root changes its own block alone; a mask with all blocks in one would be noticed."""
    heads = heads_of("both ways")
    rows = rows_of(heads, ANCHORS)
    slots = heads.drafted_slots(rows)
    rows.next_token_ids[0, 9] += 1
    changed = (heads.drafted_slots(rows) - slots).abs().amax((2, 3)) > 1e-6
    assert changed.tolist() == [[False, True, False, False], [False] * 4]


@torch.no_grad()
def test_no_block_sees_another_document() -> None:
    heads = heads_of("window")
    documents = torch.tensor([[0] * 8 + [1] * 14, [0] * 12 + [-1] * 10])
    rows = rows_of(heads, [[5, 9], [7, 3]], documents)
    slots = heads.drafted_slots(rows)
    rows.features[0, :8] += 1
    rows.features[1, 8:] += 1
    changed = (heads.drafted_slots(rows) - slots).abs().amax((2, 3)) > 1e-6
    assert changed.tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("method", ["dflash", "jetspec", "medusa"])
@torch.no_grad()
def test_best_first_is_the_best_tree(method: str) -> None:
    """Against all paths of the positions' best tokens, sorted."""
    target, top_k, nodes = shared_target(), 6, 30
    heads = random_heads(target, method, kind="dynamic", depth=3, top_k=top_k, total_tokens=nodes).bind(target)
    ids = torch.cat([prompt(9, seed=1), prompt(9, seed=2)])
    asked = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([asked[layer] for layer in heads.feature_layers], dim=-1)[:, :8]
    cache = heads.new_draft_cache()
    tree = grow_tree(heads, cache, heads.tree_config, ids, features, 3)
    chain = heads.with_tree(kind="chain", depth=3)
    state, logits = chain.start_draft(cache := heads.new_draft_cache(), ids, features)
    positions = [logits]
    for position in range(1, 3):
        positions.append(chain.extend_draft(cache, position, ids[:, :1], state, None)[1])
    for sequence in range(2):
        best = [torch.log_softmax(p[sequence, 0], -1).topk(top_k) for p in positions]
        every = [
            (sum(float(best[i].values[r]) for i, r in enumerate(ranks)), tuple(int(best[i].indices[r])
             for i, r in enumerate(ranks)))
            for length in (1, 2, 3) for ranks in itertools.product(range(top_k), repeat=length)
        ]  # fmt: skip
        expected = {path for _, path in sorted(every, reverse=True)[: nodes - 1]}
        found: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token_ids[sequence, 1:], tree.parents[sequence, 1:], strict=True):
            found.append((*found[parent], int(token)))
        assert set(found[1:]) == expected


def test_one_forward_a_round() -> None:
    target, ids = shared_target(), prompt()
    heads = random_heads(target, "dflash", DraftTreeConfig(kind="chain", depth=4))
    heads.adaptive = False
    forwards: list[None] = []
    heads.register_forward_hook(lambda *args: forwards.append(None))
    plain(target, ids, 12, assistant_model=heads)
    stats = heads.last_stats
    assert len(forwards) == stats.draft_forwards == stats.rounds - (stats.num_accepted[0][-1] == 0)


def test_taps_of_targets() -> None:
    """The authors' rule, in indices of `hidden_states`; none is past the last layer but one of a shallow target."""
    assert spread_layers(36, 5) == (2, 10, 18, 26, 34)
    assert spread_layers(6, 2) == (2, 4) and spread_layers(9, 1) == (5,)
    for depth in range(1, 8):
        assert 0 <= min(spread_layers(depth, 5)) <= max(spread_layers(depth, 5)) <= max(depth - 1, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"anchor_slot": "both"}, "anchor_slot.*idle.*both"),
        ({"block_size": 1}, "block_size.*between 2"),
        ({"mask_token_id": 99}, "mask_token_id.*0 to 98"),
        ({"sliding_layers": (5,), "sliding_window": 4}, "sliding_layers.*0 to 4.*5"),
        ({"sliding_layers": (0,)}, "sliding_window"),
        ({"hidden_size": 24}, "hidden_size.*24.*feature_size"),
        ({"feature_layers": (2, 2)}, "different indices"),
    ],
)
def test_impossible_configs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoDraftHead.from_target(shared_target(), "dflash", **options)


def test_logits_are_scaled_and_capped() -> None:
    heads = heads_of("both ways", logit_multiplier=2.0, logit_softcap=3.0)
    hidden = torch.randn(4, heads.config.hidden_size)
    logits = deep_target().lm_head(hidden)
    torch.testing.assert_close(heads.draft_logits(hidden), 3 * torch.tanh(2 * logits / 3))


# ---------------------------------------------------------------------- files
def load(tmp_path: Any, config: dict[str, Any], tensors: dict | None = None, **arguments: Any) -> DraftHead:
    files = {"config.json": config, "model.safetensors": tensors or dflash_tensors()}
    return load_heads(LAYOUTS["dflash"].write(tmp_path, files), **arguments)


ZLAB = QWEN3_CONFIG | {"block_size": 4, "dflash_config": DFLASH}


def test_ids_count_outputs_of_layers(tmp_path: Any) -> None:
    assert load(tmp_path, ZLAB).feature_layers == (2, 5)
    taps = ZLAB | {"dflash_config": DFLASH | {"target_layer_ids": [-1, 7]}}
    assert load(tmp_path, taps).feature_layers == (0, 8)  # the embedding, and what is after the final norm


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"block_size": 5, "dflash_config": DFLASH | {"block_size": 4}}, {}, "block_size=5, but.*4"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, {}, "mask_token_id=None"),
        (
            {"dflash_config": {"mask_token_id": 9}, "num_target_layers": None},
            {},
            "target_layer_ids.*num_target",
        ),
        ({"dflash_config": DFLASH | {"target_layer_ids": [1]}}, {}, "names 1 hidden states, but fc.weight reads 2"),
        ({"dflash_config": DFLASH | {"projector_type": "other"}}, {}, "projector_type='other'"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False, "sliding_window": 4}, {}, "sliding"),
        ({"layer_types": ["linear_attention"] * 2}, {}, "layer_types"),
        ({"target_hidden_size": 64}, {}, "32 wide and the target is 64 wide"),
        ({}, {"anchor_slot": "first"}, "anchor_slot.*idle.*first"),
        ({"architectures": ["Qwen3DSparkModel"]}, {"anchor_slot": "idle"}, "slot of the root is 'drafts'"),
    ],
)
def test_contradictions_are_refused(tmp_path: Any, changes: dict, arguments: dict, words: str) -> None:
    with pytest.raises(HeadLoadError, match=words):
        load(tmp_path, ZLAB | changes, **arguments)


def test_what_no_file_settles_is_an_argument(tmp_path: Any, capfd: Any) -> None:
    assert load(tmp_path, ZLAB).max_draft_positions == 3
    assert load(tmp_path, ZLAB, anchor_slot="drafts").max_draft_positions == 4
    assert load(tmp_path, ZLAB | {"architectures": ["Qwen3DSparkModel"]}).config.anchor_slot == "drafts"
    with pytest.raises(HeadConfigError, match=r"anchor_slot.*eagle"):
        load_heads(LAYOUTS["eagle"].write(tmp_path / "eagle"), anchor_slot="idle")


def test_ropes_of_targets_are_not_in_force(tmp_path: Any) -> None:
    """The authors' trainers rotate whole heads, whatever the config has taken over of the target's."""
    rope = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2]}
    heads = load(tmp_path, ZLAB | {"rope_parameters": rope, "partial_rotary_factor": 0.25})
    assert heads.config.rope_parameters == {"rope_type": "default", "rope_theta": 20000.0}


def test_tensors_must_be_all_there(tmp_path: Any) -> None:
    tensors = dflash_tensors()
    del tensors["layers.1.self_attn.k_norm.weight"]
    with pytest.raises(CheckpointKeysError, match=r"missing \['layers.1.self_attn.k_norm.weight'\]"):
        load(tmp_path, ZLAB, tensors)
    with pytest.raises(CheckpointKeysError, match=r"unknown.*other"):
        load(tmp_path, ZLAB, dflash_tensors() | {"other.weight": torch.ones(3)})


def test_configs_know_their_scale() -> None:
    """Embeddings of targets that scale them reach the heads as they were trained to read them."""
    target = shared_target("gemma3")
    heads = random_heads(target, "dflash").bind(target)
    theirs = float(target.get_input_embeddings().scalar_embed_scale)
    assert heads.config.embedding_scale == theirs != 1
    embedded = target.get_input_embeddings()(torch.tensor([[5]]))
    assert torch.equal(heads.scaled(embedded), embedded)
    heads.config.embedding_scale = 1.0
    torch.testing.assert_close(heads.bind(target).scaled(embedded), embedded / theirs)
    assert isinstance(heads.config, DFlashHeadConfig)
