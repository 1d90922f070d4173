"""EAGLE-3 heads and POSS on their backbone: what they compute, how they are trained, whose vocabulary they speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.targets import own_target, plain, prompt, shared_target

from hf_specheads import AutoDraftHead, Eagle3Head, PossEagle3Head, WrongTargetError, load_heads
from hf_specheads.errors import CheckpointKeysError, CheckpointValueError, WarmStartError
from hf_specheads.heads.eagle3 import default_feature_layers
from hf_specheads.trainer import unroll_losses

VARIANTS = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"hidden_size": 24, "own_embedding": True},
    {"draft_token_ids": list(range(5, 90, 2)), "feature_layers": (0, -1)},
]
TREES = [
    {"kind": "dynamic", "depth": 4, "top_k": 3, "total_tokens": 12},
    {"kind": "chain", "depth": 3},
    {"kind": "static", "choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
]
SPECIALISTS = {"num_specialists": 2, "positions_per_specialist": 2}
VOCABULARY = torch.tensor([t for t in range(99) if t % 5])  # 79 of 99


def make_heads(target: Any, method: str = "eagle3", seed: int = 3, **options: Any) -> Eagle3Head:
    """Heads whose every weight matters, norms included."""
    if method == "poss-eagle3":
        options = SPECIALISTS | options
    torch.manual_seed(seed)
    heads = AutoDraftHead.from_target(target, method, **options).eval()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads.bind(target)


@pytest.fixture
def deep() -> Any:
    """Eight layers, so that the usual three levels exist."""
    return shared_target("llama", num_hidden_layers=8)


# ---------------------------------------------------------------------- what the heads compute
def rms(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotated(values: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Rope of [heads, rows, width], half by half, base 10000."""
    half = values.shape[-1] // 2
    angles = torch.tensor(positions)[:, None] / 10000.0 ** (torch.arange(half) / half)
    first, second = values[..., :half], values[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def naive_state(heads: Eagle3Head, embeddings: torch.Tensor, inputs: torch.Tensor, specialist: int) -> torch.Tensor:
    """State after the last row of one causal sequence of rows, written out from the paper's equations."""
    config, layer = heads.config, heads.layers[specialist]
    normed = rms(inputs, layer.hidden_norm.weight)
    wide = torch.cat([rms(embeddings, layer.input_layernorm.weight), normed], -1)
    attention, rows, width = layer.self_attn, len(wide), config.head_dim
    query, key, value = (
        (wide @ projection.weight.T).view(rows, -1, width).transpose(0, 1)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = rotated(query, list(range(rows))), rotated(key, list(range(rows)))
    groups = config.num_attention_heads // config.num_key_value_heads
    outputs = []
    for head in range(config.num_attention_heads):
        scores = query[head, -1] @ key[head // groups].T / width**0.5
        outputs.append(scores.softmax(-1) @ value[head // groups])
    residual = normed[-1] if config.norm_before_residual else inputs[-1]
    a = residual + torch.cat(outputs) @ attention.o_proj.weight.T
    middle = rms(a, layer.post_attention_layernorm.weight)
    mlp = layer.mlp
    gated = torch.nn.functional.silu(middle @ mlp.gate_proj.weight.T) * (middle @ mlp.up_proj.weight.T)
    g = a + gated @ mlp.down_proj.weight.T
    return rms(g, heads.norm.weight) if config.norm_output else g


def naive_inputs(heads: Eagle3Head, features: torch.Tensor) -> torch.Tensor:
    """fc of the levels, with the norms the config asks for."""
    levels = features.split(32, dim=-1)
    if heads.config.norm_before_fc:
        features = rms(features, heads.input_norm.weight)
    if heads.config.fc_norm:
        features = torch.cat([rms(x, norm.weight) for x, norm in zip(levels, heads.fc_norm, strict=True)], -1)
    return features @ heads.fc.weight.T


def drafted_chain(heads: Eagle3Head, tokens: torch.Tensor, features: torch.Tensor, root: int, depth: int):
    """States and logits of drafting the given tokens one by one, after `root` + 1 committed rows."""
    heads.tree_config = heads.tree_config.replace(kind="chain", depth=depth)
    cache = heads.new_draft_cache()
    unknown_first = torch.nn.functional.pad(tokens[:, : root + 1], (1, 0))
    found = [heads.start_draft(cache, unknown_first, features[:, : root + 1])]
    for position in range(1, depth):
        visible = torch.ones(1, 1, position, dtype=torch.bool)
        token = tokens[:, root + position : root + position + 1]
        found.append(heads.extend_draft(cache, position, token, found[-1][0], visible))
    return found


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle3", "poss-eagle3"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_drafting_is_the_papers_equations(deep, method: str, options: dict) -> None:
    heads = make_heads(deep, method, **options, rope_theta=10000.0)
    tokens = torch.randint(3, 99, (1, 9))
    features = torch.randn(1, 6, 32 * heads.config.num_levels)
    embedding = deep.get_input_embeddings() if heads.embed_tokens is None else heads.embed_tokens
    rows = naive_inputs(heads, features[0])
    for position, (state, logits) in enumerate(drafted_chain(heads, tokens, features, root=5, depth=4)):
        specialist = 0 if method == "eagle3" else position // 2
        expected = naive_state(heads, embedding(tokens[0, : len(rows)]), rows, specialist)
        torch.testing.assert_close(state[0, 0], expected, rtol=1e-4, atol=1e-4)
        normed = expected if heads.config.norm_output else rms(expected, heads.norm.weight)
        torch.testing.assert_close(logits[0, 0], normed @ heads.lm_head.weight.T, rtol=1e-4, atol=1e-4)
        rows = torch.cat([rows, expected[None]])  # fed back as it is, without fc


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle3", "poss-eagle3"])
@pytest.mark.parametrize("root", [0, 3])
def test_training_rows_equal_step_by_step_drafting(deep, method: str, root: int) -> None:
    """Row `root` of pass i is draft position i of the round with that root."""
    heads = make_heads(deep, method)
    rows = random_rows(batch=1)
    passes = list(unrolled(heads, deep, rows, 5))
    chain = drafted_chain(heads, rows["next_token_ids"], rows["features"], root, 5)
    for position, (state, logits) in enumerate(chain):
        assert passes[position].offset == position and passes[position].features is None
        trained = passes[position].hidden[:, root : root + 1]
        torch.testing.assert_close(state, trained, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, passes[position].logits(trained), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- training
def random_rows(batch: int = 2, rows: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "features": torch.randn(batch, rows, 96, generator=generator),
        "next_token_ids": torch.randint(3, 99, (batch, rows), generator=generator),
        "target_features": torch.randn(batch, rows, 32, generator=generator),
        "loss_mask": torch.randint(0, 2, (batch, rows), generator=generator),
        "attention_mask": torch.ones(batch, rows, dtype=torch.long),
    }


def of_target(target: Any) -> dict[str, Any]:
    return {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}


def unrolled(heads: Eagle3Head, target: Any, rows: dict[str, torch.Tensor], passes: int):
    from hf_specheads.target.borrowed import as_embedding, as_lm_head
    from hf_specheads.unroll.rows import TrainingRows, row_positions

    documents = torch.zeros_like(rows["next_token_ids"])
    return heads.unroll(
        TrainingRows(
            features=rows["features"],
            token_ids=None,
            next_token_ids=rows["next_token_ids"],
            documents=documents,
            position_ids=row_positions(documents),
            embed=as_embedding(target.get_input_embeddings()),
            lm_head=as_lm_head(target.get_output_embeddings()),
        ),
        passes,
    )


def losses_of(heads: Eagle3Head, target: Any, rows: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    passes = unroll_losses(heads, **rows, **of_target(target), num_passes=4, losses=("token",), **options)
    return torch.stack([losses.token_loss for losses in passes])


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle3", "poss-eagle3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(deep, method: str, side: str) -> None:
    heads, rows = make_heads(deep, method), random_rows(batch=1)
    alone = losses_of(heads, deep, rows)
    amounts = (3, 0) if side == "left" else (0, 3)
    padded = {
        name: torch.nn.functional.pad(value, (0, 0, *amounts) if value.dim() == 3 else amounts)
        for name, value in rows.items()
    }
    padded["features"] = padded["features"] + 100 * (padded["attention_mask"] == 0)[..., None]
    torch.testing.assert_close(losses_of(heads, deep, padded), alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle3", "poss-eagle3"])
def test_packed_documents_equal_separate_rows(deep, method: str) -> None:
    heads, rows = make_heads(deep, method, draft_token_ids=VOCABULARY), random_rows()
    packed = {name: value.reshape(1, 18, *value.shape[2:]) for name, value in rows.items()}
    documents = torch.tensor([[0] * 9 + [1] * 9])
    together = losses_of(heads, deep, packed, document_ids=documents)
    torch.testing.assert_close(together, losses_of(heads, deep, rows), rtol=1e-4, atol=1e-5)


def gradients(heads: Eagle3Head, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    heads.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}


def test_gradients_flow_from_pass_to_pass() -> None:
    """The second pass teaches the first specialist, whose state it reads; detached states would not."""
    target = own_target("llama", num_hidden_layers=8).requires_grad_(False)
    heads = make_heads(target, "poss-eagle3", positions_per_specialist=1)
    assert not heads.passes_are_detached
    found = gradients(heads, losses_of(heads, target, random_rows())[1])
    assert found["layers.0.mlp.down_proj.weight"].abs().max() > 0
    assert found["layers.1.mlp.down_proj.weight"].abs().max() > 0


def test_gradient_checkpointing_changes_nothing() -> None:
    target = own_target("llama", num_hidden_layers=8).requires_grad_(False)
    heads = make_heads(target, "poss-eagle3").train()
    expected = gradients(heads, losses_of(heads, target, random_rows()).sum())
    heads.activation_checkpointing_enable()
    for name, gradient in gradients(heads, losses_of(heads, target, random_rows()).sum()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_an_own_embedding_is_trained() -> None:
    target = own_target("llama", num_hidden_layers=8).requires_grad_(False)
    heads = make_heads(target, hidden_size=24)
    assert heads.config.own_embedding and heads.embed_tokens.weight.shape == (99, 24)
    assert gradients(heads, losses_of(heads, target, random_rows()).sum())["embed_tokens.weight"].abs().max() > 0


def test_rows_outside_the_draft_vocabulary_teach_nothing(deep) -> None:
    """The authors leave out rows whose target's favourite cannot be drafted, but count them."""
    rows = random_rows()
    rows["loss_mask"] = torch.ones_like(rows["loss_mask"])
    favourites = deep.lm_head(rows["target_features"]).argmax(-1)
    heads = make_heads(deep, draft_token_ids=[t for t in range(99) if t not in set(favourites.flatten().tolist())])
    assert losses_of(heads, deep, rows).tolist() == [0, 0, 0, 0]
    one = int(favourites[0, 4])
    heads = make_heads(deep, draft_token_ids=[*range(5), one] if one >= 5 else range(5))
    losses = losses_of(heads, deep, rows)
    hidden = next(unrolled(heads, deep, rows, 1)).hidden
    chosen, total = heads.draft_vocabulary, 0.0
    for b, t in (favourites[..., None] == chosen).any(-1).nonzero().tolist():
        p = deep.lm_head(rows["target_features"][b, t])[chosen].softmax(-1)
        total -= float((p * heads.draft_logits(hidden[b, t]).log_softmax(-1)).sum().detach())
    assert float(losses[0].detach()) == pytest.approx(total / 18, rel=1e-4)


# ---------------------------------------------------------------------- generation
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["kind"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("eagle3", {}), ("eagle3", {"draft_token_ids": VOCABULARY, "norm_output": True}), ("poss-eagle3", {})],
    ids=["eagle3", "draft vocabulary", "poss-eagle3"],
)
def test_greedy_text_is_the_targets(deep, method: str, options: dict, tree: dict) -> None:
    heads = make_heads(deep, method, tree_config=tree, **options)
    heads.trace = True
    ids = prompt()
    assert torch.equal(plain(deep, ids, 24, assistant_model=heads), plain(deep, ids, 24))
    drafted = torch.cat([tree.token_ids[0, 1:] for tree in heads.last_stats.trees])
    if heads.draft_vocabulary is not None:
        assert set(drafted.tolist()) <= set(VOCABULARY.tolist()) and len(set(drafted.tolist())) > 10


def test_draft_ids_are_mapped_to_the_targets() -> None:
    """Heads whose second logit is the largest draft the second token of their vocabulary."""
    target = own_target("llama", num_hidden_layers=8)
    heads = make_heads(target, draft_token_ids=[50, 7, 98, 20], tree_config={"kind": "chain", "depth": 2})
    assert heads.draft_vocabulary.tolist() == [7, 20, 50, 98] and heads.d2t.tolist() == [7, 19, 48, 95]
    heads.draft_logits = lambda features: torch.tensor([0.0, 3, 2, 1]).expand(*features.shape[:-1], 4)
    heads.trace = True
    ids = prompt()
    assert torch.equal(plain(target, ids, 8, assistant_model=heads), plain(target, ids, 8))
    assert {tuple(tree.token_ids[0, 1:].tolist()) for tree in heads.last_stats.trees} == {(20, 20), (20,), ()}


def test_sampling_with_children_of_a_draft_vocabulary(deep) -> None:
    tree = {"kind": "chain", "depth": 3, "children": "sampled"}
    heads = make_heads(deep, draft_token_ids=VOCABULARY, tree_config=tree)
    ids = prompt()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": 20, "temperature": 0.5}
    torch.manual_seed(0)
    assert deep.generate(ids, assistant_model=heads, **options).shape == (1, 39)


@pytest.mark.parametrize("levels", [None, (0, 8, 3)], ids=["usual", "with the last"])
def test_chunked_prefill_changes_nothing(deep, levels: tuple | None) -> None:
    heads = make_heads(deep, "poss-eagle3", **({} if levels is None else {"feature_layers": levels}))
    ids = prompt(23)
    whole = plain(deep, ids, 16, assistant_model=heads)
    accepted = heads.last_stats.num_accepted
    assert torch.equal(plain(deep, ids, 16, assistant_model=heads, prefill_chunk_size=7), whole)
    assert heads.last_stats.num_accepted == accepted


def test_adapted_target() -> None:
    """peft's adapters change the hidden states that are asked for one by one."""
    base, ids = own_target("llama", num_hidden_layers=8), prompt()
    heads = make_heads(base)
    target = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = plain(target, ids, 12)
    assert torch.equal(plain(target, ids, 12, assistant_model=heads), expected)
    assert heads.last_stats.rounds > 0


def test_left_padding_and_transformers_loop(deep) -> None:
    heads = make_heads(deep, tree_config=TREES[1])
    ids = prompt(12)
    expected = plain(deep, ids, 20)
    heads.loop = "transformers"
    assert torch.equal(plain(deep, ids, 20, assistant_model=heads), expected)
    heads.loop = "own"
    padded = torch.nn.functional.pad(ids, (4, 0))
    mask = (torch.arange(16) >= 4).long()[None]
    out = deep.generate(padded, attention_mask=mask, assistant_model=heads, do_sample=False, max_new_tokens=20)
    assert torch.equal(out[:, 4:], expected)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3"])
def test_chunked_prefill_of_other_families(family: str) -> None:
    """Chunks are read off the decoder's own layers, whatever it calls them."""
    target, ids = shared_target(family), prompt()
    heads = make_heads(target, feature_layers=(0, 1, -1), tree_config=TREES[1])
    whole = plain(target, ids, 8, assistant_model=heads)
    accepted = heads.last_stats.num_accepted
    assert torch.equal(plain(target, ids, 8, assistant_model=heads, prefill_chunk_size=7), whole)
    assert heads.last_stats.num_accepted == accepted and torch.equal(whole, plain(target, ids, 8))


# ---------------------------------------------------------------------- sizes, files, warm starts
def test_fresh_heads_start_from_the_targets_lm_head(deep) -> None:
    heads = AutoDraftHead.from_target(deep, "eagle3", draft_token_ids=VOCABULARY)
    assert torch.equal(heads.lm_head.weight, deep.lm_head.weight[VOCABULARY])
    assert heads.feature_layers == (2, 4, 5) and heads.config.draft_vocab_size == 79
    own = AutoDraftHead.from_target(deep, "eagle3", own_embedding=True)
    assert torch.equal(own.embed_tokens.weight, deep.get_input_embeddings().weight)
    assert own.draft_vocabulary is None


def test_usual_levels() -> None:
    assert [default_feature_layers(n) for n in (32, 8, 7)] == [(2, 16, 29), (2, 4, 5), (2, 3, 4)]
    assert [default_feature_layers(n) for n in range(1, 7)] == [None] * 6


@pytest.mark.parametrize("method", ["eagle3", "poss-eagle3"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_saved_heads_come_back_as_they_were(deep, tmp_path: Path, method: str, dtype: torch.dtype | None) -> None:
    heads = make_heads(deep, method, draft_token_ids=VOCABULARY, fc_norm=True)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path, dtype=dtype)
    assert type(again) is (Eagle3Head if method == "eagle3" else PossEagle3Head)
    assert again.config.feature_layers == (2, 4, 5) and again.dtype == (dtype or torch.float32)
    for key, tensor in heads.state_dict().items():
        expected = tensor if not tensor.is_floating_point() or dtype is None else tensor.to(dtype)
        assert again.state_dict()[key].dtype == expected.dtype and torch.equal(again.state_dict()[key], expected), key
    again.check_target(deep)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: t["t2d"].logical_not_(), CheckpointValueError, "`t2d` marks 20 tokens, and `d2t` has 79"),
        (lambda t: t["d2t"].__setitem__(3, 95), CheckpointValueError, "must be ascending"),
        (lambda t: t["d2t"].__setitem__(78, 60), CheckpointValueError, "token id 138"),
        (lambda t: t.__setitem__("t2d", t["t2d"].roll(1)), CheckpointValueError, "disagree about which tokens"),
        (lambda t: t.__setitem__("d2t", t["d2t"].float()), CheckpointValueError, "expected torch.int64"),
        (lambda t: t.pop("t2d"), CheckpointKeysError, "missing.*t2d"),
    ],
)
def test_damaged_draft_vocabularies_are_refused(deep, tmp_path: Path, change, error: type, words: str) -> None:
    make_heads(deep, draft_token_ids=VOCABULARY).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=words):
        load_heads(tmp_path)


@torch.no_grad()
def test_specialists_start_from_eagle3(deep) -> None:
    eagle3 = make_heads(deep, draft_token_ids=VOCABULARY, norm_before_residual=True, hidden_size=24)
    poss = AutoDraftHead.from_target(deep, "poss-eagle3", from_heads=eagle3, **SPECIALISTS).eval().bind(deep)
    assert poss.config.method == "poss-eagle3" and torch.equal(poss.d2t, eagle3.d2t)
    tokens, features = torch.randint(3, 99, (1, 9)), torch.randn(1, 6, 96)
    pairs = zip(*(drafted_chain(heads, tokens, features, 5, 4) for heads in (eagle3, poss)), strict=True)
    for (_, ours), (_, theirs) in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    more = AutoDraftHead.from_target(deep, "poss-eagle3", from_heads=poss, num_specialists=3)
    assert torch.equal(more.layers[2].mlp.up_proj.weight, poss.layers[1].mlp.up_proj.weight)


def test_warm_starts_that_do_not_fit_are_refused(deep) -> None:
    eagle3 = make_heads(deep, draft_token_ids=VOCABULARY)
    with pytest.raises(WarmStartError, match=r"EAGLE-3 heads.*got EagleHead"):
        AutoDraftHead.from_target(deep, "eagle3", from_heads=AutoDraftHead.from_target(deep, "eagle"))
    with pytest.raises(WarmStartError, match="differ from the draft vocabulary of `from_heads`"):
        AutoDraftHead.from_target(deep, "eagle3", from_heads=eagle3, draft_token_ids=range(79))
    with pytest.raises(WarmStartError, match="do not fit"):
        AutoDraftHead.from_target(deep, "eagle3", from_heads=eagle3, draft_vocab_size=99)
    same = AutoDraftHead.from_target(deep, "eagle3", from_heads=eagle3, draft_token_ids=VOCABULARY)
    assert torch.equal(same.lm_head.weight, eagle3.lm_head.weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"feature_layers": ()}, "`feature_layers`"),
        ({"feature_layers": (2, 2, 5)}, "`feature_layers` must be different"),
        ({"feature_layers": (2, -2)}, "or -1 for the last"),
        ({"draft_vocab_size": 40}, "pass `draft_token_ids`"),
        ({"draft_vocab_size": 40, "draft_token_ids": [1, 2]}, "draft over 40 tokens, got 2"),
        ({"draft_token_ids": [1, 1, 2]}, "must be ascending"),
        ({"draft_token_ids": [1, 99]}, "token id 99"),
        ({"draft_vocab_size": 100, "draft_token_ids": [1]}, "between 1 and `vocab_size`"),
        ({"fc_norm": True, "norm_before_fc": True}, "set only one of them"),
        ({"num_specialists": 2}, "poss-eagle3"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(deep, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoDraftHead.from_target(deep, "eagle3", **options)


def test_shallow_targets_need_their_levels_named() -> None:
    shallow = shared_target("llama")
    with pytest.raises(ValueError, match=r"at least 7 layers, but this one has 2; choose others"):
        AutoDraftHead.from_target(shallow, "eagle3")
    heads = make_heads(shallow, feature_layers=(0, 1, -1))
    ids = prompt()
    assert torch.equal(plain(shallow, ids, 20, assistant_model=heads), plain(shallow, ids, 20))


def test_targets_of_other_depth_are_refused(deep) -> None:
    heads = AutoDraftHead.from_target(deep, "eagle3")
    heads.config.target = None
    with pytest.raises(WrongTargetError, match=r"hidden states \[2, 4, 5\].*2 layers"):
        plain(shared_target("llama"), prompt(), 4, assistant_model=heads)
    heads.config.feature_layers = None
    with pytest.raises(RuntimeError, match="bind"):
        _ = heads.feature_layers
    with pytest.raises(WrongTargetError, match=r"ascending.*2 layers"):
        plain(shared_target("llama"), prompt(), 4, assistant_model=heads)
    assert heads.bind(deep).feature_layers == (2, 4, 5)


def test_passes() -> None:
    target = shared_target("llama", num_hidden_layers=8)
    assert AutoDraftHead.from_target(target, "eagle3").default_passes == 7
    heads = AutoDraftHead.from_target(target, "poss-eagle3", num_specialists=3, positions_per_specialist=2)
    assert heads.default_passes == 6
    assert "at least 5" in heads.passes_problem(4) and heads.passes_problem(5) is None
