"""Ids, masks and batches against literal tensors."""

import pytest
import torch
from datasets import Dataset

from hf_specheads.trainer import PackedCollator, PaddedCollator, prepare_dataset
from hf_specheads.trainer.data.batches import cut_prompts, default_collator
from hf_specheads.trainer.data.chats import ExampleError, tokenize_chat
from hf_specheads.trainer.data.columns import tokenize_text
from hf_specheads.trainer.unroll.noise import document_lengths, feature_noise
from hf_specheads.trainer.unroll.target_features import unroll_inputs

MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}assistant : "
    "{% generation %}{{ m['content'] }} </s>{% endgeneration %} "
    "{% else %}user : {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETFUL = "{% for m in messages %}{% if loop.last %}{{ m['content'] }} </s> {% else %}w1 {% endif %}{% endfor %}"
CHAT = [
    {"role": "user", "content": "w0 w1"},
    {"role": "assistant", "content": "w2 w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5"},
]
#          user : w0 w1 assistant : w2  w3  </s> user : w4 assistant : w5 </s>
CHAT_IDS = [4, 6, 8, 9, 5, 6, 10, 11, 2, 4, 6, 12, 5, 6, 13, 2]
CHAT_MASK = [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["markers", "no markers"])
def test_only_the_assistant_is_supervised(tokenizer, template):
    tokenizer.chat_template = template
    [(ids, mask)] = tokenize_chat(CHAT, tokenizer)
    assert ids == CHAT_IDS
    assert mask == CHAT_MASK


def test_a_template_that_rewrites_the_past_is_refused(tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ExampleError, match="generation"):
        tokenize_chat(CHAT, tokenizer)


def test_a_tokenizer_without_template_is_refused(tokenizer):
    with pytest.raises(ExampleError, match="no chat template"):
        tokenize_chat(CHAT, tokenizer)


def test_texts_end_with_the_end_token_and_are_split(tokenizer):
    assert tokenize_text("w0 w1", tokenizer) == [8, 9, 2]
    assert tokenize_text("w0 </s>", tokenizer) == [8, 2]
    data = prepare_dataset(Dataset.from_dict({"text": ["w0 w1 w2 w3"]}), tokenizer, max_length=3)
    assert data[:] == {"input_ids": [[8, 9, 10], [11, 2]], "loss_mask": [[1, 1, 1], [1, 1]]}


def test_messages_are_cut_and_useless_examples_left_out(tokenizer):
    tokenizer.chat_template = MARKED
    chats = Dataset.from_dict({"messages": [CHAT, CHAT[:1]]})
    data = prepare_dataset(chats, tokenizer, max_length=8)
    assert data[:] == {"input_ids": [CHAT_IDS[:8]], "loss_mask": [CHAT_MASK[:8]]}
    with pytest.raises(ValueError, match="none of the 2 rows"):
        prepare_dataset(chats, tokenizer, max_length=6)


def test_tokenized_datasets_keep_their_masks(tokenizer):
    data = Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[-100, 6, -100]], "other": ["x"]})
    assert prepare_dataset(data, None, 8)[:] == {"input_ids": [[5, 6, 7]], "loss_mask": [[0, 1, 0]]}


def test_datasets_that_cannot_be_read_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"columns \['prompt'\]"):
        prepare_dataset(Dataset.from_dict({"prompt": ["a"]}), tokenizer, 8)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        prepare_dataset(Dataset.from_dict({"text": ["a"]}), None, 8)
    with pytest.raises(ExampleError, match="3 `input_ids` but a mask of length 2"):
        PaddedCollator(0, 8)([{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}])


EXAMPLES = [
    {"input_ids": [11, 12, 13], "loss_mask": [1, 0, 1]},
    {"input_ids": [21, 22]},
    {"input_ids": [31, 32, 33, 34, 35, 36], "labels": [-100, 32, 33, -100, 35, 36]},
]


def test_padded_batch():
    batch = PaddedCollator(pad_token_id=9, max_length=5)(EXAMPLES)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 9, 9], [21, 22, 9, 9, 9], [31, 32, 33, 34, 35]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 1]]


def test_packed_batch():
    batch = PackedCollator(pad_token_id=9, max_length=6)(EXAMPLES)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22, 9], [31, 32, 33, 34, 35, 36]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 1, 0], [0, 1, 1, 0, 1, 1]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_rows_of_a_packed_batch():
    """Row t: feature of token t, token t + 1; the row at the end of a document is never supervised."""
    batch = PackedCollator(pad_token_id=9, max_length=6)(EXAMPLES[:2])
    rows = unroll_inputs(batch, *[torch.arange(5.0).view(1, 5, 1)] * 2, noise=torch.full((1, 5, 1), 0.5))
    assert rows["features"][0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert rows["target_features"][0, :, 0].tolist() == [1, 2, 3, 4]
    assert rows["next_token_ids"].tolist() == [[12, 13, 21, 22]]
    assert rows["loss_mask"].tolist() == [[0, 1, 0, 1]]
    assert rows["document_ids"].tolist() == [[0, 0, 0, 1]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 0]]


def test_noise_is_uniform_and_scaled_by_length():
    batch = PackedCollator(pad_token_id=0, max_length=8)(EXAMPLES[:2])
    assert document_lengths(batch).tolist() == [[3, 3, 3, 2, 2]]
    features = torch.zeros(1, 5, 2000)
    plain = feature_noise(features, batch, 0.1, "none", torch.Generator().manual_seed(0))
    scaled = feature_noise(features, batch, 0.1, "eagle", torch.Generator().manual_seed(0))
    assert 0.099 < plain.abs().max() <= 0.1 and plain.mean().abs() < 0.01
    torch.testing.assert_close(scaled[0, 0], plain[0, 0] * 512 / 3)
    torch.testing.assert_close(scaled[0, 4], plain[0, 4] * 512 / 2)
    assert feature_noise(features, batch, 0.0, "none", torch.Generator()) is None


def test_prompts_end_where_the_reply_begins():
    chat = {"input_ids": CHAT_IDS, "loss_mask": CHAT_MASK}
    text = {"input_ids": list(range(3, 20))}
    assert cut_prompts([chat, text, text], 2, prompt_length=5) == [CHAT_IDS[:6], [3, 4, 5, 6, 7]]
    assert cut_prompts([{"input_ids": [3, 4, 5]}], 2, prompt_length=5) == [[3]]


def test_padding_token_of_the_default_collator(tokenizer):
    assert default_collator(tokenizer, 8, packing=False).pad_token_id == 0
    tokenizer.pad_token = None
    assert default_collator(tokenizer, 8, packing=True).pad_token_id == 2
    assert default_collator(None, 8, packing=False).pad_token_id == 0
