"""Builds a trainer from a recipe. Errors of the recipe are reported here, those that are cheap to detect first."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    set_seed,
)
from transformers.utils import is_torch_bf16_gpu_available

from hf_specheads import AutoDraftHead, load_heads
from hf_specheads.checkpoints.fetch import HUB_ERRORS
from hf_specheads.heads.auto import METHODS
from hf_specheads.target.loading import load_target as load_model
from hf_specheads.target.loading import target_class

from .arguments import DraftHeadTrainingArguments
from .data.images import ImageChats, ids_of, shows_images, tokenizer_of
from .data.packing import Examples
from .data.preparing import DataReport, known_as_prepared, marked_example, prepare_dataset
from .data.sources import RecipeError, kind_of, refuse_wrong_model
from .data.vocabulary import frequent_tokens
from .devices.gradients import first_process_first
from .devices.sharding import load_shares, share_here
from .joint import JointTrainer, JointTrainingArguments
from .recipe import Recipe
from .trainer import DraftHeadTrainer

logger = logging.getLogger(__name__)


def training_arguments(recipe: Recipe) -> DraftHeadTrainingArguments:
    """Returns the training arguments of a recipe. Evaluation runs at the end of every epoch unless the recipe changes
    that.

    Raises:
        RecipeError: if the recipe has no `output_dir`.
    """
    if not recipe.training.get("output_dir"):
        raise RecipeError("the recipe does not say where to write; pass output_dir=...")
    evaluated = recipe.eval_examples > 0 or recipe.eval_data is not None
    defaults: dict[str, Any] = {"eval_strategy": "epoch" if evaluated else "no", "report_to": []}
    arguments = JointTrainingArguments if recipe.trains_target else DraftHeadTrainingArguments
    chosen = {**defaults, **recipe.training}
    if chosen.get("bf16") and not chosen.get("use_cpu") and not is_torch_bf16_gpu_available():
        logger.warning("no accelerator here supports bf16, so training runs in fp32, as with bf16=false.")
        chosen["bf16"] = False
    if chosen.get("use_cpu") or not torch.accelerator.is_available():  # torch warns if it pins memory in vain
        chosen.setdefault("dataloader_pin_memory", False)
    return arguments(**chosen)


def load_datasets(recipe: Recipe) -> tuple[list[Any], Any]:
    """Loads the training data, one data set per source, and the evaluation data (without `eval_data`, the first
    examples of the first source)."""
    sources = [source.load() for source in recipe.train_sources]
    if recipe.eval_data is not None:
        held_out = recipe.eval_data.load()
        if not hasattr(held_out, "__len__"):
            return sources, _read(held_out, recipe.eval_examples or Recipe.eval_examples)
        return sources, held_out.select(range(min(recipe.eval_examples or len(held_out), len(held_out))))
    if recipe.eval_examples == 0:
        return sources, None
    train: Any = sources[0]
    if not hasattr(train, "__len__"):
        held_out = _read(train, recipe.eval_examples)
        return [train.skip(recipe.eval_examples), *sources[1:]], held_out
    if len(train) <= recipe.eval_examples:
        raise RecipeError(
            f"train_data has {len(train)} examples, too few to hold out eval_examples={recipe.eval_examples}; "
            "set eval_examples lower, or give eval_data."
        )
    first = train.select(range(recipe.eval_examples, len(train)))
    return [first, *sources[1:]], train.select(range(recipe.eval_examples))


def _read(stream: Any, count: int) -> Any:
    """Reads the first examples of a stream into a data set, so that every evaluation sees the same examples."""
    from datasets import Dataset

    return Dataset.from_list(list(stream.take(count)))


def mix(datasets: Sequence[Examples], weights: Sequence[float | None], seed: int) -> Examples:
    """Combines prepared data sets into one. With weights, examples are drawn from the data sets in these proportions
    until every example has been drawn at least once; without weights, the data sets are concatenated.

    Raises:
        RecipeError: if only some data sets have a weight, if only some are streams, or if stored features would be
            mixed with other data.
    """
    from datasets import concatenate_datasets, interleave_datasets

    if len(datasets) == 1:
        return datasets[0]
    if not all(hasattr(dataset, "column_names") for dataset in datasets):
        raise RecipeError(
            "stored features cannot be mixed with other data; train on a single folder of stored features."
        )
    if len({hasattr(dataset, "__len__") for dataset in datasets}) > 1:
        raise RecipeError("streams and data sets cannot be mixed with each other; give every source of train_data "
                          "the same `streaming`.")  # fmt: skip
    given = [weight for weight in weights if weight is not None]
    if not given:
        return concatenate_datasets(list(datasets))
    if len(given) < len(weights) or min(given) <= 0:
        raise RecipeError(f"give every source of train_data a `weight` above 0, or none of them; got {list(weights)}.")
    shares = [weight / sum(given) for weight in given]
    return interleave_datasets(list(datasets), probabilities=shares, seed=seed, stopping_strategy="all_exhausted")


def prepare_sources(
    recipe: Recipe,
    sources: Sequence[Examples],
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    args: DraftHeadTrainingArguments,
    report: DataReport,
) -> Examples:
    """Prepares the examples of all sources and mixes them."""
    prepared = [
        prepare_dataset(
            source,
            tokenizer,
            args.max_length,
            template_kwargs=args.chat_template_kwargs,
            num_proc=args.dataset_num_proc,
            report=report,
        )
        for source in sources
    ]
    if any(isinstance(source, ImageChats) for source in prepared):
        if len(prepared) > 1:
            raise RecipeError(
                "sources cannot be mixed if a processor reads their images; put all examples into one source."
            )
        return prepared[0]
    mixture = mix(prepared, [source.weight for source in recipe.train_sources], args.seed)
    return known_as_prepared(mixture, args.max_length)


def refuse_wrong_recipe(recipe: Recipe) -> None:
    """Refuses a recipe with errors that can be detected before anything is loaded.

    Raises:
        RecipeError: for an unknown method or dtype, or a local path that does not exist or holds something else.
    """
    if recipe.method not in METHODS:
        raise RecipeError(f"`method` must be one of {sorted(METHODS)}, got {recipe.method!r}.")
    torch_dtype("heads_dtype", recipe.heads_dtype)
    if recipe.target_dtype != "auto":
        torch_dtype("target_dtype", recipe.target_dtype)
    refuse_wrong_model("target", recipe.target, heads=False)
    if recipe.from_heads is not None:
        refuse_wrong_model("from_heads", recipe.from_heads, heads=True)
    for source in (*recipe.train_sources, recipe.eval_data):
        if source is not None:
            source.refuse_wrong_path()


def torch_dtype(key: str, name: str) -> torch.dtype:
    """Returns the torch dtype called `name`; `key` is the recipe key that error messages refer to.

    Raises:
        RecipeError: if there is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RecipeError(f"`{key}` must be the name of a torch dtype such as float32 or bfloat16, got {name!r}.")
    return dtype


