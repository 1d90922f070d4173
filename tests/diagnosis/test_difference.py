"""Two texts that differ: a tie that rounding decides, or a bug, and where it begins."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import tiny_target
from support.heads import random_heads
from support.targets import own_target, prompt
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.diagnosis.diff import wrong_mask, wrong_positions
from hf_specheads import UnsupportedGenerationError, explain_difference
from hf_specheads.cli import main
from hf_specheads.diagnosis.difference import first_difference, part_at_a_tie
from hf_specheads.diagnosis.rounding import logit_shifts, measure_rounding
from hf_specheads.generation.loop import RoundLoop


def inputs_of(seed: int = 7) -> dict[str, torch.Tensor]:
    ids = prompt(seed=seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def adds_up_in_another_order(target: LlamaForCausalLM) -> None:
    """Logits of forwards over several tokens are summed in two halves, as kernels for larger matrices do."""

    def summed_in_halves(module: torch.nn.Linear, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        hidden, weight = args[0], module.weight
        half = hidden.shape[-1] // 2
        parts = [hidden[..., part] @ weight[:, part].T for part in (slice(half), slice(half, None))]
        return output if hidden.shape[1] == 1 else parts[0] + parts[1]

    target.lm_head.register_forward_hook(summed_in_halves)


def twins(target: LlamaForCausalLM) -> None:
    """Makes every token 2i + 1 nearly the same as 2i: the two favourites are always as close as rounding."""
    with torch.no_grad():
        weight = target.lm_head.weight
        weight[1:-1:2] = weight[0:-1:2] * (1 + 2**-9 * torch.randn_like(weight[0:-1:2]))


@pytest.fixture
def tied() -> LlamaForCausalLM:
    """A bf16 target whose rounding depends on the shape of a forward, with ties everywhere."""
    target = own_target("llama")
    twins(target)
    target = target.to(torch.bfloat16)
    adds_up_in_another_order(target)
    return target


def test_equal_texts(target) -> None:
    found = explain_difference(target, inputs_of(), random_heads(target), max_new_tokens=24)
    assert found.verdict == "same" and found.position is None and found.first_wrong is None
    assert found.token_ids == found.plain_token_ids and len(found.token_ids) == 24
    assert found.shift <= found.allowed_shift < 1e-3


def test_a_tie_in_bf16_is_told_as_one(tied, tokenizer, tmp_path: Path) -> None:
    heads = random_heads(tied)
    ties = 0
    for seed in range(4):
        found = explain_difference(tied, inputs_of(seed), heads, max_new_tokens=20, tokenizer=tokenizer)
        assert found.verdict in ("tie", "same"), str(found)
        if found.verdict == "tie":
            ties += 1
            assert found.token != found.plain_token and found.token // 2 == found.plain_token // 2  # twins
            assert abs(found.gap) <= found.allowed_gap and found.first_wrong is None
            assert found.words is not None and "both texts are equally the target's" in str(found)
    assert ties >= 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("planted", [wrong_mask, wrong_positions])
def test_a_planted_bug_is_told_from_rounding(planted, dtype) -> None:
    target = own_target("llama").to(dtype)
    adds_up_in_another_order(target)
    heads = random_heads(target)
    assert explain_difference(target, inputs_of(), heads, max_new_tokens=24).verdict in ("same", "tie")
    with planted():
        found = explain_difference(target, inputs_of(), heads, max_new_tokens=24)
    assert found.verdict == "bug" and found.shift > found.allowed_shift
    # The first token comes from the prefill, the next from the first round: that is where it begins.
    assert found.first_wrong == 1 and found.first_wrong_token == found.token_ids[1]
    assert "first wrong logits  at new token 1" in str(found)


def test_a_bug_among_ties_is_a_bug(tied) -> None:
    with wrong_mask():
        found = explain_difference(tied, inputs_of(), random_heads(tied), max_new_tokens=24)
    assert found.verdict == "bug" and found.first_wrong == 1


def test_a_token_that_its_own_scores_do_not_favour(target, monkeypatch) -> None:
    """Right logits, wrong choice."""
    right = RoundLoop.accept

    def another_bonus_token(self: Any, tree: Any, logits: torch.Tensor, *others: Any) -> dict:
        accepted = right(self, tree, logits, *others)
        if tree.num_nodes == 1:
            return accepted
        return {row: replace(one, token_ids=[*one.token_ids[:-1], one.token_ids[-1] ^ 1])
                for row, one in accepted.items()}  # fmt: skip

    monkeypatch.setattr(RoundLoop, "accept", another_bonus_token)
    found = explain_difference(target, inputs_of(), random_heads(target), max_new_tokens=8)
    assert found.verdict == "bug" and "the scores favour another token" in found.because


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_logits_that_all_move_together_have_not_moved() -> None:
    expected = torch.tensor([[1.0, 2.0, -torch.inf], [3.0, 1.0, 0.0]])
    moved = expected + torch.tensor([[5.0], [0.0]])
    moved[1, 0] += 3
    shifts = logit_shifts(expected, moved)
    assert shifts[0] == pytest.approx(0, abs=1e-9) and shifts[1] == pytest.approx(2**0.5)


def test_rounding_is_that_of_the_shape(tied) -> None:
    ids = prompt(30)
    rounding = measure_rounding(tied, ids, 9)
    assert rounding.positions == 29 and rounding.nodes == 9
    assert 0 <= rounding.typical_gap <= rounding.gap and 0 < rounding.gap < 1
    exact = measure_rounding(own_target("llama", initializer_range=0.02).double(), ids, 9)
    assert exact.gap < 1e-6
    with pytest.raises(ValueError, match="at least 2 tokens"):
        measure_rounding(tied, ids[:, :1], 9)


def test_sampled_texts_and_batches_are_refused(target, eagle_heads) -> None:
    with pytest.raises(UnsupportedGenerationError, match="sampled text may differ by chance"):
        explain_difference(target, inputs_of(), eagle_heads, do_sample=True)
    two = {name: value.repeat(2, 1) for name, value in inputs_of().items()}
    with pytest.raises(UnsupportedGenerationError, match="one prompt at a time"):
        explain_difference(target, two, eagle_heads)


def pair_in(folder: Path, target: Any, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    random_heads(target).save_pretrained(folder / "heads")
    return ["--target", str(folder / "target"), "--heads", str(folder / "heads"), "--prompt", "w5 w6 w7 w8"]


def test_the_command_and_its_reproducer(target, tokenizer, tmp_path: Path, monkeypatch, capsys) -> None:
    models = pair_in(tmp_path, target, tokenizer)
    script = tmp_path / "scripts" / "again.py"
    options = ["--max-new-tokens", "12", "--reproducer", str(script)]
    assert main(["diff", *models, *options]) == 0
    assert "SAME: both texts are the same 12 tokens" in capsys.readouterr().out
    with wrong_mask():
        assert main(["diff", *models, *options, "--json"]) == 1
        facts = json.loads(capsys.readouterr().out)
        assert facts["verdict"] == "bug" and facts["first_wrong"] == 1
        monkeypatch.setattr(sys, "argv", [str(script)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 1 and "BUG" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0


def test_compare_explains_a_difference(target, tokenizer, tmp_path: Path, capsys) -> None:
    models = pair_in(tmp_path, target, tokenizer)
    with wrong_mask():
        code = main(["generate", *models, "--max-new-tokens", "40", "--compare", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert code == 1 and not facts["identical"]
    assert facts["difference"]["verdict"] == "bug"


def test_texts_at_hand_part_at_a_tie_or_not(tied) -> None:
    heads, ties = random_heads(tied), 0
    for seed in range(4):
        found = explain_difference(tied, inputs_of(seed), heads, max_new_tokens=20)
        texts = (prompt(seed=seed), found.token_ids, found.plain_token_ids, heads.tree_config.most_nodes)
        assert part_at_a_tie(tied, *texts)
        ties += found.verdict == "tie"
    assert ties >= 1


def test_a_token_far_from_the_favourite_or_an_early_end_is_no_tie(tied) -> None:
    ids = prompt(seed=7)
    plain = tied.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, -8:].tolist()
    least = int(tied(torch.cat([ids, torch.tensor([plain[:5]])], dim=1)).logits[0, -1].argmin())
    assert not part_at_a_tie(tied, ids, [*plain[:5], least, *plain[6:]], plain, 8)
    assert not part_at_a_tie(tied, ids, plain[:5], plain, 8)
    assert part_at_a_tie(tied, ids, plain, plain, 8)
    # What processors forbid is no favourite, however close its logit is.
    twin = plain[5] ^ 1
    texts = ([*plain[:5], twin, *plain[6:]], plain, 8)
    assert part_at_a_tie(tied, ids, *texts)
    assert not part_at_a_tie(tied, ids, *texts, suppress_tokens=[twin])


def test_where_rounding_is_not_measured_no_difference_is_a_tie(tied) -> None:
    """No forward over several tokens goes on from the states of Mamba."""
    ids, target, recurrent = prompt(seed=7), own_target("llama"), tiny_target("mamba")
    with torch.no_grad():
        for one in (recurrent, target):
            one.get_output_embeddings().weight[7] = one.get_output_embeddings().weight[6]
    assert part_at_a_tie(target, ids, [5, 6], [5, 7], 8) and not part_at_a_tie(recurrent, ids, [5, 6], [5, 7], 8)
    assert not part_at_a_tie(tied, ids[:, :1], [6], [7], 8)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "falcon_h1", "qwen3_next"])
def test_rounding_of_recurrent_targets_is_no_more_than_rounding(family) -> None:
    """Their forwards take the cache by another name, or positions that the cache does not know."""
    target, ids = tiny_target(family), prompt(seed=3)
    assert 0 < measure_rounding(target, ids, 4).gap < 1e-3
    heads = random_heads(target)
    found = explain_difference(target, {"input_ids": ids}, heads, max_new_tokens=12)
    assert found.verdict == "same" and found.allowed_gap < 1e-2


@pytest.mark.parametrize("batch", ["1", "2"])
def test_bench_tells_ties_from_bugs(tied, target, tokenizer, tmp_path: Path, capsys, batch) -> None:
    bench = ["--max-new-tokens", "20", "--repeats", "1", "--batch-size", batch]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"w{i} w{i + 3} w9"}) + "\n" for i in range(6))
    )
    bench += ["--prompts", str(tmp_path / "prompts.jsonl")]
    models = pair_in(tmp_path / "tied", tied, tokenizer)[:4]
    with pytest.MonkeyPatch.context() as patch:
        load = LlamaForCausalLM.from_pretrained.__func__

        def rounding(*args: Any, **kwargs: Any) -> LlamaForCausalLM:
            loaded = load(*args, **kwargs)
            adds_up_in_another_order(loaded)
            return loaded

        patch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(rounding))
        assert main(["bench", *models, *bench]) == 0
    assert "up to ties" in capsys.readouterr().out
    models = pair_in(tmp_path / "exact", target, tokenizer)[:4]
    with wrong_mask():
        assert main(["bench", *models, *bench, "--json"]) == 1
    side = json.loads(capsys.readouterr().out)["sides"]["heads, every round"]
    assert side["differing"] > side["ties"] and not side["identical"]
