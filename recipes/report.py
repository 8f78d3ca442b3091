"""report.html: one page of a run that needs no network and no script. All texts that come from outside are escaped."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol

from lazytrain.account import COMPUTE_PARTS, Account, AnySpan
from lazytrain.planning import Planned
from lazytrain.recipes.charts import Series, line_chart, share_bar, smooth, timeline_chart, timeline_legend
from lazytrain.recipes.page_style import PAGE_STYLE
from lazytrain.recipes.pictures import traced_ms
from lazytrain.recipes.scoring import Sample, Score
from lazytrain.solver.explanation import COLUMNS
from lazytrain.solver.plan import UnitPlan, find_runs
from lazytrain.solver.problem import UnitCost

MIB, GIB = 2**20, 2**30
SMOOTHED_SHARE = 0.015
SHOWN = {"correct": 4, "wrong": 4, "no_answer": 2}
MAX_TEXT = 3000
# A page that tries to load or run anything is stopped by the browser itself.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class TierLike(Protocol):
    """Memory of one tier (see `outcome.Tier`)."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def planned_bytes(self) -> int:
        """Return what the plan says."""

    @property
    def measured_bytes(self) -> int | None:
        """Return what the run took."""

    @property
    def budget_bytes(self) -> int:
        """Return what the plan may fill."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """All that the page shows.

    Attributes:
        rows: of metrics.jsonl. timeline, spans: one step, predicted and measured.
        measured_ms: the median step of the largest shape. scores: "before", "after" -> exact match.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    planned: Planned
    timeline: Sequence[AnySpan]
    spans: Sequence[AnySpan]
    measured_ms: float | None
    tiers: Sequence[TierLike]
    scores: Mapping[str, Score]


