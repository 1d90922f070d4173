"""Refuses calls that cannot be served, with one sentence that says why, before any forward of the call.

The checks are allow-lists: a target that silently ignores a tree mask produces wrong text, not an error. After them,
[`refuse_numbers`] compares the target's numbers in rounds with plain decoding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from ..cache.layers import chain_cache_problem, is_restored, recurrent_cache_problem, tree_cache_problem
from ..cache.names import CACHE_NAMES, cache_name
from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from ..target.images import IMAGES_SERVED, TOKEN_TYPES, read_by_the_prompt
from ..target.positions import rope_limit, sparse_limit
from ..target.recurrence import counts_padding, is_recurrent, recurrence_problem
from ..target.structure import forward_parameters, own_mask
from .options import DraftingOptions
from .pace.menu import farthest_chain
from .probe import RoundKind, probe_problem, refuse_by_probe
from .processors import out_of_step
from .sampling import TokenSampler
from .verification.rules import RULES

TREE_LAYER_TYPES = {"full_attention", "sliding_attention"}
TREE_ATTENTION = {"eager", "sdpa", "flex_attention"}
# Arguments that a verifying forward gets. Others are refused, because dropping them silently could change the text.
FORWARD_ARGUMENTS = {
    *CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "inputs_embeds", "logits_to_keep",
    "output_hidden_states", "return_dict",
}  # fmt: skip
# Arguments that carry images, videos and sound, or the outputs of their encoders.
MEDIA = {"pixel_values", "pixel_values_videos", "input_features", "mm_encoder_outputs"}
OFFLOADED_CACHES = {"offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked"}


def refuse_call(target: PreTrainedModel, mode: GenerationMode, config: GenerationConfig) -> None:
    """Checks the call itself: its decoding mode and the family of the target.

    Raises:
        UnsupportedGenerationError: if no draft head can serve the call.
    """
    text = target.config.get_text_config(decoder=True)
    both_ways = getattr(text, "use_bidirectional_attention", None)  # "vision" concerns the tokens of an image only
    reasons = {
        "targets with layers that attend to images (`cross_attention_layers`)": bool(
            getattr(text, "cross_attention_layers", None)
        ),
        f"prompts that attend in both directions (`use_bidirectional_attention={both_ways!r}`)": both_ways
        in (True, "all"),
        "beam search": (config.num_beams or 1) > 1,
        "encoder-decoder targets": bool(target.config.is_encoder_decoder),
        f"this recurrent target ({recurrence_problem(target)})": recurrence_problem(target) is not None,
        "use_cache=False": config.use_cache is False,
        f"cache_implementation={config.cache_implementation!r} (rounds need all layers on their devices)": (
            config.cache_implementation in OFFLOADED_CACHES
        ),
        "output_attentions=True": bool(config.output_attentions),
        "assistant_ensemble_weight, which is lossy": getattr(config, "assistant_ensemble_weight", None) is not None,
        f"dola_layers={config.dola_layers!r}, which changes the text": config.dola_layers is not None,
        "gradient checkpointing in training mode, where layers keep no cache (`target.eval()`)": any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in target.modules()
        ),
        f"prompt-learning adapters ({_prompt_learning(target)})": _prompt_learning(target) is not None,
    }
    for what, applies in reasons.items():
        if applies:
            raise UnsupportedGenerationError(
                f"draft heads do not support {what}; change that option or drop `assistant_model` to generate plainly."
            )
    if mode not in (GenerationMode.ASSISTED_GENERATION, GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedGenerationError(
            f"draft heads do not support generation mode {mode.value!r}; use greedy decoding or sampling."
        )


def refuse_options(heads: DraftingContract, options: DraftingOptions, config: GenerationConfig) -> None:
    """Checks the settings of the draft heads against one another and against the call.

    Raises:
        UnsupportedGenerationError: if settings do not go together. The message names the setting and the way out.
    """
    if config.do_sample and (problem := RULES[options.verification].problem(options)):
        raise UnsupportedGenerationError(
            f"{options.verification} acceptance {problem}, or `heads.verification = 'lossless'`."
        )
    if problem := heads.tree_problem(options.tree):
        raise UnsupportedGenerationError(f"{problem}.")
    if options.loop == "transformers" and not options.tree.is_chain:
        raise UnsupportedGenerationError(
            f"transformers' own loop verifies chains only, and these heads draft a {options.tree.kind} tree"
            f"{' with looked-up tokens' if options.tree.lookup else ''}; use "
            "`heads.with_tree(kind='chain', lookup=0)` or `heads.loop = 'own'`."
        )
    if options.loop == "transformers" and options.on_round is not None:
        raise UnsupportedGenerationError(
            "transformers' own loop does not report its rounds, but `heads.on_round` is set; use "
            "`heads.on_round = None` or `heads.loop = 'own'`."
        )


def refuse_processors(
    options: DraftingOptions, processors: LogitsProcessorList, config: GenerationConfig, batch_size: int
) -> None:
    """Checks the logits processors of a call against the way its tokens are verified.

    Raises:
        UnsupportedGenerationError: if processors may have a state, in two cases: a batch, because its sequences are
            not verified in step, and typical acceptance, which asks processors about paths that are never written.
    """
    if batch_size > 1 and (unknown := out_of_step(processors)):
        raise UnsupportedGenerationError(
            f"the sequences of a batch are verified out of step, and the logits processors {unknown} may keep "
            "something from one call to the next; generate one sequence at a time, or leave them out."
        )
    asks_about_text = config.do_sample and not RULES[options.verification].lossless
    if asks_about_text and not TokenSampler(processors, True).path_wise:
        unknown = [type(p).__name__ for p in processors if not TokenSampler(LogitsProcessorList([p]), True).path_wise]
        raise UnsupportedGenerationError(
            f"typical acceptance asks the logits processors about drafts that may be rejected, and {unknown} may not "
            "allow that; leave them out or use `heads.verification = 'lossless'`."
        )


def _prompt_learning(target: PreTrainedModel) -> str | None:
    """Name of a prompt-learning PEFT method on the target, whose virtual tokens are in the cache without ids.

    peft generates through the base model, to which it assigns its own `prepare_inputs_for_generation`. So the adapters
    are looked for on the owner of that method too.
    """
    lender = getattr(target.prepare_inputs_for_generation, "__self__", None)
    for model in (target, lender):
        adapters = getattr(model, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "is_prompt_learning", False):
                return str(getattr(adapter.peft_type, "value", adapter.peft_type))
    return None


def with_a_tree_for(
    target: PreTrainedModel, options: DraftingOptions, batch_size: int, model_kwargs: dict[str, Any]
) -> DraftingOptions:
    """The options of a call, with a chain instead of a tree that was not assigned if the target takes no trees."""
    cache = model_kwargs.get(cache_name(model_kwargs))
    if not options.free_tree or options.tree.is_chain or not isinstance(cache, Cache):
        return options
    if tree_problem_of(target, cache) is None:
        return options
    depth = options.tree.depth
    return replace(options, tree=options.tree.replace(kind="chain", top_k=1, total_tokens=depth + 1, lookup=0))


def refuse_prepared_call(
    target: PreTrainedModel,
    head: DraftingContract,
    options: DraftingOptions,
    batch_size: int,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Checks what `generate` prepared: the batch size, the cache, and the target's attention under a tree.

    Raises:
        UnsupportedGenerationError: if rounds cannot serve it. The message names the obstacle and the way out.
    """
    cache = _usable_cache(target, model_kwargs)
    _refuse_arguments(target, options, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    if counts_padding(target) and mask is not None and not bool(mask.all()):
        raise UnsupportedGenerationError(
            f"draft heads do not serve prompts with padding for {type(target).__name__}, where padding makes "
            "verification differ from decoding; give prompts of one length, or one at a time."
        )
    if not head.feature_layers and model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            f"{head.config.method} heads read token ids, but this prompt is given as embeddings; pass `input_ids`, or "
            "use heads that read the target's features."
        )
    for problem_of in (rescaling_rope_problem, sparse_attention_problem):
        if reason := problem_of(target, config):
            raise UnsupportedGenerationError(reason)
    if options.loop == "transformers" and (goes_back(target, cache) or chain_cache_problem(cache)):
        raise UnsupportedGenerationError(
            f"transformers' own loop cannot remove tokens from the cache of {type(target).__name__} "
            f"({type(cache.layers[0]).__name__}); use `heads.loop = 'own'`."
        )
    if options.compiled:
        _refuse_compiled(target, options, config, cache)
    if batch_size > 1:
        _refuse_batch(target, options, batch_size, config)
    if problem := tree_problem_of(target, cache):
        _refuse_without_trees(target, options, cache, problem)


