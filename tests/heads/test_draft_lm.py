"""A plain language model as draft head: it drafts what the model itself says, and the text stays the target's."""

import copy
import json

import pytest
import torch
from support.heads import random_heads
from support.targets import VOCAB, own_target, plain, prompt, shared_target
from support.trees import path_of
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from hf_specheads import (
    AutoDraftHead,
    DraftLanguageModel,
    DraftLanguageModelConfig,
    UnsupportedGenerationError,
    WrongTargetError,
    load_heads,
)
from hf_specheads.errors import HeadConfigError, UnknownFormatError
from hf_specheads.target.identity import target_sizes
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments, Unroll, unroll_losses

SLOW = pytest.mark.slow
TREES = {
    "chain": {"kind": "chain", "depth": 4},
    "dynamic": {"kind": "dynamic", "depth": 4, "top_k": 4, "total_tokens": 14},
    "static": {"kind": "static", "choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]},
    "optimal": {"kind": "optimal", "choices": [[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 1]]},
}
DRAFT_FAMILIES = ["llama-tied", "qwen2", "qwen3", "gpt2", "opt", "gpt-neox", "phi", "olmo2", "mixtral"]


def wrapped(family: str = "llama", *, seed: int = 0, tree: str = "dynamic", **options) -> DraftLanguageModel:
    return DraftLanguageModel.from_model(own_target(family, seed=seed, **options), tree_config=TREES[tree])


def near_copy(target, noise: float = 0.15) -> torch.nn.Module:
    """A model that agrees with the target now and then, so that rounds accept different numbers of tokens."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(weight.std() * noise * torch.randn(weight.shape, generator=generator))
    return model


@torch.no_grad()
def assert_tree_is_what_the_model_says(model, tree, prefix: list[int]) -> None:
    """Every node's score is the sum of log-probabilities along its path, of a plain forward without a cache."""
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    assert tokens[0] == prefix[-1]
    paths = [[tokens[n] for n in path_of(parents, node)[1:]] for node in range(1, tree.num_nodes)]
    longest = max(map(len, paths))
    texts = torch.tensor([prefix + path + [0] * (longest - len(path)) for path in paths])
    said = torch.log_softmax(model(texts).logits[:, len(prefix) - 1 :].float(), dim=-1)
    for path, logits, score in zip(paths, said, tree.scores[0, 1:], strict=True):
        expected = sum(logits[i, token] for i, token in enumerate(path))
        torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-4)


def rounds_of(stats, prompt_length: int) -> list[int]:
    """Length of the text, root included, at the start of every round that drafted."""
    lengths, length = [], prompt_length + 1
    for accepted in stats.num_accepted[0]:
        lengths.append(length)
        length += accepted + 1
    return lengths


# ---------------------------------------------------------------------- drafting
@pytest.mark.parametrize("tree", TREES)
def test_every_tree_of_every_round_is_what_the_model_says(tree):
    """Also says that the draft cache, reused from round to round, gives what a recomputation gives."""
    target, ids = shared_target("llama"), prompt()
    heads = DraftLanguageModel.from_model(near_copy(target), tree_config=TREES[tree])
    heads.trace = True
    expected = plain(target, ids, 20)
    assert torch.equal(plain(target, ids, 20, assistant_model=heads), expected)
    accepted = heads.last_stats.num_accepted[0]
    assert max(accepted) >= 2 and min(accepted) < 3, f"rounds are too much alike: {accepted}"
    starts = rounds_of(heads.last_stats, ids.shape[1])
    for length, grown in zip(starts, heads.last_stats.trees, strict=True):
        if grown.num_nodes > 1:
            assert_tree_is_what_the_model_says(heads.language_model, grown, expected[0, :length].tolist())


@pytest.mark.parametrize(
    ("family", "attention"), [*((family, "sdpa") for family in DRAFT_FAMILIES), ("llama", "eager"), ("gpt2", "eager")]
)
def test_families(family, attention):
    """Drafts of a family are its own, and the text is the target's."""
    target, ids = shared_target("llama"), prompt()
    heads = wrapped(family, attention=attention)
    heads.trace = True
    expected = plain(target, ids, 12)
    assert torch.equal(plain(target, ids, 12, assistant_model=heads), expected)
    starts = rounds_of(heads.last_stats, ids.shape[1])
    assert_tree_is_what_the_model_says(
        heads.language_model, heads.last_stats.trees[1], expected[0, : starts[1]].tolist()
    )


