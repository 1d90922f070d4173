"""The unroll against naive loops and against drafting itself."""

import pytest
import torch
from torch import nn

from hf_specheads import DraftTreeConfig
from hf_specheads.trainer import Unroll, unroll_losses
from hf_specheads.unroll.streams import document_starts, next_stream, stream_mask, visible_rows

from ..conftest import VOCAB, make_heads

PASSES = 5  # the last one continues with the last specialist


def random_rows(batch=2, rows=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(batch, rows, 32, generator=generator),
        "next_token_ids": torch.randint(3, VOCAB, (batch, rows), generator=generator),
        "target_features": torch.randn(batch, rows, 32, generator=generator),
        "loss_mask": torch.randint(0, 2, (batch, rows), generator=generator),
        "attention_mask": torch.ones(batch, rows, dtype=torch.long),
    }


def of_target(target):
    return {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}


def plain_last_row(heads, target, tokens, features, specialist):
    """Drafted feature of the last row of one plain causal sequence."""
    fused = heads.fuse(target.get_input_embeddings()(tokens), features)
    rows = torch.arange(fused.shape[0])
    mask = torch.zeros(len(rows), len(rows)).masked_fill(rows[:, None] < rows, float("-inf"))
    return heads(fused[None], rows[None], mask[None, None], specialist=specialist)[0, -1]


def naive_drafted(heads, target, rows, passes):
    """Every row of every pass as a sequence of its own: target features, then each drafted one by its own pass."""
    batch, length, _ = rows["features"].shape
    drafted = torch.zeros(passes, batch, length, 32)
    for m in range(passes):
        for b in range(batch):
            for t in range(length):
                features = rows["features"][b, : t + 1].clone()
                for k in range(1, m + 1):
                    j = t - m + k
                    if j >= 1:
                        features[j] = drafted[k - 1, b, j - 1]
                tokens = rows["next_token_ids"][b, : t + 1]
                drafted[m, b, t] = plain_last_row(heads, target, tokens, features, heads.specialist_of(m))
    return drafted


