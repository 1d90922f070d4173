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

from .cache import compact, stop_recording
from .candidates import DraftHeadCandidateGenerator
from .compatibility import refuse_call, refuse_prepared_call, refuse_processors
from .errors import UnsupportedGenerationError
from .features import FeatureReader
from .masks import grouped_attention_under_masks, tree_attention_masks, tree_position_ids
from .modeling import DraftHead
from .sampling import TokenSampler
from .stopping import StopRule
from .tree import DraftTree
from .verification import Accepted, verify_all_nodes, verify_token_by_token
from .verification_sampled import verify_sampled_at_once, verify_sampled_token_by_token
from .verification_typical import verify_typical

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
    draft_head: DraftHead,
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
    refuse_processors(draft_head, logits_processor, generation_config)
    loop = RoundLoop(model, draft_head, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
    try:
        with grouped_attention_under_masks(model):
            return loop.run(input_ids)
    finally:
        loop.close()


class RoundLoop:
    """State of one generation: caches, features to take in, and what has been emitted."""

    def __init__(
        self,
        target: PreTrainedModel,
        head: DraftHead,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ):
        self.target, self.head, self.config, self.streamer = target, head, generation_config, streamer
        self.model_kwargs = model_kwargs
        self.cache = model_kwargs["past_key_values"]
        self.sampler = TokenSampler(logits_processor, generation_config.do_sample)
        self.stop = StopRule(stopping_criteria)
        self.outputs = EmittedOutputs(generation_config)
        padding_mask = model_kwargs.get("attention_mask")
        processors = logits_processor if generation_config.do_sample else None
        self.candidates = DraftHeadCandidateGenerator(head, target, self.stop.max_length, padding_mask, processors)
        self.stats = self.candidates.stats
        self.stats.lossy = head.verification == "typical" and bool(generation_config.do_sample)
        if self.stats.lossy:
            logger.warning_once(LOSSY)
        chunked, all_layers = generation_config.prefill_chunk_size is not None, self.outputs.hidden_states is not None
        self.reader = FeatureReader(target, head.feature_layers, chunked, all_layers)
        self.takes_positions = model_kwargs.get("position_ids") is not None

    @property
    def token_by_token(self) -> bool:
        """Whether tokens must be chosen one after the other: sequence-dependent processors, or such criteria."""
        return self.stop.per_token or not self.sampler.row_wise

    def run(self, input_ids: torch.Tensor) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Prefill, then rounds until a stopping criterion is met."""
        started = time.perf_counter()
        with self.stats.stage("prefill"):
            outputs = self.target._prefill(input_ids, self.config, self.model_kwargs | self.reader.forward_kwargs)
            self.stats.target_forwards += 1
            features = self.reader.prompt_features(outputs)
            self.dtype = self.target.dtype if features is None else features.dtype
            self.cache.activate_past_recording()  # not before: sliding layers would keep the whole prompt
        # The first token is one plain step: a tree of one node, whose own token (there may be none) plays no part.
        tree = DraftTree.root_only(input_ids.new_zeros(input_ids.shape[0]))
        accepted = self.choose(tree, input_ids, outputs.logits[:, -1:])
        self.outputs.collect_first(outputs, accepted)
        input_ids = self.emit(outputs, accepted, input_ids)
        while not accepted.stopped:
            with self.stats.stage("draft"):
                tree = self.candidates.draft(input_ids, features, self.cache.get_seq_length())
            with self.stats.stage("target"):
                outputs = self.verify_forward(tree)
            with self.stats.stage("accept"):
                accepted = self.choose(tree, input_ids, outputs.logits)
            with self.stats.stage("compact"):
                features = self.keep_path(tree, outputs, accepted)
                self.outputs.collect(outputs, accepted)
                input_ids = self.emit(outputs, accepted, input_ids)
            self.record(tree, accepted)
        self.stats.seconds |= {"total": time.perf_counter() - started} if self.stats.profile else {}
        if self.streamer is not None:
            self.streamer.end()
        stop_recording(self.cache)
        return self.outputs.result(input_ids, self.cache)

    def verify_forward(self, tree: DraftTree) -> Any:
        """One target forward over all nodes of the tree."""
        length = self.cache.get_seq_length()
        inputs: dict[str, Any] = {"input_ids": tree.token_ids, "past_key_values": self.cache, "use_cache": True}
        mask = self.model_kwargs.get("attention_mask")
        if self.head.tree_config.kind == "chain":
            inputs["attention_mask"] = mask if mask is None else _extended(mask, tree.num_nodes - 1)
        else:
            inputs["attention_mask"] = tree_attention_masks(self.target, self.cache, tree, length, mask, self.dtype)
        if self.takes_positions:
            inputs["position_ids"] = tree_position_ids(self.model_kwargs["position_ids"], tree)
        self.stats.target_forwards += 1
        return self.target(**inputs, **self.reader.forward_kwargs, return_dict=True)

    def choose(self, tree: DraftTree, input_ids: torch.Tensor, logits: torch.Tensor) -> Accepted:
        """The accepted path and the bonus token, by the rule for the way the tree's children were chosen."""
        logits, scores = logits.to(input_ids.device), self.outputs.scores
        given = (tree, input_ids, logits, self.sampler, self.stop)
        if self.stats.lossy:
            (accepted,) = verify_typical(*given, scores, self.head.posterior_threshold, self.head.posterior_alpha)
        elif tree.sampled is not None:
            if self.token_by_token:
                (accepted,) = verify_sampled_token_by_token(*given, scores)
            else:
                (accepted,) = verify_sampled_at_once(*given, scores is not None)
        elif self.token_by_token or (self.config.do_sample and self.head.exact_seed):
            (accepted,) = verify_token_by_token(*given, scores)
        else:
            (accepted,) = verify_all_nodes(*given, scores is not None)
        self.stats.host_syncs += accepted.host_syncs
        return accepted

    def keep_path(self, tree: DraftTree, outputs: Any, accepted: Accepted) -> torch.Tensor | None:
        """Drops the cache rows of rejected nodes; returns the features of the path, [B, A, F]."""
        features = self.reader.features(outputs)
        path = torch.tensor([accepted.nodes], device=tree.token_ids.device)
        if self.head.tree_config.kind == "chain":
            # crop(0) is not a no-op: it trims sliding layers back to their window.
            self.cache.crop(-(tree.num_nodes - path.shape[1]))
        else:
            compact(self.cache, tree.num_nodes, path)
        if features is None:
            return None
        return features.gather(1, path.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))

    def emit(self, outputs: Any, accepted: Accepted, input_ids: torch.Tensor) -> torch.Tensor:
        """Appends the emitted tokens and streams them."""
        tokens = torch.tensor([accepted.token_ids], dtype=input_ids.dtype, device=input_ids.device)
        if self.streamer is not None:
            for token in accepted.token_ids:
                self.streamer.put(torch.tensor([token]))
        self.model_kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, num_new_tokens=tokens.shape[1]
        )
        self.model_kwargs["past_key_values"] = self.cache
        return torch.cat([input_ids, tokens], dim=1)

    def record(self, tree: DraftTree, accepted: Accepted) -> None:
        """Statistics of a finished round."""
        offered = accepted.num_accepted if accepted.cut else tree.max_depth
        self.stats.record_round(0, accepted.num_accepted, offered)
        if self.head.trace:
            # Not the distributions that children were drawn from: a vocabulary per node and round.
            self.stats.trees.append(replace(tree, sampled=None).to(torch.device("cpu")))

    def close(self) -> None:
        """Removes what was hung on the target."""
        self.reader.close()


