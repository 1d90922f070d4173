"""Batches stop where plain generation stops. Stopping criteria see the same tokens equally often, whatever they read
or store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import NEW, alone_texts, batch_of, greedy, oracle
from support.heads import random_heads
from support.targets import VOCAB, shared_target
from support.tokenizers import byte_tokenizer
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from hf_specheads import UnsupportedGenerationError
from hf_specheads.generation import sampling
from hf_specheads.generation.stopping import StopRule

SAME_LENGTH = (8, 8, 8)  # plain generation lets criteria and processors read padding like text


class Recorded(StoppingCriteria):
    """Records every call: the tokens, and the number of scores."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], int | None]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return self.ends(input_ids, scores)

    def ends(self, input_ids, scores) -> Any:
        raise NotImplementedError


class CountsCalls(Recorded):
    def ends(self, input_ids, scores):
        return torch.full((len(input_ids),), len(self.calls) >= 9)


class LooksAtTheFirst(Recorded):
    def ends(self, input_ids, scores):
        return torch.full((len(input_ids),), len(self.calls) > 4 and int(input_ids[0, -1]) % 4 == 0)


class OneBool(Recorded):
    def ends(self, input_ids, scores):
        return bool(input_ids[1, -1] % 6 == 0)


class HasState(Recorded):
    """Ends a row that has shown enough large tokens. The criterion keeps a count between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor | int = 0

    def ends(self, input_ids, scores):
        self.seen = self.seen + (input_ids[:, -1] > VOCAB // 2).long()
        return self.seen >= 4


class LooksAtScores(Recorded):
    def ends(self, input_ids, scores):
        if scores is None:
            return torch.zeros(len(input_ids), dtype=torch.bool)
        best = scores[-1].softmax(-1).max(-1).values
        return (best > 0.97) & (best < 1)


class OnlyOneRow(Recorded):
    """Ends row 1 early, while the others go on to their budget."""

    def ends(self, input_ids, scores):
        return torch.arange(len(input_ids)) == (1 if input_ids.shape[1] >= 13 else -1)


class Never(Recorded):
    def ends(self, input_ids, scores):
        return torch.zeros(len(input_ids), dtype=torch.bool)


CRITERIA = (CountsCalls, LooksAtTheFirst, OneBool, HasState, LooksAtScores, OnlyOneRow, Never)


class Recorder:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


def outcome(kind: type[Recorded], inputs: dict, eos: Any, scores: bool, **options: Any) -> tuple[list, ...]:
    """Returns the tokens, the criterion's calls, and the values that the streamer got."""
    criterion, streamer = kind(), Recorder()
    asked = {"return_dict_in_generate": True, "output_scores": True} if scores else {"return_dict_in_generate": True}
    result = greedy(shared_target(), inputs, stopping_criteria=StoppingCriteriaList([criterion]), streamer=streamer,
                    eos_token_id=eos, pad_token_id=0, **asked, **options)  # fmt: skip
    return result.sequences.tolist(), criterion.calls, streamer.values


