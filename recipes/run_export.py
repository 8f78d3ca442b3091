"""Write a model directory from a run's newest valid checkpoint.

lazytrain export RUN                  to RUN/model
lazytrain export RUN --to DIR
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lazytrain.checkpoint import Checkpoint, latest_valid
from lazytrain.configuration import load_config
from lazytrain.errors import CheckpointError, LazyTrainError
from lazytrain.export import ExportPlan, export_model
from lazytrain.locking import RunLock
from lazytrain.progress import progress_bar
from lazytrain.recipes.arguments import OneLineParser
from lazytrain.recipes.config_file import read_config
from lazytrain.recipes.failures import describe_error
from lazytrain.saving import plan_state_export
from lazytrain.shards import open_model_dir
from lazytrain.transformer import transformer_model

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


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
    """Write the working weights of the newest valid checkpoint as a model directory.

    Args:
        base: the model that was trained, for config and tokenizer; None = the one that the run noted.
    Returns:
        The checkpoint's step, and the directory.
    Raises:
        CheckpointError: no valid checkpoint, one of another model, or no base model to be found.
        ModelFileError: `target` holds something that is not an export, or is the base model.
    """
    checkpoint = latest_valid(run_dir)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint. Train with --save-every, or to the end.")
    dtype = DTYPES.get(str(checkpoint.meta.get("dtype")))
    if dtype is None:
        raise CheckpointError(f"{checkpoint.path} has weights of {checkpoint.meta.get('dtype')!r}: none of ours.")
    files = open_model_dir(base or find_base(run_dir))
    model = transformer_model(load_config(files.path))
    plan = plan_state_export(model, files, target, dtype)
    with progress_bar("exporting", len(plan.weight_map), unit="tensors") as bar:

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in read_weights(checkpoint, plan):
                yield name, tensor
                bar.advance()

        written = export_model(
            target,
            plan,
            tensors(),
            config=files.config,
            side_files=files.side_files,
            base_dir=files.path,
            metadata={"step": str(checkpoint.step)},
        )
    return checkpoint.step, written


def read_weights(checkpoint: Checkpoint, plan: ExportPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield the working weights of a checkpoint, checked against the planned shapes; states are left out."""
    specs = {spec.name: spec for _, planned in plan.shards for spec in planned}
    missing = set(specs)
    for name in checkpoint.files:
        file = checkpoint.open_file(name)
        for key in file.tensors:
            if key not in missing:
                continue
            tensor, spec = file.read(key), specs[key]
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise CheckpointError(
                    f"{checkpoint.path}: {key!r} is {tensor.dtype} {tuple(tensor.shape)}, the base model's is "
                    f"{spec.dtype} {spec.shape}. Give the --model that was trained."
                )
            missing.remove(key)
            yield key, tensor
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise CheckpointError(f"{checkpoint.path} lacks {names}. Give the --model that was trained.")


def find_base(run_dir: Path) -> Path:
    """Return the model that a run trained: the one in its options.toml, or the embedded default's."""
    embedded, noted = run_dir / "base_model", run_dir / "options.toml"
    model = read_config(noted).get("model") if noted.is_file() else None
    if isinstance(model, str):
        return Path(model)
    if embedded.is_dir():
        return embedded
    raise CheckpointError(f"{run_dir} does not say which model was trained. Give it with --model DIR.")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="lazytrain export",
        description="Write a model directory from a run's newest valid checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory (--out of lazytrain train)")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: RUN/model)")
    parser.add_argument("--model", type=Path, help="the model that was trained (default: the one that the run noted)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