@torch.no_grad()
def test_every_row_equals_a_sequence_of_its_own(target, heads):
    rows = random_rows()
    passes = unroll_losses(heads, **rows, **of_target(target), num_passes=PASSES)
    expected = naive_drafted(heads, target, rows, PASSES)
    for m, losses in enumerate(passes):
        torch.testing.assert_close(losses.drafted, expected[m], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_losses_equal_naive_loops(target, heads):
    rows = random_rows()
    losses = unroll_losses(heads, **rows, **of_target(target), num_passes=2, top_k=7)[1]
    feature, token, top_k, count = 0.0, 0.0, 0.0, 0
    for b, t in rows["loss_mask"].nonzero().tolist():
        drafted, wanted = losses.drafted[b, t], rows["target_features"][b, t]
        feature += sum(0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in (drafted - wanted).tolist()) / 32
        p = target.lm_head(wanted).softmax(-1)
        log_q = target.lm_head(drafted).log_softmax(-1)
        token -= float((p * log_q).sum())
        top_k -= sum(float(p[i] * log_q[i]) for i in p.argsort(descending=True)[:7])
        count += 1
    assert float(losses.feature_loss) == pytest.approx(feature / count, rel=1e-5)
    assert float(losses.token_loss) == pytest.approx(token / count, rel=1e-5)
    assert float(losses.top_k_loss) == pytest.approx(top_k / count, rel=1e-5)


def test_stream_mask_is_the_table_of_lags():
    """Three streams, five rows: lag 0 from stream 2, lag 1 from stream 1, lag 2 and more from stream 0."""
    seen = stream_mask(visible_rows(torch.zeros(1, 5)), 3)[0, 0] == 0
    for t in range(5):
        wanted = {(0, j) for j in range(t - 1)} | ({(1, t - 1)} if t else set()) | {(2, t)}
        assert {(int(c) // 5, int(c) % 5) for c in seen[t].nonzero()[:, 0]} == wanted


def test_streams_start_anew_in_every_document():
    documents = torch.tensor([[0, 0, 1, 1, -1]])
    starts = document_starts(documents)
    assert starts.tolist() == [[True, False, True, False, True]]
    features, drafted = torch.arange(5.0).view(1, 5, 1), 10 + torch.arange(5.0).view(1, 5, 1)
    assert next_stream(features, drafted, starts)[0, :, 0].tolist() == [0, 10, 2, 12, 4]


@torch.no_grad()
@pytest.mark.parametrize("root", [0, 2, 4])
def test_training_rows_equal_step_by_step_drafting(target, heads, root):
    """Pass m at row root + m gives the features and logits that drafting gives at draft position m."""
    depth = 4
    heads.tree_config = DraftTreeConfig(kind="chain", depth=depth)
    heads.bind(target).eval()
    rows = random_rows(batch=1)
    passes = unroll_losses(heads, **rows, **of_target(target), num_passes=depth)
    tokens = rows["next_token_ids"]
    cache = heads.new_draft_cache()
    unknown_first = torch.nn.functional.pad(tokens[:, : root + 1], (1, 0))
    feature, logits = heads.start_draft(cache, unknown_first, rows["features"][:, : root + 1])
    for m in range(depth):
        trained = passes[m].drafted[:, root + m : root + m + 1]
        torch.testing.assert_close(feature, trained, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, heads.draft_logits(trained), rtol=1e-4, atol=1e-4)
        if m + 1 < depth:
            visible = torch.ones(1, 1, m + 1, dtype=torch.bool)
            feature, logits = heads.extend_draft(
                cache, m + 1, tokens[:, root + m + 1 : root + m + 2], feature, visible
            )


def test_no_supervised_row_gives_zero_and_finite_gradients(target, heads):
    rows = random_rows()
    rows["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    passes = unroll_losses(heads, **rows, **of_target(target), num_passes=2)
    total = sum(losses.weighted() for losses in passes)
    assert float(total.detach()) == 0.0
    total.backward()
    gradients = [p.grad for p in heads.parameters() if p.grad is not None]
    assert gradients and all(bool((g == 0).all()) for g in gradients)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(target, heads, side):
    rows = random_rows(batch=1)
    alone = unroll_losses(heads, **rows, **of_target(target), num_passes=PASSES)
    amounts = (3, 0) if side == "left" else (0, 3)
    padded = {
        name: nn.functional.pad(value, (0, 0, *amounts) if value.dim() == 3 else amounts, value=0)
        for name, value in rows.items()
    }
    padded["features"] = padded["features"] + 100 * (padded["attention_mask"] == 0)[..., None]
    with_padding = unroll_losses(heads, **padded, **of_target(target), num_passes=PASSES)
    for ours, theirs in zip(alone, with_padding, strict=True):
        torch.testing.assert_close(ours.weighted(), theirs.weighted(), rtol=1e-4, atol=1e-5)


def test_packed_documents_equal_separate_rows(target, heads):
    rows = random_rows(batch=2, rows=6)
    separate = unroll_losses(heads, **rows, **of_target(target), num_passes=PASSES)
    packed = {name: value.reshape(1, 12, *value.shape[2:]) for name, value in rows.items()}
    documents = torch.tensor([[0] * 6 + [1] * 6])
    together = unroll_losses(heads, **packed, **of_target(target), num_passes=PASSES, document_ids=documents)
    for ours, theirs in zip(separate, together, strict=True):
        torch.testing.assert_close(ours.drafted.reshape(1, 12, -1), theirs.drafted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.weighted(), theirs.weighted(), rtol=1e-4, atol=1e-5)


def gradients(heads, target, rows, separate):
    heads.zero_grad()
    unroll = Unroll(heads, **rows, **of_target(target), num_passes=PASSES, separate_backward=separate)
    if separate:
        for _ in range(PASSES):
            unroll.next_pass().weighted().backward()
        unroll.finish_backward()
    else:
        sum(unroll.next_pass().weighted() for _ in range(PASSES)).backward()
    return {name: p.grad.clone() for name, p in heads.named_parameters()}


@pytest.mark.parametrize("method", ["poss", "hass"])
def test_per_pass_and_summed_backward_agree(target, method):
    target.requires_grad_(False)
    heads, rows = make_heads(target, method), random_rows()
    summed, per_pass = (gradients(heads, target, rows, separate) for separate in (False, True))
    for name, gradient in summed.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(per_pass[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_gradient_checkpointing_changes_nothing(target, heads):
    target.requires_grad_(False)
    heads.train()
    rows = random_rows()
    plain = gradients(heads, target, rows, separate=True)
    heads.activation_checkpointing_enable()
    for separate in (True, False):
        for name, gradient in gradients(heads, target, rows, separate).items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5, msg=name)


def test_no_gradient_reaches_what_the_target_says(target, heads):
    """In joint training the target's features have a graph; they are what heads are compared with all the same."""
    rows = random_rows()
    rows["target_features"].requires_grad_()
    sum(losses.weighted() for losses in unroll_losses(heads, **rows, **of_target(target), num_passes=2)).backward()
    assert heads.fc.weight.grad.any()
    assert rows["target_features"].grad is None


def test_weights_and_modules_are_the_same_to_the_unroll(target, heads):
    rows = random_rows()
    modules = unroll_losses(heads, **rows, **of_target(target), num_passes=2)
    weights = unroll_losses(
        heads, **rows, embed_tokens=target.get_input_embeddings().weight, lm_head=target.lm_head.weight, num_passes=2
    )
    assert [float(a.weighted().detach()) for a in modules] == [float(b.weighted().detach()) for b in weights]


def test_wrong_shapes_are_named(target, heads):
    rows = random_rows()
    with pytest.raises(ValueError, match="num_passes"):
        unroll_losses(heads, **rows, **of_target(target), num_passes=0)
    rows["loss_mask"] = rows["loss_mask"][:, :-1]
    with pytest.raises(ValueError, match=r"`loss_mask` must have the rows of `features` \(2, 9\), got \(2, 8\)"):
        unroll_losses(heads, **rows, **of_target(target), num_passes=1)
