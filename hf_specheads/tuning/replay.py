"""Finding out how many tokens any draft tree would have accepted, by replaying trees on the same recorded drafts.

Draft heads start from committed tokens only, so what they draft at a place of a text does not depend on earlier draft
trees. Drafts are therefore recorded once at every place of a text written by the target, with a tree wide and deep
enough to contain the others (and with the true path, whatever its rank). How far a smaller tree would have got at that
place is then looked up. This is valid for greedy text, and for sampled text with top-k children, since these are
accepted exactly if the target has drawn them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..contract import DraftingContract
from ..generation.kernels.any_length import any_length
from ..target.features import asked_hidden_states, select_hidden_states
from .progress import bar
from .turns import Prompts, generate_text

MOST_NODES = 256  # best nodes kept per level when trees of independent positions are replayed
NOT_DRAFTED = 1 << 30  # rank of a true token that the draft vocabulary lacks, or past the end of the text
STARTS = 5  # a text is walked from this many first places, so that no tree profits from where its rounds happen to end


@dataclass(frozen=True)
class RecordedDrafts:
    """What heads drafted at T places of texts, with frontiers of K nodes and D draft positions, on the CPU.

    Attributes:
        scores: D tensors [T, F, K], cumulative log-probabilities of the best K children of each of the F frontier
            nodes of a level (F = 1 for the root, else K), the best child first.
        frontiers: D - 1 tensors int64 [T, K], which of the F * K children became the next frontier.
        true_children: int64 [T, D], which of the F * K children continues the true path with the true token; -1 if
            none does.
        true_ranks: int64 [T, D], rank of the true token among all children of the previous node of the true path.
        lengths: Number of places in each text; the texts follow one another along T.
        independent: Whether the heads' draft positions are independent, so that dynamic trees are grown best-first.
    """

    scores: tuple[torch.Tensor, ...]
    frontiers: tuple[torch.Tensor, ...]
    true_children: torch.Tensor
    true_ranks: torch.Tensor
    lengths: tuple[int, ...]
    independent: bool = False

    @property
    def depth(self) -> int:
        """Number of draft positions D."""
        return len(self.scores)

    @property
    def top_k(self) -> int:
        """Number of children per node and of frontier nodes K."""
        return self.scores[0].shape[-1]


# ---------------------------------------------------------------------- recording
@torch.no_grad()
def record_drafts(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    depth: int = 8,
    top_k: int = 8,
    max_new_tokens: int = 64,
    **generate_options: Any,
) -> RecordedDrafts:
    """Lets the target write texts by plain decoding, and records what the heads draft at every place of them.

    Args:
        target: The target.
        heads: The target's heads.
        prompts: Token ids of prompts, [1, T] or plain lists.
        depth: Number of draft positions D, capped at what the heads can draft.
        top_k: Children per node and nodes per level K, capped at the size of the draft vocabulary.
        max_new_tokens: Tokens to write per prompt.
        **generate_options: Options of `generate`; greedy by default.

    Raises:
        ValueError: if no text has at least two new tokens, since nothing can be drafted then.
    """
    heads.bind(target)
    depth = min(depth, heads.max_draft_positions or depth)
    vocabulary = heads.draft_vocabulary
    top_k = min(top_k, heads.target_vocab_size if vocabulary is None else len(vocabulary))
    wide = heads.with_tree(kind="dynamic", depth=depth, top_k=top_k, total_tokens=depth + 1)
    places, lengths = [], []
    for prompt in bar(prompts, "drafts at every place of a text"):
        ids = torch.as_tensor(prompt, device=target.device).reshape(1, -1)
        text = generate_text(target, ids, **{"max_new_tokens": max_new_tokens, **generate_options})
        found = _record_text(target, wide, text, ids.shape[1], depth, top_k)
        places += found
        lengths += [len(found)] if found else []
    if not places:
        raise ValueError("nothing can be drafted: give at least one prompt, and leave room for two new tokens.")
    scores, frontiers, children, ranks = zip(*places, strict=True)
    return RecordedDrafts(
        scores=tuple(torch.stack(level).cpu() for level in zip(*scores, strict=True)),
        frontiers=tuple(torch.stack(level).cpu() for level in zip(*frontiers, strict=True)),
        true_children=torch.tensor(children),
        true_ranks=torch.tensor(ranks),
        lengths=tuple(lengths),
        independent=heads.independent_positions,
    )


@any_length
def _record_text(
    target: PreTrainedModel, heads: DraftingContract, text: torch.Tensor, prompt_length: int, depth: int, top_k: int
) -> list[tuple]:
    """Records one text [1, T]: one entry per root, from the first new token to the last but one."""
    features = None
    if heads.feature_layers:
        states = target(text, output_hidden_states=asked_hidden_states(heads.feature_layers)).hidden_states
        features = select_hidden_states(states, heads.feature_layers).to(heads.device)
    ids, cache = text.to(heads.device), heads.new_draft_cache()
    found, committed = [], 0
    for root in range(prompt_length, ids.shape[1] - 1):
        rows = None if features is None else features[:, committed:root]
        state, logits = heads.start_draft(cache, ids[:, committed : root + 1], rows)
        committed = root
        found.append(_record_place(heads, cache, state, logits, ids[0, root + 1 :][:depth].tolist(), depth, top_k))
    return found


def _record_place(
    heads: DraftingContract,
    cache: Any,
    state: torch.Tensor,
    logits: torch.Tensor,
    truth: list[int],
    depth: int,
    top_k: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int], list[int]]:
    """Records the drafts at one place.

    The frontier grows as in a dynamic tree. An additional row follows the true path, so that its ranks are known even
    outside the frontier.
    """
    vocabulary, temperature = heads.draft_vocabulary, heads.tree_config.draft_temperature
    scores, frontiers, true_children, true_ranks = [], [], [], []
    above = logits.new_zeros(1)  # cumulative scores of the frontier
    true_slot, on_path = 0, True
    visible = torch.zeros(top_k + 1, 0, dtype=torch.bool, device=heads.device)
    for position in range(depth):
        log_probs = torch.log_softmax(logits[0] / temperature, dim=-1).nan_to_num(nan=-torch.inf)  # [F or F + 1, Vd]
        best = log_probs[: len(above)].topk(top_k, dim=-1)
        children = above[:, None] + best.values
        scores.append(children)
        rank = _true_rank(log_probs[-1], truth[position] if on_path and position < len(truth) else None, vocabulary)
        on_path = rank < NOT_DRAFTED
        in_frontier = on_path and true_slot >= 0 and rank < top_k
        true_children.append(true_slot * top_k + rank if in_frontier else -1)
        true_ranks.append(rank)
        if position == depth - 1:
            break
        above, chosen = children.flatten().topk(top_k)
        frontiers.append(chosen)
        tokens = best.indices.flatten()[chosen]
        true_slot = _place_of(true_children[-1], chosen)
        tokens = tokens if vocabulary is None else vocabulary[tokens]
        true_token = torch.tensor([truth[position] if on_path else 0], device=tokens.device)
        parents = torch.cat([chosen // top_k, chosen.new_tensor([children.shape[0] if position else 0])])
        state = state[:, parents]
        own_row = torch.eye(top_k + 1, dtype=torch.bool, device=tokens.device)
        visible = torch.cat([visible[parents], own_row], dim=1)
        frontier = torch.cat([tokens, true_token])[None]
        state, logits = heads.extend_draft(cache, position + 1, frontier, state, visible[None])
    return scores, frontiers, true_children, true_ranks


def _true_rank(log_probs: torch.Tensor, token: int | None, vocabulary: torch.Tensor | None) -> int:
    if token is not None and vocabulary is not None:
        found = (vocabulary == token).nonzero()
        token = int(found) if len(found) else None
    if token is None or token >= len(log_probs):
        return NOT_DRAFTED
    return int((log_probs > log_probs[token]).sum() + (log_probs[:token] == log_probs[token]).sum())


def _place_of(child: int, chosen: torch.Tensor) -> int:
    found = (chosen == child).nonzero()
    return int(found[0]) if child >= 0 and len(found) else -1


# ---------------------------------------------------------------------- replaying
def accepted_by_ranks(record: RecordedDrafts, paths: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Returns the accepted draft tokens of a tree of fixed shape at every place, int64 [T]."""
    known, depth = set(paths), max(map(len, paths))
    accepted = []
    for ranks in record.true_ranks[:, :depth].tolist():
        length = 0
        while length < len(ranks) and tuple(ranks[: length + 1]) in known:
            length += 1
        accepted.append(length)
    return torch.tensor(accepted)


