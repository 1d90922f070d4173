"""The round loop: prompt -> features -> draft tree -> verify -> accept -> next round."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput, logging

from ..cache.names import cache_name
from ..cache.recurrent import RecurrentCache, tokens_in
from ..cache.rooms import Rooms
from ..cache.slots import to_device
from ..cache.target import TreeCache
from ..contract import DraftingContract
from ..metrics import wait_for
from ..target.features import FeatureReader
from ..target.parallel import number_of_first, parallel_group
from ..tree.draft_tree import DraftTree
from .ahead import DraftAhead, drafts_ahead
from .candidates import DraftHeadCandidateGenerator
from .committed import NewRows, PackedPaths
from .compiled.rounds import bucket, compiled_rounds, verify_tree
from .kernels.any_length import any_length
from .kernels.few_rows import FewRows
from .kernels.unrecorded import guard_for
from .observer import tell
from .opening import TargetCache, open_cache
from .options import DraftingOptions
from .outputs import EmittedOutputs
from .pace.pace import PLAIN, Pace
from .pace.paces import pace_of
from .prompts import SharedPrompts, copies_of_prompts, groups_of_prompts, read_prompts
from .sampling import TokenSampler
from .sequences import Sequences
from .stepwise import StepwiseCriteria
from .stopping import StopRule
from .verification.accepted import Accepted, Meanwhile
from .verification.rules import LOSSY, RULES, Verification

logger = logging.get_logger(__name__)


class RoundLoop:
    """State of one generation: the caches, the rows to take in, and the emitted tokens.

    The arguments are those of [`call.run_rounds`]; `sequences` holds the prompt.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        head: DraftingContract,
        options: DraftingOptions,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        sequences: Sequences,
        model_kwargs: dict[str, Any],
    ):
        self.target, self.options, self.config, self.sequences = target, options, generation_config, sequences
        self.model_kwargs, self.batch = model_kwargs, (batch := len(sequences.lengths))
        self.sampler = TokenSampler(logits_processor, bool(generation_config.do_sample), batch, options.exact_seed)
        self.stop, self.outputs = StopRule(stopping_criteria, batch), EmittedOutputs(generation_config, batch)
        self.stepwise = StepwiseCriteria(stopping_criteria, sequences, self.outputs) if self.stop.in_step else None
        self.padding_mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        call = (self.stop.max_length, self.padding_mask, logits_processor if self.config.do_sample else None, options)
        self.candidates = DraftHeadCandidateGenerator(head, target, *call)
        self.stats = self.candidates.stats
        self.rule = RULES[options.verification]
        self.stats.lossy = bool(generation_config.do_sample) and not self.rule.lossless
        if self.stats.lossy:
            logger.warning_once(LOSSY)
        self.reader = FeatureReader(head.feature_layers, self.outputs.hidden_states is not None)
        self._target_cache: TargetCache | None = None
        self.prefilled = 0  # tokens in the target's cache after the prefill
        # The text under typical acceptance depends on which rounds draft, and a trace records only rounds that draft.
        adaptive = options.adaptive and not (options.trace or self.stats.lossy)
        self.pace_of = partial(pace_of, head, target, options, config=generation_config)
        self.pace: Pace | None = self.pace_of(batch) if adaptive else None
        self.choice = PLAIN  # for the current round: a place in the pace's menu, or PLAIN
        self.group = parallel_group(target)
        self.compiled = compiled_rounds(head, target, generation_config) if options.compiled else None
        self.candidates.compiled = self.compiled
        self.few_rows = FewRows() if self.compiled else FewRows(target, cast(PreTrainedModel, head))
        self.unrecorded = guard_for(target, cast(PreTrainedModel, head)) if self.compiled is None else nullcontext
        ahead = drafts_ahead(self.candidates, options, self.outputs, target.device) and self.group is None
        self.ahead = DraftAhead(self.candidates) if ahead and self.stepwise is None else None

    @property
    def stock(self) -> Cache:
        """The transformers cache of the call."""
        return self.model_kwargs[cache_name(self.model_kwargs)]

    @property
    def is_seen(self) -> bool:
        """Whether the caller can see the transformers cache after the call."""
        stock = self.model_kwargs.get(cache_name(self.model_kwargs))
        return self.outputs.as_dict or getattr(stock, "_is_user_defined", False)

    @property
    def target_cache(self) -> TargetCache:
        """The target's cache, which the prefill opens."""
        if self._target_cache is None:
            raise RuntimeError("the target's cache does not exist before the prefill.")
        return self._target_cache

    def run(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Runs the prefill, then rounds until a stopping criterion is met for every sequence of the batch."""
        started, sequences = time.perf_counter(), self.sequences
        with self.stats.stage("prefill"):
            rows = self.prefill()
        if self.pace is not None:
            self.pace.begin_call(self.candidates.text, time.perf_counter() - started)
        while sequences.active:
            rows = self.round(rows)
        wait_for(self.stats.devices)
        self.stats.seconds |= {"total": time.perf_counter() - started} if self.stats.profile else {}
        self.stats.plain_because = self.candidates.why_plain(self.pace) if self.stats.plain_steps else None
        self.close()
        return self.outputs.result(sequences.padded(), self.stock)

    @any_length
    def round(self, rows: NewRows) -> NewRows:
        """Runs one round of every active sequence.

        Takes the rows that were committed since the last draft, and returns those for the next round.
        """
        began = time.perf_counter()
        drafts = self.begin_round()
        with self.stats.stage("draft"):
            drafts = drafts and self.candidates.has_drafts
            tree = self.next_tree(rows, drafts)
        nodes = tree.token_ids.numel()
        with self.stats.stage("target"), self.unrecorded(), self.few_rows.at_work(nodes, fewest=2):
            outputs = self.verify(tree)
        with self.stats.stage("accept"):
            accepted = self.accept(tree, outputs.logits, self.meanwhile(tree, outputs))
        with self.stats.stage("commit"):
            new_rows = self.commit(tree, outputs, accepted)
            gave_up = drafts and self.candidates.gave_up
            rows = new_rows if tree.num_nodes > 1 or gave_up else rows.followed_by(new_rows)
            self.emit(outputs, accepted, new_rows.token_ids)
            self.record(tree, accepted, drafts and not gave_up)
        seconds = time.perf_counter() - began
        if self.pace is not None:
            self.keep_pace(self.pace, tree, accepted, seconds - self.few_rows.take_lost())
        rows = self.drop_ended(rows, accepted)
        tell(self.options.on_round, tree, accepted, seconds)
        return rows

    # ------------------------------------------------------------------ the prompt
    def prefill(self) -> NewRows:
        """Runs the prompt's forward and chooses the first token. Returns the prompt as rows for the draft head."""
        began, prompt = time.perf_counter(), self.sequences.padded()
        copies = copies_of_prompts(self.config, self.model_kwargs)
        call = (self.target, prompt, self.config, self.model_kwargs, copies)
        with self.unrecorded():
            outputs, features = read_prompts(self.reader, *call, groups_of_prompts(*call))
        self.stats.target_forwards += self.reader.prefills
        self.prefilled = tokens_in(self.stock, otherwise=self.sequences.prompt_length)
        counted = self.reader.counted(self.model_kwargs)
        dtype, fixed = self.target.dtype if features is None else features.dtype, self.fixed_size()
        opened = (self.options, self.batch, self.model_kwargs, counted, self.prefilled, self.is_seen, dtype, fixed)
        self._target_cache = open_cache(self.target, *opened, self.stop.left(self.sequences.prompt_length))
        self.candidates.begin_text(prompt)
        # The tree has a single node. Its token plays no part, as the prompt may have none (`inputs_embeds`).
        accepted = self.accept(DraftTree.root_only(prompt.new_zeros(self.batch)), outputs.logits[:, -1:])
        first = to_device([result.token_ids for result in accepted.values()], prompt.device)
        self.emit(outputs, accepted, first, prefill=True)
        rows = NewRows.of_prompt(torch.cat([prompt, first], dim=1), features, self.padding_mask)
        if self.compiled:
            drafted = self.candidates.head.draft_rows(largest := self.candidates.largest) + largest.lookup
            capacity = bucket(rows.token_ids.shape[1] + self.stop.budget(self.sequences.prompt_length) + drafted)
            self.candidates.draft_cache.fix_capacity(capacity, self.compiled.rooms)
        self.candidates.shared = SharedPrompts.of(rows, copies)
        rows = self.drop_ended(rows, accepted)
        tell(self.options.on_round, None, accepted, time.perf_counter() - began)
        return rows

    def fixed_size(self) -> tuple[int, Rooms | None] | None:
        """Slots of the target's cache in compiled rounds, and the rooms of its buffers; `None` in other rounds."""
        if self.compiled is None:
            return None
        budget = self.stop.budget(self.sequences.prompt_length)
        return bucket(self.prefilled + budget + self.candidates.largest.most_nodes), self.compiled.rooms

    # ------------------------------------------------------------------ a round
    def begin_round(self) -> bool:
        """Chooses what the round drafts. Returns whether it drafts at all."""
        if self.compiled is not None:
            self.compiled.begin_round()
        self.choice = PLAIN
        if isinstance(self.target_cache, RecurrentCache) and self.target_cache.must_catch_up:
            return False
        if self.pace is None:
            return True
        self.choice = self.pace.choose(max(self.target_cache.counts), self.candidates.text)
        if self.group is not None:
            self.choice = number_of_first(self.choice, self.group, self.target.device)
        self.candidates.choose(self.pace, self.choice)
        return self.choice != PLAIN

    def next_tree(self, rows: NewRows, drafts: bool) -> DraftTree:
        """The tree to verify: a tree that was drafted ahead, a new draft, or only the roots."""
        if self.ahead is not None and (tree := self.ahead.take(drafts)) is not None:
            return tree
        if self.compiled is not None:
            self.compiled.begin_step()
        return self.draft(rows.joined()) if drafts else DraftTree.root_only(rows.token_ids[:, -1])

    def draft(self, rows: NewRows) -> DraftTree:
        """Drafts the next tree of every active sequence."""
        sequences = self.sequences
        input_ids = sequences.tokens_of(sequences.active[0]) if self.batch == 1 else None
        lengths = [sequences.lengths[sequence] for sequence in sequences.active]
        with self.unrecorded(), self.few_rows.at_work(len(sequences.active), fewest=1):
            return self.candidates.draft(rows, lengths, max(self.target_cache.counts), input_ids)

    def verify(self, tree: DraftTree) -> ModelOutput:
        """Runs one target forward over all nodes of the tree."""
        self.stats.target_forwards += 1
        cache, hidden_states = self.target_cache, self.reader.forward_kwargs
        plain = self.pace is not None or self.candidates.lookup is not None
        sizes = (self.options.tree.num_nodes, self.options.tree.most_nodes, *([1] if plain else []))
        if self.compiled is not None and isinstance(cache, TreeCache) and self.compiled.takes(tree, sizes):
            return self.compiled.verify(self.target, cache, tree, hidden_states)
        if isinstance(cache, RecurrentCache):
            before, outputs = cache.additional_forwards, cache.verify(tree, **hidden_states)
            self.stats.target_forwards += cache.additional_forwards - before
            return outputs
        return verify_tree(self.target, cache, tree, hidden_states)

    def meanwhile(self, tree: DraftTree, outputs: ModelOutput) -> Meanwhile | None:
        """Work for the device while the host waits for the target's choices: the next draft, or `None`."""
        if (ahead := self.ahead) is None or tree.num_nodes == 1:
            return None
        lengths = [self.sequences.lengths[sequence] for sequence in self.sequences.active]
        context = max(self.target_cache.counts)
        return lambda choices: ahead.begin(tree, choices, self.reader.features(outputs), lengths, context)

    def accept(self, tree: DraftTree, logits: torch.Tensor, meanwhile: Meanwhile | None = None) -> dict[int, Accepted]:
        """The accepted path and the bonus token of every active sequence, by the rule in force."""
        active, cache = self.sequences.active, self._target_cache
        lengths = [self.sequences.lengths[sequence] for sequence in active]
        sampler = self.sampler.at_lengths(min(lengths), max(lengths) + tree.max_depth)
        limits = [
            cache.most_accepted(row) if isinstance(cache, RecurrentCache) else None for row in range(len(active))
        ]
        logits = logits.to(tree.token_ids.device)
        call = (self.sequences, sampler, self.stop, self.outputs, self.options)
        accepted = self.rule.accept(Verification(tree, logits, active, limits, *call, meanwhile))
        self.stats.host_syncs += sum(result.host_syncs for result in accepted)
        return dict(zip(active, accepted, strict=True))

    def commit(self, tree: DraftTree, outputs: ModelOutput, accepted: dict[int, Accepted]) -> NewRows:
        """Keeps the cache rows and features of the accepted paths only. Returns the rows to take in next."""
        longest = None if self.compiled is None else self.candidates.largest.most_levels + 1
        paths = PackedPaths.of(list(accepted.values()), self.sequences.last_tokens(), tree.token_ids.device, longest)
        with self.unrecorded():
            self.target_cache.keep_paths(paths.nodes, paths.counts, paths.device_counts, paths.are_prefixes)
        ahead = None if self.ahead is None else self.ahead.accepted(paths)
        return paths.rows(self.reader.features(outputs)) if ahead is None else ahead

    def emit(
        self, outputs: ModelOutput, accepted: dict[int, Accepted], token_ids: torch.Tensor, prefill: bool = False
    ) -> None:
        """Appends emitted tokens and keeps the outputs that the caller asked for.

        The rows of `token_ids` [B, *] end with the emitted tokens.
        """
        self.outputs.collect(outputs, accepted, prefill)
        for row, (sequence, result) in zip(token_ids, accepted.items(), strict=True):
            self.sequences.append(sequence, result.token_ids, row)
        self.candidates.extend_text([result.token_ids for result in accepted.values()])

    def keep_pace(self, pace: Pace, tree: DraftTree, accepted: dict[int, Accepted], seconds: float) -> None:
        """Tells the pace what the round cost and gained, except for rounds that say nothing about others."""
        caught_up = isinstance(self.target_cache, RecurrentCache) and self.target_cache.caught_up
        compiles = self.compiled is not None and self.compiled.compiles
        if caught_up or compiles or (self.ahead is not None and self.ahead.in_vain):
            return  # its time is neither that of a plain step nor that of a usual round
        gave_up = self.choice != PLAIN and self.candidates.gave_up  # the draft took time, but has no node
        num_accepted, drafts = [result.num_accepted for result in accepted.values()], self.candidates
        if not (cut := any(result.cut for result in accepted.values())):
            drafts.learn(tree, list(accepted.values()))
        if tree.num_nodes == 1 and not gave_up:
            pace.record_plain(seconds)
        elif self.stats.rounds == 1:
            pace.record_intake(self.choice, seconds, num_accepted, drafts.text)
        elif drafts.is_whole(tree) and not cut:
            num_drafted = [result.num_drafted(tree) for result in accepted.values()]
            told = (drafts.reach, drafts.text, drafts.told, num_drafted)
            pace.record_round(self.choice, seconds, num_accepted, *told)

    def record(self, tree: DraftTree, accepted: dict[int, Accepted], drafts: bool) -> None:
        """Adds a finished round to the statistics."""
        if not drafts:
            self.stats.plain_steps += 1
            return
        for sequence, result in accepted.items():
            offered = result.num_accepted if result.cut else tree.max_depth
            self.stats.record_round(sequence, result.num_accepted, offered)
        if self.options.trace:
            # The distributions of drawn children are left out: each node would keep a whole vocabulary.
            self.stats.trees.append(replace(tree, sampled=None).to(torch.device("cpu")))

    def drop_ended(self, rows: NewRows, accepted: dict[int, Accepted]) -> NewRows:
        """Removes ended sequences from the batch, so that they cost nothing from then on. Returns the other rows."""
        ended = [sequence for sequence, result in accepted.items() if result.stopped]
        ended = ended if self.stepwise is None else self.stepwise.ended(ended)
        kept = [index for index, sequence in enumerate(accepted) if sequence not in ended]
        self.sequences.end(ended)
        self.stats.new_tokens = self.sequences.mean_new_tokens
        self.sequences.stream(None if self.stepwise is None else self.stepwise.steps)
        if not ended or not kept:
            return rows
        if self.pace is not None:
            self.pace = self.pace_of(self.batch, active=len(kept))
        if self.ahead is not None:
            self.ahead.undo()
        self.target_cache.select_sequences(kept)
        self.candidates.select_sequences(kept)
        return rows.select_sequences(kept)

    def close(self) -> None:
        """Gives the transformers cache its contents back, also after errors.

        For a single sequence these are what plain decoding has in the cache at the last emitted token. For a batch
        they are what plain decoding has at the end if the caller can see the cache; otherwise the cache is emptied.
        """
        self.candidates.draft_cache.leave_room()
        if self._target_cache is None:
            return
        cache, self._target_cache = self._target_cache, None
        if self.batch == 1:
            cache.give_back(self.prefilled + max(self.sequences.emitted_tokens(0) - 1, 0))
            return
        ended = self.is_seen and not self.sequences.active
        cache.give_back(None, self.sequences.padded()[:, self.sequences.prompt_length : -1] if ended else None)
