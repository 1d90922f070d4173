"""The candidate generator: takes in features and drafts trees, for our round loop and for transformers' own loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from ..contract import DraftingContract
from ..metrics import GenerationStats, devices_of
from ..target.features import asked_hidden_states, select_hidden_states
from ..target.positions import context_limit, rope_limit
from ..tree.config import DraftTreeConfig
from ..tree.draft_tree import DraftTree
from ..tree.graft import graft_path
from .committed import NewRows
from .compiled.rounds import CompiledRounds
from .drafting.foresight import Reach, mood_after
from .drafting.grow import grow_tree
from .drafting.lookup import TextLookup
from .options import DraftingOptions
from .pace.favourites import Favourites, favourites_of_chain, favourites_of_tree
from .pace.menu import largest, trees_of_call
from .pace.pace import PLAIN, Pace
from .pace.tallies import TextTally
from .prompts import SharedPrompts
from .sampling import DraftSampler
from .verification.accepted import Accepted

ONE_DRAFT = DraftTreeConfig(kind="chain", depth=1, top_k=1, total_tokens=2)


class DraftHeadCandidateGenerator(CandidateGenerator):
    """Drafts candidates with a draft head for one generation.

    [`draft`] gives trees to [`speculative_generate`]. [`get_candidates`] follows transformers' contract and gives
    chains to its assisted loop, which `heads.loop = "transformers"` selects. That loop stops at the exact token only
    for length and end-of-sequence. Its samples have the same distribution as plain `generate`'s, but a seed gives
    different ones.

    Args:
        head: The draft head.
        target: The target model.
        max_length: Most tokens of the generation, prompt included; `None` without a limit.
        padding_mask: int or bool [B, T], 0 on padding of the prompt; `None` without padding.
        sampling_processors: Processors and warpers of a call with `do_sample=True`, for trees with sampled children;
            `None` for greedy decoding.
        options: Settings of a call that has begun and bound the draft head. By default the draft head is bound to the
            target here, and its settings are read.
    """

    requires_model_outputs = True

    def __init__(
        self,
        head: DraftingContract,
        target: PreTrainedModel,
        max_length: int | None = None,
        padding_mask: torch.Tensor | None = None,
        sampling_processors: LogitsProcessorList | None = None,
        options: DraftingOptions | None = None,
    ):
        self.head = head if options is not None else head.bind(target)
        self.device = self.head.device  # kept, because the property walks through all modules
        self.options = options or DraftingOptions.of(head)
        self.tree = self.options.tree  # of the current round: a pace may choose another tree
        self.reach: Reach | None = None  # of the current round; `None` unless its chains have variable length
        self.shared: SharedPrompts | None = None
        self.moods: list[float | None] = []  # per sequence, see [`Reach`]; `None` for a new sequence
        self.told: list[Favourites] | None = None  # what became of the favourites of the last round
        self.text = TextTally()  # of all sequences together
        self.model_kwargs_overrides: dict[str, Any] = {
            "output_hidden_states": asked_hidden_states(head.feature_layers)
        }
        self.draft_cache = head.new_draft_cache()
        trees = trees_of_call(head, target, self.options)
        self.draft_cache.deepest = max(tree.depth for tree in trees)
        self.largest = largest(trees)  # compiled rounds take their shapes from it
        self.padding_mask = padding_mask
        self.max_length = max_length
        self.draft_cache.most = None if max_length is None else max_length + head.draft_rows(self.tree)
        self.sampling_processors = sampling_processors
        self.max_positions = context_limit(target)
        self.rope_limit = rope_limit(target)
        self.stats = head.last_stats = GenerationStats(profile=self.options.profile)
        if self.options.profile:
            self.stats.devices = devices_of(target, cast(PreTrainedModel, head))
        self.compiled: CompiledRounds | None = None
        self.gave_up = False
        self.lookup: TextLookup | None = None
        if head.copied_ngrams is not None:
            self.lookup = TextLookup(*head.copied_ngrams)
        elif any(tree.lookup for tree in trees):
            self.lookup = TextLookup()
        self._proposed: list[int] = []
        self._taken_in = 0  # tokens that the draft head has taken in, in transformers' loop

    def room(self, lengths: Sequence[int], context_length: int) -> int:
        """Number of draft positions that the next round has room for.

        The round, with its bonus token, must fit into the length limit, the target's context, and the length at which
        its rope changes. Compiled rounds keep their shapes, and so do rounds of lossy rules, whose text depends on the
        shapes: the length limit shortens these rounds only when a single token is left.

        Args:
            lengths: Tokens so far per sequence, the root included, as the length limit counts them.
            context_length: Slots that the longest sequence uses in the target's cache.
        """
        depth = min(self.levels(context_length), self.tree.depth)
        if self.max_length is None:
            return depth
        left = self.max_length - min(lengths) - 1
        keeps_shapes = (self.compiled is not None and self.reach is None) or self.stats.lossy
        return depth if keeps_shapes and left > 0 else min(depth, left)

    def levels(self, context_length: int) -> int:
        """Levels below the root that the target's context has room for, including levels of looked-up tokens."""
        depth = self.tree.most_levels
        limits = [self.max_positions]
        if self.rope_limit is not None and context_length < self.rope_limit[0]:
            limits.append(self.rope_limit[0])  # all nodes stay on the root's side of this limit
        for limit in limits:
            depth = depth if limit is None else min(depth, limit - 1 - context_length)
        return max(depth, 0)

    def draft(
        self,
        rows: NewRows,
        lengths: Sequence[int],
        context_length: int,
        input_ids: torch.Tensor | None = None,
    ) -> DraftTree:
        """Takes in newly committed rows and grows the next tree.

        Args:
            rows: The rows committed since the last draft, and the root.
            lengths, context_length: As in [`room`].
            input_ids: int64 [1, T + 1], all tokens, for draws that depend on them; `None` in a batch.

        Returns:
            The tree. Only the root if there is no room, or if the draft head expects no draft to be worth its cost.
        """
        depth, device = self.room(lengths, context_length), self.device
        self.gave_up = False
        if depth == 0:
            return DraftTree.root_only(rows.token_ids[:, -1])
        if self.shared is not None:
            rows = self._take_in_prompts(rows, self.shared)
        tree = self._grow(rows, depth, input_ids)
        levels = tree.max_depth if self.reach is None else self.reach.drafted
        self.stats.draft_forwards += 1 if self.head.drafts_in_one_forward else levels
        if self.tree.stop_below > 0:
            first = 0 if self.head.predicts_acceptance else 1  # the first level where the host may stop
            self.stats.host_syncs += min(tree.max_depth + 1, depth) - first
        if "cpu" in (device.type, rows.token_ids.device.type) and device != rows.token_ids.device:
            self.stats.host_syncs += 2  # rows go to the draft head's device, and the tree comes back
        tree = self._with_lookup(tree.to(rows.token_ids.device), self.levels(context_length))
        if self.reach is not None:
            self.reach.copied = tree.num_copied
        self.gave_up = tree.num_nodes == 1
        return tree

    def _with_lookup(self, tree: DraftTree, levels: int) -> DraftTree:
        """Adds tokens copied from the text to the tree, if there is something to copy and room for it."""
        nodes = min(self.tree.lookup, levels - tree.max_depth)
        if self.lookup is None or nodes < 1:
            return tree
        path = self.lookup.continuations(tree.max_depth + nodes, tree.token_ids.device)
        return tree if path is None else graft_path(tree, path, nodes)

    @property
    def has_drafts(self) -> bool:
        """Whether there is anything to draft. Heads that only copy have nothing where the text does not repeat."""
        return self.head.copied_ngrams is None or self.lookup is None or self.lookup.found

    def choose(self, pace: Pace, choice: int) -> None:
        """Sets the tree and the reach of the next round to what a pace has chosen."""
        tree = self.options.tree if choice == PLAIN else pace.menu[choice]
        # The tree in force is always the same object, because compiled steps are made for that object.
        self.tree = self.options.tree if tree == self.options.tree else tree
        at_once = self.head.drafts_in_one_forward
        open_ended = at_once and self.head.max_draft_positions is None
        self.reach = None if choice == PLAIN else pace.reach(choice, self.moods, at_once, open_ended)

    def is_whole(self, tree: DraftTree) -> bool:
        """Whether the latest draft is as deep as intended, and was not cut off by a limit."""
        ended = self.tree.stop_below > 0 or (self.reach is not None and self.reach.ended)
        return ended or tree.max_depth >= self.tree.depth

    def learn(self, tree: DraftTree, accepted: Sequence[Accepted]) -> None:
        """Learns what became of a round's tree, from one result per sequence, to choose the next trees."""
        self.told = None
        if tree.num_nodes == 1:
            return
        self.told = self._told(tree, accepted)
        num_drafted = [result.num_drafted(tree) for result in accepted]
        if self.reach is not None:
            self.reach.learn(num_drafted)
            return
        levels, moods = tree.max_depth - tree.num_copied, zip(self.moods, num_drafted, strict=True)
        self.moods[:] = [None if mood is None else mood_after(mood, number, levels) for mood, number in moods]

    def _told(self, tree: DraftTree, accepted: Sequence[Accepted]) -> list[Favourites] | None:
        """What became of the favourites, per sequence; `None` if nobody asks or only an accelerator knows."""
        if self.reach is not None:
            if not (offered := self.reach.offered):
                return None
            levels = self.reach.levels
            return [
                favourites_of_chain(self.head, [link[sequence] for link in offered], levels, result.token_ids)
                for sequence, result in enumerate(accepted)
            ]
        if tree.sampled is not None or self.tree.lookup or tree.token_ids.device.type != "cpu":
            return None
        trees = zip(tree.parents.tolist(), tree.scores.tolist(), accepted, strict=True)
        return [favourites_of_tree(parents, scores, result.nodes) for parents, scores, result in trees]

    def begin_text(self, prompt: torch.Tensor) -> None:
        """Begins new texts with the prompts [B, T] of a call, and indexes the prompts if tokens are looked up."""
        self.moods, self.text = [None] * len(prompt), TextTally()
        if self.lookup is not None:
            self.lookup.begin(prompt, self.padding_mask)

    def extend_text(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Indexes the tokens that a round has emitted, one list per sequence, if tokens are looked up."""
        if self.lookup is not None:
            self.lookup.extend(token_ids)

    def why_plain(self, pace: Pace | None) -> str | None:
        """The reason for plain steps, in words; `None` if unknown."""
        if self.head.copied_ngrams is not None:
            return "because the text had nothing to copy there, or because copying had not paid"
        return None if pace is None else pace.why_plain()

    def select_sequences(self, kept: list[int]) -> None:
        """Keeps only some sequences of the batch."""
        self.draft_cache.select_sequences(kept)
        self.moods = [self.moods[sequence] for sequence in kept]
        if self.shared is not None:
            self.shared.prompts = [self.shared.prompts[sequence] for sequence in kept]
        if self.lookup is not None:
            self.lookup.select_sequences(kept)

    def take_in(self, rows: NewRows) -> NewRows:
        """Lets the draft head take in all rows but the last. Returns the last row, for the next draft to take in."""
        if rows.token_ids.shape[1] > 2:
            device = self.device
            features = None if rows.features is None else rows.features[:, :-1].to(device)
            valid = None if rows.valid is None else rows.valid[:, :-1].to(device)
            self.draft_cache.begin_round(valid, rows.counts and [count - 1 for count in rows.counts])
            grow_tree(self.head, self.draft_cache, ONE_DRAFT, rows.token_ids[:, :-1].to(device), features, depth=1)
            self.draft_cache.drop_drafted()
        return NewRows(rows.token_ids[:, -2:], None if rows.features is None else rows.features[:, -1:])

    def _take_in_prompts(self, rows: NewRows, shared: SharedPrompts) -> NewRows:
        """Lets the draft head take in prompts that several sequences share, once each and without their last row.

        Returns the rows that every sequence has for itself: that last row, and the rows of plain steps since.
        """
        self.shared = None
        rows = rows.with_validity() if self.draft_cache.static else rows
        self.take_in(rows.first(shared.rows + 1).select_sequences(shared.readers()))
        self.draft_cache.select_sequences(shared.places())
        features = None if rows.features is None else rows.features[:, shared.rows :]
        return NewRows(rows.token_ids[:, shared.rows :], features)

    def put_sequence(self, place: int, other: DraftHeadCandidateGenerator, batch: int) -> None:
        """Takes over the only sequence of another generator, into a place of `batch` or after the last."""
        self.draft_cache.put_sequence(place, other.draft_cache, batch, self.device)
        self.moods[place : place + 1] = other.moods
        if self.lookup is not None and other.lookup is not None:
            self.lookup.put_sequence(place, other.lookup)

    def _grow(self, rows: NewRows, depth: int, input_ids: torch.Tensor | None) -> DraftTree:
        """Grows the tree of the draft head, without looked-up tokens, on the draft head's device."""
        device = self.device
        token_ids = rows.token_ids.to(device)
        features = None if rows.features is None else rows.features.to(device)
        if self.draft_cache.static:
            rows = rows.with_validity()
        self.draft_cache.begin_round(None if rows.valid is None else rows.valid.to(device), rows.counts)
        sampler = None
        if self.sampling_processors is not None and self.tree.children == "sampled":
            sampler = DraftSampler(self.sampling_processors, token_ids[:, :0] if input_ids is None else input_ids)
        call = (self.head, self.draft_cache, self.tree, token_ids, features, depth)
        in_shape = token_ids.shape[1] == self.largest.most_levels + 2
        if (
            self.compiled is not None
            and sampler is None
            and (in_shape or self.compiled.drafts_links(self.head, self.tree))
        ):
            self.draft_cache.levels = 0
            return self.compiled.grow(*call, in_shape, self.reach)
        self.draft_cache.levels = depth if self.reach is None else int(min(depth, self.reach.farthest))
        return grow_tree(*call, sampler, self.reach)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts a chain of candidates for transformers' assisted loop, int64 [1, T + 1 + depth].

        The first call returns the prompt alone, so that the target is prefilled and its features exist. For drawn
        candidates, the draft's log-probabilities fp32 [1, depth, V] are returned as well. With them the loop applies
        the rule that is exact for drawn candidates (Leviathan et al. 2023, algorithm 1).
        """
        self.stats.target_forwards += 1  # the target's forward that follows this call
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        length, features = input_ids.shape[1], None
        committed = length - 1 - self._taken_in
        if self.head.feature_layers:
            features = select_hidden_states(model_outputs.hidden_states, self.head.feature_layers)[:, :committed]
        rows = NewRows(input_ids[:, -committed - 1 :], features)
        if not self._taken_in:
            rows = NewRows.of_prompt(input_ids, features, self.padding_mask)
        if self.lookup is not None:
            self.lookup.follow(input_ids)
        if not self.has_drafts:
            self._proposed = []
            return input_ids, None
        self._taken_in = length - 1
        tree = self.draft(rows, [length], length - 1, input_ids)
        self._proposed = tree.token_ids[0, 1:].tolist()
        draft_logits = None if tree.sampled is None else tree.sampled.probs.log()
        return torch.cat([input_ids, tree.token_ids[:, 1:]], dim=1), draft_logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Records the round that transformers' assisted loop has just verified."""
        if self.stats.target_forwards == 1:
            return  # the prefill is no round
        offered = len(self._proposed)
        # If the last token agrees with the draft too, it is no bonus token: the loop ended inside the chain.
        if num_matches < offered and self._proposed[num_matches] == int(input_ids[0, -1]):
            offered = num_matches
        self.stats.record_round(0, num_matches, offered)
