"""What all rules of verification share: the result of a round, and walks down a path of a draft tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...cache.slots import to_device
from ...tree.draft_tree import DraftTree
from ..sampling import refuse_no_distribution
from ..stopping import StopRule, cut_blocks

Meanwhile = Callable[[torch.Tensor], None]  # gets the tokens chosen at each node, int64 [B, N]


@dataclass
class Accepted:
    """What one sequence gains from one round.

    Attributes:
        token_ids: Emitted tokens: the accepted draft tokens and then the bonus token, cut where generation stops.
        nodes: The node at which each token was chosen, the root first. The cache keeps the rows of these nodes.
        scores: Processed scores fp32 [1, V] per emitted token, if asked for.
        stopped: Whether generation ends after the last token.
        cut: Whether tokens that the target accepted were dropped, because generation stops earlier or because the
            sequence is too far ahead of the others.
        host_syncs: Number of times the host waited for the device. Of sequences that were decided together, only the
            first one counts it.
    """

    token_ids: list[int]
    nodes: list[int]
    scores: list[torch.Tensor] = field(default_factory=list)
    stopped: bool = False
    cut: bool = False
    host_syncs: int = 1

    def limited(self, most: int | None) -> Accepted:
        """The same result with at most `most` tokens (`None` for no limit). Later rounds draft the rest again."""
        if most is None or len(self.token_ids) <= most:
            return self
        tokens, nodes, scores = self.token_ids[:most], self.nodes[:most], self.scores[:most]
        return Accepted(tokens, nodes, scores, cut=True, host_syncs=self.host_syncs)

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens, the bonus token not counted."""
        return len(self.token_ids) - 1

    def num_drafted(self, tree: DraftTree) -> int:
        """Number of accepted tokens that the draft head drafted; the others were copied from the text."""
        drafted = tree.num_nodes - tree.num_copied
        return sum(node < drafted for node in self.nodes[1:])


def accepted_paths(
    tree: DraftTree,
    best: torch.Tensor,
    bonus: torch.Tensor,
    scores: torch.Tensor | None,
) -> list[Accepted]:
    """Reads the accepted path of every sequence, wherever generation stops. One host sync for all sequences.

    Args:
        tree: Draft tree of B sequences and N nodes.
        best: int64 [B], the last accepted node.
        bonus: int64 [B], the bonus token after that node.
        scores: [B, N, V], processed scores to keep; `None` to keep none.
    """
    width = tree.max_depth + 1
    path = tree.path_to(best)  # [B, D + 1]
    depth, tokens = tree.depths.gather(1, best[:, None]), tree.token_ids.gather(1, path)
    numbers = torch.cat([depth, path, tokens, bonus[:, None]], dim=1).tolist()  # the round's one host sync
    paths = []
    for num_accepted, *values in numbers:
        emitted = [*values[width + 1 : width + 1 + num_accepted], values[-1]]
        paths.append((values[: num_accepted + 1], emitted))
    return _as_accepted(paths, scores)


def agreed_paths(
    tree: DraftTree,
    choices: torch.Tensor,
    scores: torch.Tensor | None,
    meanwhile: Meanwhile | None = None,
) -> list[Accepted]:
    """Follows the chosen tokens from the root as far as the tree has them, with results as in [`accepted_paths`].

    A node is accepted if its parent is accepted and its token is the one chosen there. One host sync for all
    sequences. The host follows the path, so that the device has no other work.

    Args:
        tree: Draft tree of B sequences and N nodes.
        choices: int64 [B, N], the token chosen at each node.
        scores: As in [`accepted_paths`].
        meanwhile: Called with the choices before the host waits for them, to give the device further work. The host
            does not wait for that work.
    """
    nodes, packed = tree.num_nodes, choices
    if nodes > 1:
        is_chain = tree.shape is not None and tree.shape.is_chain
        packed = torch.cat([choices, tree.token_ids] if is_chain else [choices, tree.token_ids, tree.parents], dim=1)
    arrived = packed.tolist if meanwhile is None else _sent(packed)
    if meanwhile is not None:
        meanwhile(choices)
    paths = []
    for numbers in arrived():
        parents = numbers[2 * nodes :] or range(-1, nodes - 1)
        path = _agreed_path(numbers, numbers[nodes : 2 * nodes], parents)
        paths.append((path, [numbers[node] for node in path]))
    return _as_accepted(paths, scores)