def heads_for(alone: list[torch.Tensor]) -> list:
    target = shared_target()
    return [oracle(target, alone, alone_texts(target, alone)), random_heads(target, "poss")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("with_eos", [False, True], ids=["no eos", "eos"])
@pytest.mark.parametrize("kind", CRITERIA)
def test_criteria_stop_a_batch_where_plain_generation_stops(kind, with_eos):
    scores = kind in (LooksAtScores, CountsCalls)
    inputs, alone = batch_of(SAME_LENGTH)
    full = alone_texts(shared_target(), alone)
    eos = [full[0][5], full[2][16]] if with_eos else None
    expected = outcome(kind, inputs, eos, scores)
    for heads in heads_for(alone):
        assert outcome(kind, inputs, eos, scores, assistant_model=heads) == expected
    assert len(expected[1]) > 3, "the criterion was hardly asked: a weak test"


@pytest.mark.parametrize("with_eos", [False, True], ids=["no eos", "eos"])
def test_stop_strings(with_eos):
    """Without an end-of-sequence token, plain generation pads nothing: rows go on until all have met a stop string."""
    target, tokenizer = shared_target(), byte_tokenizer()
    inputs, alone = batch_of(SAME_LENGTH)
    full = alone_texts(target, alone)
    options = {"stop_strings": [tokenizer.decode([text[3 + 2 * row]]) for row, text in enumerate(full)],
               "tokenizer": tokenizer, "eos_token_id": 98 if with_eos else None, "pad_token_id": 0}  # fmt: skip
    expected = greedy(target, inputs, **options)
    assert expected.shape[1] < 8 + NEW
    for heads in (oracle(target, alone, full), random_heads(target, "poss")):
        assert torch.equal(greedy(target, inputs, assistant_model=heads, **options), expected)


# ---------------------------------------------------------------------- processors that hold something per row
class Tries:
    """One trie per row, which rejects prefixes of other rows."""

    def __init__(self, prompts: torch.Tensor):
        self.length = prompts.shape[1]
        self.asked: list[list[tuple[int, ...]]] = [[] for _ in prompts]

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        path = tuple(ids[self.length :].tolist())
        for step, token in enumerate(path):
            if token not in (*self.allowed(row, step), 0):
                raise KeyError(f"row {row} has no branch {path[: step + 1]}")
        self.asked[row].append(path)
        return self.allowed(row, len(path))

    @staticmethod
    def allowed(row: int, step: int) -> list[int]:
        return [3 + (7 * step + 31 * row + branch) % (VOCAB - 3) for branch in range(5)]


@pytest.mark.parametrize("with_eos", [False, True])
def test_one_trie_per_row(with_eos):
    target = shared_target()
    inputs, alone = batch_of(SAME_LENGTH)
    theirs = Tries(inputs["input_ids"])
    options = {"eos_token_id": Tries.allowed(1, 6) if with_eos else None, "pad_token_id": 0}
    expected = greedy(target, inputs, prefix_allowed_tokens_fn=theirs, **options)
    truth = [row[8:] for row in expected.tolist()]
    for heads in (oracle(target, alone, truth), random_heads(target)):
        ours = Tries(inputs["input_ids"])
        got = greedy(target, inputs, assistant_model=heads, prefix_allowed_tokens_fn=ours, **options)
        assert torch.equal(got, expected)
        for mine, other in zip(ours.asked, theirs.asked, strict=True):
            assert mine == other[: len(mine)], "once per step, of its own row"


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"logits_processor": LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=torch.tensor([2, 8, 5]))])},
        # The scheme of the last case is the default one, and it also keeps something per row.
        pytest.param(
            lambda: {"watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash", context_width=2)},
            marks=pytest.mark.slow,
        ),
        lambda: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    ],
    ids=["prompt_ignore_length", "selfhash", "watermark"],
)  # fmt: skip
def test_processors_with_something_per_row(options):
    target = shared_target()
    inputs, alone = batch_of(SAME_LENGTH)
    expected = greedy(target, inputs, **options())
    assert not torch.equal(expected, greedy(target, inputs)), "without effect: a weak test"
    for heads in (oracle(target, alone, [row[8:] for row in expected.tolist()]), random_heads(target)):
        assert torch.equal(greedy(target, inputs, assistant_model=heads, **options()), expected)


def test_watermarks_with_a_state_are_refused():
    inputs, _ = batch_of(SAME_LENGTH)
    config = SynthIDTextWatermarkingConfig(keys=[3, 5], ngram_len=2)
    with pytest.raises(UnsupportedGenerationError, match="SynthID"):
        greedy(shared_target(), inputs, assistant_model=random_heads(shared_target()), watermarking_config=config)


# ---------------------------------------------------------------------- planted
@pytest.mark.parametrize("kind", [CountsCalls, LooksAtTheFirst, HasState, OnlyOneRow])
def test_planted_bug_criteria_are_asked_row_by_row(kind, monkeypatch):
    """Control: criteria are called row by row, out of step with the other rows."""
    init = StopRule.__init__

    def row_by_row(self, criteria, batch=1):
        init(self, criteria)

    inputs, alone = batch_of(SAME_LENGTH)
    expected = outcome(kind, inputs, None, False)
    monkeypatch.setattr(StopRule, "__init__", row_by_row)
    assert outcome(kind, inputs, None, False, assistant_model=heads_for(alone)[0]) != expected


def test_planted_bug_every_row_is_row_0_to_its_trie(monkeypatch):
    monkeypatch.setattr(sampling, "processors_of", lambda processors, sequence: processors)
    with pytest.raises((KeyError, AssertionError)):
        test_one_trie_per_row(False)
