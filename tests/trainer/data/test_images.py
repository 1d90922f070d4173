"""Training on chats with images: what is supervised, what the target sees, and that drafting sees the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.images import IMAGE_TOKEN, IMAGE_TOKENS, image_target
from support.processors import TEMPLATE, image_processor, picture
from transformers import PreTrainedTokenizerFast

from hf_specheads import AutoDraftHead
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments, JointTrainer, JointTrainingArguments
from hf_specheads.trainer import prepare_dataset as prepare
from hf_specheads.trainer.building import build_trainer, first_example, load_tokenizer
from hf_specheads.trainer.data.chats import ExampleError
from hf_specheads.trainer.data.images import ImageChats, ImageCollator, image_messages
from hf_specheads.trainer.data.preparing import DataReport
from hf_specheads.trainer.data.sources import DataSource, RecipeError
from hf_specheads.trainer.recipe import Recipe
from hf_specheads.trainer.unroll.target_features import FrozenTarget

MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'][0]['text'] }}#{% endgeneration %}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}#{% endif %}{% endfor %}"
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*turns: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


IMAGE = {"type": "image"}
TURN = [("assistant", [text("a-dog")])]
ONE = chat(("user", [IMAGE, text("what/is/it")]), ("assistant", [text("a-dog")]))
NONE = chat(("user", [text("hello/you")]), ("assistant", [text("hi")]))
TWO = chat(
    ("user", [text("see"), IMAGE, text("this")]),
    ("assistant", [text("yes")]),
    ("user", [text("and"), IMAGE]),
    ("assistant", [text("no-no")]),
)


def rows() -> Dataset:
    data = {"messages": [ONE, NONE, TWO], "images": [[picture(0)], [], [picture(1), picture(2)]]}
    return Dataset.from_dict(data)


@pytest.fixture(params=["llava", "gemma3"])
def kind(request) -> str:
    return request.param


def supervised(processor: Any, example: dict[str, Any]) -> str:
    kept = [token for token, made in zip(example["input_ids"], example["loss_mask"], strict=True) if made]
    return processor.tokenizer.decode(kept)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_replies_are_supervised_and_images_are_not(kind, template):
    processor = image_processor(kind)
    processor.chat_template = template.replace("IMAGE", "<image>" if kind == "llava" else "<boi>")
    report = DataReport()
    prepared = prepare(rows(), processor, 64, report=report)
    assert isinstance(prepared, ImageChats) and len(prepared) == 3 and report.examples == 3
    assert [supervised(processor, prepared[i]) for i in range(3)] == ["a-dog#", "hi#", "yes#no-no#"]
    counts = [prepared[i]["input_ids"].count(IMAGE_TOKEN) for i in range(3)]
    assert counts == [IMAGE_TOKENS, 0, 2 * IMAGE_TOKENS]


def test_the_target_sees_what_it_is_served(kind):
    """Features of a padded batch are those of the processor's own inputs, chat by chat."""
    processor, target = image_processor(kind), image_target(kind)
    prepared = prepare(rows(), processor, 64)
    batch = ImageCollator(0, 64)([prepared[i] for i in range(3)])
    features, final = FrozenTarget(target).features(batch, (1, -1))
    pictures = [[picture(0)], [], [picture(1), picture(2)]]
    for row, (messages, images) in enumerate(zip((ONE, NONE, TWO), pictures, strict=True)):
        words = processor.apply_chat_template(messages, tokenize=False)
        inputs = processor(text=[words], images=[images] if images else None, return_tensors="pt")
        states = target(**inputs, output_hidden_states=True).hidden_states
        length = inputs["input_ids"].shape[1]
        assert batch["input_ids"][row, :length].tolist() == inputs["input_ids"][0].tolist()
        assert torch.allclose(final[row, :length], states[-1][0], atol=1e-5)
        assert torch.allclose(features[row, :length], torch.cat([states[1], states[-1]], -1)[0], atol=1e-5)
    changed = [{**prepared[0], "image_inputs": {**prepared[0]["image_inputs"]}}]
    changed[0]["image_inputs"]["pixel_values"] = changed[0]["image_inputs"]["pixel_values"].flip(-1)
    other, _ = FrozenTarget(target).features(ImageCollator(0, 64)(changed), (1, -1))
    assert not torch.allclose(other[0], features[0, : other.shape[1]], atol=1e-3), "the image plays no part"


def test_images_where_messages_name_them_or_have_no_place_for_them(tmp_path):
    picture(0).save(tmp_path / "one.png")
    named = chat(("user", [{"type": "image", "path": str(tmp_path / "one.png")}, text("what/is/it")]), *TURN)
    unplaced = [{"role": "user", "content": "what/is/it"}, {"role": "assistant", "content": "a-dog"}]
    by_name, by_column = image_messages({"messages": named}), image_messages({"messages": unplaced, "images": ["x"]})
    assert by_name[0] == by_column[0] == ONE
    assert by_name[1] == [str(tmp_path / "one.png")] and by_column[1] == ["x"]
    processor = image_processor("llava")
    given = prepare(Dataset.from_dict({"messages": [named]}), processor, 64)[0]
    expected = prepare(rows(), processor, 64)[0]
    assert given["input_ids"] == expected["input_ids"]
    assert torch.equal(given["image_inputs"]["pixel_values"], expected["image_inputs"]["pixel_values"])


