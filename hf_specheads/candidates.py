"""The candidate generator: features in, draft tree out. Used by our round loop and by transformers' own loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from .drafting import grow_tree
from .features import asked_hidden_states, select_hidden_states
from .metrics import GenerationStats
from .modeling import DraftHead
from .sampling import DraftSampler
from .tree import DraftTree


class DraftHeadCandidateGenerator(CandidateGenerator):
    """Drafts candidates with a draft head, one generation long.

    [`draft`] gives trees to [`speculative_generate`]. [`get_candidates`] follows transformers' contract and gives
    chains to its assisted loop (set `heads.loop = "transformers"`); that loop stops at the exact token for length and
    end-of-sequence only, and its seeded samples differ from plain `generate`'s although their distribution does not.

    Args:
        head: The draft head; bound to the target here.
        target: The target model.
        max_length: Total tokens of the generation, `None` without limit.
        padding_mask: int or bool [B, T], 0 on padding of the prompt; `None` without padding.
        sampling_processors: Processors and warpers of a call with `do_sample=True`, for trees with sampled children;
            `None` for greedy decoding.
    """

    requires_model_outputs = True

    def __init__(
        self,
        head: DraftHead,
        target: PreTrainedModel,
        max_length: int | None = None,
        padding_mask: torch.Tensor | None = None,
        sampling_processors: LogitsProcessorList | None = None,
    ):
        self.head = head.bind(target)
        self.model_kwargs_overrides: dict[str, Any] = {
            "output_hidden_states": asked_hidden_states(head.feature_layers)
        }
        self.cache = head.new_draft_cache()
        if padding_mask is not None:
            self.cache.context_mask = padding_mask.bool()
        self.max_length = max_length
        self.sampling_processors = sampling_processors
        config = target.config.get_text_config(decoder=True)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.stats = head.last_stats = GenerationStats(profile=head.profile)
        self._proposed: list[int] = []

    def room(self, length: int, context_length: int) -> int:
        """Draft positions of the next round: none for the last token of the budget, none past the target's context.

        Args:
            length: Tokens so far, the root included, as the length limit counts them.
            context_length: Tokens in the target's cache, i.e. the root's position.
        """
        if self.max_length is not None and self.max_length - length <= 1:
            return 0
        depth = self.head.tree_config.depth
        if self.max_positions is not None:
            depth = min(depth, self.max_positions - 1 - context_length)
        return max(depth, 0)

    def draft(self, input_ids: torch.Tensor, features: torch.Tensor | None, context_length: int) -> DraftTree:
        """Takes in newly committed features and grows the next tree.

        Args:
            input_ids: int64 [B, T + 1], committed tokens and the root.
            features: [B, M, F], target features of the last M committed tokens before the root; `None` for heads that
                read none.
            context_length: Tokens in the target's cache.
        """
        depth = self.room(input_ids.shape[1], context_length)
        if depth == 0:
            return DraftTree.root_only(input_ids[:, -1])
        rows = input_ids.shape[1] - 1 - self.cache.committed
        if features is not None:
            # Features without known tokens (a prompt given as embeddings) cannot be paired; the head starts after.
            rows = min(features.shape[1], input_ids.shape[1])
        if self.cache.committed == 0 and self.cache.context_mask is not None:
            # The rows are the last of the prompt: earlier ones came in a cache, or as embeddings without tokens.
            self.cache.context_mask = self.cache.context_mask[:, -rows:]
        device = self.head.device
        token_ids = input_ids[:, -rows - 1 :].to(device)
        if token_ids.shape[1] == rows:
            token_ids = torch.nn.functional.pad(token_ids, (1, 0))
        if features is not None:
            features = features[:, -rows:].to(device)
        self.stats.draft_forwards += depth
        sampler = None
        if self.sampling_processors is not None:
            sampler = DraftSampler(self.sampling_processors, input_ids)
        return grow_tree(self.head, self.cache, token_ids, features, depth, sampler).to(input_ids.device)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Chain candidates for transformers' assisted loop, int64 [1, T + 1 + depth].

        The first call returns the prompt alone, so that the target is prefilled and its features exist. Of drawn
        candidates the log-probabilities fp32 [1, depth, V] of the draft are returned as well: with them the loop
        applies the rule that is exact for drawn ones (Leviathan et al. 2023, algorithm 1).
        """
        self.stats.target_forwards += 1  # the one that follows this call
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        features = None
        if self.head.feature_layers:
            new_rows = input_ids.shape[1] - 1 if self.cache.committed == 0 else n_last_matches + 1
            features = select_hidden_states(model_outputs.hidden_states, self.head.feature_layers)[:, :new_rows]
        tree = self.draft(input_ids, features, input_ids.shape[1] - 1)
        self._proposed = tree.token_ids[0, 1:].tolist()
        draft_logits = None if tree.sampled is None else tree.sampled.probs.log()
        return torch.cat([input_ids, tree.token_ids[:, 1:]], dim=1), draft_logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Records the round that transformers' assisted loop has just verified."""
        if self.stats.target_forwards == 1:
            return  # the prefill
        offered = len(self._proposed)
        # A last token that agrees with the draft as well was no bonus token: the loop cut the round there.
        if num_matches < offered and self._proposed[num_matches] == int(input_ids[0, -1]):
            offered = num_matches
        self.stats.record_round(0, num_matches, offered)
