"""The recipe's command line: one frozen record of options."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazytrain.errors import ConfigError
from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.config_file import apply_config, find_config
from lazytrain.solver.deadline import PLAN_SECONDS
from lazytrain.solver.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one run of the recipe is told. None = the default that fits the model at hand (see `--help`)."""

    model: Path | None
    data: str | None
    eval_data: str | None
    query_field: str | None
    response_field: str | None
    prompt: str | None
    out: Path
    resume: str | None
    steps: int | None
    epochs: float | None
    batch_size: int | None
    max_tokens: int | None
    microbatches: int | None
    too_long: str
    packing: bool
    lr: float | None
    warmup_steps: int | None
    weight_decay: float | None
    max_grad_norm: float
    master_bits: int
    seed: int
    device: str | None
    dtype: str | None
    compile: bool | None
    exact: bool
    gpu_memory: int | None
    host_memory: int | None
    spill_dir: Path | None
    plan: Path | None
    plan_seconds: int
    plan_only: bool
    eval_limit: int | None
    eval_before: bool | None
    eval_batch_size: int
    max_new_tokens: int | None
    save_every: int | None
    dry_run: bool
    fresh_profile: bool
    print_config: bool
    tensorboard: bool
    wandb: str | None
    messages_field: str | None
    accumulate: int
    group_by_length: bool


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse a command line, flags over the file of --config; help and argparse's own errors exit, with code 0 and 2.

    Raises:
        ConfigError: the file, or two options that do not go together.
    """
    parser = make_parser()
    path = find_config(arguments)
    if path is not None:
        apply_config(parser, path)
    values = vars(parser.parse_args(arguments))
    del values["config"]
    options = Options(**values)
    if options.model is None and options.data is not None:
        raise ConfigError(
            "--data without --model: the embedded model knows only the embedded sample. Give --model DIR."
        )
    if options.model is not None and options.data is None:
        raise ConfigError("--model without --data: give --data FILE, a JSON, JSONL or parquet file, or a hub name.")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of a run's flags."""
    parser = OneLineParser(
        prog="lazytrain train",
        description="Fine-tune all weights of a model on math problems, then measure exact match. "
        "Without flags: a small model from scratch on an embedded sample, in a few minutes.",
        allow_abbrev=False,
    )
    _add_input(parser.add_argument_group("model and data"))
    _add_training(parser.add_argument_group("training"))
    _add_machine(parser.add_argument_group("machine and plan"))
    add_evaluation(parser.add_argument_group("evaluation"))
    _add_output(parser.add_argument_group("settings and output"))
    return parser


def _positive(text: str) -> int:
    return _at_least(text, 1)


def parse_count(text: str) -> int:
    """Return a whole number of at least 0; raises argparse.ArgumentTypeError for anything else."""
    return _at_least(text, 0)