def test_a_copy_of_the_target_accepts_everything():
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, 41)
    every = {"kind": "dynamic", "depth": 2, "top_k": 3, "total_tokens": 13}  # keeps every candidate
    for tree, accepted in ((TREES["chain"], [4] * 8), (TREES["static"], [4] * 8), (every, [2] * 13 + [0])):
        heads = DraftLanguageModel.from_model(copy.deepcopy(target), target=target, tree_config=tree)
        assert torch.equal(plain(target, ids, 41, assistant_model=heads), expected)
        assert heads.last_stats.num_accepted == [accepted]
    shared = DraftLanguageModel.from_model(target, tree_config=TREES["chain"])
    assert torch.equal(plain(target, ids, 41, assistant_model=shared), expected)
    assert shared.last_stats.num_accepted == [[4] * 8]


def test_sampled_chains_of_a_copy_are_always_accepted():
    """Leviathan's rule with p = q."""
    target, ids = shared_target("llama"), prompt()
    heads = DraftLanguageModel.from_model(copy.deepcopy(target))
    heads = heads.with_tree(kind="chain", depth=3, children="sampled")
    mask = torch.ones_like(ids)
    for seed in range(3):
        torch.manual_seed(seed)
        target.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=25, assistant_model=heads)
        assert heads.last_stats.num_accepted == [[3] * 6]


def test_seeded_sampling_is_that_of_plain_generate():
    target, ids = shared_target("llama"), prompt()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": True, "max_new_tokens": 20}
    heads = wrapped(seed=1)
    torch.manual_seed(4)
    expected = target.generate(ids, **options)
    torch.manual_seed(4)
    assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)


def test_the_loop_of_transformers():
    target, ids = shared_target("llama"), prompt()
    heads = DraftLanguageModel.from_model(copy.deepcopy(target), tree_config=TREES["chain"])
    heads.loop = "transformers"
    assert torch.equal(plain(target, ids, 20, assistant_model=heads), plain(target, ids, 20))
    assert heads.last_stats.acceptance_length > 3


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_changes_nothing(family):
    target, ids, padding = shared_target("llama"), prompt(), 5
    heads = wrapped(family, seed=1)
    heads.trace = True
    trees = []
    for pad in (0, padding):
        padded = torch.nn.functional.pad(ids, (pad, 0))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (pad, 0))
        target.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=heads)
        trees.append(heads.last_stats.trees)
    assert len(trees[0]) == len(trees[1]) > 3
    for ours, theirs in zip(*trees, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-4, atol=1e-4)


def test_a_second_turn_on_the_first_ones_cache():
    """The head has not seen the text that is in the target's cache; it takes in all of it."""
    target, ids = shared_target("llama"), prompt()
    heads = DraftLanguageModel.from_model(copy.deepcopy(target), tree_config=TREES["chain"])
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options)
    turn = torch.cat([first.sequences, prompt(5, seed=8)], dim=1)
    texts = []
    for assistant in (None, heads):
        cache = copy.deepcopy(first.past_key_values)
        texts.append(
            target.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=17, past_key_values=cache,
                            assistant_model=assistant, **options).sequences
        )  # fmt: skip
    assert torch.equal(texts[1], texts[0])
    assert heads.last_stats.num_accepted[0][:3] == [4, 4, 4]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_past_its_own_context(family):
    """A draft model with a shorter context than the target's drafts on, badly; learned positions do not overflow."""
    target, ids = shared_target("llama"), prompt()
    limit = {"gpt2": {"n_positions": 24}}.get(family, {"max_position_embeddings": 24})
    assert torch.equal(plain(target, ids, 16, assistant_model=wrapped(family, **limit)), plain(target, ids, 16))


# ---------------------------------------------------------------------- vocabularies
@pytest.mark.parametrize(("ours", "theirs"), [(200, 201), (201, 200)])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_vocabularies_that_differ_by_padding(ours, theirs, tree):
    target, ids = shared_target("llama", vocab_size=theirs), prompt()
    heads = wrapped("llama", vocab_size=ours, seed=1, tree=tree)
    heads = heads.with_tree(top_k=theirs, total_tokens=500) if tree == "dynamic" else heads
    heads.trace = True
    expected = plain(target, ids, 8)
    assert torch.equal(plain(target, ids, 8, assistant_model=heads), expected)
    drafted = torch.cat([grown.token_ids[0, 1:] for grown in heads.last_stats.trees])
    assert drafted.max() < min(ours, theirs)
    if tree == "dynamic":
        assert drafted.max() == min(ours, theirs) - 1, "every token both models know can be drafted"