@dataclass(frozen=True)
class ReplayedDynamic:
    """Replayed dynamic trees of one depth and width, for any number of nodes.

    Attributes:
        better: int64 [T, D], number of candidates that score above the true node of each level; `NOT_DRAFTED` if the
            true node is not a candidate.
        best_of_level: [T, D], score of the best frontier node of each level.
    """

    better: torch.Tensor
    best_of_level: torch.Tensor

    def accepted(self, total_tokens: int, stop_below: float = 0.0) -> torch.Tensor:
        """Returns the accepted draft tokens at every place, int64 [T].

        These are the leading true nodes that are among the best `total_tokens - 1` candidates.
        """
        drafted = torch.arange(self.better.shape[1]) < self.levels(stop_below)[:, None]
        kept = (self.better < total_tokens - 1) & drafted
        return kept.long().cumprod(dim=1).sum(dim=1)

    def levels(self, stop_below: float) -> torch.Tensor:
        """Returns the number of levels drafted at every place, int64 [T].

        Drafting stops after a frontier whose best node has a probability below `stop_below`.
        """
        goes_on = self.best_of_level[:, :-1] >= (math.log(stop_below) if stop_below > 0 else -math.inf)
        return 1 + goes_on.long().cumprod(dim=1).sum(dim=1)


