"""Every way to process the target's logits with every way to verify: constraints hold, and the distribution is right.

Whole generations show that the constraints hold and which rule was used. Single rounds, drafted and verified many
times, give the distribution of the next two tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.distributions import PROMPT, VOCAB, chi_square, critical_value, five_token_target
from support.heads import random_heads
from support.stubs import TableHead
from support.trees import row
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_specheads.cache.draft import DraftCache
from hf_specheads.errors import UnsupportedGenerationError
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.generation.sampling import DraftSampler, TokenSampler
from hf_specheads.generation.stopping import StopRule
from hf_specheads.generation.verification import rules
from hf_specheads.generation.verification.sampled import verify_sampled_at_once, verify_sampled_token_by_token
from hf_specheads.generation.verification.top_k import verify_all_nodes, verify_token_by_token
from hf_specheads.tree.draft_tree import DraftTree, SampledChildren

NEVER = StopRule(StoppingCriteriaList())
STATIC = {"kind": "static", "choices": ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))}
CHAIN = {"kind": "chain", "depth": 2}


class Grammar(LogitsProcessor):
    """A constraint with a state: the sum of neighbours is odd, or the token is 0. It must see every token exactly
    once."""

    def __init__(self) -> None:
        self.length: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == 1
        assert self.length is None or input_ids.shape[1] == self.length + 1, "asked about text that was not written"
        self.length = input_ids.shape[1]
        allowed = torch.tensor([token for token in range(VOCAB) if follows(int(input_ids[0, -1]), token)])
        return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores[:, allowed])


def follows(last: int, token: int) -> bool:
    return token == 0 or (last + token) % 2 == 1


def allowed_tokens(batch: int, ids: torch.Tensor) -> list[int]:
    return [token for token in range(VOCAB) if token != int(ids[-1])]


# Options of `generate`, and a function that makes the same processors anew for every generation, as they may have a
# state.
PROCESSORS: dict[str, tuple[dict[str, Any], Callable[[], list]]] = {
    "temperature": ({"temperature": 0.6}, lambda: [TemperatureLogitsWarper(0.6)]),
    "top-k": ({"top_k": 3}, lambda: [TopKLogitsWarper(3)]),
    "top-p": ({"top_p": 0.7}, lambda: [TopPLogitsWarper(0.7)]),
    "min-p": ({"min_p": 0.3}, lambda: [MinPLogitsWarper(0.3)]),
    "typical-p": ({"typical_p": 0.6}, lambda: [TypicalLogitsWarper(0.6)]),
    "repetition penalty": ({"repetition_penalty": 1.8}, lambda: [RepetitionPenaltyLogitsProcessor(1.8)]),
    "prefix_allowed_tokens_fn": (
        {"prefix_allowed_tokens_fn": allowed_tokens}, lambda: [PrefixConstrainedLogitsProcessor(allowed_tokens, 1)],
    ),
    "grammar": ({"logits_processor": Grammar}, lambda: [Grammar()]),
}  # fmt: skip
OF_THE_USER = ("prefix_allowed_tokens_fn", "grammar")
READ_THE_TEXT = ("repetition penalty", *OF_THE_USER)

# Tree, attributes of the heads, and the expected rule for processors of transformers and of the user.
RULES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "top-k, token by token": ({}, {}, "verify_token_by_token", "verify_token_by_token"),
    "top-k, at once": ({}, {"exact_seed": False}, "verify_all_nodes", "verify_token_by_token"),
    "sampled chain": (CHAIN | {"children": "sampled"}, {}, "verify_sampled_at_once", "verify_sampled_token_by_token"),
    "sampled tree": (STATIC | {"children": "sampled"}, {}, "verify_sampled_at_once", "verify_sampled_token_by_token"),
    "typical": ({}, {"verification": "typical"}, "verify_typical", "verify_typical"),
}
LOSSLESS = [rule for rule in RULES if rule != "typical"]
# Every processor once, and every rule with a row-wise processor and, if it selects another rule, with one that reads
# the text.
IN_THE_DEFAULT_RUN = [
    *zip(("temperature", "top-k", "top-p", "min-p"), LOSSLESS, strict=True),
    ("typical-p", LOSSLESS[0]),
    *zip(READ_THE_TEXT, LOSSLESS[1:], strict=True),
]
VERIFY = {verify.__name__: verify for verify in (
    verify_all_nodes, verify_token_by_token, verify_sampled_at_once, verify_sampled_token_by_token,
)}  # fmt: skip


# ---------------------------------------------------------------------- whole generations


def heads_of(rule: str) -> Any:
    tree, attributes, *_ = RULES[rule]
    heads = random_heads(five_token_target(), **tree)
    for name, value in attributes.items():
        setattr(heads, name, value)
    return heads


def generate(heads: Any, processors: str | None, **options: Any) -> torch.Tensor:
    """Returns the whole text int64 [T] of one generation."""
    given = dict(PROCESSORS[processors][0]) if processors else {}
    if "logits_processor" in given:
        given["logits_processor"] = [given["logits_processor"]()]
    options = {"max_new_tokens": 8, "top_k": 0, "attention_mask": torch.ones_like(PROMPT)} | given | options
    return five_token_target().generate(PROMPT, assistant_model=heads, **options)[0]


@functools.cache
def raw_logits(context: tuple[int, ...]) -> torch.Tensor:
    """Returns the target's logits [1, V] after a text, without cache."""
    with torch.no_grad():
        return five_token_target()(torch.tensor([context])).logits[:, -1].float()


