"""Causes of low acceptance to plant in sound heads, their target, their training or the prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_specheads import AutoDraftHead
from hf_specheads.diagnosis.alternative import partial_frequencies, partial_rotation, put_into_force
from hf_specheads.diagnosis.doctor import measured_statistics
from hf_specheads.diagnosis.layouts import reordered
from hf_specheads.diagnosis.teacher_forced import FIRST_TOKENS
from hf_specheads.heads.layers import rotary_embedding
from hf_specheads.target.adapter import adapter_parameters, add_adapter

from .lab import Case, Lab, tiny_tokenizer
from .tiny import LEVELS, NEW_TOKENS, fresh_heads, learn, scaling_target, texts_of, tiny_prompts

Plant = Callable[[Case], None]


@dataclass(frozen=True)
class Planting:
    """One planted cause.

    Attributes:
        number: Number of the cause in the list of ten.
        planted: Description of the change.
        heads: Name of the heads in which the cause is planted.
        make: Makes the case from the lab.
        named: Names of causes; the doctor must name one of them first.
    """

    number: int
    planted: str
    heads: str
    make: Callable[[Lab], Case]
    named: tuple[str, ...]


def planted(number: int, what: str, heads: str, plant: Plant, *named: str, **training: Any) -> Planting:
    """Plants a cause in shipped heads, or in heads called `tiny METHOD` that are trained for it."""

    def make(lab: Lab) -> Case:
        method = heads.removeprefix("tiny ")
        case = lab.shipped(heads) if heads == method else lab.tiny(method, **training)
        plant(case)
        return case

    return Planting(number, what, heads, make, named)


# ---------------------------------------------------------------------- settings of heads
def settings(**changes: Any) -> Plant:
    """Changes fields of the config, and rebuilds what depends on them."""
    return lambda case: put_into_force(case.heads, changes)


def flipped(name: str) -> Plant:
    """Inverts a boolean field of the config."""
    return lambda case: put_into_force(case.heads, {name: not getattr(case.heads.config, name)})


def rope(**changes: Any) -> Plant:
    """Changes parameters of the rotary positions."""

    def plant(case: Case) -> None:
        now = case.heads.config.rope_parameters or {}
        put_into_force(case.heads, {"rope_parameters": {**now, **changes}})

    return plant


def no_map(case: Case) -> None:
    case.heads.d2t.zero_()


def another_map(case: Case) -> None:
    """Shifts the draft vocabulary from the first tokens to the last, as if counted on other texts."""
    vocabulary, size = case.heads.config.vocab_size, len(case.heads.d2t)
    case.heads.d2t.copy_(torch.full_like(case.heads.d2t, vocabulary - size))


def other_slot(case: Case) -> None:
    case.heads.config.anchor_slot = "drafts" if case.heads.config.anchor_slot == "idle" else "idle"


def weights(change: Callable[[torch.Tensor], torch.Tensor], *ends: str) -> Plant:
    """Changes the weights whose names have one of these endings."""

    def plant(case: Case) -> None:
        for name, weight in case.heads.named_parameters():
            if name.endswith(ends):
                weight.data = change(weight.data)

    return plant


def as_gguf(weight: torch.Tensor, width: int = 64) -> torch.Tensor:
    """Reorders the rows of each attention head for rotary positions that pair neighbouring dimensions, as in GGUF
    files."""
    return weight.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def transposed_squares(weight: torch.Tensor) -> torch.Tensor:
    """Transposes square matrices."""
    return weight.T.contiguous() if weight.ndim == 2 and weight.shape[0] == weight.shape[1] else weight


def gates_exchanged(case: Case) -> None:
    for module in case.heads.modules():
        if hasattr(module, "gate_proj"):
            module.gate_proj.weight, module.up_proj.weight = module.up_proj.weight, module.gate_proj.weight


def backwards(*stacks: str) -> Plant:
    """Reverses the order of layers, specialists or Medusa heads."""

    def plant(case: Case) -> None:
        count = len(getattr(case.heads, stacks[0]))
        found = reordered(case.heads, list(stacks), list(range(count))[::-1])
        for name, weight in {name: weight.clone() for name, weight in found.items()}.items():
            case.heads.get_parameter(name).data = weight

    return plant


def tokens_before(case: Case) -> None:
    """Rolls the columns of blocks, as in files whose blocks read the feature last."""
    width = case.heads.config.feature_size
    weights(lambda one: one.roll(-width, dims=1), ".linear.weight", ".residual.weight")(case)


def later_map(case: Case) -> None:
    """Maps every draft id to the token after its own."""
    last = case.heads.config.vocab_size - 1 - torch.arange(len(case.heads.d2t))
    case.heads.d2t.copy_((case.heads.d2t + 1).minimum(last))


def swapped_halves(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(weight.shape[1] // 2, dims=1)


def lost(weight: torch.Tensor) -> torch.Tensor:
    """Replaces a tensor by random values, as if it had been missing from the file."""
    return torch.nn.init.normal_(torch.empty_like(weight), std=0.02, generator=torch.Generator().manual_seed(0))


def without_adapter(lab: Lab) -> Case:
    """Makes heads that were trained on a target with an adapter, and pairs them with the target without the
    adapter."""
    target = copy.deepcopy(lab.tiny_target)
    add_adapter(target, rank=4, alpha=8, modules="q_proj,v_proj,down_proj")
    torch.manual_seed(1)
    for weight in adapter_parameters(target):
        torch.nn.init.normal_(weight, std=0.3)  # values like after training, because a fresh adapter changes nothing
    heads = learn(fresh_heads(target), texts_of(target, tiny_prompts()))
    return Case(lab.tiny_target, heads, tiny_prompts(), NEW_TOKENS, 2, lab.texts())


def unscaled_embedding(lab: Lab) -> Case:
    """Makes heads for a target that scales its embedding, with weights as if trained on the unscaled embedding."""
    target = scaling_target()
    evidence = texts_of(target, tiny_prompts())
    heads = learn(fresh_heads(target, "eagle"), evidence)
    width = heads.config.embedding_size
    heads.fc.weight.data[:, :width] *= width**0.5
    return Case(target, heads, tiny_prompts(), 24, 2, evidence)


def nothing(case: Case) -> None:
    """Changes nothing, for causes that lie in the training."""


# ---------------------------------------------------------------------- target, prompts, training
def untrained(case: Case) -> None:
    torch.manual_seed(0)
    case.heads = AutoDraftHead.from_target(case.target, case.heads.config.method).to(case.target.dtype).eval()


def random_prompts(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = case.target.config.vocab_size
    case.prompts = [torch.randint(5, vocabulary, ids.shape, generator=generator) for ids in case.prompts]
    case.evidence = None


def long_prompts(case: Case) -> None:
    """Puts a long text, unlike the training, before some of the prompts."""
    before = tiny_prompts(len(case.prompts), 150, seed=50)
    case.prompts += [torch.cat(pair, dim=1) for pair in zip(before, case.prompts, strict=True)][:4]
    case.evidence = None


def raw_texts(lab: Lab) -> Case:
    """Asks heads that were trained on chats for raw text."""
    tokenizer = tiny_tokenizer()
    texts = [tokenizer.decode(ids[0]) for ids in tiny_prompts()]
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=True) for text in texts]
    evidence = texts_of(lab.tiny_target, [torch.tensor([chat["input_ids"]]) for chat in chats])
    heads = learn(fresh_heads(lab.tiny_target), evidence)
    return Case(lab.tiny_target, heads, texts, 24, 2, tokenizer=tokenizer)


def other_template(lab: Lab) -> Case:
    """Trains with a template that puts a block of its own before every answer, and supervises this block."""
    tokenizer, block = tiny_tokenizer(), 13
    chats = [[{"role": "user", "content": tokenizer.decode(ids[0])}] for ids in tiny_prompts()]
    asked = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
    evidence = texts_of(lab.tiny_target, [torch.tensor([ids]) for ids in asked])
    places, starts = torch.arange(evidence.token_ids.shape[1])[None], torch.tensor(evidence.starts)[:, None]
    labels = evidence.token_ids.masked_fill(places <= starts + FIRST_TOKENS, block)
    heads = learn(fresh_heads(lab.tiny_target), evidence, labels=labels)
    return Case(lab.tiny_target, heads, chats, 24, 2, evidence, tokenizer)


def other_texts(lab: Lab) -> Case:
    """Trains heads on the target's predictions within texts by others, and on none of its own answers."""
    evidence = texts_of(lab.tiny_target, tiny_prompts(6, 60))
    places = torch.arange(evidence.token_ids.shape[1])[None]
    labels = evidence.favourites.roll(1, dims=1)
    heads = learn(fresh_heads(lab.tiny_target), evidence, labels=labels, where=(places >= 2) & (places < 60))
    return Case(lab.tiny_target, heads, tiny_prompts(6, 60), 24, 2, evidence)


