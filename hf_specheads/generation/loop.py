"""The round loop: prompt -> features -> draft tree -> verify -> accept -> next round."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from ..cache.target import ChainCache, TreeCache, root_positions_of
from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from ..target.features import FeatureReader
from ..tree.draft_tree import DraftTree
from .attention import grouped_attention_under_masks
from .candidates import DraftHeadCandidateGenerator
from .committed import NewRows
from .compiled import bucket, compiled_rounds
from .outputs import EmittedOutputs
from .pace import Pace, pace_of
from .refusals import refuse_call, refuse_prepared_call, refuse_processors, refuse_tree
from .sampling import TokenSampler
from .sequences import Sequences, pad_token_of
from .stopping import StopRule
from .verification.accepted import Accepted
from .verification.sampled import verify_sampled_at_once, verify_sampled_token_by_token
from .verification.top_k import verify_all_nodes, verify_token_by_token
from .verification.typical import verify_typical

logger = logging.get_logger(__name__)

LOSSY = (
    "these draft heads verify by typical acceptance, so sampled text does not follow the target's distribution; set "
    "`heads.verification = 'lossless'` for exact sampling."
)


@torch.no_grad()
def speculative_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_head: DraftingContract,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generates with draft heads; the text is the target's own (unless `heads.verification` says otherwise).

    Reached through `target.generate(..., assistant_model=heads)` or, without the dispatch that importing this package
    installs, through

        target.generate(**inputs, custom_generate=hf_specheads.speculative_generate, draft_head=heads)

    (transformers hands no streamer and no stop-string tokenizer to a `custom_generate` callable; use
    `assistant_model=` for those.) Statistics of the call are left in `draft_head.last_stats`.

    Args:
        model: The target.
        input_ids: int64 [B, T], the prompt.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepared them.
        draft_head: Heads made for this target.
        streamer: Receives every token, one `put` each.
        synced_gpus: Not supported.

    Returns:
        int64 [B, T + new tokens], or the usual dict output under `return_dict_in_generate`.

    Raises:
        UnsupportedGenerationError: if the call cannot be served exactly; before any forward.
        WrongTargetError: if the heads belong to another target; before any forward.
    """
    refuse_call(model, draft_head, generation_config.get_generation_mode(), generation_config)
    refuse_prepared_call(model, draft_head, input_ids.shape[0], generation_config, model_kwargs)
    if synced_gpus:
        raise UnsupportedGenerationError(
            "draft heads do not support synced_gpus (ZeRO-3 or FSDP generation); gather the target first."
        )
    refuse_processors(draft_head, logits_processor, generation_config, input_ids.shape[0])
    pad_token_id = pad_token_of(generation_config._pad_token_tensor, generation_config._eos_token_tensor)
    sequences = Sequences(input_ids, pad_token_id or 0, streamer)
    loop = RoundLoop(
        model, draft_head, logits_processor, stopping_criteria, generation_config, sequences, model_kwargs
    )
    try:
        with grouped_attention_under_masks(model):
            return loop.run()
    finally:
        loop.close()


