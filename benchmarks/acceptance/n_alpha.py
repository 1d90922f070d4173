"""n-alpha: how often a chain's draft agrees with the target when n of the features it reads were drafted.

    python -m benchmarks n_alpha --heads model_cards/eagle model_cards/hass

EAGLE's measure of how heads bear their own errors (arXiv 2401.15077, section 4): the target writes a text greedily;
at every position of it, the draft whose last n rows were made of drafted features, and of the true tokens, is compared
with the target's choice. n-alpha is acceptance at draft position n + 1 given that all before it were accepted, on the
same positions for every n and every head. Draft heads that draft no features are measured the same way: for Medusa
the row lies n tokens back. Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import DraftHead
from hf_specheads.bootstrap import ratio_draws
from hf_specheads.target.borrowed import as_embedding, as_lm_head
from hf_specheads.target.features import asked_hidden_states, select_hidden_states
from hf_specheads.unroll.rows import TrainingRows, row_positions

from ..results import Result, footnote, markdown_table, number
from ..setup import add_generation_arguments, count_parameters, load_pair, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Heads, prompts, and how far."""
    heads = ["eagle", "hass", "poss2", "poss3"]
    add_generation_arguments(parser, heads, prompts=["held_out", "functions"], repeats=None)
    parser.add_argument("--max_n", type=int, default=4, help="most drafted features in a row")


@torch.no_grad()
def agreement(
    target: PreTrainedModel, heads: DraftHead, text: torch.Tensor, prompt_length: int, max_n: int
) -> torch.Tensor:
    """Where draft and target choose the same token, bool [n, positions] for n = 0 to `max_n` (or as far as the heads
    draft), at every token of the text that the target wrote, but for the first `max_n` + 1 of them.

    Args:
        target: The target.
        heads: Its heads.
        text: int64 [1, T], a prompt and what the target made of it.
        prompt_length: Tokens of the prompt.
        max_n: Most drafted features.
    """
    layers = heads.feature_layers
    asked = asked_hidden_states((*layers, -1) if layers else (-1,))
    outputs = target(input_ids=text, output_hidden_states=asked, use_cache=False)
    features = select_hidden_states(outputs.hidden_states, layers or (-1,))
    documents = torch.zeros_like(text[:, 1:])
    rows = TrainingRows(
        features=features[:, :-1].to(heads.device),
        token_ids=text[:, :-1],
        next_token_ids=text[:, 1:],
        documents=documents,
        position_ids=row_positions(documents),
        embed=as_embedding(target.get_input_embeddings()),
        lm_head=as_lm_head(target.get_output_embeddings()),
    )
    # Row t knows token t + 1 and drafts token t + 2; with n drafted features the round's root was token t + 1 - n.
    compared = torch.arange(prompt_length + max_n - 1, text.shape[1] - 2)
    wanted = outputs.logits[0, 1:].argmax(dim=-1)[compared]
    passes = max_n + 1 if heads.max_draft_positions is None else min(max_n + 1, heads.max_draft_positions)
    found = []
    for drafted in heads.unroll(rows, passes):
        choices = drafted.logits(drafted.hidden[0, compared - drafted.offset]).argmax(dim=-1)
        if heads.draft_vocabulary is not None:
            choices = heads.draft_vocabulary[choices]
        found.append(choices.to(wanted.device) == wanted)
    return torch.stack(found)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every head on the same texts."""
    target, loaded, prompts = load_pair(args, every_round=True)
    greedy = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    texts = [(target.generate(**inputs, **greedy), inputs["input_ids"].shape[1]) for inputs in prompts]
    texts = [(text, length) for text, length in texts if text.shape[1] > length + args.max_n + 1]
    heads: dict[str, Any] = {}
    positions = 0
    for name, one in loaded.items():
        found = [agreement(target, one, text, length, args.max_n) for text, length in texts]
        agreed = torch.stack([each.sum(dim=1) for each in found]).double()  # [texts, n]
        counts = torch.tensor([each.shape[1] for each in found], dtype=torch.float64)
        positions = int(counts.sum())
        heads[name] = {
            "method": one.config.method,
            "inputs": getattr(one.config, "inputs", None),
            "trained_positions": getattr(one.config, "trained_positions", None),
            "parameters": count_parameters(one),
            "n_alpha": (agreed.sum(dim=0) / counts.sum()).tolist(),
            "standard_error": [ratio_draws(each.tolist(), counts.tolist()).std().item() for each in agreed.T],
        }
        print(f"{name}: {heads[name]['n_alpha']}", file=sys.stderr, flush=True)
    return {
        **settings(args, texts),
        "max_n": args.max_n,
        "positions": positions,
        "heads": heads,
    }


def table(result: Result) -> str:
    """One row per head, one column per number of drafted features."""
    rows = []
    for name, facts in result["heads"].items():
        cells = zip(facts["n_alpha"], facts["standard_error"], strict=True)
        row = [name, facts["inputs"] or "-", number(facts["trained_positions"], 0)]
        row += [f"{number(value, 3)} ± {number(error, 3)}" for value, error in cells]
        rows.append(row + ["-"] * (3 + result["max_n"] + 1 - len(row)))
    header = ["heads", "inputs", "trained positions", *(f"{n}-alpha" for n in range(result["max_n"] + 1))]
    sets = ", ".join(result["prompts"])
    return markdown_table(header, rows) + footnote(
        result, f"Greedy, {result['positions']} positions of {result['num_prompts']} texts (prompts: {sets}), "
        "standard errors bootstrapped over texts",
    )  # fmt: skip