def later_labels(lab: Lab) -> Case:
    return lab.tiny("eagle3", labels=lab.texts().token_ids.roll(-1, dims=1))


def partial_rope(lab: Lab) -> Case:
    """Loads heads whose rotary positions cover half of every attention head as if they covered all of it."""
    heads, share = fresh_heads(lab.tiny_target), 0.5
    attention = heads.layers[0].self_attn
    heads.rotary_emb.inv_freq = partial_frequencies(attention.head_dim, share, 10000.0)
    heads.rotary_emb.inv_freq *= 4  # makes the rotation strong enough to matter at this length
    learn(heads, lab.texts())
    back = torch.tensor(partial_rotation(attention.head_dim, share)).argsort()
    for part in (attention.q_proj, attention.k_proj):
        part.weight.data = part.weight.data.unflatten(0, (-1, attention.head_dim))[:, back].flatten(0, 1)
    heads.rotary_emb = rotary_embedding(heads.config)
    return Case(lab.tiny_target, heads, tiny_prompts(), 24, 2, lab.texts())


def shuffled_output(case: Case) -> None:
    with torch.no_grad():
        weight = case.heads.lm_head.weight
        weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])


def rotated_target(case: Case) -> None:
    """Rotates the target's weights, as is done before quantisation: the text stays the same, the features change. The
    heads keep the feature statistics of their training, but no fingerprint of the target."""
    case.heads.bind(case.target)
    case.heads.config.feature_statistics = measured_statistics(case.evidence, case.heads.feature_layers)
    case.heads.config.target = None
    case.target, case.evidence = rotate(copy.deepcopy(case.target)), None


