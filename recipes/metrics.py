"""metrics.jsonl: one line a step, and the same numbers as a note for the progress bar."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from lazytrain.base import StepMetrics
from lazytrain.durable import sync_directory, write_file
from lazytrain.errors import NonFiniteError
from lazytrain.recipes.batches import TokenCounts

MAX_SKIPPED_IN_ROW = 20


class MetricsFile:
    """Appends a line a step; lines of steps from `first_step` on, left by a run that was killed later, are removed."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] < first_step]
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        write_file(partial, "".join(json.dumps(row) + "\n" for row in kept).encode())
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")
        sync_directory(path.absolute().parent)

    def write(
        self, metrics: StepMetrics, counts: TokenCounts, batch: Mapping[str, Tensor], *, num_params: int = 0
    ) -> dict[str, Any]:
        """Append one step; return its line.

        Args:
            num_params: of the model, for its TFLOP/s; 0 = unknown.
        """
        account = metrics.last_account
        row = metrics._asdict() | {
            "last_account": None if account is None else {k: round(ms, 3) for k, ms in account._asdict().items()},
            "real_tokens": counts.real_tokens,
            "padding_tokens": counts.padding_tokens,
            "shape": list(batch["tokens_bt"].shape),
            "tokens_per_s": counts.real_tokens / metrics.step_s,
            "padded_tokens_per_s": (counts.real_tokens + counts.padding_tokens) / metrics.step_s,
        }
        if num_params:
            row["model_tflops"] = model_tflops(num_params, counts, metrics.step_s)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        return row

    def sync(self) -> None:
        """Wait until the disk has every line; a checkpoint that follows stands for them."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.sync()
        finally:
            self._file.close()


def count_skipped(before: int, metrics: StepMetrics) -> int:
    """Return how many steps in a row were skipped, after `before` of them and this one.

    Raises:
        NonFiniteError: too many for a chance: the weights themselves give no finite gradient any more.
    """
    if not metrics.skipped:
        return 0
    if before + 1 >= MAX_SKIPPED_IN_ROW:
        raise NonFiniteError(
            f"{MAX_SKIPPED_IN_ROW} steps in a row were skipped, the last one {metrics.step}: gradient norm "
            f"{metrics.grad_norm} in {metrics.bad_unit}. The training has diverged; nothing more is saved. "
            "Start anew with a lower --lr, or more --warmup-steps."
        )
    return before + 1


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; a last line cut by a kill is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def model_tflops(num_params: int, counts: TokenCounts, step_s: float) -> float:
    """Return 6 x parameters x real tokens a second, in 1e12: neither padding nor recomputing counts as work."""
    return 6 * num_params * counts.real_tokens / step_s / 1e12


def describe_metrics(metrics: StepMetrics, counts: TokenCounts, *, num_params: int = 0) -> str:
    """Return loss, norm before clipping, rate, speed (of real tokens, and with padding) and what bounds a step."""
    rate = counts.real_tokens / metrics.step_s
    speed = f"{rate:,.0f} tokens/s"
    if counts.padding_tokens:
        speed += f" ({(counts.real_tokens + counts.padding_tokens) / metrics.step_s:,.0f} with padding)"
    if num_params:
        speed += f", {model_tflops(num_params, counts, metrics.step_s):.3g} TFLOP/s"
    note = f"loss {metrics.loss:.4f}, norm {metrics.grad_norm:.2f}, lr {metrics.lr:.2e}, {speed}"
    return note if metrics.last_account is None else f"{note}, bound by {metrics.last_account.bound}"
