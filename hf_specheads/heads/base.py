"""[`DraftHead`], the base class of all draft heads."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from huggingface_hub import CommitInfo
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from ..configuration import DraftHeadConfig
from ..contract import LOOPS, DraftingContract, Memory, TrainingContract
from ..errors import CheckpointValueError, WarmStartError, WrongTargetError, refuse_wrong_keys
from ..generation.verification.rules import RULES
from ..metrics import GenerationStats
from ..publishing.card.facts import Published
from ..publishing.card.render import save_card
from ..publishing.push import push_heads
from ..target.adapter import adapter_identity, load_adapter
from ..target.borrowed import Binding, BorrowedModules
from ..target.identity import fingerprints_match, target_fingerprint, target_identity, target_sizes
from .adapter import check_adapter, find_adapter, save_adapter_beside
from .placement import Placement
from .pruning import PRUNED_TOKEN_IDS, PrunableVocabulary
from .tree_choice import TreeChoice

PUSH_OPTIONS = ("commit_message", "commit_description", "private", "revision", "create_pr", "custom_generate")


class DraftHead(TreeChoice, PrunableVocabulary, DraftingContract, TrainingContract, PreTrainedModel):
    """Base class of all draft heads; hand one to `generate(assistant_model=...)`.

    Attributes:
        tree_config: The [`DraftTreeConfig`] to draft. Assign one, or use [`with_tree`] for a single call. If none is
            assigned, it is the tree tuned on this machine ([`tune`]), else the saved one, else the device's default.
        verification: `"lossless"`: the output has exactly the target's distribution. `"typical"` (Medusa, section
            2.3.1): with `do_sample=True`, accepts tokens that the target finds likely enough, followed by the most
            probable token. This is **lossy**: faster, but the text follows another distribution (and
            `last_stats.lossy` is `True`); greedy decoding stays exact.
        posterior_threshold, posterior_alpha: Settings of typical acceptance: a token is accepted if its probability
            exceeds `min(posterior_threshold, posterior_alpha * exp(-entropy))`.
        exact_seed: When sampling, draw token by token as plain `generate` does, so that the same seed gives the same
            tokens (one host sync per token). `False` draws at all nodes at once: same distribution, one host sync per
            round. No effect on trees with sampled children, whose draws have no counterpart in plain `generate`.
        loop: `"own"`: our round loop; `"transformers"`: transformers' assisted loop, for chains only.
        adaptive: Draft what has paid most so far, judged by the wall time of rounds and plain steps with this target,
            and try alternatives now and then ([`generation.pace`]). If a tree was assigned, the choice is between that
            tree and a plain step; otherwise it includes chains and trees of other sizes. The tokens do not depend on
            the choice, unless sampling draws in an order of its own (`exact_seed = False`, sampled children): a seed
            then fixes the text only with `adaptive = False`. No effect if `trace` is set or with typical acceptance.
        probe: Before the first call with a target, verify a small draft tree with it and compare the logits with those
            of plain decoding ([`generation.probe`]). A target that would generate another text is refused.
        compiled: Compile the steps of a round with `torch.compile`, in fixed shapes, during the first call. The
            target's `generation_config.compile_config` holds the compiler's options.
        profile: Record wall seconds by stage in `last_stats.seconds`; every stage then waits for the devices.
        trace: Keep every draft tree in `last_stats.trees`.
        on_round: Function that the generating thread calls with every round ([`generation.observer.Round`]); an error
            that it raises ends the call. It influences neither tokens nor drafts.
        last_stats: [`GenerationStats`] of the last `generate`, or `None`.
        placement: [`Placement`]: whether the heads follow their target to its device and dtype when they are bound.
    """

    config_class = DraftHeadConfig
    config: DraftHeadConfig
    # Methods that the class implements, each with its name and papers, for model cards.
    published: ClassVar[dict[str, Published]] = {}
    # Saved tensors that are not floating-point weights, with their dtypes.
    integer_tensors: ClassVar[dict[str, torch.dtype]] = {PRUNED_TOKEN_IDS: torch.long}
    adaptive: bool = True
    probe: bool = True
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["DraftDecoderLayer"]

    if TYPE_CHECKING:
        # transformers wraps `nn.Module.to`, which hides from type checkers that it is a method.
        def to(self, *args: Any, **kwargs: Any) -> Self: ...  # type: ignore[override]
        def post_init(self) -> None: ...

    def __init__(self, config: DraftHeadConfig):
        super().__init__(config)
        self.forget_tree()
        self.verification = "lossless"
        self.posterior_threshold = 0.09
        self.posterior_alpha = 0.3
        self.exact_seed = True
        self.loop = "own"
        self.compiled = False
        self.memory = Memory()
        self.profile = False
        self.trace = False
        self.last_stats: GenerationStats | None = None
        self.placement = Placement()
        self._binding = Binding()  # not a module, so that nothing of the target is registered, trained or saved
        self._init_vocabulary(config)

    @property
    def verification(self) -> str:
        return self._verification

    @verification.setter
    def verification(self, rule: str) -> None:
        self._verification = _one_of("verification", rule, RULES)

    @property
    def loop(self) -> str:
        return self._loop

    @loop.setter
    def loop(self, loop: str) -> None:
        self._loop = _one_of("loop", loop, LOOPS)

    @property
    def generation_config(self) -> GenerationConfig:
        """A new, empty config: `generate` of some targets (Whisper) writes to its assistant's, and heads read none."""
        return GenerationConfig()

    # ------------------------------------------------------------------ the target
    def check_target(self, target: PreTrainedModel) -> None:
        """Refuses a target that the heads were not made for, before any forward.

        Raises:
            WrongTargetError: if sizes, vocabulary or fingerprint differ, or the target lacks the adapter trained with
                the heads; the message names both sides.
        """
        name = target.config.name_or_path or type(target).__name__
        self.check_sizes(target)
        identity = self.config.target or {}
        known = identity.get("fingerprint")
        if known and not fingerprints_match(known, target_fingerprint(target)):
            raise WrongTargetError(
                f"these {self.config.method} heads were made for {identity.get('name') or 'another target'!r}, but "
                f"the weights of {name!r} are not the same (the fingerprint of the token embedding differs); load "
                "heads trained for this target, or set `heads.config.target = None` to use these heads anyway."
            )
        check_adapter(self.config, target)

    def check_sizes(self, target: PreTrainedModel) -> None:
        """Checks only the sizes; part of [`check_target`]."""
        for field, theirs in target_sizes(target).items():
            ours = getattr(self.config, field)
            if ours != theirs:
                name = target.config.name_or_path or type(target).__name__
                undo = f", or undo `resize_token_embeddings` with {ours}" if field == "vocab_size" else ""
                raise WrongTargetError(
                    f"these {self.config.method} heads were made for a target with {field}={ours}, but {name!r} has "
                    f"{field}={theirs}; load heads trained for this target{undo}."
                )

    def bind(self, target: PreTrainedModel, *, follow: bool = True) -> Self:
        """Borrows the target's embedding and `lm_head`. A new target is checked first; if the heads are bound to the
        target already, only its sizes are checked. The binding does not keep the target alive.

        Args:
            target: The target.
            follow: Move the heads to the device of the target's `lm_head` and to the target's dtype, unless a device
                or dtype was chosen for them ([`heads.placement`]). After `False` they no longer follow any target.

        Raises:
            WrongTargetError: see [`check_target`].
            UnsupportedGenerationError: if the heads are on the meta device, or on one where they cannot call the
                modules they borrow.
        """
        if self._binding.target is not target:
            self.check_target(target)
            self._binding = Binding(target)
        self.check_sizes(target)  # a target may have been resized since the heads were bound to it
        self._binding.look_again()
        if not follow:
            self.placement = Placement(device=False, dtype=False)
        self.placement.follow(self, target, self.borrowed)
        self._found_tree = None  # a changed number of threads may select another tuned tree
        self._refresh_pruning()
        return self

    def for_call(self, target: PreTrainedModel) -> Self:
        """Returns a copy of these heads (weights shared) for one call, bound to its target: another thread or a
        streamer may bind the original to another target during the call. With `compiled`, the original is returned,
        because compiled steps refer to it."""
        heads = self if self.compiled else copy.copy(self)
        return heads if heads._binding.target is target else heads.bind(target)

    def remember_target(self, target: PreTrainedModel) -> None:
        """Writes the target's identity, its special tokens, and any adapter trained with the heads into the config."""
        self.config.target = target_identity(target)
        self.config.target_adapter = adapter_identity(target)
        config = target.config.get_text_config(decoder=True)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self.config, name, getattr(config, name, None))

    def load_target_adapter(self, target: PreTrainedModel, source: str | None = None, **hub: Any) -> None:
        """Loads the adapter stored beside these heads into the target, in place. From then on `generate` gives the
        adapted target's text, with and without draft heads (Medusa-2, arXiv 2401.10774, section 2.2.2).

        Args:
            target: The target as published.
            source: Folder or Hub id of the heads; defaults to where they were loaded from.
            **hub: `revision`, `token`, `local_files_only` for a Hub id.

        Raises:
            HeadLoadError: if there is no adapter beside the heads, or it is another target's.
            ValueError: if the target has adapters already.
        """
        load_adapter(target, find_adapter(self.config, source, **hub))

    @property
    def borrowed(self) -> BorrowedModules:
        """The modules borrowed from the target.

        Raises:
            RuntimeError: if the heads are not bound to a target yet, or their target no longer exists.
        """
        return self._binding.borrowed

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Draft logits in fp32, [..., H] -> [..., Vd]; Vd is V unless the heads have a [`draft_vocabulary`]."""
        return self.project(features)

    def get_input_embeddings(self) -> torch.nn.Module | None:  # type: ignore[override]  # most heads have none
        """The heads' own token embedding, or `None` if they borrow the target's. Quantisers call this method."""
        return self._modules.get("embed_tokens")

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        """Config fields that a warm start takes from `source`.

        Raises:
            WarmStartError: if heads of this family cannot start from `source`.
        """
        if not isinstance(source, cls):
            raise WarmStartError(
                f"`from_heads` must be loaded {cls.__name__} heads, got {type(source).__name__}; pass load_heads(...)."
            )
        kept = ("tree_config", "tuned", "target", "method", "train_max_length", "architectures", "dtype",
                "pruned_vocab_size")  # fmt: skip
        return {name: value for name, value in source.config.to_diff_dict().items() if name not in kept
                and hasattr(cls.config_class, name) and name != "model_type"}  # fmt: skip

    @classmethod
    def weights_elsewhere(cls, config: DraftHeadConfig, **hub: Any) -> dict[str, torch.Tensor] | None:
        """Weights of heads that are saved as a config alone: an empty dict if they have none, else tensors of another
        checkpoint that the config names. `None` for heads whose weights lie beside their config, as most do.

        Args:
            config: The config.
            **hub: `token` and `local_files_only`, if the other checkpoint is on the Hub.
        """
        return None

    @property
    def weights_are_elsewhere(self) -> bool:
        """Whether these heads are saved as a config without weights; see [`weights_elsewhere`]."""
        return False

    @classmethod
    def split_options(cls, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits the options of `AutoDraftHead.from_target` into fields of the config and options that are stored in
        the weights; [`start_from_target`] and [`start_from`] receive the latter as keyword arguments."""
        return options, {}

    def start_from_target(self, target: PreTrainedModel) -> None:
        """Initialises fresh heads with weights of their target; does nothing unless the family overrides it."""

    def start_from(self, source: DraftHead) -> None:
        """Copies the weights of `source`.

        Raises:
            WarmStartError: if the weights do not fit.
        """
        try:
            self.load_state_dict(trained_weights(source))
        except RuntimeError as error:
            raise WarmStartError(
                f"the weights of `from_heads` do not fit the new heads; leave out the sizes, so that they are taken "
                f"from `from_heads`, or drop `from_heads`. {error}"
            ) from error

    # ------------------------------------------------------------------ options, saving
    def with_tree(self, **overrides: Any) -> Self:
        """Returns the same heads (weights shared) with another draft tree, for one call:

            target.generate(**inputs, assistant_model=heads.with_tree(kind="chain", depth=4))

        Raises:
            ValueError: for unknown or impossible tree options.
        """
        other = copy.copy(self)
        if overrides:
            other.tree_config = self.tree_config.replace(**overrides)
        other.last_stats = None
        return other

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but reads safetensors files only, and raises an error if a tensor is missing or unknown.
        Without a `device_map` the heads follow their target to its device, without a `dtype` to its dtype.

        Raises:
            CheckpointKeysError: if tensors are missing or unknown; the message names them.
            CheckpointValueError: if the saved draft vocabulary is invalid.
        """
        kwargs.setdefault("use_safetensors", True)
        placement = Placement.asked_for(kwargs.get("device_map"), kwargs.get("dtype", kwargs.get("torch_dtype")))
        args, kwargs = _with_weights_from_elsewhere(cls, args, kwargs)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        heads, info = loaded
        refuse_wrong_keys(missing=set(info["missing_keys"]), unknown=set(info["unexpected_keys"]))
        if problem := heads.pruning_problem():
            raise CheckpointValueError(f"{problem}; the file is damaged, download it again.")
        heads.placement = placement
        return (heads, info) if output_loading_info else heads

    # Here and in `push_to_hub`, options are passed by keyword only.
    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """As in transformers, plus a model card, which keeps the text of an existing README.md. An assigned tree is
        saved as the default tree and removes one tuned on this machine; without one, `learnt_tree=True` saves the
        [`learnt_tree`] as tuned on this machine. Target weights are never saved; an adapter trained with the heads is.
        """
        push, repo_id = kwargs.pop("push_to_hub", False), kwargs.pop("repo_id", Path(save_directory).name)
        hub = {name: kwargs.pop(name) for name in PUSH_OPTIONS if name in kwargs}
        self.write_trees(learnt=kwargs.pop("learnt_tree", False))
        if self.config.target_adapter is not None and kwargs.get("is_main_process", True):
            save_adapter_beside(self.config, Path(save_directory), self._binding.target)
        if self.weights_are_elsewhere:
            kwargs["state_dict"] = {name: t for name, t in self.state_dict().items() if name == PRUNED_TOKEN_IDS}
        saved = super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            save_card(save_directory)
        if push:
            self.push_to_hub(repo_id, token=kwargs.get("token"), facts_from=save_directory, **hub)
        return saved

    def push_to_hub(self, repo_id: str, **options: Any) -> CommitInfo:  # type: ignore[override]
        """Uploads the heads: weights, config, a model card generated from facts, its figures, and the target's adapter
        if one was trained with the heads (Medusa-2). Weights of the target are never uploaded.

        Text and metadata that users added to the card are kept, both on the Hub and in the folder that the heads were
        loaded from. The card describes training and speed by that folder's `training_facts.json` and
        `eval_results.json`.

        Args:
            repo_id: `org/name`, or a name in the user's own namespace; created if it does not exist.
            commit_message, commit_description, private, token, revision, create_pr, max_shard_size: As in
                transformers; `revision` is a branch, created if it does not exist.
            custom_generate: Also upload the code for `generate(custom_generate=repo_id, trust_remote_code=True)`.
            base_model: Hub id of the target, if the heads were trained with a local copy of it.
            facts_from: Folder with the facts; defaults to the one that the heads were loaded from.
            training, evaluations, license, target_license, datasets, language, limits, tags, commit, versions:
                Facts for the card; see [`publishing.card.facts.CardFacts`].

        Returns:
            The commit with its URL, and the URL of the pull request if one was requested.

        Raises:
            HfHubHTTPError: if the Hub refuses the upload or is unavailable.
            ValueError: for an unknown fact.
        """
        return push_heads(self, repo_id, **options)


def _with_weights_from_elsewhere(
    cls: type[DraftHead], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for transformers' `from_pretrained`, with `state_dict` filled in if the weights are elsewhere."""
    source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if source is None:
        return args, kwargs
    hub = {name: kwargs[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in kwargs}
    config = kwargs.get("config") or cls.config_class.from_pretrained(source, **hub)
    weights = cls.weights_elsewhere(config, **{name: hub[name] for name in hub if name != "revision"})
    if weights is None:
        return args, kwargs
    if config.pruned_vocab_size is not None:
        weights |= load_file(cached_file(source, "model.safetensors", **hub))
    kept = {name: value for name, value in kwargs.items() if name not in (*hub, "pretrained_model_name_or_path")}
    return (None, *args[1:]), {**kept, "config": config, "state_dict": weights}


def _one_of(name: str, value: str, known: Collection[str]) -> str:
    """Returns the value of a setting if it is a known one.

    Raises:
        ValueError: for any other value; the message lists the known ones.
    """
    if value not in known:
        raise ValueError(f"`heads.{name}` must be one of {list(known)}, got {value!r}.")
    return value


def trained_weights(heads: DraftHead) -> dict[str, torch.Tensor]:
    """Weights that a warm start copies, by name: all but the token ids that the heads are pruned to."""
    return {name: value for name, value in heads.state_dict().items() if name != PRUNED_TOKEN_IDS}
