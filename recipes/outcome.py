"""What a run says of itself: the plan before it starts, and measured beside predicted when it is done."""

import json
import math
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lazytrain.engine import Engine
from lazytrain.lanes import Span
from lazytrain.planning import Planned
from lazytrain.progress import duration
from lazytrain.recipes.metrics import read_metrics
from lazytrain.recipes.pictures import draw_run
from lazytrain.recipes.preparation import Job
from lazytrain.recipes.report import RunReport, format_bytes, write_report
from lazytrain.recipes.scoring import Score
from lazytrain.slabs import resident_host_bytes
from lazytrain.solver.explanation import format_plan
from lazytrain.solver.simulator import simulate


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
        f"will use: device {format_bytes(predicted.device_peak_bytes)}, host {format_bytes(predicted.host_bytes)}, "
        f"NVMe {format_bytes(predicted.nvme_bytes)}"
    )


def describe_room(own_bytes: int, shared_bytes: int, shared_checkpoints: int | None) -> Iterator[str]:
    """Yield what a run says of the room on NVMe that it is about to take, if any."""
    if not own_bytes:
        return
    if shared_checkpoints is None:
        yield f"takes {format_bytes(own_bytes)} on NVMe now; checkpoints are copies: they can't share files with it"
    elif not shared_checkpoints:
        yield f"takes {format_bytes(own_bytes)} on NVMe now; new checkpoints get the room of those that they replace"
    else:
        yield (
            f"takes {format_bytes(own_bytes)} on NVMe now, and {format_bytes(shared_bytes)} for the older versions "
            f"that {shared_checkpoints} more checkpoints will hold there"
        )


class Tier(NamedTuple):
    """The bytes of one tier: by the plan, in the run (None where nobody counts), and what the plan may fill."""

    name: str
    planned_bytes: int
    measured_bytes: int | None
    budget_bytes: int


def measure_tiers(planned: Planned, engine: Engine, device: torch.device, host_before_bytes: int) -> list[Tier]:
    """Return memory per tier after the last step, beside the plan; a run on the CPU has its "device" in the host's.

    Args:
        host_before_bytes: in RAM before the weights were placed: Python, torch, the data.
    """
    predicted, hardware = planned.plan.predicted, planned.problem.hardware
    assert predicted is not None
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    host = max(0, resident_host_bytes() - host_before_bytes)
    tiers = [
        Tier("device", predicted.device_peak_bytes, peak, hardware.device_memory_bytes),
        Tier("host", predicted.host_bytes, host, hardware.host_memory_bytes),
    ]
    if planned.problem.device_is_host:
        tiers = [tiers[1]._replace(planned_bytes=predicted.device_peak_bytes + predicted.host_bytes)]
    if planned.problem.allow_nvme:
        spilled = engine.spill.reserved_bytes - engine.spill.shared_bytes if engine.spill is not None else 0
        tiers.append(Tier("NVMe", predicted.nvme_bytes, spilled, hardware.nvme_bytes))
    return tiers


def describe_use(tiers: Sequence[Tier]) -> str:
    """Return what is in use of each tier that somebody counts, for example "device 13.2 GiB, host 24.1 GiB"."""
    used = [f"{tier.name} {format_bytes(tier.measured_bytes)}" for tier in tiers if tier.measured_bytes is not None]
    return ", ".join(used)


def write_outcome(
    out: Path,
    planned: Planned,
    spans: Sequence[Span],
    scores: Mapping[str, Score],
    tiers: Sequence[Tier],
    say: Callable[[str], None],
) -> None:
    """Write `outcome.json`, `run.png` and `report.html`; print measured beside predicted and the exact match.

    Args:
        scores: "before", "after" -> exact match, where it was measured.
    """
    rows = read_metrics(out / "metrics.jsonl")
    predicted = planned.plan.predicted
    assert predicted is not None
    measured_ms = _measured_step_ms(rows)
    losses = [row["loss"] for row in rows if math.isfinite(row["loss"])]
    num_skipped = sum(row["skipped"] for row in rows)
    if num_skipped:
        say(f"{num_skipped:,} of {len(rows):,} steps were skipped, since their gradient norm was not finite")
    outcome: dict[str, Any] = {
        "step_ms": {"predicted": predicted.step_ms, "measured": measured_ms},
        "device_peak_bytes": {
            "predicted": predicted.device_peak_bytes,
            "measured": next((tier.measured_bytes for tier in tiers if tier.name == "device"), None),
        },
        "host_peak_rss_bytes": {
            "predicted": predicted.host_bytes,
            "measured": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
        "tiers": {tier.name: {k: v for k, v in tier._asdict().items() if k != "name"} for tier in tiers},
        "exact_match": {name: _score(scores.get(name)) for name in ("before", "after")},
        "final_loss": statistics.fmean(losses[-20:]) if losses else None,
        "num_skipped_steps": num_skipped,
    }
    (out / "outcome.json").write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    timeline = simulate(planned.problem, planned.plan).timeline
    if rows and measured_ms is not None:
        draw_run(
            out / "run.png",
            [(row["step"], row["loss"]) for row in rows],
            timeline,
            spans,
            predicted_ms=predicted.step_ms,
            measured_ms=measured_ms,
        )
        say(
            f"step of the largest shape: predicted {predicted.step_ms:.1f} ms, measured {measured_ms:.1f} ms "
            f"({measured_ms / predicted.step_ms - 1:+.1%})"
        )
    for tier in tiers:
        say(describe_tier(tier))
    for name, score in scores.items():
        say(f"{name} training: {score.describe()}")
    report = RunReport(
        name=out.resolve().name,
        rows=rows,
        planned=planned,
        timeline=timeline,
        spans=spans,
        measured_ms=measured_ms,
        tiers=tiers,
        scores=scores,
    )
    write_report(out / "report.html", report)
    say(f"run directory: {out} (report.html shows all of this)")


def describe_tier(tier: Tier) -> str:
    """Return one line on a tier's memory."""
    measured = "not counted" if tier.measured_bytes is None else format_bytes(tier.measured_bytes)
    return (
        f"{tier.name} memory: planned {format_bytes(tier.planned_bytes)}, measured {measured}, "
        f"of {format_bytes(tier.budget_bytes)} that the plan may fill"
    )


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