def test_tokens_the_draft_model_does_not_know():
    """A target may write tokens past the draft model's vocabulary; they are drafted from, but never drafted."""
    target, heads = own_target("llama", vocab_size=201), wrapped("llama", vocab_size=200)
    ids = torch.cat([prompt(), torch.tensor([[200, 200]])], dim=1)
    assert torch.equal(plain(target, ids, 8, assistant_model=heads), plain(target, ids, 8))


def test_other_vocabularies_are_refused():
    target = shared_target("llama")
    heads = wrapped("llama", vocab_size=120)
    with pytest.raises(WrongTargetError, match=r"120 tokens, but .* 99"):
        plain(target, prompt(), assistant_model=heads)
    with pytest.raises(WrongTargetError, match="tokenizer"):
        DraftLanguageModel.from_model(own_target("llama", vocab_size=120), target=target)


def test_a_draft_model_made_for_a_target_refuses_another():
    heads = DraftLanguageModel.from_model(own_target("llama", seed=2), target=shared_target("llama"))
    with pytest.raises(WrongTargetError, match="fingerprint"):
        plain(shared_target("llama", seed=1), prompt(), assistant_model=heads)
    # Without one, any target with the vocabulary will do, of whatever width.
    other = shared_target("llama", hidden_size=48)
    assert torch.equal(plain(other, prompt(), 8, assistant_model=wrapped()), plain(other, prompt(), 8))


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("family", "words"),
    [("mistral", "Sliding"), ("gemma3", "Sliding"), ("qwen2-window", "Sliding"), ("bloom", "position_ids"),
     ("lfm2", "do not attend to the whole text"), ("llama4", "do not attend to the whole text")],
)  # fmt: skip
def test_models_that_cannot_draft_trees(family, words):
    with pytest.raises(ValueError, match=f"cannot draft trees: .*{words}"):
        DraftLanguageModel.from_model(shared_target(family))


def test_models_that_are_no_causal_language_models(tmp_path):
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="encoder-decoder"):
        DraftLanguageModel.from_model(T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="not a text-only causal language model"):
        DraftLanguageModel.from_model(AutoModel.from_config(shared_target("llama").config))
    alibi = AutoConfig.for_model("falcon", vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                 alibi=True)  # fmt: skip
    with pytest.raises(ValueError, match="alibi"):
        DraftLanguageModel.from_model(AutoModelForCausalLM.from_config(alibi))


def test_an_attention_that_takes_no_mask():
    model = own_target("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        DraftLanguageModel.from_model(model)


def test_a_prompt_of_embeddings(target):
    embeddings = target.get_input_embeddings()(prompt()).detach()
    with pytest.raises(UnsupportedGenerationError, match=r"embeddings.*input_ids"):
        target.generate(inputs_embeds=embeddings, max_new_tokens=4, assistant_model=wrapped())
    # Heads that read the target's features take it.
    target.generate(inputs_embeds=embeddings, max_new_tokens=4, assistant_model=random_heads(target))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"language_model": {"model_type": "nonsense"}}, "model config that transformers knows"),
        ({"language_model": {"model_type": "t5"}}, "no causal language model"),
        ({"language_model": {"model_type": "llama", "vocab_size": 99}, "num_hidden_layers": 3}, "contradicts"),
        ({"num_hidden_layer": 3}, "unknown option"),
        ({"language_model": {"model_type": "mistral", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1,
                             "intermediate_size": 32, "num_attention_heads": 2}}, "cannot draft trees"),
    ],
)  # fmt: skip
def test_impossible_options(target, options, words):
    with pytest.raises(ValueError, match=words):
        AutoDraftHead.from_target(target, "draft-lm", **options)