def test_rows_that_cannot_be_read_are_counted():
    processor, report = image_processor("llava"), DataReport()
    data = Dataset.from_dict({"messages": [ONE, ONE, NONE], "images": [[picture(0)], [], []]})
    prepared = prepare(data, processor, 64, report=report)
    assert (len(prepared), report.bad) == (2, 1) and "has 1 image parts, but `images` has 0" in report.first_problem
    for wrong in ("hi", ["hi"], [{"role": "user", "content": [3]}], [{"role": "user"}]):
        with pytest.raises(ExampleError, match="must be a list"):
            image_messages({"messages": wrong})
    with pytest.raises(ValueError, match="an image ends at token 23, and max_length is 18"):
        prepare(rows().select([2]), processor, 18)
    processor.chat_template = TEMPLATE.replace("IMAGE", "PICTURE")
    with pytest.raises(ValueError, match=r"writes none of .*<image>.* for an image"):
        prepare(Dataset.from_dict({"messages": [ONE], "images": [[picture(0)]]}), processor, 64)


def test_a_tokenizer_says_what_reads_images():
    with pytest.raises(ValueError, match=r"images, which the target's processor .* reads"):
        processor = image_processor("llava")
        processor.tokenizer.chat_template = processor.chat_template
        prepare(rows().remove_columns("images").select([0]), processor.tokenizer, 64)


def arguments(folder: Any, **options: Any) -> DraftHeadTrainingArguments:
    given = {"output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "use_cpu": True,
             "max_length": 64, "report_to": [], "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 3,
             "eval_max_new_tokens": 8, "logging_steps": 1, "learning_rate": 1e-2}  # fmt: skip
    return DraftHeadTrainingArguments(**given | options)


@pytest.mark.parametrize(("kind", "method"), [("llava", "eagle"), ("gemma3", "eagle3"), ("llava", "dflash")])
def test_training_and_evaluation(kind, method, tmp_path):
    processor, target = image_processor(kind), image_target(kind)
    levels = {} if method == "eagle" else {"feature_layers": (0, 1, -1)}
    heads = AutoDraftHead.from_target(target, method, **levels)
    args = arguments(tmp_path, max_steps=6)
    trainer = DraftHeadTrainer(heads, target, args, rows(), rows(), processing_class=processor)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    evaluated = trainer.state.log_history[-2]
    assert evaluated["eval_loss"] > 0 and evaluated["eval_acceptance_length"] >= 1
    inputs = trainer.eval_dataset.prompts(1)[0]
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(**inputs, **options, assistant_model=heads.eval()),
                       target.generate(**inputs, **options))  # fmt: skip


def test_what_goes_not_together_with_images_is_said_first(tmp_path):
    processor, target = image_processor("llava"), image_target("llava")
    heads = AutoDraftHead.from_target(target, "eagle")
    with pytest.raises(ValueError, match="packing=True cannot be used with chats that a processor reads"):
        DraftHeadTrainer(heads, target, arguments(tmp_path, packing=True), rows(), processing_class=processor)
    with pytest.raises(ValueError, match="cannot be streamed"):
        prepare(rows().to_iterable_dataset(), processor, 64)
    joint = JointTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="joint training cannot use chats that a processor reads"):
        medusa = AutoDraftHead.from_target(target, "medusa")
        JointTrainer(medusa, target, joint, train_dataset=rows(), processing_class=processor)


def test_from_a_recipe(tmp_path):
    """What `specheads train` does with a folder of a multimodal model and a file of chats that name their images."""
    processor, target = image_processor("llava"), image_target("llava")
    target.save_pretrained(tmp_path / "target")
    processor.save_pretrained(tmp_path / "target")
    picture(0).save(tmp_path / "one.png")
    asked = [{"type": "image", "path": str(tmp_path / "one.png")}, text("what/is/it")]
    line = json.dumps({"messages": chat(("user", asked), *TURN)})
    (tmp_path / "chats.jsonl").write_text("\n".join([line] * 4), encoding="utf-8")
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 1, "use_cpu": True, "max_length": 64}
    data = DataSource(str(tmp_path / "chats.jsonl"))
    recipe = Recipe(str(tmp_path / "target"), data, "eagle", eval_examples=1, training=training)
    trainer = build_trainer(recipe)
    assert isinstance(trainer.train_dataset, ImageChats) and "what/is/it#[[a-dog#]]" in first_example(trainer)
    assert trainer.train().global_step == 1
    fast = processor.tokenizer.backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>").save_pretrained(tmp_path / "text")
    with pytest.raises(RecipeError, match=r"the data hold images, and the target .* has no processor"):
        load_tokenizer(dataclasses.replace(recipe, target=str(tmp_path / "text")), rows())
