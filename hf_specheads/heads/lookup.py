"""Prompt lookup as a draft head without weights: it drafts what followed the same tokens earlier in the text.

Copying from the prompt drafts well where the answer repeats it: in summaries, edits of code, retrieval (LLMA, arXiv
2304.04487; prompt lookup decoding, Saxena 2023). These methods copy a single path for a single sequence. Here the text
yields a distribution over next tokens, as with any draft head, so trees, batches and sampled children work as well.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ..cache.draft import DraftCache
from ..cache.slots import SlotCache
from ..configuration import DraftHeadConfig
from ..errors import WrongTargetError
from ..generation.drafting.lookup import LONGEST, SHORTEST
from ..publishing.card.facts import Published
from ..target.identity import target_sizes
from ..unroll.rows import DraftedPass, TrainingRows
from .base import DraftHead

__all__ = ["LookupHead", "LookupHeadConfig"]

LOOKUP_PAPERS = (
    "Inference with Reference: Lossless Acceleration of Large Language Models (LLMA), "
    "[arXiv:2304.04487](https://arxiv.org/abs/2304.04487)",
    "Prompt lookup decoding (Saxena, 2023), "
    "[github.com/apoorvumang/prompt-lookup-decoding](https://github.com/apoorvumang/prompt-lookup-decoding)",
)
# One matching place counts as much as this many places that match in one token less.
LONGER_COUNTS = 8.0
UNSEEN = 1e-9  # weight of tokens that never followed: sampled children need a positive probability, however small
NO_TOKEN = -1  # stands before the beginning of the text and matches no token


@strict
class LookupHeadConfig(DraftHeadConfig):
    r"""Configuration of prompt lookup.

    Args:
        longest_ngram, shortest_ngram: Largest and smallest number of last tokens to look up. Places in the text that
            match more of the last tokens count more; those that match fewer than `shortest_ngram` do not count.
    """

    model_type = "specheads_lookup"
    required_fields: ClassVar[tuple[str, ...]] = ("vocab_size",)

    method: str = "lookup"
    longest_ngram: int = LONGEST
    shortest_ngram: int = SHORTEST

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if not 1 <= self.shortest_ngram <= self.longest_ngram <= 64:
            raise ValueError(
                "`shortest_ngram` must be at least 1, and `longest_ngram` between `shortest_ngram` and 64, got "
                f"{self.shortest_ngram} and {self.longest_ngram}."
            )


class TextCache(DraftCache):
    """The tokens committed so far in a generation, and the root.

    Attributes:
        token_ids: int64 [B, >= longest + 1], where `longest` is that of the cache; `None` before the first round.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.token_ids: torch.Tensor | None = None

    @property
    def text(self) -> torch.Tensor:
        """int64 [B, C], tokens in all visible slots; those after the root are meaningless."""
        if self.token_ids is None:
            raise RuntimeError("this cache holds no text yet; call `start_draft` first.")
        return self.token_ids[:, : self.shown()[1]]

    def take_in(self, token_ids: torch.Tensor) -> None:
        """Appends committed rows and the root, int64 [B, M + 1]."""
        rows = token_ids.shape[1] - 1
        slots = self.open_rows(rows, token_ids.device, and_root=True).expand(len(token_ids), -1)
        if self.token_ids is None:
            self.token_ids = token_ids.new_zeros(len(token_ids), self.capacity)
        elif self.token_ids.shape[1] < self.capacity:
            wider = self.capacity - self.token_ids.shape[1]
            self.token_ids = torch.nn.functional.pad(self.token_ids, (0, wider))
        self.token_ids = self.token_ids.scatter(1, slots, token_ids)
        self.commit(rows)

    def roots(self) -> torch.Tensor:
        """Slots of the roots, int64 [B, 1], or [1, 1] if all sequences have the same."""
        known = self.known_lengths()
        return known[:, None] if isinstance(known, torch.Tensor) else self.text.new_full((1, 1), known)

    def put_buffers(self, place: int, other: SlotCache, batch: int) -> None:
        assert isinstance(other, TextCache)
        theirs = other.token_ids
        if theirs is None:
            theirs = None if self.token_ids is None else self.token_ids[:1, :0]
        if theirs is None:
            return
        mine = theirs.new_zeros(batch, self.capacity) if self.token_ids is None else self.token_ids
        missing = (0, self.capacity - mine.shape[1], 0, int(place == len(mine)))
        self.token_ids = torch.nn.functional.pad(mine, missing)
        rows = min(theirs.shape[1], self.capacity)
        self.token_ids[place, :rows] = theirs[0, :rows]

    def select_buffers(self, kept: list[int]) -> None:
        super().select_buffers(kept)
        if self.token_ids is not None:
            self.token_ids = self.token_ids[kept]


