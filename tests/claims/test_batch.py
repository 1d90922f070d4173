"""Batches: every row gives the same text as alone, whatever the other rows accept, where it ends and how it is
padded."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from support.batches import LENGTHS, NEW, alone_texts, assert_rows, batch_of, greedy, oracle
from support.distributions import PROMPT, chi_square, critical_value, five_token_target, target_distribution
from support.heads import METHODS_BY_KIND, random_heads
from support.targets import DIFFERENT_FAMILIES, shared_target
from support.trees import TREES
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specheads import UnsupportedGenerationError
from hf_specheads.cache import target as target_cache
from hf_specheads.generation.pace.pace import Pace

FEW_SLOTS = 8
TREE_FAMILIES = ("llama", "qwen3", "mistral", "qwen2-window", "gemma2", "gemma3", "phi3", "mixtral", "gpt2", "gpt-oss")


IN_THE_DEFAULT_RUN = ("llama", "mistral", "gemma3", "gpt2", "gpt-oss")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in IN_THE_DEFAULT_RUN else pytest.mark.slow) for name in TREE_FAMILIES],
)
def test_rows_equal_themselves_alone(family):
    target = shared_target(family)
    inputs, alone = batch_of()
    texts = alone_texts(target, alone)
    for heads in (
        oracle(target, alone, texts),
        oracle(target, alone, texts, ranks=(0,), kind="chain", depth=5),
        oracle(target, alone, texts, ranks=(0, 1), kind="static", choices=((0,), (1,), (0, 0), (0, 1), (1, 0))),
        random_heads(target, "poss"),
    ):
        got = greedy(target, inputs, assistant_model=heads)
        assert_rows(got, max(LENGTHS), texts)
        for accepted in heads.last_stats.num_accepted:
            assert sum(n + 1 for n in accepted) == NEW - 1
    assert torch.equal(got, greedy(target, inputs)), "transformers' own batch"


@pytest.mark.parametrize("rows", [1, 3])
def test_caches_grow_in_the_middle_of_a_text(rows, monkeypatch):
    """Lets the text exceed the slots that a cache starts with, twice."""
    monkeypatch.setattr(target_cache, "FIRST_SLOTS", FEW_SLOTS)
    target = shared_target("qwen2-window", max_position_embeddings=4096)
    inputs, alone = batch_of((9, 5, 7)[:rows])
    new = 2 * (FEW_SLOTS + 9) + 20
    texts = alone_texts(target, alone, max_new_tokens=new)
    heads = oracle(target, alone, texts, ranks=(0, 0, 1, None))
    assert_rows(greedy(target, inputs, assistant_model=heads, max_new_tokens=new), 9, texts)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_every_method_with_every_tree(method, kind):
    family = DIFFERENT_FAMILIES[len(method + kind) % len(DIFFERENT_FAMILIES)]
    target = shared_target(family)
    inputs, alone = batch_of((7, 19, 3))
    heads = random_heads(target, method, TREES[kind])
    got = greedy(target, inputs, assistant_model=heads, max_new_tokens=14)
    assert_rows(got, 19, alone_texts(target, alone, max_new_tokens=14))


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("poss", "eagle3", "draft-lm", "dflash", "jetspec", "dspark", "dflash2", "peagle", "mtp")
]


@pytest.mark.parametrize("method", ["eagle", "hydra", "domino", *SLOW])
def test_drafts_of_a_row_do_not_depend_on_the_others(method):
    """A row accepts in a batch what it accepts alone: neither padding nor the ragged rounds of other rows affect its
    draft."""
    target = shared_target("llama")
    inputs, alone = batch_of((19, 6, 13))
    heads = random_heads(target, method, TREES["dynamic"])
    # makes the drafts as good as those of untrained heads can be: they repeat the target's tokens
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if "layers" in name:
                weight.mul_(0.3)
    greedy(target, inputs, assistant_model=heads)
    together = heads.last_stats.num_accepted
    for row, ids in enumerate(alone):
        greedy(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, assistant_model=heads)
        assert heads.last_stats.num_accepted[0] == together[row]


def test_rows_end_where_they_end_alone_and_cost_nothing_after():
    target = shared_target("llama")
    inputs, alone = batch_of()
    full = alone_texts(target, alone)
    eos = [full[0][3], full[1][11]]
    options = {"eos_token_id": eos, "pad_token_id": 0}
    texts = alone_texts(target, alone, **options)
    assert len({len(text) for text in texts}) > 2
    sizes: list[int] = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs.get("input_ids", args[0] if args else None))),
        with_kwargs=True,
    )
    try:
        for heads in (oracle(target, alone, full), random_heads(target, "poss")):
            sizes.clear()
            assert_rows(greedy(target, inputs, assistant_model=heads, **options), max(LENGTHS), texts)
            assert sizes == sorted(sizes, reverse=True) and sizes[0] == len(LENGTHS) > sizes[-1]
            rounds = [len(accepted) for accepted in heads.last_stats.num_accepted]
            assert sum(sizes) == len(LENGTHS) + sum(rounds)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.6},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": [5, 17, 23, 60], "pad_token_id": 0},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + row, 80 + row))},
        {"bad_words_ids": [[5], [9, 7]], "exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 40},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_that_read_the_text(options):
    target = shared_target("llama")
    inputs, alone = batch_of((8, 8, 8))  # plain generate penalises padding like text, so the prompts have none
    expected = greedy(target, inputs, **options)
    for heads in (random_heads(target, "poss"), oracle(target, alone, alone_texts(target, alone))):
        assert torch.equal(greedy(target, inputs, assistant_model=heads, **options), expected)


class Recorder:
    """A streamer that records what it is given."""

    def __init__(self):
        self.put_values: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers_see_the_steps_of_plain_generate():
    target = shared_target("llama")
    inputs, alone = batch_of()
    full = alone_texts(target, alone)
    options = {"eos_token_id": [full[0][3], full[1][11]], "pad_token_id": 0}
    plain_streamer, ours = Recorder(), Recorder()
    greedy(target, inputs, streamer=plain_streamer, **options)
    greedy(target, inputs, streamer=ours, assistant_model=oracle(target, alone, full), **options)
    assert ours.put_values == plain_streamer.put_values and ours.ended == plain_streamer.ended == 1


def test_scores_and_logits_per_step():
    target = shared_target("llama")
    inputs, alone = batch_of()
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = greedy(target, inputs, **asked)
    got = greedy(target, inputs, **asked, assistant_model=oracle(target, alone, alone_texts(target, alone)))
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == len(getattr(expected, name)) == NEW
        torch.testing.assert_close(torch.stack(getattr(got, name)), torch.stack(getattr(expected, name)),
                                   atol=1e-4, rtol=1e-4)  # fmt: skip


def test_rows_are_sampled_from_the_targets_distribution_whatever_is_drafted(monkeypatch):
    """Chooses another tree of the menu in every round: plain steps, favourites, drawn chains."""
    target, samples, length, chosen = five_token_target(), 600, 4, []
    draw = random.Random(0)

    def any_choice(pace: Pace, *_: object) -> int:
        chosen.append(-1 if len(chosen) % 3 == 2 else draw.randrange(len(pace.menu)))
        return chosen[-1]

    monkeypatch.setattr(Pace, "choose", any_choice)
    heads = random_heads(target)
    heads.forget_tree()
    heads.adaptive = True
    counts = Counter()
    torch.manual_seed(5)
    for _ in range(12):
        got = target.generate(
            PROMPT.expand(samples // 12, -1), attention_mask=torch.ones(samples // 12, PROMPT.shape[1]),
            max_new_tokens=length, do_sample=True, top_k=0, temperature=0.8, assistant_model=heads,
        )  # fmt: skip
        counts.update(tuple(row) for row in got[:, PROMPT.shape[1] :].tolist())
    # all memories have the same menu
    pace = next(one for one in heads.memory[target].values() if isinstance(one, Pace))
    menus = {pace.menu[choice].children for choice in chosen if choice >= 0}
    assert menus == {"top_k", "sampled"} and -1 in chosen
    statistic, freedom = chi_square(counts, target_distribution(target, {"temperature": 0.8}, length), samples)
    assert statistic < critical_value(freedom)


@pytest.mark.covering(2)
@pytest.mark.parametrize("exact_seed", [True, False])
@pytest.mark.parametrize("children", ["top_k", "sampled"])
@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_every_row_is_sampled_from_the_targets_distribution(children, penalty, exact_seed):
    target, samples, length = five_token_target(), 300, 2
    setting = {"temperature": 0.8, "repetition_penalty": penalty}
    heads = random_heads(target, kind="static", choices=((0,), (1,), (0, 0), (0, 1)), children=children)
    heads.exact_seed = exact_seed
    expected = target_distribution(target, setting, length)
    torch.manual_seed(5)
    got = target.generate(
        PROMPT.expand(samples, -1), attention_mask=torch.ones(samples, PROMPT.shape[1]), max_new_tokens=length,
        do_sample=True, top_k=0, assistant_model=heads, **setting,
    )  # fmt: skip
    counts = Counter(tuple(row) for row in got[:, PROMPT.shape[1] :].tolist())
    statistic, freedom = chi_square(counts, expected, samples)
    assert freedom >= 4 and statistic < critical_value(freedom)


def test_planted_bug_one_length_for_all_rows_changes_the_text(monkeypatch):
    """Control: if every row's slots start at the end of the longest row, rows attend to slots that are not theirs."""
    target = shared_target("llama")
    inputs, alone = batch_of()
    texts = alone_texts(target, alone)
    heads = oracle(target, alone, texts)
    monkeypatch.setattr(
        target_cache.TreeCache, "known_lengths", lambda self: torch.full_like(torch.tensor(self.counts), self.longest)
    )
    got = greedy(target, inputs, assistant_model=heads)
    assert got[:, max(LENGTHS) :].tolist() != texts


