"""TensorBoard and Weights & Biases beside metrics.jsonl, where a run asks for them; imported only then."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from lazytrain.errors import ConfigError
from lazytrain.recipes.metrics import read_metrics
from lazytrain.recipes.options import Options

WANDB_ID = "wandb_run_id"
SCALARS = (
    *("loss", "grad_norm", "clip_coef", "lr", "step_s"),
    *("tokens_per_s", "padded_tokens_per_s", "model_tflops", "real_tokens", "padding_tokens"),
)


class Tracker(Protocol):
    """Something that keeps scalars by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep some scalars of a step."""

    def close(self, failed: bool) -> None:
        """Write what is still held back; `failed` = the run ended by an error."""


class TensorBoard:
    """Event files in a directory; those of steps that a resumed run takes again are replaced."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._writer = _load("tensorboard").SummaryWriter(log_dir=str(directory), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep some scalars of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        """Write what is still held back."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases; a resumed run goes on with the one whose id lies in the run directory.

    It writes in a process of its own, behind by a second or so: what a kill took is logged again from metrics.jsonl.
    Steps that it has already are left out: it would warn at each that steps must rise.
    """

    def __init__(self, project: str, out: Path, first_step: int, config: Mapping[str, Any]) -> None:
        wandb = _load("wandb")
        path = out / WANDB_ID
        known = path.read_text(encoding="utf-8").strip() if first_step and path.is_file() else None
        try:
            self._run = wandb.init(
                project=project, name=out.name, dir=str(out), config=dict(config), id=known, resume="allow"
            )
        except Exception as error:  # its own exceptions: no key, no network, a project that is not there
            raise ConfigError(
                f"--wandb {project}: Weights & Biases can't start: {' '.join(str(error).split()).rstrip('.')}. "
                "Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from error
        path.write_text(f"{self._run.id}\n", encoding="utf-8")
        for row in read_metrics(out / "metrics.jsonl"):
            if row["step"] < first_step:
                self.log(row["step"], _scalars(row))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep some scalars of a step."""
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Write what is still held back."""
        self._run.finish(exit_code=int(failed))


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning: training goes on."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Keep the scalars of a line of metrics.jsonl."""
        self.log(row["step"], _scalars(row))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep some scalars of a step; values that are not finite are left out."""
        finite = _finite(values)
        for tracker in list(self._trackers):
            try:
                tracker.log(step, finite)
            except Exception as error:
                self._trackers.remove(tracker)
                warnings.warn(
                    f"{type(tracker).__name__} failed at step {step} and is dropped: {error}. metrics.jsonl goes on.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self, *, failed: bool = False) -> None:
        """Close them all."""
        for tracker in self._trackers:
            try:
                tracker.close(failed)
            except Exception as error:
                warnings.warn(f"{type(tracker).__name__} can't be closed: {error}", RuntimeWarning, stacklevel=2)


def check_trackers(options: Options) -> None:
    """Refuse at once a tracker that is asked for and not installed, or does not load.

    Raises:
        ConfigError: names the extra to install.
    """
    wanted = {"tensorboard": options.tensorboard, "wandb": options.wandb is not None}
    for name, is_wanted in wanted.items():
        if is_wanted:
            _load(name)


@contextlib.contextmanager
def open_trackers(options: Options, *, first_step: int, config: Mapping[str, Any]) -> Iterator[Trackers]:
    """Start the trackers that the options name, and close them at the end.

    Args:
        first_step: the step that the run goes on from. config: the settings in force, to be shown.
    """
    made: list[Tracker] = []
    trackers = Trackers(made)
    failed = True
    try:
        if options.tensorboard:
            made.append(TensorBoard(options.out / "tensorboard", first_step))
        if options.wandb is not None:
            plain = {name: x if isinstance(x, int | float | None) else str(x) for name, x in config.items()}
            made.append(WandB(options.wandb, options.out, first_step, plain))
        yield trackers
        failed = False
    finally:
        trackers.close(failed=failed)


def _load(name: str) -> ModuleType:
    """Import a tracker's module.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    spec = find_spec(name)
    # Without an origin it is a folder of that name in the working directory: W&B makes one wherever it runs.
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"--{name}: the package {name} is not installed. Install it with: pip install 'lazytrain[{name}]'"
        )
    try:
        return import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except Exception as error:  # a package that doesn't fit its own dependencies raises anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--{name}: the package {name} does not load: {reason.rstrip('.')}. "
            f"Install it anew with: pip install --upgrade 'lazytrain[{name}]'"
        ) from error


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    return _finite({name: row[name] for name in SCALARS if name in row})


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
