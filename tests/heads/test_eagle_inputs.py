"""EAGLE's input ablation: what rows are made of, drafting against the unroll, and exactness of the text."""

import json

import pytest
import torch
from support.heads import random_heads
from support.targets import plain, prompt, shared_target

from hf_specheads import AutoDraftHead, DraftTreeConfig, EagleHeadConfig, load_heads
from hf_specheads.errors import WarmStartError
from hf_specheads.heads.eagle import INPUTS
from hf_specheads.trainer import Unroll, unroll_losses

DEPTH = 4
TREES = [
    {"depth": 4, "top_k": 3, "total_tokens": 12},
    {"kind": "chain", "depth": 3},
    {"kind": "static", "choices": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))},
]


def make(inputs, method="eagle", **options):
    """Heads whose weights are large enough that every input matters."""
    torch.manual_seed(1)
    target = shared_target()
    heads = AutoDraftHead.from_target(target, method, inputs=inputs, **options).eval().bind(target)
    with torch.no_grad():
        for parameter in heads.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return target, heads


def rows_of(length=9, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (batch, length + 1), generator=generator)
    return {
        "features": torch.randn(batch, length, 32, generator=generator),
        "token_ids": ids[:, :-1],
        "next_token_ids": ids[:, 1:],
        "target_features": torch.randn(batch, length, 32, generator=generator),
        "loss_mask": torch.ones(batch, length),
        "attention_mask": None,
    }


def unrolled(target, heads, rows, **options):
    modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
    return unroll_losses(heads, **rows, **modules, num_passes=DEPTH, **options)


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle", "poss"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_training_rows_equal_step_by_step_drafting(inputs, method):
    """In one go, and with the committed rows taken in over two rounds."""
    options = {} if method == "eagle" else {"num_specialists": 2, "positions_per_specialist": 2}
    target, heads = make(inputs, method, **options)
    heads.tree_config = DraftTreeConfig(kind="chain", depth=DEPTH)
    rows, root = rows_of(), 4
    passes = unrolled(target, heads, rows)
    tokens = torch.cat([rows["token_ids"], rows["next_token_ids"][:, -1:]], dim=1)  # [1, T + 1]
    cache = heads.new_draft_cache()
    heads.start_draft(cache, tokens[:, :3], rows["features"][:, :2])
    state, logits = heads.start_draft(cache, tokens[:, 2 : root + 2], rows["features"][:, 2 : root + 1])
    for m in range(DEPTH):
        trained = passes[m].drafted[:, root + m : root + m + 1]
        torch.testing.assert_close(state[..., -32:], trained, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, heads.draft_logits(trained), rtol=1e-4, atol=1e-4)
        if m + 1 < DEPTH:
            visible = torch.ones(1, 1, m + 1, dtype=torch.bool)
            node = tokens[:, root + m + 2 : root + m + 3]
            state, logits = heads.extend_draft(cache, m + 1, node, state, visible)


@torch.no_grad()
@pytest.mark.parametrize("inputs", INPUTS)
def test_logits_depend_on_what_rows_are_made_of(inputs):
    _, heads = make(inputs)
    tokens, features = rows_of()["token_ids"][:, :6], rows_of()["features"][:, :5]

    def drafted(tokens=tokens, features=features, node=7):
        cache = heads.new_draft_cache()
        state, first = heads.start_draft(cache, tokens, features)
        visible = torch.ones(1, 1, 1, dtype=torch.bool)
        state, second = heads.extend_draft(cache, 1, torch.tensor([[node]]), state, visible)
        third = heads.extend_draft(cache, 2, torch.tensor([[9]]), state, torch.ones(1, 1, 2, dtype=torch.bool))[1]
        return first, second, third

    def changed(**other):
        return [not torch.allclose(a, b, atol=1e-4) for a, b in zip(drafted(), drafted(**other), strict=True)]

    other_root, other_row = tokens.clone(), tokens.clone()
    other_root[:, -1] += 1
    other_row[:, 2] += 1
    wanted = {  # by the root's token, a committed token, the target's features, a node's token: positions 1, 2, 3
        "feature+shifted_token": ([True] * 3, [True] * 3, [True] * 3, [False, True, True]),
        "feature+token": ([False, True, True], [True] * 3, [True] * 3, [False, False, True]),
        "token": ([True] * 3, [True] * 3, [False] * 3, [False, True, True]),
        "feature": ([False] * 3, [False] * 3, [True] * 3, [False] * 3),
    }[inputs]
    assert changed(tokens=other_root) == wanted[0]
    assert changed(tokens=other_row) == wanted[1]
    assert changed(features=features + 1) == wanted[2]
    assert changed(node=8) == wanted[3]