def _usable_cache(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> Cache:
    """Returns the cache of the call; refuses calls without a cache from which rounds can remove tokens."""
    cache = model_kwargs.get(cache_name(model_kwargs))
    if not model_kwargs.get("use_cache", True):
        raise UnsupportedGenerationError("draft heads need a cache, got use_cache=False; pass use_cache=True.")
    if not isinstance(cache, Cache):
        raise UnsupportedGenerationError(
            f"{type(target).__name__} does not take the cache that `generate` prepares (got {type(cache).__name__}), "
            "and draft heads cannot remove rejected tokens from any other; drop `assistant_model`."
        )
    return cache


def _refuse_arguments(target: PreTrainedModel, options: DraftingOptions, model_kwargs: dict[str, Any]) -> None:
    """Refuses arguments that a verifying forward would not get."""
    extra = {name for name, value in model_kwargs.items() if name not in FORWARD_ARGUMENTS and _says(name, value)}
    if options.loop == "own":
        extra -= read_by_the_prompt(target, model_kwargs)
    if media := sorted(MEDIA & extra):
        raise UnsupportedGenerationError(
            f"draft heads do not serve prompts of {type(target).__name__} with {media}; leave them out or drop "
            f"`assistant_model` (images are served with `heads.loop = 'own'` for {sorted(IMAGES_SERVED)})."
        )
    if extra and options.loop == "own":
        raise UnsupportedGenerationError(
            f"draft heads do not pass {sorted(extra)} on to the target's forward; leave them out or drop "
            "`assistant_model`."
        )


def _refuse_without_trees(target: PreTrainedModel, options: DraftingOptions, cache: Cache, problem: str) -> None:
    """Refuses what a target without trees cannot verify: trees, and chains if its cache cannot be rolled back."""
    problem_of = recurrent_cache_problem if goes_back(target, cache) else chain_cache_problem
    if chain_problem := problem_of(cache):
        raise UnsupportedGenerationError(
            f"draft heads are not supported for {type(target).__name__} here: {chain_problem}; use the default cache, "
            "or drop `assistant_model`."
        )
    if not options.tree.is_chain:
        raise UnsupportedGenerationError(
            f"draft trees are not supported for {type(target).__name__}: {problem}; draft a chain instead, "
            f"`heads.with_tree(kind='chain'{', lookup=0' if options.tree.lookup else ''})`, or drop `assistant_model`."
        )


def _says(name: str, value: Any) -> bool:
    """Whether an argument of the forward carries information about a text.

    transformers also passes empty arguments, and token types that mark all tokens as text.
    """
    if value is None or value is False or (isinstance(value, dict) and not value):
        return False
    return not (name in TOKEN_TYPES and isinstance(value, torch.Tensor) and not bool(value.any()))


def _refuse_compiled(
    target: PreTrainedModel, options: DraftingOptions, config: GenerationConfig, cache: Cache
) -> None:
    """Refuses what does not go with rounds of fixed shapes."""
    reasons = {
        f"stop_below={options.tree.stop_below}, which may leave levels out": options.tree.stop_below > 0,
        "a call without max_length": config.max_length is None,
        "heads.loop = 'transformers'": options.loop == "transformers",
        "flex attention, whose block masks are built again in every round": (
            target.config.get_text_config(decoder=True)._attn_implementation == "flex_attention"
        ),
        f"{type(target).__name__}: {tree_problem_of(target, cache)}": tree_problem_of(target, cache) is not None,
    }
    for what, applies in reasons.items():
        if applies:
            raise UnsupportedGenerationError(
                f"`heads.compiled` drafts trees of one shape into caches of one size, which does not go with {what}; "
                "mend that, or set `heads.compiled = False`."
            )


def _refuse_batch(
    target: PreTrainedModel, options: DraftingOptions, batch_size: int, config: GenerationConfig
) -> None:
    """Refuses what does not go with a batch, whose sequences accept different numbers of tokens."""
    reasons = {
        "heads.loop = 'transformers'": options.loop == "transformers",
        "output_hidden_states=True": bool(config.output_hidden_states and config.return_dict_in_generate),
    }
    for what, applies in reasons.items():
        if applies:
            raise UnsupportedGenerationError(
                f"draft heads do not support a batch of {batch_size} with {type(target).__name__} here ({what}); "
                "generate one sequence at a time, or mend that."
            )


def goes_back(target: PreTrainedModel, cache: Cache) -> bool:
    """Whether rejected tokens are forgotten by restoring what the cache held before ([`RecurrentCache`])."""
    return is_recurrent(target) or is_restored(cache)


def rounds_go_back(target: PreTrainedModel, options: DraftingOptions, batch_size: int, cache: Cache) -> bool:
    """Whether the rounds of a call forget rejected tokens by restoring the cache ([`goes_back`]).

    So do the chains of a batch or stream if the target takes no trees: its sequences cannot have slots of their own.
    """
    if goes_back(target, cache):
        return True
    several = batch_size > 1 or options.in_stream
    return several and options.tree.is_chain and tree_problem_of(target, cache) is not None


def tree_problem_of(target: PreTrainedModel, cache: Cache) -> str | None:
    """Why a tree of nodes cannot be verified by this target in one forward, or `None` if it can."""
    if is_recurrent(target):
        return "it keeps a state of the whole text, and paths of a tree would need one each"
    config = target.config.get_text_config(decoder=True)
    other = set(getattr(config, "layer_types", None) or ()) - TREE_LAYER_TYPES
    if other or getattr(config, "attention_chunk_size", None):
        return f"it has layers of type {sorted(other) or ['chunked_attention']}"
    if "position_ids" not in forward_parameters(target):
        return "its forward takes no position_ids (positions enter as attention biases)"
    if getattr(config, "alibi", False):
        return "positions enter its attention as biases (alibi), which take no tree"
    if (module := own_mask(target)) is not None:
        return f"its attention hides tokens by a mask of its own ({module}), by their slots and not by their positions"
    if config._attn_implementation not in TREE_ATTENTION:
        return (
            f"attention implementation {config._attn_implementation!r} takes no 4D mask "
            "(`model.set_attn_implementation('sdpa')` does)"
        )
    return tree_cache_problem(cache)


def rescaling_rope_problem(target: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Why a call may reach positions at which the target's rope changes, and the way out; `None` if it cannot.

    Plain decoding then keeps keys from before and after the change side by side, or recomputes its cache (Phi-3).
    """
    limit = rope_limit(target)
    if limit is None or config.max_length is None or config.max_length <= limit[0]:
        return None
    return (
        f"{limit[1]!r} rope of {type(target).__name__} rescales past {limit[0]} tokens, which draft heads cannot "
        f"follow exactly, and this call may reach {config.max_length}; lower max_new_tokens or drop `assistant_model`."
    )


def sparse_attention_problem(target: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Why a call may reach contexts that a sparse attention reads only in part, and the way out; `None` if it cannot.

    Which tokens are read depends on ties, and a forward over several tokens may break ties differently than a forward
    over one.
    """
    limit = sparse_limit(target)
    if limit is None or (config.max_length is not None and config.max_length <= limit[0]):
        return None
    return (
        f"attention of {type(target).__name__} picks {limit[0]} tokens of a longer context (`{limit[1]}`), not always "
        "the same ones in a forward over several tokens, and this call may reach "
        f"{config.max_length or 'any length'}; lower max_new_tokens or drop `assistant_model`."
    )


def kind_of_rounds(target: PreTrainedModel, options: DraftingOptions, batch: int, cache: Cache) -> RoundKind:
    """The kind of rounds that the target runs in a call, for the probe."""
    if rounds_go_back(target, options, batch, cache):
        return RoundKind(tree=False, ragged=batch > 1, recurrent=True)
    takes_no_trees = options.tree.is_chain and tree_problem_of(target, cache) is not None
    return RoundKind(not options.tree.is_chain, batch > 1, options.compiled, takes_no_trees)


def refuse_numbers(
    target: PreTrainedModel, head: DraftingContract, options: DraftingOptions, batch_size: int, cache: Cache
) -> float:
    """Checks with a few forwards, once per target and kind of rounds, that rounds compute what plain steps compute.

    Returns:
        Wall seconds that the check took; 0.0 if `options.probe` is off.

    Raises:
        UnsupportedGenerationError: if rounds compute something else.
    """
    if not options.probe:
        return 0.0
    kind = kind_of_rounds(target, options, batch_size, cache)
    return refuse_by_probe(target, replace(kind, features=head.feature_layers))


def with_copies(
    target: PreTrainedModel, head: DraftingContract, options: DraftingOptions, batch_size: int, cache: Cache
) -> DraftingOptions:
    """The options of a call, which know whether its rounds may verify copied tokens beside the chain in force. They do
    without where the target cannot verify trees, or does not compute the same there."""
    free = options.free_tree and options.adaptive and options.loop == "own" and not options.compiled
    if not (free and farthest_chain(head, target)) or goes_back(target, cache) or tree_problem_of(target, cache):
        return options
    kind = replace(kind_of_rounds(target, options, batch_size, cache), tree=True, features=head.feature_layers)
    return replace(options, takes_trees=not options.probe or probe_problem(target, kind) is None)