class LookupHead(DraftHead):
    """Drafts what followed earlier occurrences of the text's last tokens. It has no weights, reads no features, and
    fits any target with the same vocabulary size.

    The draft logit of a token is the logarithm of the summed weights of the places that it followed. Places that match
    more tokens weigh more, and later places up to twice as much as early ones. A round for which the text has no such
    place is a plain step. See also `lookup` of [`DraftTreeConfig`], which adds a copied path to other heads' trees.
    """

    config_class = LookupHeadConfig
    config: LookupHeadConfig
    placed: torch.Tensor
    published: ClassVar[dict[str, Published]] = {"lookup": Published("Prompt lookup", LOOKUP_PAPERS)}

    def __init__(self, config: LookupHeadConfig):
        super().__init__(config)
        self.register_buffer("placed", torch.zeros(1), persistent=False)  # records the heads' device and dtype
        self.post_init()

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # transformers asks parameters, and there are none
        return self.placed.device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.placed.dtype

    @classmethod
    def weights_elsewhere(cls, config: DraftHeadConfig, **hub: Any) -> dict[str, torch.Tensor]:
        """An empty dict: these heads have no weights."""
        return {}

    @property
    def weights_are_elsewhere(self) -> bool:
        return True

    # ------------------------------------------------------------------ the target
    def check_target(self, target: PreTrainedModel) -> None:
        """Refuses a target with another vocabulary size; nothing else about it matters."""
        self.check_sizes(target)

    def check_sizes(self, target: PreTrainedModel) -> None:
        """As [`check_target`]: the vocabulary size is the only one that matters."""
        theirs = target_sizes(target)["vocab_size"]
        if self.config.vocab_size != theirs:
            name = target.config.name_or_path or type(target).__name__
            raise WrongTargetError(
                f"these lookup heads have a vocabulary of {self.config.vocab_size} tokens, but {name!r} has "
                f"{theirs}; make new ones with `AutoDraftHead.from_target(target, 'lookup')`."
            )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def copied_ngrams(self) -> tuple[int, int]:
        return self.config.longest_ngram, self.config.shortest_ngram

    def _refresh_pruning(self) -> None:
        """Does nothing: there are no rows to copy, `_logits` leaves other tokens out."""

    # ------------------------------------------------------------------ drafting
    def new_draft_cache(self) -> TextCache:
        return TextCache()

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. The state of a node is the last tokens on its path, int64 [B, 1, longest_ngram]."""
        assert isinstance(cache, TextCache)
        cache.take_in(token_ids)
        back = torch.arange(1 - self.config.longest_ngram, 1, device=token_ids.device)
        slots = (cache.roots() + back).expand(len(token_ids), -1)
        last = torch.where(slots >= 0, cache.text.gather(1, slots.clamp_min(0)), NO_TOKEN)[:, None]
        return last, self._logits(cache, last)

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(cache, TextCache)
        last = torch.cat([features[..., 1:], token_ids[..., None]], dim=-1)
        return last, self._logits(cache, last)

    def _logits(self, cache: TextCache, last: torch.Tensor) -> torch.Tensor:
        """Draft logits, fp32 [B, K, Vd], after nodes whose paths end in the tokens `last` [B, K, n]."""
        text, roots = cache.text, cache.roots()
        places = torch.arange(text.shape[1], device=text.device)
        agree = (places < roots)[:, None].expand(-1, last.shape[1], -1)  # before the root, where a next token is known
        agreeing = torch.zeros(*last.shape[:2], text.shape[1], dtype=torch.float32, device=text.device)
        for back in range(last.shape[2]):
            same = text.roll(back, dims=1)[:, None] == last[..., last.shape[2] - 1 - back, None]
            agree = agree & same & (places >= back)
            agreeing = agreeing + agree
        recent = 0.5 + 0.5 * (places + 1).float() / (roots + 1)
        counts = LONGER_COUNTS ** (agreeing - last.shape[2]) * recent[:, None]
        counts = torch.where(agreeing >= self.config.shortest_ngram, counts, 0.0)
        followers = text.roll(-1, dims=1)[:, None].expand_as(counts)
        seen = counts.new_zeros(*last.shape[:2], self.config.vocab_size).scatter_add(2, followers, counts)
        # The weights of unseen tokens differ slightly, so that the order of equals in a top-k kernel does not matter.
        order = torch.arange(self.config.vocab_size, device=text.device).float() / (2 * self.config.vocab_size)
        seen = seen + UNSEEN * (1 - order)
        return (seen if self.draft_vocabulary is None else seen[..., self.draft_vocabulary]).log()

    # ------------------------------------------------------------------ training
    def passes_problem(self, num_passes: int) -> str | None:
        return "but lookup heads have no weights to train; train heads of another method."

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Refuses to train, because there are no weights.

        Raises:
            ValueError: always.
        """
        raise ValueError("lookup heads have no weights to train; train heads of another method.")
