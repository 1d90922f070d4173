"""Checks on the target itself, before its first rounds, that it computes the same numbers in rounds as in decoding.

Signatures and layer types do not tell whether a forward respects the masks and positions it is given. Some targets
hide tokens by masks of their own, made from cache slots; their text would be wrong without an error. So the probe
decodes a few tokens one by one after a short random context, as plain generation does, and verifies the same tokens as
a round would, from the same prefill. The logits must be equal up to rounding. This costs four forwards, three of them
of at most five tokens, once per class, config, attention and kind of rounds in a process
(`last_stats.probe_seconds`).
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.chain import ChainCache
from ..cache.names import cache_parameter
from ..cache.recurrent import RecurrentCache
from ..cache.target import TreeCache, layer_windows
from ..errors import UnsupportedGenerationError
from ..target.features import asked_hidden_states, features_problem
from ..target.identity import target_sizes
from ..target.positions import drops_positions
from ..target.recurrence import counts_padding
from ..target.structure import forward_parameters
from ..tree.draft_tree import DraftTree
from .kernels.any_length import any_length

SHORT_CONTEXT = 16
BEYOND_WINDOW = 8  # tokens by which the context exceeds a sliding window
LONGEST_CONTEXT = 512  # no longer context is tried, so that the probe stays cheap
PADDING = 3  # tokens of padding before the first sequence of a batch
EARLIER = 2  # tokens that the second sequence has committed fewer than the first
# Parents of the nodes. The root has child 1 off the path and child 2 on it; node 3 follows 2, and node 4 follows 1.
Nodes = tuple[int, ...]
TREE: Nodes = (-1, 0, 0, 2, 1)
TREE_PATH: Nodes = (0, 2, 3)
CHAIN: Nodes = (-1, 0, 1)
CHAIN_PATH: Nodes = (0, 1, 2)
FULL_PRECISION_TOLERANCE = 1e-3
LOW_PRECISION_ROUNDINGS = 64  # logits may differ by so many steps (eps) of a low-precision type, times their spread

_verdicts: dict[tuple, str | None] = {}


@dataclass(frozen=True)
class RoundKind:
    """The properties of a call's rounds that the target's numbers may depend on.

    Attributes:
        tree: Whether nodes have siblings; otherwise chains are verified.
        ragged: Whether the sequences of a batch have committed different numbers of tokens.
        static: Whether the cache has a fixed size and attention reads all of its slots (compiled rounds).
        rolled_back: Whether transformers' own cache is used, and rejected tokens are removed from it.
        features: Hidden states that the draft head reads.
        recurrent: Whether rejected tokens are forgotten by restoring earlier states ([`RecurrentCache`]).
    """

    tree: bool
    ragged: bool = False
    static: bool = False
    rolled_back: bool = False
    features: tuple[int, ...] = ()
    recurrent: bool = False


def refuse_by_probe(target: PreTrainedModel, kind: RoundKind) -> float:
    """Tries a kind of rounds on a target, unless this process has tried it before.

    Returns:
        Wall seconds that the trial took.

    Raises:
        UnsupportedGenerationError: if the target's logits would not be those of plain decoding, or its hidden states
            cannot serve as features.
    """
    started = time.perf_counter()
    if (problem := probe_problem(target, kind)) is None:
        return time.perf_counter() - started
    way_out = "drop `assistant_model`"
    if kind.ragged and probe_problem(target, replace(kind, ragged=False)) is None:
        way_out = f"generate one sequence at a time, or {way_out}"
    elif kind.tree and not kind.ragged and probe_problem(target, replace(kind, tree=False)) is None:
        way_out = f"draft a chain instead, `heads.with_tree(kind='chain')`, or {way_out}"
    raise UnsupportedGenerationError(
        f"draft heads are not supported for {type(target).__name__} here: tried on {_words(kind)}, {problem}; "
        f"{way_out}."
    )


def _words(kind: RoundKind) -> str:
    shape = "a small draft tree" if kind.tree else "a short chain of drafts"
    return f"{shape} in a batch of different lengths" if kind.ragged else shape


def probe_problem(target: PreTrainedModel, kind: RoundKind) -> str | None:
    """How a target's logits under a kind of rounds differ from plain decoding, in words; `None` if they do not.

    Verdicts are remembered, errors are not, because the cause of an error may be temporary.
    """
    if target.training:
        return None  # with dropout, two forwards cannot be compared
    config = target.config.get_text_config(decoder=True)
    settings = repr(vars(config))  # runs in every call, and `to_json_string` takes 25 times as long
    key = (type(target), settings, config._attn_implementation, target.dtype, kind)
    if key not in _verdicts:
        doing = "decode from tokens, mask and positions alone"
        try:
            probe = _Probe(target, kind)
            doing = "verify several tokens in one forward"
            _verdicts[key] = probe.feature_problem() or difference(probe.decoded, probe.verified(), target.dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            return f"it could not {doing} ({said.rstrip('.')})"
    return _verdicts[key]


def difference(expected: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> str | None:
    """How logits differ by more than rounding, in words; `None` if they do not.

    The difference is the root mean square over the vocabulary, divided by the spread of the logits. In a low-precision
    type, a difference of more than a quarter of what is allowed must not change the most probable token.

    Args:
        expected, got: [..., V], in any dtype.
        dtype: The dtype in which they were computed.
    """
    expected, got = expected.double(), got.double().to(expected.device)
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    shift = (got - expected).square().mean(-1).sqrt() / spread.clamp_min(1e-12)
    if dtype in (torch.float32, torch.float64):
        wrong, allowed = ~(shift <= FULL_PRECISION_TOLERANCE), FULL_PRECISION_TOLERANCE
    else:
        allowed = LOW_PRECISION_ROUNDINGS * torch.finfo(dtype).eps
        other_favourite = got.argmax(-1) != expected.argmax(-1)
        wrong = ~(shift <= allowed) | (other_favourite & (shift > allowed / 4))
    if not bool(wrong.any()):
        return None
    return (
        f"its logits are not those of plain decoding, off by {shift.max():.2g} of their spread (up to "
        f"{allowed:.2g} is rounding)"
    )


def drafts_problem(expected: DraftTree, got: DraftTree, dtype: torch.dtype) -> str | None:
    """How a chain differs from the expected one by more than rounding, in words; `None` if it does not.

    The chains are compared up to their first different token: rounding may have decided it, and later tokens follow
    from it.
    """
    same = (expected.token_ids == got.token_ids).long().cumprod(1)
    compared = torch.nn.functional.pad(same[:, :-1], (1, 0), value=1).bool()
    shift = (expected.scores.double() - got.scores.double()).abs().where(compared, 0.0) / expected.depths.clamp_min(1)
    full = dtype in (torch.float32, torch.float64)
    allowed = FULL_PRECISION_TOLERANCE if full else LOW_PRECISION_ROUNDINGS * torch.finfo(dtype).eps
    if bool((shift <= allowed).all()):
        return None
    return f"its log-probabilities are off by {shift.max():.2g} per token (up to {allowed:.2g} is rounding)"


class _Probe:
    """A random context, its prefill, and the plainly decoded logits `decoded` [B, 3, V] of the path to verify."""

    def __init__(self, target: PreTrainedModel, kind: RoundKind):
        self.target, self.kind = target, kind
        self.parents = TREE if kind.tree else CHAIN
        self.path = TREE_PATH if kind.tree else CHAIN_PATH
        self.batch = 2 if kind.ragged else 1
        accepted = forward_parameters(target)
        self.takes_positions = "position_ids" in accepted
        self.counts_itself = self.takes_positions and drops_positions(target)
        self.cache_name = cache_parameter(accepted)
        self.keeps_logits = "logits_to_keep" in accepted
        self.hidden_states = {"output_hidden_states": asked_hidden_states(kind.features)}
        self.length = context_length(target)
        self.tokens = _tokens(target, self.batch, self.length + len(self.parents))
        self.mask: torch.Tensor | None = None
        if kind.ragged and not counts_padding(target):
            self.mask = torch.ones_like(self.tokens[:, : self.length])
            self.mask[0, :PADDING] = 0
        self.decoded = self._decode()

    @torch.no_grad()
    def _forward(self, cache: Any, first: int, end: int) -> torch.Tensor:
        """Runs a plain forward over the columns from `first` to `end`. Returns its last logits, [B, <= 3, V]."""
        inputs: dict[str, Any] = {self.cache_name: cache, "use_cache": True, "return_dict": True}
        if self.mask is not None:
            inputs["attention_mask"] = torch.nn.functional.pad(self.mask, (0, end - self.length), value=1)
        if self.takes_positions and not self.counts_itself:
            inputs["position_ids"] = self._positions()[:, first:end]
        if self.keeps_logits:
            inputs["logits_to_keep"] = EARLIER + 1
        outputs = self.target(self.tokens[:, first:end], **inputs, **self.hidden_states)
        self.states: Any = outputs.hidden_states if self.kind.features else ()
        return outputs.logits[:, -EARLIER - 1 :]

    def feature_problem(self) -> str | None:
        """Why the hidden states of the last forward cannot serve as features; `None` if they can."""
        return features_problem(self.states, self.kind.features, target_sizes(self.target)["feature_size"])

    def _positions(self) -> torch.Tensor:
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device).repeat(self.batch, 1)
        if self.mask is not None:
            positions[0] = (positions[0] - PADDING).clamp_min(0)
        return positions

    def _decode(self) -> torch.Tensor:
        """Decodes the path plainly: a prefill that ends with the root, and two steps of one token.

        In a batch, the path of the second sequence is the last three tokens of its prompt, unless states are restored.
        """
        cache = DynamicCache(config=self.target.config.get_text_config(decoder=True))
        if self.kind.rolled_back or self.kind.recurrent:
            self._forward(cache, 0, self.length - 1)
            self.prefilled = copy.deepcopy(cache)
            prompt = self._forward(cache, self.length - 1, self.length)
        else:
            cache.activate_past_recording()  # rounds begin before the prompt's end: windows need earlier tokens
            prompt = self._forward(cache, 0, self.length)
            self.prefilled = copy.deepcopy(cache)
        steps = [self._forward(cache, at, at + 1)[:, -1:] for at in (self.length, self.length + 1)]
        decoded = torch.cat([prompt[:, -1:], *steps], dim=1)
        if self.kind.ragged and not self.kind.recurrent:
            decoded[1] = prompt[1]
        return decoded

    @torch.no_grad()
    @any_length
    def verified(self) -> torch.Tensor:
        """The logits of the same path [B, 3, V] as rounds compute them, with the caches of rounds."""
        root = self.length - 1
        if self.kind.recurrent:
            return self._caught_up(self.tokens[:, root : root + 3])
        paths = [self.tokens[0, root : root + 3]]
        if self.kind.ragged:
            paths.append(self.tokens[1, root - EARLIER : root + 1])
        token_ids = self.tokens[:, -len(self.parents) :].clone()  # tokens of nodes off the path
        for row, path in enumerate(paths):
            token_ids[row, list(self.path)] = path
        tree = _tree(self.parents, token_ids)
        if self.kind.rolled_back:
            return self._rolled_back(tree)
        cache = self._tree_cache()
        outputs = self.target(token_ids, use_cache=True, return_dict=True, **cache.forward_inputs(tree))
        return outputs.logits[:, list(self.path)]

    def _tree_cache(self) -> TreeCache:
        """A cache with the prompt in slots, in which the path does not count as committed yet.

        What the slots of uncommitted tokens hold does not matter, because rounds overwrite them.
        """
        lengths = [self.length - 1, self.length - 1 - EARLIER][: self.batch]
        positions = torch.tensor([[length] for length in lengths], device=self.tokens.device)
        if self.kind.ragged and not self.counts_itself:
            positions[0] -= PADDING
        capacity = self.length + len(self.parents) if self.kind.static else None
        call = (self.batch, self.mask, positions, self.target.dtype, capacity)
        cache = TreeCache(self.prefilled, self.target, *call)
        cache.counts = lengths
        if cache.lengths is not None or self.kind.ragged:
            cache.lengths = torch.tensor(lengths, device=self.tokens.device)
        return cache

    def _rolled_back(self, chain: DraftTree) -> torch.Tensor:
        """Verifies a chain with wrong tokens, keeps only its root, and then verifies the rest of the path."""
        root = self.length - 1
        cache = ChainCache(self.prefilled, None, torch.tensor([[root]]).to(self.tokens.device), self.takes_positions)
        wrong = chain.token_ids.clone()
        wrong[:, 1:] = self.tokens[:, -2:]
        logits = []
        for tokens, count in ((wrong, 1), (chain.token_ids[:, 1:], 2)):
            nodes = torch.arange(count, device=tokens.device)[None]
            inputs = cache.forward_inputs(_tree(CHAIN[: tokens.shape[1]], tokens))
            outputs = self.target(tokens, use_cache=True, return_dict=True, **inputs)
            logits.append(outputs.logits[:, :count])
            cache.keep_paths(nodes, [count], torch.tensor([count]), True)
        return torch.cat(logits, dim=1)

    def _caught_up(self, path: torch.Tensor) -> torch.Tensor:
        """Verifies chains with wrong tokens, then the rest of the path [B, 3] from restored states.

        The first sequence keeps the root of its chain, and the second sequence also keeps the child. The second
        forward begins with the tokens that were kept.
        """
        root, kept = self.length - 1, [1, 2][: self.batch]
        positions = torch.full((self.batch, 1), root, device=path.device)
        if self.mask is not None and not self.counts_itself:
            positions[0] -= PADDING
        call = (self.mask, positions, self.takes_positions, root, False, self.batch)
        cache = RecurrentCache(self.prefilled, self.target, self.cache_name, *call)
        wrong, rest = path.clone(), path.roll(-1, dims=1)[:, :2]
        for row, count in enumerate(kept):
            wrong[row, count:] = self.tokens[row, count - 3 :]
            rest[row, : 3 - count] = path[row, count:]
        first = cache.verify(_tree(CHAIN, wrong)).logits
        cache.keep_paths(path, kept, torch.tensor(kept), True)
        second = cache.verify(_tree(CHAIN[:2], rest)).logits
        rows = zip(first, second, kept, strict=True)
        return torch.stack([torch.cat([before[:count], after[: 3 - count]]) for before, after, count in rows])


def context_length(target: PreTrainedModel) -> int:
    """Length of the probe's context in tokens: longer than every sliding window that is not too long to exceed."""
    config = target.config.get_text_config(decoder=True)
    stated = [value for name, value in vars(config).items() if "window" in name and isinstance(value, int)]
    windows = [int(window) for window in (*layer_windows(target), *stated) if window]
    limit = getattr(config, "max_position_embeddings", None) or LONGEST_CONTEXT
    longest = min(LONGEST_CONTEXT, limit - len(TREE))
    lengths = [window + BEYOND_WINDOW + PADDING + EARLIER for window in windows]
    return min(max([SHORT_CONTEXT, *(length for length in lengths if length <= longest)]), longest)


def _tokens(target: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Random token ids, int64 [batch, length], without the ids that the config names (image tokens and the like)."""
    config = target.config.get_text_config(decoder=True)
    named = {value for source in (target.config, config) for name, value in vars(source).items()
             if "token" in name and isinstance(value, int)}  # fmt: skip
    drawn = torch.randint(config.vocab_size, (4 * batch * length,), generator=torch.Generator().manual_seed(0))
    plain = [token for token in drawn.tolist() if token not in named]
    return torch.tensor(plain[: batch * length]).view(batch, length).to(target.device)


def _tree(parents: tuple[int, ...], token_ids: torch.Tensor) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    shape = token_ids.shape
    rows = torch.tensor([parents, depths], device=token_ids.device)
    scores = torch.zeros(shape, dtype=torch.float32, device=token_ids.device)
    return DraftTree(token_ids, rows[0].expand(shape), rows[1].expand(shape), scores, max(depths))