def processed(processors: str, context: tuple[int, ...]) -> torch.Tensor:
    """Returns the target's distribution [V] after a text, as one step of plain generation computes it."""
    scores = raw_logits(context)
    for processor in PROCESSORS[processors][1]():
        scores = processor(torch.tensor([context]), scores.clone())
    return scores[0].softmax(-1)


def cases(rules: Iterable[str]) -> list[Any]:
    """Returns all processors with these rules. The default run has typical acceptance with all processors."""
    chosen = [*IN_THE_DEFAULT_RUN, *((processors, "typical") for processors in PROCESSORS)]
    return [pytest.param(*case, marks=[] if case in chosen else pytest.mark.slow)
            for case in itertools.product(PROCESSORS, rules)]  # fmt: skip


@pytest.mark.parametrize(("processors", "rule"), cases(RULES))
def test_constraints_hold(processors, rule, monkeypatch):
    heads, used = heads_of(rule), set()
    for name in (*VERIFY, "verify_typical"):
        verify = getattr(rules, name)

        def noted(*args, name=name, verify=verify, **options):
            used.add(name)
            return verify(*args, **options)

        monkeypatch.setattr(rules, name, noted)
    if rule == "typical" and processors in OF_THE_USER:
        with pytest.raises(UnsupportedGenerationError, match="typical acceptance asks the logits processors"):
            generate(heads, processors, do_sample=True)
        return
    text = generate(heads, processors, do_sample=True).tolist()
    assert len(text) == PROMPT.shape[1] + 8
    for length in range(PROMPT.shape[1], len(text)):
        assert processed(processors, tuple(text[:length]))[text[length]] > 0
    # The first token is not drafted, so it is chosen like any token without children.
    first = {"verify_typical"} if rule == "typical" else {"verify_token_by_token", "verify_all_nodes"}
    expected = RULES[rule][3 if processors in OF_THE_USER else 2]
    assert expected in used
    assert used <= {expected} | first


@pytest.mark.parametrize("rule", RULES)
def test_the_argmax_is_the_same_by_every_rule(rule):
    for processors in (None, "repetition penalty", "prefix_allowed_tokens_fn", "grammar"):
        expected = generate(None, processors, do_sample=False)
        assert torch.equal(generate(heads_of(rule), processors, do_sample=False), expected)


# ---------------------------------------------------------------------- the distribution


class SameDraft(TableHead):
    """Drafts from a table, with the same draft in all rows."""

    def logits_after(self, row, path):
        return super().logits_after(0, path)[:VOCAB]