class EndsAfter(StoppingCriteria):
    """Ends a row that is long enough at any of some tokens. Such criteria of users must be called after every
    token."""

    def __init__(self, length: int, tokens: set[int]):
        self.length, self.tokens = length, tokens

    def __call__(self, input_ids, scores, **kwargs):
        long = input_ids.shape[1] >= self.length
        return torch.tensor([long and int(row[-1]) in self.tokens for row in input_ids])


def test_criteria_of_users_end_rows():
    target = shared_target("llama")
    inputs, alone = batch_of((8, 8, 8))
    full = alone_texts(target, alone)
    ends = {full[0][6], full[1][13]}
    options = {"stopping_criteria": StoppingCriteriaList([EndsAfter(12, ends)]), "eos_token_id": 98, "pad_token_id": 0}
    texts = alone_texts(target, alone, **options)
    assert len({len(text) for text in texts}) > 1
    assert_rows(greedy(target, inputs, assistant_model=oracle(target, alone, full), **options), 8, texts)


class Stateful(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_what_a_batch_cannot_do_is_refused_before_any_forward():
    target = shared_target("llama")
    inputs, _ = batch_of((6, 6))
    heads = random_heads(target)
    cases = {
        "Stateful": {"logits_processor": LogitsProcessorList([Stateful()])},
        "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    }
    for message, options in cases.items():
        with pytest.raises(UnsupportedGenerationError, match=message):
            greedy(target, inputs, assistant_model=heads, **options)
