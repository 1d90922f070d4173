"""Heads of every family pruned to some tokens: the text stays the target's, drafts hold no other tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.distributions import chi_square, critical_value, five_token_target, sample, target_distribution
from support.heads import LEVELS, METHODS_BY_KIND, OPTIONS, random_heads
from support.targets import VOCAB, own_target, plain, prompt, shared_target
from support.trees import TREES
from transformers import set_seed

from hf_specheads import AutoDraftHead, load_heads
from hf_specheads.errors import CheckpointValueError, HeadLoadError, WrongTargetError
from hf_specheads.heads import DraftLanguageModel
from hf_specheads.heads.auto import METHODS
from hf_specheads.target.projection import has_plain_weight, projection_rows

NEW = 12
KEPT = torch.arange(3, VOCAB, 3)  # a third of the vocabulary


def pruned_heads(target, method: str, kind: str = "chain"):
    return random_heads(target, method, TREES[kind]).prune_draft_vocabulary(KEPT)


# ---------------------------------------------------------------------- exactness
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_the_targets(method, kind):
    target, ids = shared_target(), prompt()
    heads = pruned_heads(target, method, kind)
    heads.trace = True
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    drafted = torch.cat([tree.token_ids[0, 1:] for tree in heads.last_stats.trees])
    assert len(drafted) and set(drafted.tolist()) <= set(KEPT.tolist())


@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_sampled_text_with_a_seed_is_the_targets(method):
    target, ids = shared_target(), prompt()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    set_seed(11)
    expected = target.generate(ids, **options)
    heads = pruned_heads(target, method, "dynamic")
    set_seed(11)
    assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)


TREES_OF_DRAWN = {
    "chain": {"kind": "chain", "depth": 2},
    "tree": {"kind": "static", "choices": ((0,), (1,), (0, 0), (0, 1), (1, 0))},
}


# By default chains are drawn of whole vocabularies, in claims/test_sampling_matrix.py.
@pytest.mark.parametrize("tree", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_sampled_children_follow_the_target(tree):
    """Drawn from three of five tokens; the other two are emitted as often as the target says."""
    target, samples = five_token_target(), 150
    heads = random_heads(target, children="sampled", **TREES_OF_DRAWN[tree]).prune_draft_vocabulary([0, 3, 4])
    expected = target_distribution(target, {}, 3)
    counts = Counter(tuple(sample(target, heads).tolist()) for _ in range(samples))
    statistic, freedom = chi_square(counts, expected, samples)
    assert statistic < critical_value(freedom)


# ---------------------------------------------------------------------- logits
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_rows_of_the_whole_ones(method):
    """Of the first two draft positions, after pruning before and after the heads know their target, and back."""
    target = shared_target()
    heads = random_heads(target, method, TREES["chain"]).bind(target)
    if method == "dflash2":  # drafts among its best candidates only, here all of them
        heads.config.selector_top_k = heads.config.vocab_size
    whole = two_positions(heads)
    heads.prune_draft_vocabulary(KEPT)
    for pruned, full in zip(two_positions(heads), whole, strict=True):
        torch.testing.assert_close(pruned, full[..., KEPT])
    assert two_positions(heads.prune_draft_vocabulary(None))[0].equal(whole[0])
    again = random_heads(target, method, TREES["chain"]).prune_draft_vocabulary(KEPT.flip(0)).bind(target)
    again.config.__dict__.update({"selector_top_k": heads.config.selector_top_k} if method == "dflash2" else {})
    torch.testing.assert_close(two_positions(again)[1], whole[1][..., KEPT])


@torch.no_grad()
def two_positions(heads):
    generator = torch.Generator().manual_seed(4)
    width = heads.config.feature_size * max(len(heads.feature_layers), 1)
    features = torch.randn(1, 5, width, generator=generator) if heads.feature_layers else None
    cache = heads.new_draft_cache()
    states, first = heads.start_draft(cache, prompt(6), features)
    visible = torch.ones(1, 1, 1, dtype=torch.bool)
    return first, heads.extend_draft(cache, 1, torch.tensor([[9]]), states, visible)[1]


@pytest.mark.parametrize("lm_head", ["own", "target"])
@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_projections_of_their_own(method, lm_head):
    target, ids = shared_target("phi"), prompt()  # its `lm_head` has a bias
    torch.manual_seed(0)
    heads = AutoDraftHead.from_target(target, method, num_heads=2, lm_head=lm_head).eval().bind(target)
    whole = two_positions(heads)
    heads.prune_draft_vocabulary(KEPT)
    torch.testing.assert_close(two_positions(heads)[1], whole[1][..., KEPT])
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))


class Doubled(torch.nn.Linear):
    """Stands for a quantised or adapted `lm_head`: its weight is not all there is to it."""

    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_module_that_is_more_than_its_weight(bias):
    module, hidden = Doubled(300, 20, bias=bias), torch.randn(3, 300)  # asked in more than one piece
    assert not has_plain_weight(module) and has_plain_weight(torch.nn.Linear(2, 2))
    rows = projection_rows(module, 300, torch.tensor([2, 5, 19]), hidden)
    torch.testing.assert_close(rows(hidden), module(hidden)[:, [2, 5, 19]])
    assert (rows.bias is not None) == bias and rows.weight.is_contiguous()


def test_rows_follow_the_weights():
    """Copies are made anew for another target, for changed weights and another type, and not otherwise."""
    target = own_target()
    heads = random_heads(target, kind="chain").prune_draft_vocabulary(KEPT).bind(target)
    rows = heads._binding.copied["rows"]
    assert (
        heads.bind(target)._binding.copied["rows"] is rows and heads.with_tree(depth=2)._binding.copied["rows"] is rows
    )
    with torch.no_grad():
        target.lm_head.weight.mul_(2)
    features = torch.randn(1, 1, heads.config.feature_size)
    expected = target.lm_head(features)[..., KEPT]
    torch.testing.assert_close(heads.bind(target).draft_logits(features), expected)
    target.to(torch.float64)
    assert heads.bind(target)._binding.copied["rows"][0].weight.dtype == torch.float64
    heads.config.target = None
    other = own_target(seed=5)
    torch.testing.assert_close(heads.bind(other).draft_logits(features), other.lm_head(features)[..., KEPT])


# ---------------------------------------------------------------------- draft vocabularies of the training
def test_only_trained_tokens_are_left():
    target, ids = shared_target(), prompt()
    trained = torch.arange(10, 60)
    heads = AutoDraftHead.from_target(target, "eagle3", draft_token_ids=trained, **LEVELS).eval().bind(target)
    whole = two_positions(heads)[1]
    heads.prune_draft_vocabulary(KEPT)
    left = [token for token in KEPT.tolist() if 10 <= token < 60]
    assert heads.draft_vocabulary.tolist() == left and heads.config.pruned_vocab_size == len(left)
    torch.testing.assert_close(two_positions(heads)[1], whole[..., torch.tensor(left) - 10])
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    with pytest.raises(ValueError, match="none of the 2 `token_ids` is among the 50 tokens"):
        heads.prune_draft_vocabulary([3, 70])


@pytest.mark.parametrize("ours", [201, 199])
def test_draft_models_with_a_padded_vocabulary(ours):
    target, ids = shared_target(vocab_size=200), prompt()
    heads = DraftLanguageModel.from_model(own_target(vocab_size=ours, seed=1), tree_config=TREES["chain"].to_dict())
    kept = [5, 100, 198]
    assert torch.equal(
        plain(target, ids, 8, assistant_model=heads.prune_draft_vocabulary(kept)), plain(target, ids, 8)
    )
    drawn = heads.with_tree(children="sampled")
    for some in (kept, None):
        heads.prune_draft_vocabulary(some)
        mask = torch.ones_like(ids)
        text = target.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=True, assistant_model=drawn)
        assert text.shape[1] == ids.shape[1] + 8
    if ours > 200:
        other = DraftLanguageModel.from_model(own_target(vocab_size=ours)).prune_draft_vocabulary([5, 200])
        with pytest.raises(WrongTargetError, match=r"cannot draft for this target, e.g. 200"):
            other.bind(target)
        assert heads.prune_draft_vocabulary([5, 200]).draft_vocabulary.tolist() == [5]


def test_a_shared_draft_model_is_left_alone():
    """Pruning acts on the drafts, not on the model the heads wrap."""
    target, ids, model = shared_target(), prompt(), own_target(seed=1)
    expected = plain(model, ids, 8)
    heads = DraftLanguageModel.from_model(model, tree_config={"kind": "chain"}).prune_draft_vocabulary(KEPT)
    plain(target, ids, 8, assistant_model=heads)
    assert torch.equal(plain(model, ids, 8), expected)


# ---------------------------------------------------------------------- files
@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_round_trip(method, tmp_path):
    target, ids = shared_target(), prompt()
    heads = pruned_heads(target, method)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path)
    assert again.draft_vocabulary.tolist() == KEPT.tolist() and again.draft_vocabulary.dtype == torch.long
    for one in (heads, again):
        assert torch.equal(plain(target, ids, NEW, assistant_model=one), plain(target, ids, NEW))
    assert again.last_stats.num_accepted == heads.last_stats.num_accepted
    again.prune_draft_vocabulary(None).save_pretrained(tmp_path / "whole")
    if method != "lookup":  # which has no file of weights then
        assert "pruned_token_ids" not in load_file(tmp_path / "whole" / "model.safetensors")
    assert load_heads(tmp_path / "whole", dtype=torch.bfloat16).pruned_token_ids is None


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (torch.tensor([4, 3]), CheckpointValueError),
        (torch.tensor([3, VOCAB]), CheckpointValueError),
        (torch.tensor([3.0, 4.0]), CheckpointValueError),
        (torch.tensor([3, 4, 5]), HeadLoadError),
        (None, HeadLoadError),
    ],
    ids=["descending", "outside", "float", "too many", "missing"],
)
def test_damaged_files_are_refused(ids, error, tmp_path):
    target = shared_target()
    random_heads(target, "eagle", TREES["chain"]).prune_draft_vocabulary([3, 4]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["pruned_token_ids"]
    tensors |= {} if ids is None else {"pruned_token_ids": ids}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error):
        load_heads(tmp_path)


@pytest.mark.parametrize("token_ids", [[], [3, 3], [-1], [VOCAB]], ids=str)
def test_what_is_no_vocabulary_is_refused(token_ids):
    heads = random_heads(shared_target(), "eagle", TREES["chain"])
    with pytest.raises(ValueError, match="token id"):
        heads.prune_draft_vocabulary(token_ids)
    assert heads.draft_vocabulary is None


@pytest.mark.parametrize("method", ["eagle", "poss", "medusa", "eagle3", "draft-lm"])
def test_warm_starts_take_the_whole_vocabulary(method):
    target = shared_target()
    heads = AutoDraftHead.from_target(
        target, method, from_heads=pruned_heads(target, method), **(OPTIONS[method] if method == "eagle3" else {})
    )
    assert heads.draft_vocabulary is None and heads.config.pruned_vocab_size is None
