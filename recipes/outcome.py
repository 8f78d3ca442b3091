"""What a run says of itself: the plan before it starts, and measured beside predicted when it is done."""

import json
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lazytrain.lanes import Span
from lazytrain.planning import Planned
from lazytrain.progress import duration
from lazytrain.recipes.metrics import read_metrics
from lazytrain.recipes.pictures import draw_run
from lazytrain.recipes.preparation import Job
from lazytrain.recipes.scoring import Score
from lazytrain.solver.explanation import format_plan
from lazytrain.solver.simulator import simulate

GIB = 2**30


def describe_plan(planned: Planned, job: Job) -> Iterator[str]:
    """Yield the lines that a run prints before it starts: the plan, use per tier, speed and time."""
    yield format_plan(planned.problem, planned.plan)
    predicted = planned.plan.predicted
    assert predicted is not None
    seconds = predicted.step_ms / 1e3
    yield (
        f"expected: {predicted.step_ms:.1f} ms a step of the largest shape, "
        f"{planned.problem.tokens_per_step / seconds:,.0f} tokens/s (padding counted), "
        f"{job.num_steps:,} steps in at most {duration(job.num_steps * seconds)}"
    )
    yield (
        f"will use: device {predicted.device_peak_bytes / GIB:.2f} GiB, host {predicted.host_bytes / GIB:.2f} GiB, "
        f"NVMe {predicted.nvme_bytes / GIB:.2f} GiB"
    )


def write_outcome(
    out: Path,
    planned: Planned,
    spans: Sequence[Span],
    before: Score | None,
    after: Score | None,
    peak: int | None,
    say: Callable[[str], None],
) -> None:
    """Write `outcome.json` and `run.png`, and print measured beside predicted and the exact match.

    Args:
        peak: bytes that training had allocated on the device at most; None where nobody counts.
    """
    rows = read_metrics(out / "metrics.jsonl")
    predicted = planned.plan.predicted
    assert predicted is not None
    measured_ms = _measured_step_ms(rows)
    outcome: dict[str, Any] = {
        "step_ms": {"predicted": predicted.step_ms, "measured": measured_ms},
        "device_peak_bytes": {"predicted": predicted.device_peak_bytes, "measured": peak},
        "host_peak_rss_bytes": {
            "predicted": predicted.host_bytes,
            "measured": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
        "exact_match": {name: _score(score) for name, score in (("before", before), ("after", after))},
        "final_loss": statistics.fmean(row["loss"] for row in rows[-20:]) if rows else None,
    }
    (out / "outcome.json").write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    if rows and measured_ms is not None:
        draw_run(
            out / "run.png",
            [(row["step"], row["loss"]) for row in rows],
            simulate(planned.problem, planned.plan).timeline,
            spans,
            predicted_ms=predicted.step_ms,
            measured_ms=measured_ms,
        )
        say(
            f"step of the largest shape: predicted {predicted.step_ms:.1f} ms, measured {measured_ms:.1f} ms "
            f"({measured_ms / predicted.step_ms - 1:+.1%})"
        )
    if peak is not None:
        say(f"device peak: predicted {predicted.device_peak_bytes / GIB:.2f} GiB, measured {peak / GIB:.2f} GiB")
    for name, score in (("before training", before), ("after training", after)):
        if score is not None:
            say(f"{name}: {score.describe()}")
    say(f"run directory: {out}")


def _measured_step_ms(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the median time of the steps of the largest shape, but for the first, which makes its programs."""
    if not rows:
        return None
    places = [row["shape"][0] * row["shape"][1] for row in rows]
    times_ms = [row["step_s"] * 1e3 for row, n in zip(rows, places) if n == max(places)]
    return statistics.median(times_ms[1:] or times_ms)


def _score(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {
        "exact_match": score.exact_match,
        "correct": score.correct,
        "wrong": score.wrong,
        "no_answer": score.no_answer,
        "by_type": {name: counts._asdict() for name, counts in score.by_type.items()},
    }