def replay_dynamic(record: RecordedDrafts, depth: int, top_k: int) -> ReplayedDynamic:
    """Replays dynamic trees with frontiers of `top_k` nodes.

    Nodes that the recorded frontier did not hold are taken to have no children.

    Raises:
        ValueError: if the record is not deep or wide enough.
    """
    if depth > record.depth or top_k > record.top_k:
        raise ValueError(
            f"the record has depth {record.depth} and top_k {record.top_k}, which is too small for depth {depth} and "
            f"top_k {top_k}."
        )
    if record.independent:
        return _replay_best_first(record, depth, top_k)
    width, places = record.top_k, len(record.true_ranks)
    slots = torch.zeros(places, 1, dtype=torch.long)
    levels, true_scores, best = [], [], []
    for level in range(depth):
        scores = record.scores[level].gather(1, slots.clamp_min(0)[..., None].expand(-1, -1, width))[..., :top_k]
        scores = scores.masked_fill(slots[..., None] < 0, -torch.inf).flatten(1)  # [T, F * k]
        index = (slots[..., None] * width + torch.arange(top_k)).flatten(1)
        index = index.masked_fill((slots[..., None] < 0).expand(-1, -1, top_k).flatten(1), -2)
        true = index == record.true_children[:, level, None]
        true_scores.append(torch.where(true, scores, -torch.inf).amax(dim=1))
        levels.append(scores)
        frontier = scores.topk(min(top_k, scores.shape[1]), dim=1)
        best.append(frontier.values[:, 0])
        if level + 1 < depth:
            chosen = index.gather(1, frontier.indices)  # [T, k]
            found = record.frontiers[level][:, None] == chosen[..., None]  # [T, k, K]
            slots = torch.where(found.any(-1), found.long().argmax(-1), -1)
    candidates = torch.cat(levels, dim=1)
    better = torch.stack([(candidates > score[:, None]).sum(dim=1) for score in true_scores], dim=1)
    impossible = torch.stack(true_scores, dim=1).isinf()
    return ReplayedDynamic(better.masked_fill(impossible, NOT_DRAFTED), torch.stack(best, dim=1))


def _replay_best_first(record: RecordedDrafts, depth: int, top_k: int) -> ReplayedDynamic:
    """Replays dynamic trees of heads whose draft positions are independent.

    The candidates are the `MOST_NODES` best nodes of every level, which include all nodes of a tree with fewer nodes.
    """
    places, above = len(record.true_ranks), torch.zeros(len(record.true_ranks), 1, dtype=torch.float32)
    true, levels, true_scores, best = above[:, 0], [], [], []
    for level in range(depth):
        # Subtracting the score of the best frontier node leaves the log-probabilities of this level alone.
        start = record.scores[level - 1].flatten(1).amax(1, keepdim=True) if level else above
        children = (record.scores[level][:, 0] - start)[:, :top_k]
        rank = record.true_ranks[:, level, None]
        true = true + torch.where(rank < top_k, children.gather(1, rank.clamp_max(top_k - 1)), -torch.inf)[:, 0]
        paths = (above[..., None] + children[:, None]).view(places, -1)
        above = paths.topk(min(MOST_NODES, paths.shape[1]), dim=1).values
        levels.append(above)
        true_scores.append(true)
        best.append(above[:, 0])
    candidates = torch.cat(levels, dim=1)
    better = torch.stack([(candidates > score[:, None]).sum(dim=1) for score in true_scores], dim=1)
    impossible = torch.stack(true_scores, dim=1).isinf()
    return ReplayedDynamic(better.masked_fill(impossible, NOT_DRAFTED), torch.stack(best, dim=1))


def favourite_paths(record: RecordedDrafts, most_nodes: int, depth: int) -> tuple[tuple[int, ...], ...]:
    """Returns the paths of child ranks that the true text took most often.

    The first N - 1 paths form the tree that would have accepted most among all trees of fixed shape with N nodes. They
    always form a tree, since a path is never more frequent than its prefixes.

    Returns:
        At most `most_nodes - 1` paths, the most frequent first; prefixes come before the paths that extend them.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for ranks in record.true_ranks[:, :depth].tolist():
        for length in range(1, len(ranks) + 1):
            if ranks[length - 1] >= record.top_k:
                break
            counts[tuple(ranks[:length])] += 1
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return tuple(order[: most_nodes - 1])


def walk(record: RecordedDrafts, accepted: torch.Tensor, seconds: torch.Tensor | float = 0.0) -> tuple[float, float]:
    """Returns the mean tokens and seconds per round when rounds follow one another through the texts.

    Args:
        record: The recorded drafts.
        accepted: int64 [T], accepted draft tokens of a round that starts at each place.
        seconds: [T], or one number, the seconds of a round that starts at each place.
    """
    costs = torch.as_tensor(seconds, dtype=torch.float64).expand(len(accepted)).tolist()
    steps = (accepted + 1).tolist()
    tokens = rounds = spent = 0.0
    first = 0
    for length in record.lengths:
        for start in range(min(STARTS, length)):
            place = start
            while place < length:
                rounds, tokens, spent = rounds + 1, tokens + steps[first + place], spent + costs[first + place]
                place += steps[first + place]
        first += length
    return tokens / rounds, spent / rounds