def _extended(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """A 2D padding mask [B, T] continued with ones for more tokens."""
    return torch.cat([mask, mask.new_ones(mask.shape[0], tokens)], dim=1)


class EmittedOutputs:
    """Scores, raw logits and hidden states of the emitted tokens, one tuple entry per token as in plain `generate`."""

    def __init__(self, config: GenerationConfig):
        asked = config.return_dict_in_generate
        self.as_dict = bool(asked)
        self.scores: tuple | None = () if asked and config.output_scores else None
        self.logits: tuple | None = () if asked and config.output_logits else None
        self.hidden_states: tuple | None = () if asked and config.output_hidden_states else None

    def collect_first(self, outputs: Any, accepted: Accepted) -> None:
        """Adds the first token, chosen from the prefill; its hidden states are those of the whole prompt."""
        if self.scores is not None:
            self.scores += tuple(accepted.scores)
        if self.logits is not None:
            self.logits += (outputs.logits[:, -1].float(),)
        if self.hidden_states is not None:
            self.hidden_states += (tuple(outputs.hidden_states),)

    def collect(self, outputs: Any, accepted: Accepted) -> None:
        """Adds the rows of one round's emitted tokens."""
        if self.scores is not None:
            self.scores += tuple(accepted.scores)
        if self.logits is not None:
            self.logits += tuple(outputs.logits[:, node].float() for node in accepted.nodes)
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(layer[:, node : node + 1] for layer in outputs.hidden_states) for node in accepted.nodes
            )

    def result(self, input_ids: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if not self.as_dict:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=self.scores,
            logits=self.logits,
            hidden_states=self.hidden_states,
            past_key_values=cache,
        )
