"""The shipped target's tokenizer: byte-level BPE over tasks and standard-library text, with the chat template.

    python -m hf_specheads.trainer.shipped_pair.tokenizer --output_dir runs/tokenizer

A word has the same tokens after a space, a quote or an underscore. In usual tokenizers, whose tokens include a leading
space, ` Florence` is one token and `"Florence"` is three others, and a small model cannot copy one into the other
unless it has memorised the spelling of that word. Spaces are therefore tokens of their own, except in front of very
common words. Every digit is a token, so that numbers can be copied, compared and added digit by digit.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .chat import CHAT_TEMPLATE, END_OF_TEXT, MARKERS, SPECIAL_TOKENS, TURN_END, answer_text
from .corpus import read_split
from .tasks import FAMILIES, Example, examples
from .tasks.draw import value_is_held_out
from .tasks.words import SLOTS

VOCABULARY = 4096
# Words whose token includes a leading space. No slot of a task is filled with one of them.
COMMON_WORDS = """
a about after again all also an and answer are as at be by can column columns costs could day days did do does down
each else end entries every first following for from give has have here how if in into is it keys know last leaves
less list me minutes more my name names no not now number numbers of on one or order out please row rows self
sentence shows so some starts steps table take takes text than that the their them then there they this to two up
use value was what when where which who will with work would write yes you your
"""
PIECES = rf" (?:{'|'.join(COMMON_WORDS.split())})(?![A-Za-z_])| ?\n[ \n]*| +|[A-Za-z]+|[0-9]|[^A-Za-z0-9\s]+ ?|\s+"
EXAMPLES_PER_FAMILY = 2000
TEXT_SHARE = 0.35  # share of standard-library text, in characters; below half, so that chats decide most merges
MODEL_MAX_LENGTH = 2048


def texts_of(example: Example) -> Iterator[str]:
    """Yields the texts between the special tokens of a chat."""
    for message in example.messages:
        yield answer_text(message, example.thinking)
    for tool in example.tools or []:
        yield str(tool["function"]).replace("'", '"')


def training_texts(library: list[str], per_family: int = EXAMPLES_PER_FAMILY, seed: int = 0) -> list[str]:
    """Returns training chats, and enough standard-library text to make up `TEXT_SHARE` of all characters.

    Args:
        library: Texts of the training split, used from the front; see `corpus.read_split`.
        per_family: Number of chats of each family.
        seed: Seed of the chats.
    """
    chats = [text for family in FAMILIES for example in islice(examples(family, seed), per_family)
             for text in texts_of(example)]  # fmt: skip
    wanted = sum(map(len, chats)) * TEXT_SHARE / (1 - TEXT_SHARE)
    chosen: list[str] = []
    for text in library:
        if wanted <= 0:
            break
        chosen.append(text[: int(wanted) + 1])
        wanted -= len(text)
    return chats + chosen


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE on `texts`, without merges across words, spaces and digits. The EOS token is `<|im_end|>`,
    which ends every turn.

    Args:
        texts: Texts to learn merges from.
        vocab_size: Total number of entries, including bytes, special tokens and markers.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (TURN_END, END_OF_TEXT)],
        model_max_length=MODEL_MAX_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def unlearnable_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the held-out words, plurals included, that are a single token. No training chat contains such a token,
    so its embedding is never trained and the target cannot copy it."""
    held_out = [word for slot in SLOTS for word in slot if value_is_held_out(word)]
    forms = [form for word in held_out for form in (word, f"{word}s")]
    return [form for form in forms if len(tokenizer(form, add_special_tokens=False)["input_ids"]) == 1]


def refuse_unlearnable_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises SystemExit for a tokenizer with [`unlearnable_words`]."""
    if words := unlearnable_words(tokenizer):
        raise SystemExit(
            f"the held-out words {words} are one token each, which no training chat contains; remove them from "
            "tasks/words.py, or train another tokenizer."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=VOCABULARY)
    parser.add_argument("--per_family", type=int, default=EXAMPLES_PER_FAMILY, help="chats of each family")
    args = parser.parse_args()
    tokenizer = train_tokenizer(training_texts(read_split(held_out=False), args.per_family), args.vocab_size)
    refuse_unlearnable_words(tokenizer)
    tokenizer.save_pretrained(args.output_dir)
    print(f"{len(tokenizer)} tokens in {args.output_dir}")


if __name__ == "__main__":
    main()