class RoundLoop:
    """State of one generation: caches, rows to take in, and what has been emitted."""

    def __init__(
        self,
        target: PreTrainedModel,
        head: DraftingContract,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        sequences: Sequences,
        model_kwargs: dict[str, Any],
    ):
        self.target, self.head, self.config, self.sequences = target, head, generation_config, sequences
        self.model_kwargs, self.batch = model_kwargs, len(sequences.lengths)
        self.sampler = TokenSampler(logits_processor, generation_config.do_sample, batch=self.batch)
        self.stop = StopRule(stopping_criteria)
        self.outputs = EmittedOutputs(generation_config, self.batch)
        self.padding_mask = model_kwargs.get("attention_mask")
        processors = logits_processor if generation_config.do_sample else None
        self.candidates = DraftHeadCandidateGenerator(
            head, target, self.stop.max_length, self.padding_mask, processors
        )
        self.stats = self.candidates.stats
        self.stats.lossy = head.verification == "typical" and bool(generation_config.do_sample)
        if self.stats.lossy:
            logger.warning_once(LOSSY)
        chunked, all_layers = generation_config.prefill_chunk_size is not None, self.outputs.hidden_states is not None
        self.reader = FeatureReader(target, head.feature_layers, chunked, all_layers)
        self.cache: TreeCache | ChainCache | None = None
        self.pace: Pace | None = None
        if head.adaptive and not (head.trace or self.stats.lossy):
            self.pace = pace_of(head, self.batch, generation_config)
        self.compiled = compiled_rounds(target, generation_config) if head.compiled else None
        if self.compiled is not None:
            self.candidates.compiled = self.compiled
            self.candidates.cache.fix_capacity(bucket(self.stop.max_length + self.room_for_drafts))

    @property
    def room_for_drafts(self) -> int:
        """Slots that a round may need past the tokens of the budget."""
        tree = self.head.tree_config
        return tree.num_nodes + tree.depth * max(tree.num_nodes, tree.top_k)

    @property
    def token_by_token(self) -> bool:
        """Whether tokens must be chosen one after the other: sequence-dependent processors, or such criteria."""
        return self.stop.per_token or not self.sampler.row_wise

    def run(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Prefill, then rounds until a stopping criterion is met for every row of the batch."""
        started, sequences = time.perf_counter(), self.sequences
        with self.stats.stage("prefill"):
            rows = self.prefill()
        while sequences.active:
            began, context = time.perf_counter(), max(self.cache.counts)
            drafts = self.pace is None or self.pace.drafts(context)
            with self.stats.stage("draft"):
                tree = self.draft(rows) if drafts else DraftTree.root_only(rows.token_ids[:, -1])
            with self.stats.stage("target"):
                outputs = self.verify_forward(tree)
            with self.stats.stage("accept"):
                accepted = self.choose(tree, outputs.logits)
            with self.stats.stage("commit"):
                new_rows = self.commit(tree, outputs, accepted)
                rows = new_rows if tree.num_nodes > 1 else rows.followed_by(new_rows)
                self.emit(outputs, accepted)
                self.record(tree, accepted, drafts)
            if self.pace is not None:
                self.keep_pace(tree, accepted, time.perf_counter() - began, context)
            rows = self.drop_ended(rows, accepted)
        self.stats.seconds |= {"total": time.perf_counter() - started} if self.stats.profile else {}
        self.close()
        stock = self.model_kwargs["past_key_values"] if self.batch == 1 else None
        return self.outputs.result(sequences.padded(), stock)

    # ------------------------------------------------------------------ the prompt
    def prefill(self) -> NewRows:
        """The prompt's forward and the first token, a plain step. Returns the prompt as rows for the draft head."""
        prompt = self.sequences.padded()
        outputs = self.target._prefill(prompt, self.config, self.model_kwargs | self.reader.forward_kwargs)
        self.stats.target_forwards += 1
        features = self.reader.prompt_features(outputs)
        self.cache = self.open_cache(self.target.dtype if features is None else features.dtype)
        # A tree of one node, whose own token (there may be none) plays no part.
        accepted = self.choose(DraftTree.root_only(prompt.new_zeros(self.batch)), outputs.logits[:, -1:])
        self.emit(outputs, accepted, prefill=True)
        first = torch.tensor([result.token_ids for result in accepted.values()], device=prompt.device)
        rows = NewRows.of_prompt(torch.cat([prompt, first], dim=1), features, self.padding_mask)
        return self.drop_ended(rows, accepted)

    def open_cache(self, dtype: torch.dtype) -> TreeCache | ChainCache:
        """Takes over the target's cache, now that it holds the prompt."""
        stock: Any = self.model_kwargs["past_key_values"]
        positions = root_positions_of(self.model_kwargs, stock.get_seq_length(), self.target.device)
        if self.head.tree_config.kind == "chain" and refuse_tree(self.target, stock):
            takes_positions = self.model_kwargs.get("position_ids") is not None
            return ChainCache(stock, self.padding_mask, positions, takes_positions)
        capacity = None
        if self.compiled is not None:
            capacity = bucket(self.stop.max_length + self.head.tree_config.num_nodes)
        return TreeCache(stock, self.target, self.batch, self.padding_mask, positions, dtype, capacity)

    # ------------------------------------------------------------------ a round
    def draft(self, rows: NewRows) -> DraftTree:
        """The next tree of every active row."""
        sequences = self.sequences
        input_ids = sequences.row(sequences.active[0]) if self.batch == 1 else None
        lengths = [sequences.lengths[row] for row in sequences.active]
        return self.candidates.draft(rows, lengths, max(self.cache.counts), input_ids)

    def verify_forward(self, tree: DraftTree) -> Any:
        """One target forward over all nodes of the tree."""
        self.stats.target_forwards += 1
        asked = self.reader.forward_kwargs
        sizes = (self.head.tree_config.num_nodes, *([] if self.pace is None else [1]))
        if self.compiled is not None and tree.num_nodes in sizes:
            return self.compiled.verify(self.target, self.cache, tree, asked)
        inputs = self.cache.forward_inputs(tree)
        return self.target(tree.token_ids, use_cache=True, return_dict=True, **inputs, **asked)

    def choose(self, tree: DraftTree, logits: torch.Tensor) -> dict[int, Accepted]:
        """The accepted path and the bonus token of every active row, by the rule for the way the tree's children were
        chosen."""
        active, sequences, logits = self.sequences.active, self.sequences, logits.to(tree.token_ids.device)
        seeded = self.batch == 1 and self.config.do_sample and self.head.exact_seed and tree.sampled is None
        if self.token_by_token or self.stats.lossy or seeded:
            accepted = [self.choose_in_row(tree, logits, index, row) for index, row in enumerate(active)]
        else:
            verify = verify_all_nodes if tree.sampled is None else verify_sampled_at_once
            lengths = [sequences.lengths[row] for row in active]
            accepted = verify(tree, lengths, logits, self.sampler, self.stop, self.outputs.scores is not None)
            self.stats.host_syncs += 1
        return dict(zip(active, accepted, strict=True))

    def choose_in_row(self, tree: DraftTree, logits: torch.Tensor, index: int, row: int) -> Accepted:
        """The same for one row, the `index`-th of the tree."""
        given = (tree.row(index), self.sequences.row(row), logits[index : index + 1], self.sampler.for_row(row),
                 self.stop, self.outputs.earlier_scores(row))  # fmt: skip
        if self.stats.lossy:
            (accepted,) = verify_typical(*given, self.head.posterior_threshold, self.head.posterior_alpha)
        elif tree.sampled is not None and self.token_by_token:
            (accepted,) = verify_sampled_token_by_token(*given)
        else:
            (accepted,) = verify_token_by_token(*given)
        self.stats.host_syncs += accepted.host_syncs
        return accepted

    def commit(self, tree: DraftTree, outputs: Any, accepted: dict[int, Accepted]) -> NewRows:
        """Keeps what belongs to the accepted paths, in the target's cache and of the features; forgets the rest."""
        results, device = list(accepted.values()), tree.token_ids.device
        counts = [len(result.nodes) for result in results]
        most = max(counts) if self.compiled is None else self.head.tree_config.depth + 1
        path = torch.tensor([[*result.nodes, *[0] * (most - len(result.nodes))] for result in results], device=device)
        is_prefix = all(result.nodes == list(range(len(result.nodes))) for result in results)
        self.cache.keep_path(path, counts, is_prefix)
        roots = self.sequences.last_tokens()
        tokens = [[*[0] * (most - count), root, *result.token_ids]
                  for root, result, count in zip(roots, results, counts, strict=True)]  # fmt: skip
        token_ids = torch.tensor(tokens, device=device)
        features = self.reader.features(outputs)
        if set(counts) == {most}:
            return NewRows(token_ids, _at_nodes(features, path))
        nodes = torch.tensor([[*[0] * (most - len(r.nodes)), *r.nodes] for r in results], device=device)
        valid = torch.arange(most, device=device) >= most - torch.tensor(counts, device=device)[:, None]
        return NewRows(token_ids, _at_nodes(features, nodes), valid, counts)

    def emit(self, outputs: Any, accepted: dict[int, Accepted], prefill: bool = False) -> None:
        """Appends the emitted tokens, and keeps what the caller asked for."""
        self.outputs.collect(outputs, accepted, prefill)
        for row, result in accepted.items():
            self.sequences.append(row, result.token_ids)

    def keep_pace(self, tree: DraftTree, accepted: dict[int, Accepted], seconds: float, context: int) -> None:
        """What the round cost and bought, for the choice between drafting and plain steps."""
        if tree.num_nodes == 1:
            self.pace.record_plain(seconds, context)
            return
        emitted = sum(len(result.token_ids) for result in accepted.values())
        self.pace.record_round(seconds, emitted / len(accepted))

    def record(self, tree: DraftTree, accepted: dict[int, Accepted], drafts: bool) -> None:
        """Statistics of a finished round."""
        if not drafts:
            self.stats.plain_steps += 1
            return
        for row, result in accepted.items():
            offered = result.num_accepted if result.cut else tree.max_depth
            self.stats.record_round(row, result.num_accepted, offered)
        if self.head.trace:
            # Not the distributions that children were drawn from: a vocabulary per node and round.
            self.stats.trees.append(replace(tree, sampled=None).to(torch.device("cpu")))

    def drop_ended(self, rows: NewRows, accepted: dict[int, Accepted]) -> NewRows:
        """Rows that have ended cost nothing from here on."""
        ended = [row for row, result in accepted.items() if result.stopped]
        kept = [index for index, result in enumerate(accepted.values()) if not result.stopped]
        self.sequences.end(ended)
        self.sequences.stream()
        if not ended or not kept:
            return rows
        if self.pace is not None:
            self.pace.conditions_changed()
        index = torch.tensor(kept, device=rows.token_ids.device)
        self.cache.select_rows(index)
        self.candidates.cache.select_rows(index)
        return rows.select_rows(index)

    def close(self) -> None:
        """Removes what was hung on the target, and gives transformers' cache its contents back, after errors too."""
        self.reader.close()
        if self.cache is not None:
            self.cache.give_back(keep=self.batch == 1)
            self.cache = None


def _at_nodes(features: torch.Tensor | None, nodes: torch.Tensor) -> torch.Tensor | None:
    """Features [B, A, F] at nodes [B, A] of a tree with features [B, N, F]."""
    if features is None:
        return None
    return features.gather(1, nodes.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