@torch.no_grad()
def rotate(target: Any) -> Any:
    """Multiplies the residual stream of a Llama by an orthogonal matrix. Logits stay the same."""
    width = target.config.hidden_size
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0))).Q
    model = target.model
    head = torch.nn.Linear(width, target.config.vocab_size, bias=False)
    head.weight.copy_((target.lm_head.weight * model.norm.weight) @ rotation)
    model.embed_tokens.weight.data = model.embed_tokens.weight @ rotation  # no longer tied to `lm_head`
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


SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
QUERIES_AND_KEYS = ("q_proj.weight", "k_proj.weight")
WINDOW = {"sliding_layers": (0, 1), "sliding_window": 6}

PLANTINGS = (
    planted(1, "hidden states one layer up", "eagle3", settings(feature_layers=(3, 9, 14)), "taps"),
    planted(1, "hidden states in another order", "eagle3", settings(feature_layers=(13, 8, 2)), "taps"),
    planted(1, "hidden states one layer up", "tiny dflash", settings(feature_layers=(3, 5, 7)), "taps"),
    planted(1, "hidden states in another order", "tiny dspark", settings(feature_layers=LEVELS[::-1]), "taps"),
    planted(1, "two of the hidden states exchanged", "eagle3", settings(feature_layers=(8, 2, 13)), "taps"),
    planted(2, "norm_before_residual", "eagle3", flipped("norm_before_residual"), "norm flags"),
    planted(2, "norm_output", "eagle3", flipped("norm_output"), "norm flags"),
    planted(2, "weights of norms less one", "eagle3", weights(lambda one: one - 1, "norm.weight"), "norm weights"),
    planted(3, "rope scaled by 8", "eagle3", rope(rope_type="linear", factor=8.0), "rope"),
    planted(3, "rope of base 100", "eagle3", rope(rope_theta=100.0), "rope"),
    planted(3, "queries and keys as GGUF has them", "eagle", weights(as_gguf, *QUERIES_AND_KEYS), "row order"),
    planted(3, "rope of base 100", "tiny dflash", rope(rope_theta=100.0), "rope"),
    Planting(3, "rope of a part read as rope of all", "tiny eagle3", partial_rope, ("rope",)),
    planted(4, "no training", "eagle", untrained, "under-trained"),
    Planting(4, "trained on texts of others", "tiny eagle3", other_texts, ("not its own answers",)),
    planted(5, "prompts of random tokens", "eagle", random_prompts, "not text"),
    Planting(5, "trained on chats, asked for raw text", "tiny eagle3", raw_texts, ("mode",)),
    Planting(6, "beginnings of answers of another template", "tiny eagle3", other_template, ("turns",)),
    planted(7, "no map of the vocabulary", "eagle3", no_map, "draft vocabulary"),
    planted(7, "a map of other tokens", "eagle3", another_map, "draft vocabulary"),
    planted(7, "a map one token late", "eagle3", later_map, "draft vocabulary"),
    planted(8, "contexts longer than in training", "tiny eagle3", long_prompts, "context"),
    planted(8, "a window ignored", "tiny dflash", settings(sliding_layers=()), "window", options=WINDOW),
    planted(9, "weights of the target rotated", "eagle", rotated_target, "another target"),
    Planting(9, "the target without its adapter", "tiny eagle3", without_adapter, ("another target",)),
    Planting(10, "labels off by one", "tiny eagle3", later_labels, ("training labels",)),
    planted(10, "rows made of their own token", "eagle", settings(inputs="feature+token"), "token shift"),
    planted(10, "tokens with the feature before", "tiny jetspec", nothing, "token shift", shift=1),
    planted(10, "tokens with the feature before", "tiny eagle3", nothing, "token shift", shift=1),
    planted(10, "rows of lm_head shuffled", "eagle3", shuffled_output, "damaged weights", "draft vocabulary"),
    planted(10, "gate and up exchanged", "eagle", gates_exchanged, "row order"),
    planted(10, "twice the attention heads, half as wide", "eagle", settings(**SHAPE), "attention shape"),
    planted(10, "specialists in the other order", "poss3", backwards("layers"), "row order"),
    planted(10, "heads in the other order", "medusa", backwards("blocks", "lm_heads"), "row order"),
    planted(10, "square matrices transposed", "medusa", weights(transposed_squares, ".weight"), "row order"),
    planted(10, "tokens before the feature", "hydra-plus", tokens_before, "row order"),
    planted(10, "fc lost", "eagle", weights(lost, "fc.weight"), "training gap"),
    Planting(10, "embedding not scaled", "tiny eagle", unscaled_embedding, ("embedding scale",)),
    planted(10, "the slot of the anchor", "tiny dflash", other_slot, "anchor slot"),
    planted(10, "the slot of the anchor", "tiny dspark", other_slot, "anchor slot"),
    planted(10, "blocks that see ahead", "tiny jetspec", settings(causal=False), "block mask"),
    planted(10, "another mask token", "tiny dflash2", settings(mask_token_id=17), "mask token"),
    planted(10, "another mask token", "tiny peagle", settings(mask_token_id=17), "mask token"),
    planted(10, "embedding and feature swapped in fc", "tiny mtp", weights(swapped_halves, "fc.weight"), "row order"),
)
