"""Measures a target's share of right answers per family on held-out chats.

    python -m hf_specheads.trainer.shipped_pair.right_answers --target runs/target/final --per_family 50

The script prints the shares at each temperature. `--output` also writes them to a file, and `--answers` writes every
answer with its error, if any.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .chat import END_OF_TEXT, TURN_END, prompt_tokens
from .tasks import FAMILIES, Example, answer_problem, examples

MAX_NEW_TOKENS = 320  # right answers have at most 250 tokens


def generate_ids(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Generates continuations in one batch padded on the left, each up to and including its end of turn.

    Args:
        target: Target that knows the chat format.
        tokenizer: Tokenizer of the target.
        prompts: Token ids of the prompts.
        temperature: 0 is greedy; else the target's whole distribution is sampled at this temperature.
        seed: Seed of the sampling.
    """
    torch.manual_seed(seed)
    ends = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    pad = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = target.generate(
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=ends,
        pad_token_id=pad,
        **sampling,
    )
    return [_until_end(row, ends) for row in output[:, longest:].tolist()]


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    place = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: place + 1]


def generate_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Example],
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
) -> list[str]:
    """Generates the target's answers to chats without their last message, in the form `tasks.answer_problem` takes.

    `batch_size` chats share a forward; see [`generate_ids`].
    """
    answers: list[str] = []
    for start in range(0, len(asked), batch_size):
        prompts = [prompt_tokens(example, tokenizer) for example in asked[start : start + batch_size]]
        ids = generate_ids(target, tokenizer, prompts, temperature, seed + start)
        answers += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return answers


def right_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    per_family: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Lets the target answer held-out chats of every family, and checks the answers.

    Returns:
        Per chat: `family`, `thinking`, `answer` and `problem` (`None` for a right answer).
    """
    asked = [example for family in FAMILIES for example in islice(examples(family, seed, held_out=True), per_family)]
    answers = generate_answers(target, tokenizer, asked, temperature, seed)
    return [
        {
            "family": example.family,
            "thinking": example.thinking,
            "answer": answer,
            "problem": answer_problem(example, answer),
        }
        for example, answer in zip(asked, answers, strict=True)
    ]


def shares(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the share of right answers per family, and over all families as `all`."""
    found = {"all": [result["problem"] is None for result in results]}
    for result in results:
        found.setdefault(result["family"], []).append(result["problem"] is None)
    return {name: round(sum(right) / len(right), 4) for name, right in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--per_family", type=int, default=50, help="held-out chats of each family")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0, help="seed of chats and sampling")
    parser.add_argument("--output", type=Path, help="JSON file for the shares")
    parser.add_argument("--answers", type=Path, help="JSONL file for all answers")
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    table, lines = {}, []
    for temperature in args.temperatures:
        results = right_answers(target, tokenizer, args.per_family, temperature, args.seed)
        table[f"temperature {temperature:g}"] = shares(results)
        lines += [json.dumps({"temperature": temperature, **result}, ensure_ascii=False) for result in results]
    print(json.dumps(table, indent=2))
    if args.output is not None:
        args.output.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    if args.answers is not None:
        args.answers.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
