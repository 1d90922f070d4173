"""Blocks: reproducible, full, only what the assistant says as labels, documents kept apart."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specheads.trainer.shipped_pair.mixture import IGNORED, MixtureBlocks, text_stream

BLOCK = 512


@pytest.fixture(scope="module")
def stream(chat_tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    texts = [f"def f{i}(x):\n    return x + {i}\n" for i in range(200)]
    return text_stream(texts, chat_tokenizer)


@pytest.fixture(scope="module")
def blocks(chat_tokenizer: PreTrainedTokenizerFast, stream: torch.Tensor) -> MixtureBlocks:
    return MixtureBlocks(chat_tokenizer, stream, BLOCK, num_blocks=40, seed=1, text_share=0.2, sheet_share=0.0)


def documents(block: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    starts = [*(block["position_ids"] == 0).nonzero().flatten().tolist(), BLOCK]
    return [{name: row[start:end] for name, row in block.items()} for start, end in itertools.pairwise(starts)]


def test_the_stream_ends_each_text(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    stream = text_stream(["a = 1\n", "b = 2\n"], chat_tokenizer)
    assert chat_tokenizer.decode(stream) == "a = 1\n<|endoftext|>b = 2\n<|endoftext|>"


def test_blocks_are_full_and_reproducible(chat_tokenizer, stream, blocks: MixtureBlocks) -> None:
    again = MixtureBlocks(chat_tokenizer, stream, BLOCK, num_blocks=4, seed=1, text_share=0.2, sheet_share=0.0)
    other = MixtureBlocks(chat_tokenizer, stream, BLOCK, num_blocks=4, seed=2, text_share=0.2)
    for index in (3, 0, 2):
        block = blocks[index]
        assert {name: tuple(row.shape) for name, row in block.items()} == dict.fromkeys(block, (BLOCK,))
        assert all(torch.equal(block[name], again[index][name]) for name in block)
        assert not torch.equal(block["input_ids"], other[index]["input_ids"])


def test_labels_are_the_assistants_tokens_and_blocks_of_text(chat_tokenizer, blocks: MixtureBlocks) -> None:
    texts_alone, kinds = 0, set()
    for index in range(len(blocks)):
        found = documents(blocks[index])
        texts_alone += len(found) == 1
        for document in found:
            ids, labels = document["input_ids"], document["labels"]
            assert labels[0] == IGNORED and ((labels == ids) | (labels == IGNORED)).all()
            assert torch.equal(document["position_ids"], torch.arange(len(ids)))
            is_chat = chat_tokenizer.decode(ids[0]) == "<|im_start|>"
            kinds.add(is_chat)
            if is_chat:
                said = chat_tokenizer.decode(labels[labels != IGNORED])
                assert said.endswith("<|im_end|>") and "<|im_start|>" not in said
            elif len(found) == 1:
                assert (labels[1:] == ids[1:]).all()
            else:  # what fills a block up
                assert document is found[-1] and (labels == IGNORED).all()
    assert kinds == {True, False} and 2 <= texts_alone <= 16


def test_documents_of_a_block_do_not_see_each_other(chat_tokenizer, blocks: MixtureBlocks) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer), num_hidden_layers=2, **sizes)).eval()
    block = next(block for block in blocks if len(documents(block)) > 2)
    with torch.no_grad():
        together = target(
            input_ids=block["input_ids"][None], position_ids=block["position_ids"][None], use_cache=False
        ).logits[0]
        alone = torch.cat([target(input_ids=d["input_ids"][None]).logits[0] for d in documents(block)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_too_little_text_is_refused(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="3 tokens, too few for blocks of 512"):
        MixtureBlocks(chat_tokenizer, torch.zeros(3, dtype=torch.int32), BLOCK, num_blocks=1)
