"""Everything a run needs before it can plan: model, tokenizer, rows, batches; from files or the embedded default."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from lazytrain.base import Model
from lazytrain.configuration import ModelConfig, load_config
from lazytrain.errors import ConfigError, DataError
from lazytrain.progress import progress_bar
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.chats import ChatTemplate, load_chat_template
from lazytrain.recipes.default_model import DefaultRun, write_default_model
from lazytrain.recipes.encoding import encode_rows
from lazytrain.recipes.options import Options
from lazytrain.recipes.prompts import Prompt, SpecialTokens, get_prompt, load_tokenizer, read_special_tokens
from lazytrain.recipes.rows import Row, load_rows
from lazytrain.recipes.sample import write_sample
from lazytrain.recipes.splits import drop_overlap, sample_rows, split_rows
from lazytrain.shards import ModelDir, check_params, open_model_dir
from lazytrain.transformer import transformer_model

HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 500
SHAPE_SEARCH_STEPS = 2000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The run's numbers, after defaults; `num_steps` None = by `epochs`, `batch_size` counts the rows of a step."""

    batch_size: int
    num_steps: int | None
    epochs: float
    max_tokens: int
    max_new_tokens: int
    lr: float
    num_warmup_steps: int | None
    betas: tuple[float, float]
    weight_decay: float
    prompt: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained on what."""

    settings: Settings
    model_dir: ModelDir
    config: ModelConfig
    model: Model
    tokenizer: Tokenizer
    special: SpecialTokens
    prompt: Prompt | ChatTemplate
    stream: BatchStream
    held_out: list[Row]
    num_steps: int

    @property
    def num_warmup_steps(self) -> int:
        """Return the length of the warm-up: as given, or 3% of the steps."""
        given = self.settings.num_warmup_steps
        return given if given is not None else max(1, round(0.03 * self.num_steps))


def resolve_settings(options: Options) -> Settings:
    """Return the options with defaults filled in: those of the embedded run, or those for fine-tuning a model."""
    small = DefaultRun()
    embedded = options.model is None
    return Settings(
        batch_size=options.accumulate * (options.batch_size or (small.batch_size if embedded else 32)),
        num_steps=options.steps or (small.steps if embedded and options.epochs is None else None),
        epochs=options.epochs if options.epochs is not None else 1.0,
        max_tokens=options.max_tokens or (small.max_tokens if embedded else 512),
        max_new_tokens=options.max_new_tokens or (small.max_new_tokens if embedded else 256),
        lr=options.lr if options.lr is not None else (small.lr if embedded else 2e-5),
        num_warmup_steps=options.warmup_steps
        if options.warmup_steps is not None
        else (small.warmup_steps if embedded else None),
        betas=small.betas if embedded else (0.9, 0.999),
        weight_decay=options.weight_decay
        if options.weight_decay is not None
        else (small.weight_decay if embedded else 0.0),
        prompt=options.prompt or ("plain" if embedded else "metamath"),
    )


def prepare(options: Options, say: Callable[[str], None]) -> Job:
    """Open or write the model and the rows, check them against each other, and lay out the batches.

    Args:
        say: called with each line of report.
    """
    settings = resolve_settings(options)
    model_path, train_source, eval_source = _find_input(options, say)
    model_dir = open_model_dir(model_path)
    config = load_config(model_path)
    model = transformer_model(config)
    for note in check_params(model, model_dir):
        say(f"model: {note}")
    tokenizer = load_tokenizer(model_path)
    special = read_special_tokens(model_path, tokenizer)
    prompt: Prompt | ChatTemplate
    if settings.prompt == "chat":
        prompt = load_chat_template(model_path, tokenizer)
        special = replace(special, stop_ids=tuple(sorted({*special.stop_ids, *prompt.stop_ids})))
    else:
        prompt = get_prompt(settings.prompt)
    train, held_out = _load_rows(options, train_source, eval_source, say)
    config.check_sequence_length(settings.max_tokens)
    with progress_bar("encoding", len(train), unit="rows") as bar:
        encoded = encode_rows(
            train,
            tokenizer,
            special,
            prompt,
            max_tokens=settings.max_tokens,
            too_long=options.too_long,  # type: ignore[arg-type]
            vocab_size=config.vocab_size,
            progress=bar.advance,
        )
    say(f"data: {encoded.report.describe()}")
    stream = BatchStream(
        encoded,
        batch_size=settings.batch_size,
        seq_tokens=settings.max_tokens if options.packing else None,  # lines as long as the longest sample fill badly
        seed=options.seed,
        packing=options.packing,
        group_by_length=options.group_by_length,
    )
    say(f"batches: {describe_stream(stream)}")
    chosen = _sample_held_out(options, held_out, say)
    return Job(
        settings=settings,
        model_dir=model_dir,
        config=config,
        model=model,
        tokenizer=tokenizer,
        special=special,
        prompt=prompt,
        stream=stream,
        held_out=chosen,
        num_steps=settings.num_steps or max(1, round(settings.epochs * stream.steps_per_epoch)),
    )


def describe_stream(stream: BatchStream) -> str:
    """Return one line: steps, shapes, and real tokens apart from padding."""
    counts = stream.epoch_counts
    places = counts.real_tokens + counts.padding_tokens
    shapes = ", ".join(f"{rows}x{length}" for rows, length in stream.shapes)
    return (
        f"{stream.steps_per_epoch:,} an epoch, shapes {shapes}; {counts.real_tokens:,} real tokens and "
        f"{counts.padding_tokens:,} of padding ({counts.padding_tokens / places:.1%})"
    )


def largest_batch(stream: BatchStream) -> dict[str, Tensor]:
    """Return a real batch of the largest shape, for profiling."""

    def places(step: int) -> tuple[int, int]:
        counts = stream.count_tokens(step)
        return counts.real_tokens + counts.padding_tokens, counts.target_tokens

    return stream.batch(max(range(min(stream.steps_per_epoch, SHAPE_SEARCH_STEPS)), key=places))


def _find_input(options: Options, say: Callable[[str], None]) -> tuple[Path, str, str | None]:
    if options.model is not None:
        assert options.data is not None
        return options.model, options.data, options.eval_data
    sample_dir, model_dir = options.out / "sample", options.out / "base_model"
    train_path, held_out_path = write_sample(sample_dir)
    write_default_model(model_dir, load_rows(train_path).rows, seed=options.seed)
    say(f"embedded default: sample in {sample_dir}, model with random weights in {model_dir}")
    return model_dir, str(train_path), str(held_out_path)


def _load_rows(
    options: Options, train_source: str, eval_source: str | None, say: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    fields = {
        "query_field": options.query_field,
        "response_field": options.response_field,
        "messages_field": options.messages_field,
    }
    fallback = options.out / "cache"
    loaded = load_rows(train_source, split="train", cache_fallback=fallback, **fields)  # type: ignore[arg-type]
    say(f"rows: {loaded.report.describe()} of {train_source}")
    if eval_source is None:
        if len(loaded.rows) < 2:
            raise DataError(f"{train_source}: one row can't be split. Give --eval-data, or more rows.")
        count = max(1, min(MAX_HELD_OUT, round(HELD_OUT_SHARE * len(loaded.rows))))
        split = split_rows(loaded.rows, count, options.seed)
        say(
            f"held out: {len(split.held_out):,} rows; {split.num_dropped:,} dropped so that no problem is on both sides"
        )
        return split.train, split.held_out
    evaluation = load_rows(eval_source, split="test", cache_fallback=fallback, **fields)  # type: ignore[arg-type]
    train, num_dropped = drop_overlap(loaded.rows, evaluation.rows)
    say(f"held out: {evaluation.report.describe()} of {eval_source}; {num_dropped:,} training rows overlapped")
    if not train:
        raise DataError(f"every row of {train_source} is also in {eval_source}. Give another file to one of them.")
    return train, evaluation.rows


def _sample_held_out(options: Options, held_out: list[Row], say: Callable[[str], None]) -> list[Row]:
    if options.eval_limit is not None and options.eval_limit < 0:
        raise ConfigError(f"--eval-limit {options.eval_limit}: below 0. Give 0 for none, or leave it out for all.")
    chosen = sample_rows(held_out, options.eval_limit, options.seed)
    if 0 < len(chosen) < len(held_out):
        say(f"evaluation: {len(chosen):,} of {len(held_out):,} held-out rows, a sample drawn by --seed {options.seed}")
    return chosen
