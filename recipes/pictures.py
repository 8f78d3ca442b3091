"""One picture of a run: the loss, and the timeline of a step, predicted above measured."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazytrain.account import AnySpan

QUEUES = ("compute", "h2d", "d2h", "cpu", "nvme_read", "nvme_write")
COLORS = {
    "forward": "#4477aa",
    "backward": "#225588",
    "head": "#66ccee",
    "embed": "#99ddff",
    "update": "#ee6677",
    "load": "#228833",
    "fetch": "#88bb55",
    "store": "#ccbb44",
    "offload": "#aa8833",
    "spill": "#aa3377",
}
OTHER_COLOR = "#bbbbbb"


def draw_run(
    path: Path,
    losses: Sequence[tuple[int, float]],
    predicted: Sequence[AnySpan],
    measured: Sequence[AnySpan],
    *,
    predicted_ms: float,
    measured_ms: float,
) -> None:
    """Write a PNG: loss by step, and both timelines on one scale of time.

    Args:
        losses: (step, loss).
        predicted: the simulator's steady step. measured: the spans of one traced step.
        predicted_ms, measured_ms: the step times that the titles state.
    """
    figure, axes = pyplot.subplots(3, 1, figsize=(11, 9), height_ratios=(2, 1.2, 1.2), layout="constrained")
    axes[0].plot([s for s, _ in losses], [x for _, x in losses], linewidth=1, color=COLORS["forward"])
    axes[0].set(xlabel="step", ylabel="loss", title="Training loss")
    axes[0].set_yscale("log")
    axes[0].grid(alpha=0.3)
    _draw_both(figure, axes[1:], predicted, measured, predicted_ms=predicted_ms, measured_ms=measured_ms)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_step(
    path: Path,
    predicted: Sequence[AnySpan],
    measured: Sequence[AnySpan],
    *,
    predicted_ms: float,
    measured_ms: float,
) -> None:
    """Write a PNG of one step's timelines (see `draw_run`)."""
    figure, axes = pyplot.subplots(2, 1, figsize=(14, 6), layout="constrained")
    _draw_both(figure, axes, predicted, measured, predicted_ms=predicted_ms, measured_ms=measured_ms)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_both(
    figure: Figure,
    axes: Sequence[Axes],
    predicted: Sequence[AnySpan],
    measured: Sequence[AnySpan],
    *,
    predicted_ms: float,
    measured_ms: float,
) -> None:
    begin_ms, end_ms = 0.0, max(predicted_ms, traced_ms(measured) or measured_ms)
    draw_timeline(axes[0], predicted, f"One step, predicted: {predicted_ms:.1f} ms", begin_ms, end_ms)
    title = f"One step, measured: {traced_ms(measured):.1f} ms (of all such steps: {measured_ms:.1f} ms)"
    if not measured:
        title = f"No step was traced (measured: {measured_ms:.1f} ms)"
    draw_timeline(axes[1], measured, title, begin_ms, end_ms)
    names = sorted({color_key(bar.name) for bar in (*predicted, *measured)} & set(COLORS))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[name]) for name in names]
    if names:
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))


def traced_ms(spans: Sequence[AnySpan]) -> float:
    """Return how long the step took that was traced, until its last compute ended; others may have been longer."""
    return max((span.end_ms for span in spans if span.queue == QUEUES[0]), default=0.0)


def draw_timeline(axes: Axes, bars: Sequence[AnySpan], title: str, begin_ms: float, end_ms: float) -> None:
    """Draw bars by queue, one row each, from `begin_ms` to `end_ms`."""
    rows = [queue for queue in QUEUES if any(bar.queue == queue for bar in bars)]
    for row, queue in enumerate(rows):
        mine = [bar for bar in bars if bar.queue == queue]
        spans = [(bar.start_ms, max(min(bar.end_ms, end_ms) - bar.start_ms, end_ms * 1e-4)) for bar in mine]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[COLORS.get(color_key(b.name), OTHER_COLOR) for b in mine])
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set(xlim=(begin_ms, end_ms), xlabel="ms", title=title)


def color_key(name: str) -> str:
    """Return which colour a piece of work has: by the first known word of its name."""
    for word in name.lower().replace("_", " ").split():
        if word in COLORS:
            return word
    return name