def drafts(rule: str, processors: str, rows: int) -> DraftTree:
    """Makes one draft tree per row, after the tests' prompt."""
    tree, *_ = RULES[rule]
    tree = tree or {"depth": 2, "top_k": 2, "total_tokens": 5}
    head = SameDraft(11, rows, **tree)
    sampler = None
    if tree.get("children") == "sampled":
        sampler = DraftSampler(LogitsProcessorList(PROCESSORS[processors][1]()), PROMPT.expand(rows, -1))
    return grow_tree(
        head, DraftCache(0), head.tree_config, PROMPT[:, -1:].expand(rows, -1), torch.zeros(rows, 1, 2), 2, sampler
    )


def node_logits(tree: DraftTree) -> torch.Tensor:
    """Returns the target's raw logits [B, N, V] at the nodes."""
    logits = []
    for node in range(tree.num_nodes):
        numbers = torch.full((len(tree.token_ids),), node)
        tokens, depth = tree.token_ids.gather(1, tree.path_to(numbers)).tolist(), tree.depths[:, node].tolist()
        contexts = [(*PROMPT[0].tolist(), *words[1 : d + 1]) for words, d in zip(tokens, depth, strict=True)]
        logits.append(torch.cat([raw_logits(context) for context in contexts]))
    return torch.stack(logits, dim=1)


def one(tree: DraftTree, index: int) -> DraftTree:
    single = row(tree, index)
    if tree.sampled is None:
        return single
    drawn = SampledChildren(tree.sampled.probs[index : index + 1], tree.sampled.parents, tree.sampled.children)
    return DraftTree(single.token_ids, single.parents, single.depths, single.scores, single.max_depth, drawn)


def next_two(rule: str, processors: str, samples: int) -> Counter:
    """Counts the next two tokens. If a round emits only one, plain generation draws the second."""
    name = RULES[rule][3 if processors in OF_THE_USER else 2]
    tree = drafts(rule, processors, samples)
    logits = node_logits(tree)
    samplers = [TokenSampler(LogitsProcessorList(PROCESSORS[processors][1]()), True) for _ in range(samples)]
    if name.endswith("token_by_token"):
        accepted = [
            VERIFY[name](one(tree, index), PROMPT, logits[index : index + 1], sampler, NEVER, None)[0]
            for index, sampler in enumerate(samplers)
        ]
    else:
        accepted = VERIFY[name](tree, logits, samplers[0].at_nodes(tree, [PROMPT] * samples, [*range(samples)]), False)
    assert sum(result.num_accepted for result in accepted) > 0
    counts: Counter = Counter()
    for result in accepted:
        tokens = result.token_ids[:2]
        if len(tokens) == 1:
            probs = processed(processors, (*PROMPT[0].tolist(), *tokens))
            tokens = [*tokens, int(torch.multinomial(probs, 1))]
        counts[tuple(tokens)] += 1
    return counts


def expected_two(processors: str) -> dict[tuple[int, int], float]:
    context = tuple(PROMPT[0].tolist())
    first = processed(processors, context)
    return {
        (a, b): (first[a] * processed(processors, (*context, a))[b]).item() if first[a] > 0 else 0.0
        for a, b in itertools.product(range(VOCAB), repeat=2)
    }


@pytest.mark.parametrize(("processors", "rule"), cases(LOSSLESS))
def test_distribution_of_the_next_two_tokens(processors, rule):
    samples, expected = 200, expected_two(processors)
    counts = next_two(rule, processors, samples)
    assert all(expected[pair] > 0 for pair in counts)
    statistic, freedom = chi_square(counts, expected, samples)
    assert freedom >= 2
    assert statistic < critical_value(freedom)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_planted_bug_the_targets_logits_are_not_processed(rule, monkeypatch):
    """Control of the test above."""
    for name in ("scores_at_node", "scores_at_all_nodes"):
        monkeypatch.setattr(TokenSampler, name, lambda sampler, *given: given[-1].float())
    statistic, freedom = chi_square(next_two(rule, "temperature", 200), expected_two("temperature"), 200)
    assert statistic > critical_value(freedom)