def parse_whole(text: str) -> int:
    """Return a whole number; raises argparse.ArgumentTypeError for anything else."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _at_least(text: str, low: int) -> int:
    value = parse_whole(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"{text} is below {low}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def _above_zero(text: str) -> float:
    value = _rate(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too small: give a number above 0")
    return value


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", type=Path, help="HF model directory (llama, mistral, qwen2, qwen3); default: the embedded one"
    )
    group.add_argument("--data", help="training rows: JSON, JSONL, parquet, a directory of them, or a hub name")
    group.add_argument("--eval-data", help="rows to measure exact match on; default: a share of --data held out")
    group.add_argument("--query-field", help="column of the problem (default: query, question or instruction)")
    group.add_argument("--response-field", help="column of the solution (default: response, answer or output)")
    group.add_argument(
        "--prompt",
        choices=("metamath", "plain", "chat"),
        help="prompt style, chat = the model's own template (default: metamath)",
    )
    group.add_argument("--out", type=Path, default=Path("runs/metamathqa"), help="run directory (default: %(default)s)")
    group.add_argument("--resume", choices=("auto",), help="auto: go on from the newest valid checkpoint in --out")
    group.add_argument("--messages-field", help="column of a chat's turns (default: messages or conversations)")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=_positive, help="optimizer steps (default: --epochs)")
    group.add_argument("--epochs", type=_above_zero, help="passes over the data (default: 1)")
    group.add_argument("--batch-size", type=_positive, help="rows a step (default: 32)")
    group.add_argument("--max-tokens", type=_positive, help="longest row in tokens (default: 512)")
    group.add_argument("--microbatches", type=_positive, help="chunks a step is cut in (default: the planner's)")
    group.add_argument(
        "--too-long", choices=("drop", "truncate"), default="drop", help="longer rows (default: %(default)s)"
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="several samples a row, without attention between them (default: one sample a row)",
    )
    group.add_argument("--lr", type=_rate, help="peak learning rate (default: 2e-5)")
    group.add_argument("--warmup-steps", type=parse_count, help="linear warm-up (default: 3%% of the steps)")
    group.add_argument("--weight-decay", type=_rate, help="AdamW's (default: 0)")
    group.add_argument(
        "--max-grad-norm", type=_above_zero, default=1.0, help="exact global clipping (default: %(default)s)"
    )
    group.add_argument(
        "--master-bits", type=parse_whole, choices=(24, 32), default=32, help="master weights (default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=parse_whole, default=0, help="of order and initial weights (default: %(default)s)"
    )
    group.add_argument("--save-every", type=_positive, help="steps between checkpoints (default: at the end only)")
    group.add_argument("--accumulate", type=_positive, default=1, help="batches a step (default: %(default)s)")
    group.add_argument(
        "--group-by-length",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="batches of rows of like length; no = all as long as the longest",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="working weights (default: bfloat16 on a GPU)")
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile block programs (default: on a GPU, with --model)",
    )
    group.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the same bits under any plan also when compiled; slower (default: off)",
    )
    group.add_argument("--gpu-memory", type=parse_size, help="device memory the plan may fill, for example 24GiB")
    group.add_argument("--host-memory", type=parse_size, help="host memory the plan may fill")
    group.add_argument("--spill-dir", type=Path, help="a directory on NVMe that the plan may use (default: no NVMe)")
    group.add_argument("--plan", type=Path, help="use this plan.json instead of solving for one")
    group.add_argument(
        "--plan-seconds",
        type=_positive,
        default=int(PLAN_SECONDS),
        help="time for each search for a plan (default: %(default)s)",
    )
    group.add_argument("--plan-only", action="store_true", help="profile, plan, write plan.json in --out and stop")
    group.add_argument(
        "--dry-run", action="store_true", help="profile, plan, print plan.json on standard output; write no file"
    )
    group.add_argument(
        "--fresh-profile", action="store_true", help="measure again what was measured before and kept (default: off)"
    )


def add_evaluation(group: argparse._ArgumentGroup, *, before: bool = True) -> None:
    """Add the flags of an evaluation; `before` = with the choice to evaluate before training too."""
    group.add_argument(
        "--eval-limit", type=parse_count, help="problems to evaluate, 0 = none (default: all held-out ones)"
    )
    if before:
        group.add_argument(
            "--eval-before",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="also before training (default: with --model)",
        )
    group.add_argument(
        "--eval-batch-size", type=_positive, default=256, help="rows generated at once (default: %(default)s)"
    )
    group.add_argument("--max-new-tokens", type=_positive, help="longest answer (default: 256)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", type=Path, metavar="FILE", help="settings from a .toml or .yaml file; flags win")
    group.add_argument("--print-config", action="store_true", help="print the settings in force as TOML and stop")
    group.add_argument(
        "--tensorboard",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also log to TensorBoard, in --out (default: off; needs the extra `tensorboard`)",
    )
    group.add_argument("--wandb", metavar="PROJECT", help="also log to Weights & Biases (needs the extra `wandb`)")