# ---------------------------------------------------------------------- construction, files
def test_fresh_models_follow_the_target(target):
    heads = AutoDraftHead.from_target(target, "draft-lm", hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
    model = heads.language_model
    assert (model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers) == (VOCAB, 16, 3)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert heads.config.target["fingerprint"] and heads.config.feature_size == target_sizes(target)["feature_size"]
    default = AutoDraftHead.from_target(target, "draft-lm").language_model.config
    assert (default.hidden_size, default.num_hidden_layers, default.head_dim) == (32, 2, 32)
    gpt2 = AutoDraftHead.from_target(target, "draft-lm", language_model=own_target("gpt2").config.to_diff_dict())
    assert type(gpt2.language_model).__name__ == "GPT2LMHeadModel"


def assert_same_weights(ours, theirs) -> None:
    theirs = theirs.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    "family",
    ["llama-tied", "gpt2", *(pytest.param(f, marks=SLOW) for f in ("llama", "gpt2-untied", "qwen3", "mixtral"))],
)
def test_round_trip(family, tmp_path):
    target, ids = shared_target("llama"), prompt()
    heads = wrapped(family, tree="static")
    heads.save_pretrained(tmp_path)
    loaded = load_heads(tmp_path)
    assert type(loaded.language_model) is type(heads.language_model)
    assert loaded.tree_config == heads.tree_config
    assert_same_weights(heads, loaded)
    assert_same_weights(AutoDraftHead.from_pretrained(tmp_path), loaded)
    texts = [plain(target, ids, 8, assistant_model=assistant) for assistant in (None, heads, loaded)]
    assert torch.equal(texts[2], texts[0])
    assert loaded.last_stats.num_accepted == heads.last_stats.num_accepted
    half = load_heads(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert torch.equal(plain(target, ids, 8, assistant_model=half), texts[0])


def test_damaged_configs(tmp_path):
    wrapped().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    fields = config["language_model"]
    for changes, words in (
        ({"language_model": None}, "language_model"),
        ({"language_model": {"model_type": "gemma3_text"}}, "config.json"),
        ({"num_hidden_layers": 7}, "contradicts"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"language_model": fields | {"num_hidden_layers": 10**9}, "num_hidden_layers": None}, "between 1 and 1024"),
        ({"language_model": fields | {"num_attention_heads": 0}, "num_attention_heads": None}, "config.json"),
        ({"language_model": fields | {"hidden_size": "wide"}}, "config.json"),
        ({"language_model": fields | {"hidden_act": "nonsense"}}, "cannot be built"),
        ({"language_model": [1]}, "config.json"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(HeadConfigError, match=words):
            load_heads(tmp_path)


def test_the_folder_of_a_language_model_names_the_wrapper(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(UnknownFormatError, match=r"DraftLanguageModel\.from_model"):
        load_heads(tmp_path)


def test_warm_start_from_another_draft_model(target):
    first = AutoDraftHead.from_target(target, "draft-lm", hidden_size=16, num_attention_heads=2)
    second = AutoDraftHead.from_target(target, "draft-lm", from_heads=first)
    assert_same_weights(first, second)
    with pytest.raises(ValueError, match="contradicts"):
        AutoDraftHead.from_target(target, "draft-lm", from_heads=first, hidden_size=32)


# ---------------------------------------------------------------------- training
def rows_of(ids: torch.Tensor, features: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of token ids [B, T + 1] and features [B, T + 1, H] without padding."""
    return {
        "features": features[:, :-1],
        "token_ids": ids[:, :-1],
        "next_token_ids": ids[:, 1:],
        "target_features": features[:, 1:],
        "loss_mask": torch.ones_like(ids[:, 1:]),
        "attention_mask": None,
    }


def unrolled(heads, target, ids, **options) -> torch.Tensor:
    """Draft logits [B, T, V] of the one pass."""
    features = torch.zeros(*ids.shape, 32)
    rows = rows_of(ids, features) | {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
    unroll = Unroll(heads, **(rows | options), num_passes=1)
    drafted = next(unroll._passes)
    assert drafted.features is None and drafted.offset == 0
    return drafted.logits(drafted.hidden)


@torch.no_grad()
def test_rows_say_what_follows_the_next_token(target):
    heads, ids = wrapped(seed=1), torch.cat([prompt(9), prompt(9, seed=3)])
    expected = heads.language_model(ids).logits[:, 1:]
    torch.testing.assert_close(unrolled(heads, target, ids), expected, rtol=1e-4, atol=1e-5)
    # Drafting from the same text gives the same.
    heads.bind(target)
    for root in (1, 4, 8):
        _, logits = heads.start_draft(heads.new_draft_cache(), ids[:, : root + 1], None)
        torch.testing.assert_close(logits[:, 0], expected[:, root - 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packed_and_padded_rows_equal_separate_ones(target):
    heads, first, second = wrapped(seed=1), prompt(7), prompt(5, seed=3)
    separate = [heads.language_model(ids).logits[:, 1:] for ids in (first, second)]
    packed = torch.cat([first, second], dim=1)
    documents = torch.tensor([[0] * 7 + [1] * 4])
    together = unrolled(heads, target, packed, document_ids=documents)
    torch.testing.assert_close(together[:, :6], separate[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[:, 7:], separate[1], rtol=1e-4, atol=1e-5)
    for side in ((3, 0), (0, 3)):
        padded, mask = (torch.nn.functional.pad(x, side) for x in (first, torch.ones_like(first)))
        rows = mask[:, :-1] * mask[:, 1:]
        logits = unrolled(heads, target, padded, attention_mask=rows)
        torch.testing.assert_close(logits[rows.bool()], separate[0][0], rtol=1e-4, atol=1e-5)


def test_tokens_must_be_known(target):
    with pytest.raises(ValueError, match="token_ids"):
        unrolled(wrapped(), target, prompt(), token_ids=None)


def test_losses_have_no_feature_part_and_a_minimum_at_the_target(target):
    """The target itself has the least token loss any draft model can have: its own entropy."""
    target.requires_grad_(False)
    ids = prompt(16)
    features = target(ids, output_hidden_states=True).hidden_states[-1]
    rows = rows_of(ids, features) | {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
    entropy = torch.distributions.Categorical(logits=target.lm_head(features[:, 1:])).entropy().mean()
    heads = DraftLanguageModel.from_model(copy.deepcopy(target).requires_grad_(True))
    (losses,) = unroll_losses(heads, **rows, num_passes=1)
    assert "feature" not in losses.values
    torch.testing.assert_close(losses.token_loss, entropy, rtol=1e-5, atol=1e-5)
    losses.token_loss.backward()
    assert max(p.grad.abs().max() for p in heads.parameters()) < 1e-5
    (other,) = unroll_losses(wrapped(seed=1), **rows, num_passes=1)
    assert other.token_loss > entropy + 0.1


@pytest.mark.parametrize("packing", [pytest.param(False, marks=SLOW), True])
def test_training_lowers_the_loss(target, tmp_path, packing):
    from datasets import Dataset

    examples = [{"input_ids": prompt(12, seed=seed)[0].tolist()} for seed in range(8)]
    args = DraftHeadTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", max_steps=12,
        per_device_train_batch_size=4, learning_rate=5e-2, logging_steps=4, max_length=64, packing=packing,
        feature_loss_weight=0.0, token_loss_weight=1.0, top_k_loss_weight=0.0, bf16=packing,
        activation_checkpointing=packing, eval_acceptance_prompts=0,
    )  # fmt: skip
    heads = AutoDraftHead.from_target(target, "draft-lm", num_attention_heads=2, hidden_size=16)
    data = Dataset.from_list(examples)
    trainer = DraftHeadTrainer(model=heads, target=target, args=args, train_dataset=data)
    trainer.train()
    losses = [entry["token_loss_1"] for entry in trainer.state.log_history if "token_loss_1" in entry]
    assert losses[-1] < losses[0] - 0.2, losses
    trainer.save_model(tmp_path / "heads")
    assert_same_weights(load_heads(tmp_path / "heads"), heads)


def test_only_one_pass(target, tmp_path):
    args = DraftHeadTrainingArguments(output_dir=str(tmp_path), use_cpu=True, num_passes=3, report_to=[])
    with pytest.raises(ValueError, match="num_passes=3 but a language model"):
        DraftHeadTrainer(model=AutoDraftHead.from_target(target, "draft-lm"), target=target, args=args)


def test_config_describes_the_model_it_builds():
    config = DraftLanguageModelConfig(vocab_size=99, feature_size=32)
    again = DraftLanguageModelConfig(**{k: v for k, v in config.to_dict().items() if k != "model_type"})
    assert again.language_model == config.language_model
    assert config.language_model["model_type"] == "llama" and config.hidden_size == 32
