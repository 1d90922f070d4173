"""Renders the sections of a model card as Markdown; a section without known facts is empty."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...configuration import DraftHeadConfig
from ..curves import last_values
from ..figures import CURVES, POS_ACC, SPEED_UP
from .facts import CardFacts, is_hub_id

# Training facts that the card omits: they appear elsewhere in the card, or only in `training_facts.json`.
TRAINING_LEFT_OUT = ("versions", "commit", "target", "method", "parameters", "log_history", "num_specialists", "name",
                     "positions_per_specialist", "right_answers")  # fmt: skip
# Training arguments that are shown: RUN_ARGUMENTS, then all loss weights, then UNROLL_ARGUMENTS.
RUN_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta2", "max_grad_norm", "max_steps",
    "num_train_epochs", "bf16", "seed", "max_length", "packing",
)  # fmt: skip
LOSS_WEIGHT = "_loss_weight"
UNROLL_ARGUMENTS = ("pass_decay", "feature_noise", "embedding_noise")
ADAPTER_TEXT = (
    " They were trained together with a LoRA adapter of the target (Medusa-2), which lies beside them in "
    "`target_adapter/`: the text is that of the target **with** this adapter."
)
HELD_OUT = "held-out prompts"


def summary(facts: CardFacts) -> str:
    """Describes the model and its target in one paragraph."""
    size = f"{facts.num_parameters / 1e6:.1f} M parameters" if facts.num_parameters else ""
    if not facts.is_heads:
        layers = facts.config.get("num_hidden_layers")
        details = ", ".join(part for part in (size, f"{layers} layers" if layers else "") if part)
        kind = f"`{facts.config.get('model_type')}` language model"
        return f"A {kind}{f' ({details})' if details else ''}, target of draft heads."
    specialists = int(facts.config.get("num_specialists", 1))
    shape = ""
    if specialists > 1:
        shape = f"{specialists} specialists of {facts.config.get('positions_per_specialist')} draft positions each"
    details = ", ".join(part for part in (shape, size) if part)
    return (
        f"{facts.method_name} draft heads{f' ({details})' if details else ''} for "
        f"{target_link(facts)}. They make `generate` need fewer forwards of the target without changing its output: "
        "every token is the target's own." + (ADAPTER_TEXT if facts.config.get("target_adapter") else "")
    )


def target_link(facts: CardFacts) -> str:
    """The target's name, with a link if it is on the Hub, and its revision if known."""
    name = facts.target_name
    if not name:
        return "their target"
    revision = (facts.config.get("target") or {}).get("revision")
    link = f"[{name}](https://huggingface.co/{name})" if facts.target_on_hub else f"`{name}`"
    return f"{link} (revision `{revision}`)" if revision else link


def _place(name: str) -> str:
    """Source to load a model from: its Hub id, or a placeholder path."""
    return name if is_hub_id(name) else f"path/to/{name}"


def usage(facts: CardFacts) -> str:
    """Python code that loads the models and generates."""
    own = _place(facts.name)
    target = _place(facts.target_name or "target") if facts.is_heads else own
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *(["from hf_specheads import load_heads"] if facts.is_heads else []),
        "",
        f'target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")',
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")',
        *([f'heads = load_heads("{own}")'] if facts.is_heads else []),
        *(["heads.load_target_adapter(target)"] if facts.config.get("target_adapter") else []),
        'inputs = tokenizer("...", return_tensors="pt").to(target.device)',
        f"out = target.generate(**inputs, {'assistant_model=heads, ' if facts.is_heads else ''}max_new_tokens=256)",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------ measured results
def results(facts: CardFacts) -> str:
    """Tables of measured results and pos-acc, with figures; columns without any value are left out.

    For a target, the table shows its shares of right answers instead.
    """
    evaluations = facts.evaluations
    if not facts.is_heads:
        return _right_answers((facts.training or {}).get("right_answers") or {})
    columns = {
        "acceptance length": lambda r: _rounded(r.get("acceptance_length"), 2),
        "speed-up": lambda r: _rounded(r.get("speed_up"), 2),
        "tokens/s plain": lambda r: _rounded(r.get("plain_tokens_per_second"), 1),
        "tokens/s with heads": lambda r: _rounded(r.get("tokens_per_second"), 1),
        "draft tree": lambda r: _tree_text(r.get("tree_config")),
        "prompts": lambda r: _rounded(r.get("prompts"), 0),
        "identical texts": lambda r: {True: "yes", False: "no"}.get(r.get("identical"), ""),
        "hardware": lambda r: str(r.get("hardware") or ""),
    }
    rows = [{name: column(result) for name, column in columns.items()} for result in evaluations]
    used = [name for name in columns if any(row[name] for row in rows)]
    if not used:
        return ""
    tasks = [str(result.get("task") or HELD_OUT) for result in evaluations]
    table = markdown_table(
        ["task", *used], [[task, *(row[n] for n in used)] for task, row in zip(tasks, rows, strict=True)]
    )
    return "\n\n".join([table, *_pos_acc(tasks, evaluations), *figure_links(facts, POS_ACC, SPEED_UP)])