def load_tokenizer(recipe: Recipe, *datasets: Examples) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Loads the target's tokenizer, or its processor if the data hold images. This is the first access to the target,
    so errors of its name appear here.

    Raises:
        RecipeError: if it cannot be loaded, if the data hold images and the target has no processor, or if the data
            hold chats and there is no chat template.
    """
    hub = {"revision": recipe.target_revision} if recipe.target_revision else {}
    try:
        trusted = {name: recipe.target_options[name] for name in ("trust_remote_code",)
                   if name in recipe.target_options}  # fmt: skip
        reader: Any = AutoProcessor if any(map(shows_images, datasets)) else AutoTokenizer
        tokenizer = reader.from_pretrained(recipe.target, **hub, **trusted)
    except (OSError, ValueError) as error:
        raise RecipeError(f"the target {recipe.target!r} cannot be loaded: {error}") from error
    if reader is AutoProcessor and not isinstance(tokenizer, ProcessorMixin):
        raise RecipeError(f"the data hold images, and the target {recipe.target!r} has no processor that reads them.")
    known = [dataset for dataset in datasets if hasattr(dataset, "column_names")]
    columns = [dataset.column_names or list(next(iter(dataset))) for dataset in known]
    chats = [kind for names in columns if (kind := kind_of(names)) in ("messages", "conversations")]
    if chats and not tokenizer.chat_template:
        raise RecipeError(
            f"the data hold chats (`{chats[0]}`), and the tokenizer of {recipe.target!r} has no chat template; use a "
            "target with one, or data with a `text` column."
        )
    return tokenizer


def load_target(recipe: Recipe, images: bool = False) -> PreTrainedModel:
    """Loads the target with the recipe's placement and quantisation; with `images`, including its vision model.

    Raises:
        RecipeError: for an unknown option, or a quantisation whose library is missing.
    """
    hub = {"revision": recipe.target_revision} if recipe.target_revision else {}
    dtype: Any = recipe.target_dtype
    if dtype != "auto":
        dtype = torch_dtype("target_dtype", dtype)
    options = dict(recipe.target_options)
    if isinstance(options.get("quantization_config"), dict):
        from transformers.quantizers import AutoQuantizationConfig

        try:
            options["quantization_config"] = AutoQuantizationConfig.from_dict(options["quantization_config"])
        except (ValueError, TypeError, ImportError) as error:
            raise RecipeError(f"`target_options.quantization_config` is not valid: {error}") from error
    try:
        return load_model(recipe.target, images=images, dtype=dtype, **options, **hub)
    except TypeError as error:
        raise RecipeError(f"`target_options` {sorted(options)} cannot be used with this target: {error}") from error


def load_for(recipe: Recipe, args: DraftHeadTrainingArguments, images: bool = False) -> PreTrainedModel:
    """Loads the target. If it is to be sharded and `target_options` do not affect how weights are loaded, only the
    first process reads the weights and the others receive their shares."""
    plain = set(recipe.target_options) <= {"trust_remote_code", "attn_implementation"}
    if not (args.shard_target and plain and args.world_size > 1) or recipe.trains_target:
        return load_target(recipe, images)

    def without_weights() -> PreTrainedModel:
        hub = {"revision": recipe.target_revision} if recipe.target_revision else {}
        config = AutoConfig.from_pretrained(recipe.target, **recipe.target_options, **hub)
        with torch.device("meta"):
            return target_class(config, images).from_config(config, **recipe.target_options)

    return load_shares(lambda: load_target(recipe, images), without_weights, args)


def build_trainer(recipe: Recipe) -> DraftHeadTrainer:
    """Loads data, tokenizer and target, creates the draft heads, and builds a trainer from them.

    Raises:
        RecipeError: for errors in the recipe.
        ValueError, OSError: for errors in models and data, as raised by the code that loads them.
    """
    refuse_wrong_recipe(recipe)
    args = training_arguments(recipe)
    set_seed(args.seed)
    with first_process_first(args):
        sources, held_out = load_datasets(recipe)
    tokenizer = load_tokenizer(recipe, *sources, held_out)
    report = DataReport()
    with first_process_first(args):
        train = prepare_sources(recipe, sources, tokenizer, args, report)
    target = load_for(recipe, args, images=isinstance(tokenizer, ProcessorMixin))
    heads_dtype = torch_dtype("heads_dtype", recipe.heads_dtype)
    base = None
    if recipe.from_heads is not None:
        base = load_heads(
            recipe.from_heads, dtype=heads_dtype, positions_per_specialist=recipe.from_positions_per_specialist
        )
        if base.config.target_adapter is not None:
            base.load_target_adapter(target)
    options = dict(recipe.heads)
    size = options.get("draft_vocab_size")
    if size is not None and base is None and "draft_token_ids" not in options:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        options["draft_token_ids"] = frequent_tokens(ids_of(train), min(size, vocab_size), vocab_size)
        options["draft_vocab_size"] = len(options["draft_token_ids"])
    heads = AutoDraftHead.from_target(target, recipe.method, from_heads=base, dtype=heads_dtype, **options)
    trainer_class: type[DraftHeadTrainer] = JointTrainer if recipe.trains_target else DraftHeadTrainer
    with naming_the_hub(args):
        trainer = trainer_class(
            model=heads,
            target=target,
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
        )
    trainer.data_report = report
    return trainer


@contextmanager
def naming_the_hub(args: DraftHeadTrainingArguments) -> Iterator[None]:
    """Explains errors of the Hub while a trainer is created, which with `push_to_hub` creates a repository at once.

    Raises:
        RecipeError: if the Hub does not answer or refuses, with its reason.
    """
    try:
        yield
    except (*HUB_ERRORS[:2], OfflineModeIsEnabled) as error:
        raise RecipeError(
            f"push_to_hub=true, but the Hub did not provide the repository {args.hub_model_id!r}: {error}; leave "
            "push_to_hub out, and push the heads later with `specheads push`."
        ) from error


def describe(trainer: DraftHeadTrainer, recipe: Recipe, checkpoint: str | None) -> str:
    """Describes the run that is about to start, one line per fact."""
    args, config = trainer.args, trainer.model.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    train, evaluation = _length(trainer.train_dataset), _length(trainer.eval_dataset)
    weights = " + ".join(f"{weight} {name}" for name, weight in args.loss_weights.items() if weight)
    share = share_here(trainer.frozen_target.model)
    placed = "" if share is None else f", {share:.0%} of the layers' weights on each process".replace("%", " %")
    sizes = f"{(config.target or {}).get('model_type')}, H = {config.feature_size}, V = {config.vocab_size}"
    specialists = getattr(config, "num_specialists", 1)
    # Best-fit packing turns examples into rows of several examples each.
    unit = "packed rows" if args.packing and args.packing_strategy == "best_fit" else "examples"
    rows = [
        ("target", f"{recipe.target} ({sizes}){placed}"),
        ("heads", f"{config.method}, {specialists} specialist(s), {parameters / 1e6:.2f} M parameters, "
                  f"{trainer.model.dtype}, from {recipe.from_heads or 'random weights'}"),
        ("passes", f"{trainer.num_passes}, {args.backward} backward, {args.pass_reduction} over passes"),
        ("loss", f"{weights}, times {args.pass_decay} per position" if args.pass_decay != 1 else weights),
        ("noise", f"U(-{args.feature_noise}, {args.feature_noise}), scaling {args.feature_noise_scaling}"
                  + (f"; NEFTune alpha {args.embedding_noise} on embeddings" if args.embedding_noise else "")),
        ("masks", "the authors' zero-logit masks (parity only)" if args.upstream_masking else "as in drafting"),
        ("data", f"{train} {unit} to train on, {evaluation} examples to evaluate on, "
                 f"{'packed' if args.packing else 'padded'} to at most {args.max_length} tokens"),
        ("rows", str(trainer.data_report)),
        ("step", f"{per_step} {unit} on {args.world_size} process(es), device {args.device}"),
        ("length", _length_of(args, train, per_step)),
        ("output", f"{args.output_dir}" + (f", resuming {checkpoint}" if checkpoint else "")),
    ]  # fmt: skip
    if isinstance(args, JointTrainingArguments):
        adapter = f"rank {args.target_lora_rank}, learning rate {args.target_learning_rate}, from step "
        rows.insert(1, ("adapter", f"{adapter}{args.heads_warmup_steps}, of the target"))
    rows.append(("example", first_example(trainer)))
    return "\n".join(f"{name:>8}: {value}" for name, value in rows)


def _length_of(args: DraftHeadTrainingArguments, examples: int | str, per_step: int) -> str:
    """Describes the length of the training, and warns of a warm-up as long as the training, in which the learning rate
    never reaches its peak."""
    steps, told = args.max_steps, f"{args.max_steps} steps"
    if steps <= 0:
        steps = math.ceil(args.num_train_epochs * examples / per_step) if isinstance(examples, int) else 0
        told = f"{args.num_train_epochs} epochs"
    warmup = args.get_warmup_steps(steps)
    if steps and warmup >= steps:
        told += f" (about {steps} steps, all of them warm-up: warmup_steps={warmup} is to be lower)"
    return told


def first_example(trainer: DraftHeadTrainer) -> str:
    """Returns the first training example as text, with supervised parts in `[[ ]]`."""
    example = next(iter(trainer.train_dataset))
    return marked_example(example, tokenizer_of(trainer.processing_class))


def _length(dataset: Any) -> int | str:
    if dataset is None:
        return 0
    return len(dataset) if hasattr(dataset, "__len__") else "streamed"
