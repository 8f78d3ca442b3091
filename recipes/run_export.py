"""Write a model directory from a run's newest valid checkpoint.

lazytrain export RUN                  to RUN/model
lazytrain export RUN --to DIR
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lazytrain.base import Model
from lazytrain.checkpoint import Checkpoint, latest_valid
from lazytrain.configuration import load_config
from lazytrain.errors import CheckpointError, LazyTrainError
from lazytrain.export import ExportPlan, check_target, export_model
from lazytrain.homes import owned_params
from lazytrain.locking import RunLock
from lazytrain.progress import progress_bar
from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.config_file import read_config
from lazytrain.recipes.failures import describe_error
from lazytrain.shards import CONFIG, open_model_dir
from lazytrain.tensorfile import TensorFile
from lazytrain.tensorwriter import TensorSpec
from lazytrain.transformer import transformer_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; return 0, or 2 after one line that says what was wrong."""
    options = _parse(arguments)
    try:
        if not options.run.is_dir():
            raise CheckpointError(f"{options.run} is no directory. Give the --out of a run of lazytrain train.")
        with RunLock(options.run):
            step, written = export_run(options.run, options.to or options.run / "model", options.model)
        print(f"wrote the model of step {step} to {written}")
        return 0
    except (LazyTrainError, OSError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return 2


def export_run(run_dir: Path, target: Path, base: Path | None = None) -> tuple[int, Path]:
    """Copy the model that the newest valid checkpoint holds; a checkpoint is a model directory already.

    Copied, not linked: whoever writes into the export later must not reach the checkpoint.

    Args:
        base: another source of config and tokenizer; None = the checkpoint's own.
    Returns:
        The checkpoint's step, and the directory.
    Raises:
        CheckpointError: no valid checkpoint, one without a config, or one that doesn't fit the config.
        ModelFileError: `target` holds something that is not an export, or is the base model.
    """
    check_target(target, find_base(run_dir))
    checkpoint = latest_valid(run_dir)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint. Train with --save-every, or to the end.")
    if base is None and CONFIG not in checkpoint.files:
        raise CheckpointError(f"{checkpoint.path} has no {CONFIG}. Give the model that was trained with --model DIR.")
    if base is None:
        checkpoint.verify_texts()
    source = open_model_dir(base or checkpoint.path)
    shards = {name: checkpoint.open_file(name) for name in checkpoint.files if name.endswith(".safetensors")}
    plan = plan_copy(shards)
    check_fit(checkpoint, plan, transformer_model(load_config(source.path)))
    with progress_bar("exporting", len(plan.weight_map), unit="tensors") as bar:

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for file in shards.values():
                for name in file.tensors:
                    yield name, file.read(name)
                    bar.advance()

        written = export_model(
            target,
            plan,
            tensors(),
            config=source.config,
            side_files=source.side_files,
            base_dir=source.path,
            metadata={"step": str(checkpoint.step)},
        )
    return checkpoint.step, written


def plan_copy(shards: Mapping[str, TensorFile]) -> ExportPlan:
    """Return the plan of an export with the same tensors in files of the same names."""
    specs = {
        shard: tuple(TensorSpec(name, info.dtype, info.shape) for name, info in file.tensors.items())
        for shard, file in shards.items()
    }
    return ExportPlan(tuple(specs.items()), sum(spec.num_bytes for shard in specs.values() for spec in shard))


def check_fit(checkpoint: Checkpoint, plan: ExportPlan, model: Model) -> None:
    """Refuse a config that describes other tensors than the checkpoint holds.

    Raises:
        CheckpointError: names a tensor that one of them lacks, or that has another shape there.
    """
    found = {spec.name: spec.shape for _, specs in plan.shards for spec in specs}
    wanted = {s.full_name: s.shape for unit in model.units for s in owned_params(model, unit).values()}
    differing = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{checkpoint.path}: {name!r} is {found.get(name, 'missing')}, the config says "
            f"{wanted.get(name, 'nothing')}. Give the --model that was trained."
        )


def find_base(run_dir: Path) -> Path | None:
    """Return the model that a run trained: the one in its options.toml, or the embedded default's; None if unknown."""
    embedded, noted = run_dir / "base_model", run_dir / "options.toml"
    model = read_config(noted).get("model") if noted.is_file() else None
    if isinstance(model, str):
        return Path(model)
    return embedded if embedded.is_dir() else None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="lazytrain export",
        description="Write a model directory from a run's newest valid checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory (--out of lazytrain train)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: RUN/model)")
    parser.add_argument("--model", type=Path, help="config and tokenizer (default: the checkpoint's)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