@torch.no_grad()
def test_the_first_token_is_read_only_where_rows_read_their_own():
    for inputs in INPUTS:
        target, heads = make(inputs)
        rows = rows_of()
        other = rows | {"token_ids": rows["token_ids"].clone()}
        other["token_ids"][:, 0] += 1
        first, second = (unrolled(target, heads, each)[0].drafted for each in (rows, other))
        assert torch.equal(first, second) == (inputs != "feature+token")


def test_unroll_says_when_it_misses_the_tokens():
    target, heads = make("feature+token")
    with pytest.raises(ValueError, match="need the rows' own `token_ids`"):
        unrolled(target, heads, rows_of() | {"token_ids": None})


@pytest.mark.parametrize("inputs", INPUTS)
def test_per_pass_backward_agrees(inputs):
    target, heads = make(inputs)
    target.requires_grad_(False)
    gradients = []
    for separate in (False, True):
        heads.zero_grad()
        rows = rows_of(batch=2)
        modules = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
        unroll = Unroll(heads, **rows, **modules, num_passes=3, separate_backward=separate)
        if separate:
            for _ in range(3):
                unroll.next_pass().weighted().backward()
            unroll.finish_backward()
        else:
            sum(unroll.next_pass().weighted() for _ in range(3)).backward()
        gradients.append({name: p.grad.clone() for name, p in heads.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.get("kind", "dynamic"))
@pytest.mark.parametrize("inputs", INPUTS[1:])
def test_the_text_is_the_targets(inputs, tree):
    target, heads = make(inputs, tree_config=tree)
    ids = prompt()
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), plain(target, ids, 24))
    assert heads.last_stats.rounds > 1


@pytest.mark.parametrize("inputs", INPUTS[1:])
def test_a_prompt_of_embeddings(inputs):
    """Its tokens are unknown; the draft may suffer, the text must not."""
    target, heads = make(inputs)
    ids = prompt()
    embeds = target.get_input_embeddings()(ids)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
    wanted = target.generate(inputs_embeds=embeds, **options)
    assert torch.equal(target.generate(inputs_embeds=embeds, assistant_model=heads, **options), wanted)


@pytest.mark.parametrize("inputs", INPUTS)
def test_saved_and_loaded(inputs, tmp_path):
    """A config that does not say, as those written before, means EAGLE's own inputs."""
    _, heads = make(inputs)
    heads.save_pretrained(tmp_path)
    if inputs == INPUTS[0]:
        fields = json.loads((tmp_path / "config.json").read_text())
        del fields["inputs"]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = load_heads(str(tmp_path))
    assert loaded.config.inputs == inputs
    assert loaded.fc.in_features == {"feature+shifted_token": 64, "feature+token": 64}.get(inputs, 32)


def test_unknown_inputs_and_warm_starts_across_inputs_are_refused():
    target, shifted = make(INPUTS[0])
    with pytest.raises(ValueError, match=r"`inputs` must be one of .*'token'.*, got 'words'"):
        AutoDraftHead.from_target(target, "eagle", inputs="words")
    with pytest.raises(WarmStartError, match=r"`from_heads` have inputs='feature\+shifted_token'"):
        AutoDraftHead.from_target(target, "eagle", from_heads=shifted, inputs="feature+token")
    _, own = make("feature+token")
    assert AutoDraftHead.from_target(target, "poss", from_heads=own).config.inputs == "feature+token"
    assert EagleHeadConfig().inputs == random_heads(target).config.inputs == INPUTS[0]
