"""Causes of low acceptance, planted in sound heads, their target or the prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.diagnosis.doctor import measured_statistics
from hf_specheads.diagnosis.evidence import capture, continue_texts
from hf_specheads.heads.layers import rotary_embedding


@dataclass
class Case:
    """What the doctor is given.

    Attributes:
        target: The target.
        heads: Its heads, something planted in them.
        prompts: Token ids [1, T] each.
        new_tokens: Text per prompt.
    """

    target: PreTrainedModel
    heads: DraftHead
    prompts: list[torch.Tensor]
    new_tokens: int


@dataclass(frozen=True)
class Planting:
    """One cause.

    Attributes:
        number: Of the cause in the list of ten.
        planted: What was done.
        method: Of the heads it is planted in.
        plant: Does it to a case.
        named: Names of causes, one of which the doctor must say first.
    """

    number: int
    planted: str
    method: str
    plant: Callable[[Case], None]
    named: tuple[str, ...] = field(default=())


def other_levels(step: int) -> Callable[[Case], None]:
    def plant(case: Case) -> None:
        levels = [level % (case.target.config.num_hidden_layers + 1) for level in case.heads.feature_layers]
        case.heads.config.feature_layers = tuple(level + step for level in levels)

    return plant


def flag(name: str) -> Callable[[Case], None]:
    def plant(case: Case) -> None:
        value = not getattr(case.heads.config, name)
        setattr(case.heads.config, name, value)
        for module in case.heads.modules():
            if hasattr(module, name):
                setattr(module, name, value)

    return plant


def rope(**parameters: Any) -> Callable[[Case], None]:
    def plant(case: Case) -> None:
        now = dict(case.heads.config.rope_parameters or {})
        case.heads.config.rope_parameters = {**now, **parameters}
        case.heads.rotary_emb = rotary_embedding(case.heads.config)

    return plant


def no_map(case: Case) -> None:
    case.heads.d2t.zero_()


def another_map(case: Case) -> None:
    """As many tokens, counted on other texts: the last ones instead of the first."""
    vocabulary, size = case.heads.config.vocab_size, len(case.heads.d2t)
    case.heads.d2t.copy_(torch.full_like(case.heads.d2t, vocabulary - size))


def untrained(case: Case) -> None:
    torch.manual_seed(0)
    case.heads = AutoDraftHead.from_target(case.target, case.heads.config.method).to(case.target.dtype).eval()


def random_prompts(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = case.target.config.vocab_size
    case.prompts = [torch.randint(5, vocabulary, ids.shape, generator=generator) for ids in case.prompts]


def own_token(case: Case) -> None:
    case.heads.config.inputs = "feature+token"


def next_label(case: Case) -> None:
    """The first head guesses what the second should."""
    case.heads.blocks[0].load_state_dict(case.heads.blocks[1].state_dict())


def shuffled_output(case: Case) -> None:
    with torch.no_grad():
        weight = case.heads.lm_head.weight
        weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])


def rotated_target(case: Case) -> None:
    """A target whose weights were rotated before they were quantised: the same text, other features. The heads know
    the statistics of their training, and no fingerprint."""
    texts = continue_texts(case.target, case.prompts, case.new_tokens)
    evidence = capture(case.target, texts, [ids.shape[1] for ids in case.prompts])
    case.heads.bind(case.target)
    case.heads.config.feature_statistics = measured_statistics(case.heads, evidence)
    case.heads.config.target = None
    case.target = rotate(copy.deepcopy(case.target))


@torch.no_grad()
def rotate(target: Any) -> Any:
    """Multiplies the residual stream of a Llama by an orthogonal matrix; logits stay the same."""
    width = target.config.hidden_size
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0))).Q
    model = target.model
    head = torch.nn.Linear(width, target.config.vocab_size, bias=False)
    head.weight.copy_((target.lm_head.weight * model.norm.weight) @ rotation)
    model.embed_tokens.weight.data = model.embed_tokens.weight @ rotation  # its own from here on
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for reader in readers:
                reader.weight.data = (reader.weight * norm.weight) @ rotation
            norm.weight.fill_(1)
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight.data = rotation.T @ writer.weight
    model.norm.weight.fill_(1)
    target.lm_head = head
    target.config.tie_word_embeddings = False
    return target


PLANTINGS = (
    Planting(1, "hidden states one layer up", "eagle3", other_levels(1), ("taps",)),
    Planting(1, "hidden states one layer down", "eagle3", other_levels(-1), ("taps",)),
    Planting(2, "norm_before_residual", "eagle3", flag("norm_before_residual"), ("norm flags",)),
    Planting(2, "norm_output", "eagle3", flag("norm_output"), ("norm flags",)),
    Planting(3, "rope scaled by 8", "eagle3", rope(rope_type="linear", factor=8.0), ("rope",)),
    Planting(3, "rope of base 500000", "eagle3", rope(rope_theta=500000.0), ("rope",)),
    Planting(4, "no training", "eagle", untrained, ("under-trained",)),
    Planting(5, "prompts of random tokens", "eagle", random_prompts, ("not text",)),
    Planting(7, "no map of the vocabulary", "eagle3", no_map, ("draft vocabulary",)),
    Planting(7, "a map of other tokens", "eagle3", another_map, ("draft vocabulary",)),
    Planting(9, "weights of the target rotated", "eagle", rotated_target, ("another target",)),
    Planting(10, "labels off by one", "medusa", next_label, ("training labels",)),
    Planting(10, "rows made of their own token", "eagle", own_token, ("token shift",)),
    Planting(10, "rows of lm_head shuffled", "eagle3", shuffled_output, ("damaged weights", "draft vocabulary")),
)