def _right_answers(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Table of shares of right answers: one row per kind of task, one column per decoding method."""
    if not shares:
        return ""
    kinds = list(next(iter(shares.values())))
    rows = [[kind, *(f"{100 * found[kind]:.0f} %" for found in shares.values())] for kind in kinds]
    return markdown_table(["right answers, held-out prompts", *shares], rows)


def _pos_acc(tasks: Sequence[str], evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    deepest = max(len(result.get("pos_acc") or ()) for result in evaluations)
    if not deepest:
        return []
    rows = [
        [task, *(f"{value:.2f}" for value in result["pos_acc"]), *[""] * (deepest - len(result["pos_acc"]))]
        for task, result in zip(tasks, evaluations, strict=True)
        if result.get("pos_acc")
    ]
    header = ["pos-acc at draft position", *map(str, range(1, deepest + 1))]
    explanation = "pos-acc: how often a draft position is accepted, given that all earlier ones were."
    return [markdown_table(header, rows), explanation]


def figure_links(facts: CardFacts, *titles: str) -> list[str]:
    """Markdown images of the figures that exist."""
    return [f"![{title}]({facts.figures[title]})" for title in titles if title in facts.figures]


def _rounded(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else ""


def _tree_text(tree: Mapping[str, Any] | None) -> str:
    if not tree:
        return ""
    nodes = "" if tree.get("kind") == "chain" else f", {tree.get('total_tokens')} nodes"
    return f"{tree.get('kind')}, depth {tree.get('depth')}{nodes}"


# ------------------------------------------------------------------ training, architecture
def training(facts: CardFacts) -> str:
    """Curves and last values of the training log, and a table of the facts of the training run."""
    shown = {key: value for key, value in (facts.training or {}).items() if key not in TRAINING_LEFT_OUT}
    if isinstance(arguments := shown.get("arguments"), Mapping):
        weights = [name for name in arguments if name.endswith(LOSS_WEIGHT)]
        names = (*RUN_ARGUMENTS, *weights, *UNROLL_ARGUMENTS)
        shown["arguments"] = {name: arguments[name] for name in names if name in arguments}
    if isinstance(recipe := shown.get("recipe"), Mapping):
        shown["recipe"] = {name: value for name, value in recipe.items() if name not in ("training", "target")}
    return "\n\n".join(part for part in (*_log(facts), _fact_table(shown)) if part)


def _log(facts: CardFacts) -> list[str]:
    header, rows = last_values((facts.training or {}).get("log_history") or [])
    if not any(row[3] for row in rows):  # the column of tau is empty
        return figure_links(facts, CURVES)
    explanation = (
        "tau: tokens of a round, the target's own included. At draft positions: how probably a token drawn there is "
        "accepted, and for `generate` how often it was, given that all earlier ones were."
    )
    return [*figure_links(facts, CURVES), markdown_table(header, rows), explanation]


def _fact_table(facts: Mapping[str, Any]) -> str:
    rows = [[f"`{key}`", str(value)] for key, value in _flattened(facts)]
    return markdown_table(["fact", "value"], rows) if rows else ""


def _flattened(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            rows += _flattened(value, f"{prefix}{key}.")
        elif value is not None and not _is_unprintable(value):
            rows.append((prefix + str(key), f"{value:.6g}" if isinstance(value, float) else value))
    return rows


def _is_unprintable(value: Any) -> bool:
    """Whether a value is a long list or a path of the machine that the model was trained on."""
    return (isinstance(value, list) and len(value) > 12) or (isinstance(value, str) and Path(value).is_absolute())


def architecture(facts: CardFacts) -> str:
    """Table of the sizes that all models have, followed by the fields of the family's own config."""
    names = ["vocab_size", "hidden_size", "feature_size", "embedding_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim"]  # fmt: skip
    if (config_class := facts.config_class) is not None:
        base = {field.name for field in dataclasses.fields(DraftHeadConfig)}
        own = [field.name for field in dataclasses.fields(config_class) if field.name not in base]
        names += [name for name in own if name not in names and not isinstance(facts.config.get(name), dict)]
    return _fact_table({name: facts.config.get(name) for name in [*names, "dtype"]})


# ------------------------------------------------------------------ limits, licence, provenance
def limits(facts: CardFacts) -> list[str]:
    """Known limits: those of all draft heads, those that follow from the config, and those that were given."""
    if not facts.is_heads:
        return facts.limits
    known = [
        "They fit only the target they were trained for; loading checks its sizes and a fingerprint of its embedding."
    ]
    if facts.config.get("trained_positions"):
        known.append(
            f"Trained for {facts.config['trained_positions']} draft positions; deeper drafts are accepted less."
        )
    if facts.config.get("train_max_length"):
        known.append(f"Trained on sequences of up to {facts.config['train_max_length']} tokens.")
    return [*known, *facts.limits, "Text unlike the training data is drafted worse: slower, but never different."]


def licence(facts: CardFacts) -> str:
    """Licence of the weights, and what is known about the target's licence."""
    own = f"These weights: {facts.license}." if facts.license else "No licence of these weights was stated."
    target = "The target has its own licence, which binds users of the pair." if facts.is_heads else ""
    return " ".join(part for part in (own, facts.target_license or target) if part)


def provenance(facts: CardFacts) -> str:
    """Package versions, and the commit if known."""
    rows = {**facts.versions, **({"commit": facts.commit} if facts.commit else {})}
    return ", ".join(f"{name} {value}" for name, value in rows.items())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Renders a Markdown table; vertical bars in cells are escaped and line breaks replaced by spaces."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
