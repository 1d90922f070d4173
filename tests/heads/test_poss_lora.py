"""POSS with LoRA specialists: one layer, one adapter per specialist, switched by the draft position."""

import pytest
import torch
from support.targets import own_target, plain, prompt, shared_target

from hf_specheads import AutoDraftHead, DraftTreeConfig, PossHead, PossLoraHead, load_heads
from hf_specheads.errors import HeadConfigError, WarmStartError
from hf_specheads.heads.poss_lora import ADAPTED_MODULES, adapter_of
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments, Unroll, unroll_losses

SPECIALISTS = {"num_specialists": 3, "positions_per_specialist": 1, "specialist_rank": 4}
TREES = {
    "chain": {"kind": "chain", "depth": 5},
    "dynamic": {"kind": "dynamic", "depth": 5, "top_k": 4, "total_tokens": 20},
    "static": {"kind": "static", "choices": [[0], [1], [0, 0], [1, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]},
}


def lora_heads(target, *, adapted: bool = True, seed: int = 1, **options) -> PossLoraHead:
    """Heads whose weights are large enough that attention matters; `adapted`: with adapters that add something."""
    torch.manual_seed(seed)
    heads = AutoDraftHead.from_target(target, "poss-lora", **{**SPECIALISTS, **options})
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if parameter.dim() == 2 and ".lora_" not in name:
                parameter.mul_(8)
            elif adapted and ".lora_B." in name:
                parameter.normal_(std=0.3)
    return heads.eval()


def adapter(heads, specialist: int) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in heads.named_parameters() if f".{adapter_of(specialist)}." in name}


def random_rows(batch: int = 2, rows: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "features": torch.randn(batch, rows, 32, generator=generator),
        "next_token_ids": torch.randint(3, 99, (batch, rows), generator=generator),
        "target_features": torch.randn(batch, rows, 32, generator=generator),
        "loss_mask": torch.ones(batch, rows, dtype=torch.long),
        "attention_mask": None,
    }


def of_target(target) -> dict[str, torch.nn.Module]:
    return {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}


def drafted(heads, target, passes: int = 5) -> list[torch.Tensor]:
    """What every pass drafts at every row, [B, T, H] each."""
    with torch.no_grad():
        return [p.drafted for p in unroll_losses(heads, **random_rows(), **of_target(target), num_passes=passes)]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- size
@pytest.mark.parametrize(("specialists", "rank"), [(1, 4), (2, 4), (6, 2)])
def test_parameters_are_one_layer_and_the_adapters(target, specialists, rank):
    """An adapter of rank r has r (in + out) parameters for each of the seven projections."""
    heads = lora_heads(target, num_specialists=specialists, specialist_rank=rank)
    full = AutoDraftHead.from_target(target, "poss", num_specialists=specialists, positions_per_specialist=1)
    h, kv, middle = 32, 16, 37
    projections = [(h, h), (h, kv), (h, kv), (h, h), (h, middle), (h, middle), (middle, h)]
    assert len(projections) == len(ADAPTED_MODULES)
    layer = sum(a * b for a, b in projections) + h
    one_adapter = rank * sum(a + b for a, b in projections)
    fc = 2 * h * h + h
    count = sum(p.numel() for p in heads.parameters())
    assert count == fc + layer + (specialists - 1) * one_adapter
    assert sum(p.numel() for p in full.parameters()) == fc + specialists * layer
    # Memory follows, in any dtype.
    half = heads.to(torch.bfloat16)
    assert sum(p.numel() * p.element_size() for p in half.parameters()) == 2 * count


def test_everything_is_trained(target):
    assert all(p.requires_grad for p in lora_heads(target).parameters())


