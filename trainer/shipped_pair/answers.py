"""Training data of the shipped draft heads: the target's own answers to chats of its training tasks, as token ids.

    python -m hf_specheads.trainer.shipped_pair.answers --target runs/target/final --output runs/answers.jsonl

Batches are answered alternately greedily and at temperature 1, because draft heads are used with both. Only the answer
is supervised; earlier turns of a dialogue come from the corpus. Answers that do not end within their limit are left
out. The file grows by whole batches, so a call can be stopped and repeated with the same arguments; the costs of
completed calls are stored beside it. `--from_corpus` writes the right answers to the same chats instead, for
comparison.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..data.batches import PackedCollator
from .chat import chat_tokens, prompt_tokens
from .costs import add_costs
from .right_answers import generate_ids
from .tasks import FAMILIES, Example, example_at

TEMPERATURES = (0.0, 1.0)  # successive batches alternate between them
IN_TURN = 32  # chats of one family before the next family's turn
# Differs from the seeds of the target's own training, so that the target has seen few of these chats word by word.
SEED = 1000


@dataclass(frozen=True)
class Answer:
    """A chat with the target's own answer.

    Attributes:
        family: Name of the chat's family.
        temperature: Sampling temperature of the answer; 0 is greedy.
        input_ids: Token ids of prompt and answer, the end of turn included.
        prompt_length: Number of tokens of the prompt.
    """

    family: str
    temperature: float
    input_ids: list[int]
    prompt_length: int

    @property
    def loss_mask(self) -> list[int]:
        """1 at the tokens of the answer."""
        return [int(place >= self.prompt_length) for place in range(len(self.input_ids))]


def asked_examples(count: int, seed: int = SEED) -> Iterator[Example]:
    """Yields training chats, `IN_TURN` of one family and then of the next, so that the answers in a batch have similar
    lengths."""
    for index in range(count):
        turn, place = divmod(index, IN_TURN)
        cycle, family = divmod(turn, len(FAMILIES))
        yield example_at(FAMILIES[family], cycle * IN_TURN + place, seed)


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Example],
    temperature: float,
    seed: int = 0,
) -> list[Answer | None]:
    """Generates the target's answers to chats in one batch; `None` for answers that do not end."""
    prompts = [prompt_tokens(example, tokenizer) for example in asked]
    answers = generate_ids(target, tokenizer, prompts, temperature, seed)
    return [
        Answer(example.family, temperature, prompt + ids, len(prompt))
        if ids[-1:] == [tokenizer.eos_token_id]
        else None
        for example, prompt, ids in zip(asked, prompts, answers, strict=True)
    ]


def write_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    count: int,
    batch_size: int = IN_TURN,
    seed: int = SEED,
) -> dict[str, int]:
    """Writes answers to `count` chats into a JSONL file, continuing where the file ends.

    Returns:
        Numbers of chats `asked` and `answered`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    done = len(output.read_text(encoding="utf-8").splitlines()) if output.exists() else 0
    started, tokens = time.time(), 0
    with output.open("a", encoding="utf-8") as file, tqdm(total=count, initial=done, unit="chat") as bar:
        remaining = islice(asked_examples(count, seed), done, None)
        while batch := list(islice(remaining, batch_size)):
            # All chats of a batch share a temperature, and successive batches alternate.
            temperature = TEMPERATURES[done // batch_size % len(TEMPERATURES)]
            for found in answer(target, tokenizer, batch, temperature, seed + done):
                file.write(json.dumps(None if found is None else vars(found)) + "\n")
                tokens += 0 if found is None else len(found.input_ids)
            file.flush()
            done += len(batch)
            bar.update(len(batch))
    add_costs(output, target, tokens, time.time() - started)
    return {"asked": count, "answered": len(read_answers(output))}


def corpus_answer(example: Example, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Returns a chat with the corpus's own answer."""
    return Answer(example.family, 0.0, chat_tokens(example, tokenizer)[0], len(prompt_tokens(example, tokenizer)))


def write_corpus(tokenizer: PreTrainedTokenizerBase, output: Path, count: int, seed: int = SEED) -> dict[str, int]:
    """Writes the same chats with the corpus's own answers; returns what [`write_answers`] returns."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        for one in asked_examples(count, seed):
            file.write(json.dumps(vars(corpus_answer(one, tokenizer))) + "\n")
    return {"asked": count, "answered": count}


def read_answers(path: Path) -> list[Answer]:
    """Reads the answers of a file; chats without an answer are skipped."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Answer(**row) for row in rows if row is not None]


class AnswerBlocks(Dataset):
    """Answers packed into sequences, as a packing collator would return them, one item per sequence.

    Items hold `input_ids`, `attention_mask`, `loss_mask`, `document_ids` (-1 on padding) and `position_ids`, int64
    [block_size] each.

    Args:
        answers: Answers, in the order of training.
        block_size: Tokens per sequence. An answer that does not fit into the current sequence begins the next one;
            answers longer than `block_size` are left out.
        pad_token_id: Token id of padding.
    """

    def __init__(self, answers: Sequence[Answer], block_size: int, pad_token_id: int):
        self.block_size, self.collate = block_size, PackedCollator(pad_token_id, block_size)
        self.sequences: list[list[Answer]] = []
        left = 0
        for one in answers:
            if (length := len(one.input_ids)) > block_size:
                continue
            if length > left:
                self.sequences.append([])
                left = block_size
            self.sequences[-1].append(one)
            left -= length

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows: list[dict[str, Any]] = [
            {"input_ids": one.input_ids, "loss_mask": one.loss_mask} for one in self.sequences[index]
        ]
        batch = self.collate(rows)
        missing = self.block_size - batch["input_ids"].shape[1]
        fill = {"input_ids": self.collate.pad_token_id, "document_ids": -1}
        return {
            name: torch.nn.functional.pad(value[0], (0, missing), value=fill.get(name, 0))
            for name, value in batch.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file, one line per chat")
    parser.add_argument("--chats", type=int, default=13_000)
    parser.add_argument("--batch_size", type=int, default=IN_TURN)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--bf16", action="store_true", help="answer in bf16: faster where a CPU has AMX, else slower")
    parser.add_argument("--from_corpus", action="store_true", help="write the corpus's answers, not the target's")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    if args.from_corpus:
        print(json.dumps(write_corpus(tokenizer, args.output, args.chats, args.seed)))
        return
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(write_answers(target, tokenizer, args.output, args.chats, args.batch_size, args.seed)))


if __name__ == "__main__":
    main()