def _sent(numbers: torch.Tensor) -> Callable[[], list]:
    """Starts to copy numbers to the host. Returns a function that waits for them, but not for later device work."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    landed = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    landed.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(numbers.device))

    def wait() -> list:
        arrived.synchronize()
        return landed.tolist()

    return wait


def _agreed_path(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes, root first, of the longest path on which every node has the token chosen at its parent."""
    depths, deepest = {0: 0}, 0
    for node in range(1, len(tokens)):
        above = parents[node]
        if above not in depths or choices[above] != tokens[node]:
            continue
        depths[node] = depths[above] + 1
        deepest = node if depths[node] > depths[deepest] else deepest
    path = [deepest]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _as_accepted(paths: Sequence[tuple[list[int], list[int]]], scores: torch.Tensor | None) -> list[Accepted]:
    """The results of paths, each of which has its nodes and the tokens chosen at them."""
    results: list[Accepted] = []
    for sequence, (nodes, emitted) in enumerate(paths):
        refuse_no_distribution(emitted[-1])
        kept = [] if scores is None else [scores[sequence, node][None].to(torch.float32, copy=True) for node in nodes]
        results.append(Accepted(emitted, nodes, kept, host_syncs=0 if results else 1))
    return results


def cut_where_it_stops(
    accepted: Sequence[Accepted],
    texts: Sequence[torch.Tensor],
    rules: Sequence[StopRule],
    earlier_scores: Callable[[int], tuple[torch.Tensor, ...] | None],
) -> list[Accepted]:
    """Cuts the accepted path of every sequence where its generation stops.

    Args:
        accepted: The accepted paths.
        texts: int64 [1, T], the committed tokens of each sequence.
        rules: Stop rule of each sequence. One that needs every token costs a host sync per token; stop strings cost
            one for all sequences.
        earlier_scores: Scores of all tokens that a sequence, given its row, has emitted before, for criteria that read
            them; `None` if not kept.
    """
    cuts = cut_blocks([one.token_ids for one in accepted], texts, rules)
    results = [one.limited(kept) for one, (kept, _) in zip(accepted, cuts, strict=True)]
    for row, (result, (_, stopped)) in enumerate(zip(results, cuts, strict=True)):
        result.stopped = stopped
        if rules[row].per_token:
            results[row] = _cut_token_by_token(accepted[row], texts[row], rules[row], earlier_scores(row))
    results[0].host_syncs += any(rule.strings for rule in rules)
    return results


def _cut_token_by_token(
    whole: Accepted, input_ids: torch.Tensor, stop: StopRule, earlier_scores: tuple[torch.Tensor, ...] | None
) -> Accepted:
    """The accepted tokens up to the token after which a criterion is met."""
    tokens = torch.cat([input_ids, to_device([whole.token_ids], input_ids.device)], dim=1)
    kept, stopped = 0, False
    while not stopped and kept < len(whole.token_ids):
        kept += 1
        scores = None if earlier_scores is None else earlier_scores + tuple(whole.scores[:kept])
        stopped = stop.met(tokens[:, : input_ids.shape[1] + kept], scores)
    result = whole.limited(kept)
    result.stopped, result.host_syncs = stopped, result.host_syncs + kept
    return result


def accepted_nodes(tree: DraftTree, taken: torch.Tensor) -> torch.Tensor:
    """Nodes, bool [B, N], that are `taken` (bool [B, N]) and whose ancestors are all taken too."""
    taken = taken.clone()
    taken[:, 0] = True
    return ~(tree.ancestor_mask & ~taken[:, None]).any(-1)


def walk(
    input_ids: torch.Tensor,
    step: Callable[[int, torch.Tensor], tuple[int, torch.Tensor | None, int | None]],
    stop: StopRule,
    earlier_scores: tuple[torch.Tensor, ...] | None,
    waits: int = 1,
    most: int | None = None,
) -> Accepted:
    """Walks down from the root, with one step and one stopping check per emitted token.

    Args:
        input_ids: int64 [1, T], the committed tokens.
        step: Takes a node and the tokens up to it. Returns the token chosen there, its processed scores [1, V] (`None`
            if nobody asks for them), and the child that has this token (`None` if there is none).
        stop, earlier_scores, most: As in [`verify_token_by_token`].
        waits: Number of times the host waits in a step.
    """
    result = Accepted(token_ids=[], nodes=[], host_syncs=0)
    node: int | None = 0
    while node is not None and not result.stopped and len(result.token_ids) != most:
        result.nodes.append(node)
        token, scores, node = step(node, input_ids)
        refuse_no_distribution(token)
        input_ids = torch.cat([input_ids, to_device([[token]], input_ids.device)], dim=1)
        result.token_ids.append(token)
        result.scores += [] if scores is None else [scores]
        result.host_syncs += waits + stop.looks_at_text
        result.stopped = stops_after(input_ids, result, stop, earlier_scores)
    result.cut = node is not None
    return result


def stops_after(
    input_ids: torch.Tensor, emitted: Accepted, stop: StopRule, earlier_scores: tuple[torch.Tensor, ...] | None
) -> bool:
    """Whether generation ends after the last token of `emitted`, which is also the last of `input_ids` [1, T']."""
    if stop.looks_at_text:
        return stop.met(input_ids, None if earlier_scores is None else earlier_scores + tuple(emitted.scores))
    return stop.cut(emitted.token_ids[-1:], input_ids.shape[1] - 1)[1]