def write_report(path: Path, report: RunReport) -> None:
    """Write the page; it appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(format_report(report), encoding="utf-8", errors="replace")
    partial.replace(path)


def format_report(report: RunReport) -> str:
    """Return the page as HTML."""
    sections = [
        ("Loss", _loss(report.rows)),
        ("Throughput", _throughput(report.rows)),
        ("Where a step's time went", _account(report.rows)),
        ("One step, predicted and measured", _timelines(report)),
        ("Memory against the plan", _memory(report.tiers)),
        ("The plan", _plan(report.planned)),
        ("Exact match", _evaluation(report.scores)),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections)
    name = escape(report.name)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{name} - LazyTrain</title><style>{PAGE_STYLE}</style></head>\n"
        f"<body><main><header><h1>{name}</h1>{_summary(report)}</header>{body}</main></body></html>\n"
    )


def _summary(report: RunReport) -> str:
    predicted, rows = report.planned.plan.predicted, report.rows
    hardware = report.planned.problem.hardware.name
    facts = [("model", report.planned.plan.model), ("machine", hardware), ("steps", f"{len(rows):,}")]
    if rows:
        facts.append(("final loss", f"{statistics.fmean(row['loss'] for row in rows[-20:]):.4f}"))
    if predicted is not None and report.measured_ms is not None:
        error = report.measured_ms / predicted.step_ms - 1
        facts.append(("step", f"{report.measured_ms:.1f} ms (predicted {predicted.step_ms:.1f}, {error:+.1%})"))
    facts += [(f"exact match {name}", f"{score.exact_match:.1%}") for name, score in report.scores.items()]
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts) + "</dl>"


def _loss(rows: Sequence[Mapping[str, Any]]) -> str:
    points = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), int | float)]
    finite = [(x, y) for x, y in points if abs(y) < float("inf")]
    mean = smooth(finite, max(1, round(SMOOTHED_SHARE * len(finite))))
    skipped = sum(bool(row.get("skipped")) for row in rows)
    note = f"<p>Steps skipped, since their gradient norm was not finite: {skipped:,}.</p>" if skipped else ""
    lines = [Series("a step", "faint", points), Series("mean", "main", mean)]
    return line_chart("loss", lines, x_label="step", by_ratio=True) + note


def _throughput(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="none">No steps.</p>'
    names = {"tokens_per_s": "real tokens/s", "padded_tokens_per_s": "with padding"}
    found = {k: [(row["step"], row[k]) for row in rows if k in row] for k in names}
    styles = {"tokens_per_s": "main", "padded_tokens_per_s": "second"}
    # The first step makes its programs.
    series = [Series(names[k], styles[k], points[1:] or points) for k, points in found.items() if points]
    medians = [f"{statistics.median(y for _, y in s.points):,.0f} {s.name}" for s in series]
    flops = [row["model_tflops"] for row in rows if "model_tflops" in row]
    if flops:
        medians.append(f"{statistics.median(flops):.3g} model TFLOP/s")
    chart = line_chart("tokens per second", series, x_label="step", from_zero=True)
    return f"{chart}<p>Median: {escape(', '.join(medians))}.</p>"


def _account(rows: Sequence[Mapping[str, Any]]) -> str:
    accounts = [Account(**row["last_account"]) for row in rows if row.get("last_account")]
    if not accounts:
        return '<p class="none">Not recorded.</p>'
    mean = Account(*(statistics.fmean(values) for values in zip(*accounts, strict=True)))
    parts = {name.replace("_", " "): getattr(mean, f"{name}_ms") for name in COMPUTE_PARTS}
    parts |= {name if name == "idle" else f"waited for {name}": ms for name, ms in mean.exposed_ms.items()}
    rest = [
        (f'<i class="part-{index}"></i>{escape(name)}', f"{ms:.1f}", f"{ms / mean.step_ms:.1%}")
        for index, (name, ms) in enumerate(parts.items())
        if ms > 0
    ]
    return (
        f"<p>Mean of {len(accounts):,} steps of {mean.step_ms:.1f} ms; bound by {escape(mean.bound)}.</p>"
        + share_bar(parts)
        + _table(("part", "ms", "share"), rest)
    )


def _timelines(report: RunReport) -> str:
    predicted = report.planned.plan.predicted
    step_ms = predicted.step_ms if predicted is not None else 0.0
    end_ms = max(step_ms, *(span.end_ms for span in report.spans), 1e-3)
    measured = (
        f"Measured: {traced_ms(report.spans):.1f} ms in the traced step" if report.spans else "No step was traced"
    )
    if report.measured_ms is not None:
        measured += f", {report.measured_ms:.1f} ms in the median step of the largest shape"
    return (
        timeline_legend([*report.timeline, *report.spans])
        + timeline_chart(f"Predicted: {step_ms:.1f} ms", report.timeline, end_ms)
        + timeline_chart(measured, report.spans, end_ms)
    )


def _memory(tiers: Sequence[TierLike]) -> str:
    parts = []
    for tier in tiers:
        whole = max(tier.planned_bytes, tier.measured_bytes or 0) or 1
        values = [("planned", "second", tier.planned_bytes), ("measured", "main", tier.measured_bytes)]
        bars = "".join(
            f'<div class="bar"><span>{label}</span><div><b class="b-{style}" '
            f'style="width:{(size or 0) / whole:.2%}"></b></div>'
            f"<span>{'not counted' if size is None else format_bytes(size)}</span></div>"
            for label, style, size in values
        )
        limit = f": the plan may fill {format_bytes(tier.budget_bytes)}"
        parts.append(f"<h3>{escape(tier.name)}{limit}</h3>{bars}")
    return "".join(parts)


def _plan(planned: Planned) -> str:
    problem, plan = planned.problem, planned.plan
    rows = [_plan_row("embed", problem.embed, plan.embed)]
    for first, last, decisions in find_runs(plan.blocks):
        name = f"block {first}" if first == last else f"blocks {first}-{last}"
        rows.append(_plan_row(name, problem.blocks[first], decisions))
    rows.append(_plan_row("head", problem.head, plan.head))
    source = escape(str(plan.solver.get("source", "given")))
    return f"<p>{_chunks(plan.num_microbatches)} a step, {plan.prefetch_depth} weight slots; {source}.</p>" + _table(
        COLUMNS, rows
    )


def _chunks(count: int) -> str:
    return "1 chunk" if count == 1 else f"{count} chunks"


def _plan_row(name: str, cost: UnitCost, unit: UnitPlan) -> tuple[str, ...]:
    kept = cost.points[unit.residual_point].residual_bytes
    keeps = f"{format_bytes(kept)} a chunk" if unit.residual_point else "recompute"
    texts = (name, unit.weights, unit.states, unit.update, unit.grads, keeps, unit.residuals, unit.boundary)
    return tuple(map(escape, texts))


def _evaluation(scores: Mapping[str, Score]) -> str:
    if not scores:
        return '<p class="none">Not measured.</p>'
    rows = [(escape(f"{name} training"), *_counts(score)) for name, score in scores.items()]
    last = list(scores.values())[-1]
    if len(last.by_type) > 1:
        rows += [(escape(kind), *_counts(counts)) for kind, counts in last.by_type.items()]
    table = _table(("", "exact match", "correct", "wrong", "no answer"), rows)
    return table + "".join(_samples(verdict, last.samples) for verdict in SHOWN)


def _counts(score: Any) -> tuple[str, ...]:
    return (f"{score.exact_match:.1%}", f"{score.correct:,}", f"{score.wrong:,}", f"{score.no_answer:,}")


def _samples(verdict: str, samples: Iterable[Sample]) -> str:
    chosen = [sample for sample in samples if sample.verdict == verdict]
    if not chosen:
        return ""
    shown = chosen[: SHOWN[verdict]]
    title = f"{verdict.replace('_', ' ').capitalize()}: {len(shown)} of {len(chosen):,}"
    return f"<h3>{title}</h3>" + "".join(_sample(sample) for sample in shown)


def _sample(sample: Sample) -> str:
    read = "no answer found" if sample.extracted is None else f"read as {_cut(sample.extracted, 200)}"
    verdict = f"expected {_cut(sample.expected, 200)}, {read}"
    return (
        f'<details class="v-{escape(sample.verdict)}"><summary dir="auto">{escape(_cut(sample.query, 160))}</summary>'
        f'<pre dir="auto">{escape(_cut(sample.query))}</pre><pre dir="auto">{escape(_cut(sample.text))}</pre>'
        f"<p>{escape(verdict)}</p></details>"
    )


def _cut(text: str, limit: int = MAX_TEXT) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text):,} characters)"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls by itself where it is too wide. Cells are HTML."""
    return f'<div class="wide"><table>{"".join(_table_lines(head, rows))}</table></div>'


def _table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"


def format_bytes(size: int) -> str:
    """Return a size as GiB, or MiB below one GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