# ---------------------------------------------------------------------- which specialist
def test_fresh_adapters_add_nothing(target):
    """Every specialist is the layer alone, as in HASS heads of the same weights."""
    heads = lora_heads(target, adapted=False)
    hass = AutoDraftHead.from_target(target, "hass")
    hass.fc.load_state_dict(heads.fc.state_dict())
    hass.layers[0].load_state_dict(heads.specialist_state(0))
    for ours, theirs in zip(drafted(heads, target), drafted(hass, target), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("changed", [1, 2])
def test_an_adapter_changes_its_own_positions_only(target, changed):
    """Two positions per specialist: a changed adapter leaves all passes before its own as they were, and its own are
    those of a layer with other weights. Directly, only its own specialist changes."""
    heads = lora_heads(target, positions_per_specialist=2)
    before = drafted(heads, target, 6)
    fused, positions = torch.randn(1, 5, 32), torch.arange(5)[None]
    with torch.no_grad():
        each = [heads(fused, positions, specialist=s) for s in range(3)]
        for parameter in adapter(heads, changed).values():
            parameter.add_(0.1)
        for specialist, old in enumerate(each):
            assert same(heads(fused, positions, specialist=specialist), old) == (specialist != changed)
    first = 2 * changed
    for position, (new, old) in enumerate(zip(drafted(heads, target, 6), before, strict=True)):
        assert same(new, old) == (position < first)


def test_drafting_switches_by_position(target, monkeypatch):
    heads, ids = lora_heads(target, positions_per_specialist=2), prompt()
    calls = []
    become = type(heads.layers[0]).become
    monkeypatch.setattr(
        type(heads.layers[0]), "become", lambda self, specialist: calls.append(specialist) or become(self, specialist)
    )
    heads.bind(target)
    features = torch.randn(1, 4, 32)
    heads.tree_config = DraftTreeConfig(kind="chain", depth=8)
    cache = heads.new_draft_cache()
    state, _ = heads.start_draft(cache, ids[:, :5], features)
    assert calls == [0], "later specialists take in the committed rows with their first drafted ones"
    calls.clear()
    for position in range(1, 8):
        visible = torch.ones(1, 1, position, dtype=torch.bool)
        state, _ = heads.extend_draft(cache, position, ids[:, 5:6], state, visible)
    assert calls == [0, 1, 1, 2, 2, 2, 2]
    written = [int((layer.keys != 0).any(-1)[0, 0].sum()) for layer in cache.layers]
    assert written == [4 + 1, 4 + 3, 4 + 7]


@torch.no_grad()
@pytest.mark.parametrize("root", [0, 4])
def test_training_rows_equal_step_by_step_drafting(target, root):
    """Pass m at row root + m gives what drafting gives at draft position m."""
    depth, heads = 4, lora_heads(target)
    heads.tree_config = DraftTreeConfig(kind="chain", depth=depth)
    heads.bind(target)
    rows = random_rows()
    tokens, passes = rows["next_token_ids"][:1], [p[:1] for p in drafted(heads, target, depth)]
    cache = heads.new_draft_cache()
    unknown_first = torch.nn.functional.pad(tokens[:, : root + 1], (1, 0))
    state, logits = heads.start_draft(cache, unknown_first, rows["features"][:1, : root + 1])
    for m in range(depth):
        trained = passes[m][:, root + m : root + m + 1]
        torch.testing.assert_close(state, trained, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, heads.draft_logits(trained), rtol=1e-4, atol=1e-4)
        visible = torch.ones(1, 1, m + 1, dtype=torch.bool)
        state, logits = heads.extend_draft(cache, m + 1, tokens[:, root + m + 1 : root + m + 2], state, visible)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_the_text_is_the_targets(family, tree):
    target, ids = shared_target(family), prompt()
    heads = lora_heads(target).with_tree(**TREES[tree])
    assert torch.equal(plain(target, ids, 16, assistant_model=heads), plain(target, ids, 16))


# ---------------------------------------------------------------------- gradients
def gradients(heads, target, separate: bool) -> dict[str, torch.Tensor]:
    heads.zero_grad()
    unroll = Unroll(heads, **random_rows(), **of_target(target), num_passes=4, separate_backward=separate)
    if separate:
        for _ in range(4):
            unroll.next_pass().weighted().backward()
        unroll.finish_backward()
    else:
        sum(unroll.next_pass().weighted() for _ in range(4)).backward()
    return {name: p.grad.clone() for name, p in heads.named_parameters()}


def test_ways_of_training_agree(target):
    """One backward per pass, one for all, and recomputed activations: a summed backward reaches passes whose adapter
    is no longer the one in force, and must recompute them with theirs."""
    target.requires_grad_(False)
    heads = lora_heads(target).train()
    expected = gradients(heads, target, separate=True)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, f"no gradient reaches {name}"
    runs = [gradients(heads, target, separate=False)]
    heads.activation_checkpointing_enable()
    runs += [gradients(heads, target, separate=separate) for separate in (True, False)]
    for run in runs:
        for name, gradient in run.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_what_the_user_froze_stays_frozen(target):
    heads = lora_heads(target)
    for parameter in adapter(heads, 1).values():
        parameter.requires_grad_(False)
    drafted(heads, target)
    assert not any(p.requires_grad for p in adapter(heads, 1).values())
    assert all(p.requires_grad for p in adapter(heads, 2).values())


@pytest.mark.parametrize(
    "options", [{"backward": "summed", "activation_checkpointing": True}, {"bf16": True}], ids=["summed", "bf16"]
)
def test_training_moves_base_and_adapters_apart(target, tmp_path, options):
    from datasets import Dataset

    heads = lora_heads(target, adapted=False)
    start = {name: value.clone() for name, value in heads.state_dict().items()}
    args = DraftHeadTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", max_steps=6,
        per_device_train_batch_size=4, learning_rate=5e-3, logging_steps=2, max_length=32, eval_acceptance_prompts=0,
        **options,
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": prompt(14, seed=seed)[0].tolist()} for seed in range(8)])
    trainer = DraftHeadTrainer(model=heads, target=target, args=args, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for name, value in heads.state_dict().items():
        assert not torch.equal(value, start[name]), f"{name} was not trained"
    ours, theirs = (heads.specialist_state(specialist) for specialist in (1, 2))
    assert not torch.equal(ours["mlp.up_proj.weight"], theirs["mlp.up_proj.weight"])
    trainer.save_model(tmp_path / "heads")
    loaded = load_heads(tmp_path / "heads")
    assert loaded.config.trained_positions == 3 and loaded.default_passes == 3
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in loaded.state_dict().items())


# ---------------------------------------------------------------------- from and to other heads
def test_adapters_merge_into_full_specialists(target):
    heads = lora_heads(target).with_tree(kind="chain", depth=3)
    full = heads.to_poss()
    assert type(full) is PossHead and full.config.method == "poss" and full.config.num_specialists == 3
    assert full.config.target == heads.config.target and full.tree_config == heads.tree_config
    for ours, theirs in zip(drafted(heads, target), drafted(full, target), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    layers = [layer.state_dict()["self_attn.k_proj.weight"] for layer in full.layers]
    assert not same(layers[0], layers[1]) and not same(layers[1], layers[2])
    assert torch.equal(plain(target, prompt(), 12, assistant_model=full), plain(target, prompt(), 12))


def test_biased_projections(tmp_path):
    """Heads for Qwen2 targets: an adapter has no bias, the base keeps its own."""
    target = own_target("qwen2")
    heads = lora_heads(target, attention_bias=True)
    full = heads.to_poss()
    for ours, theirs in zip(drafted(heads, target), drafted(full, target), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_warm_starts(target):
    eagle = AutoDraftHead.from_target(target, "eagle", intermediate_size=40)
    heads = AutoDraftHead.from_target(target, "poss-lora", from_heads=eagle, **SPECIALISTS)
    assert heads.config.intermediate_size == 40
    for ours, theirs in zip(drafted(heads, target), drafted(eagle, target), strict=True):
        torch.testing.assert_close(ours, theirs)
    few = lora_heads(target, num_specialists=2)
    more = AutoDraftHead.from_target(
        target, "poss-lora", from_heads=few, num_specialists=4, positions_per_specialist=1
    )
    assert more.config.specialist_rank == 4
    for specialist in range(4):
        source = few.specialist_state(min(specialist, 1))
        for name, value in more.specialist_state(specialist).items():
            assert torch.equal(value, source[name])
    full = AutoDraftHead.from_target(target, "poss", from_heads=few, num_specialists=2, positions_per_specialist=1)
    for ours, theirs in zip(drafted(full, target), drafted(few, target), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_warm_starts_that_do_not_fit(target):
    poss = AutoDraftHead.from_target(target, "poss", num_specialists=2)
    with pytest.raises(WarmStartError, match="2 full specialists"):
        AutoDraftHead.from_target(target, "poss-lora", from_heads=poss)
    with pytest.raises(WarmStartError, match="lora_A"):
        AutoDraftHead.from_target(target, "poss-lora", from_heads=lora_heads(target), specialist_rank=8)


# ---------------------------------------------------------------------- files
def test_round_trip(target, tmp_path):
    heads = lora_heads(target, specialist_alpha=6)
    heads.save_pretrained(tmp_path)
    loaded = load_heads(tmp_path)
    assert type(loaded) is PossLoraHead and loaded.config.method == "poss-lora"
    assert (loaded.config.specialist_rank, loaded.config.specialist_alpha) == (4, 6)
    theirs = loaded.state_dict()
    assert theirs.keys() == heads.state_dict().keys()
    assert all(torch.equal(value, theirs[name]) for name, value in heads.state_dict().items())
    for mine, saved in zip(drafted(heads, target), drafted(loaded, target), strict=True):
        assert torch.equal(mine, saved)
    half = load_heads(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(plain(target, prompt(), 8, assistant_model=half), plain(target, prompt(), 8))


@pytest.mark.parametrize("options", [{"specialist_rank": 0}, {"specialist_alpha": -1}, {"specialist_rank": 33},
                                     {"num_specialists": 33}, {"num_specialists": 0}], ids=str)  # fmt: skip
def test_impossible_options(target, tmp_path, options):
    import json

    with pytest.raises(ValueError, match=next(iter(options))):
        AutoDraftHead.from_target(target, "poss-lora", **options)
    lora_heads(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | options))
    with pytest.raises(HeadConfigError):
        load_heads(tmp_path)
