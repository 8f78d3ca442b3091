"""Charts as HTML that needs nothing else: shapes are SVG stretched to the page's width, texts are HTML beside them.

A stretched SVG would distort texts, and a scaled one would make them too small to read on a telephone. Colours are
classes, so that the page's style chooses them for light and dark.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from lazytrain.account import AnySpan
from lazytrain.recipes.pictures import COLORS, QUEUES, color_key

Points = Sequence[tuple[float, float]]
MAX_POINTS = 600
WIDTH, HEIGHT = 1000, 300
NUM_TICKS = 5
# Values nearer to each other than this share of them, or to 0 than TINY, are one to a reader.
FLAT, TINY = 1e-9, 1e-200
# A bar or a gap narrower than this share of a timeline can't be seen.
THINNEST = 5e-4
LEAST_WIDTH = 2e-3
LOG_FROM = 20


class Series(NamedTuple):
    """A line of a chart: its name, its class and its points."""

    name: str
    style: str
    points: Points


class Bar(NamedTuple):
    """A stretch of a timeline, in ms."""

    start_ms: float
    end_ms: float
    style: str
    title: str


def line_chart(
    label: str, series: Sequence[Series], *, x_label: str, from_zero: bool = False, by_ratio: bool = False
) -> str:
    """Return a chart of lines; points that are not finite are left out.

    Args:
        label: what a screen reader says, and the y-axis measures.
        from_zero: begin the y-axis at 0.
        by_ratio: a logarithmic y-axis, if all values are above 0 and differ by a factor that asks for one.
    """
    thinned = [s._replace(points=thin([p for p in s.points if math.isfinite(p[1])])) for s in series]
    everything = [point for s in thinned for point in s.points]
    if not everything:
        return '<p class="none">No values.</p>'
    x_ticks, (x0, x1) = ticks(*_extent([x for x, _ in everything]), whole=True)
    y_low, y_high = _extent([y for _, y in everything])
    is_log = by_ratio and y_low > TINY and y_high / y_low > LOG_FROM
    scale = math.log10 if is_log else float
    y_ticks, ends = log_ticks(y_low, y_high) if is_log else ticks(0.0 if from_zero else y_low, y_high)
    y0, y1 = map(scale, ends)

    def down(y: float) -> float:
        return 1 - (scale(y) - y0) / (y1 - y0)

    def place(point: tuple[float, float]) -> str:
        return f"{(point[0] - x0) / (x1 - x0) * WIDTH:.1f},{down(point[1]) * HEIGHT:.1f}"

    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{down(y) * HEIGHT:.1f}" y2="{down(y) * HEIGHT:.1f}"/>'
        for y in y_ticks
    )
    lines = "".join(
        f'<polyline class="line s-{s.style}" points="{" ".join(map(place, s.points))}"/>' for s in thinned if s.points
    )
    y_labels = "".join(f'<span style="top:{down(t):.2%}">{short(t)}</span>' for t in y_ticks)
    x_labels = "".join(f'<span style="left:{(t - x0) / (x1 - x0):.2%}">{short(t)}</span>' for t in x_ticks)
    legend = _legend([(s.name, f"s-{s.style}") for s in thinned]) if len(series) > 1 else ""
    return (
        f'<figure class="chart">{legend}<div class="y">{y_labels}</div>'
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">'
        f"<title>{escape(label)}</title>{grid}{lines}</svg>"
        f'<div class="x">{x_labels}</div><figcaption>{escape(x_label)}</figcaption></figure>'
    )


def timeline_chart(title: str, spans: Iterable[AnySpan], end_ms: float) -> str:
    """Return one row of bars a queue, from 0 to `end_ms`."""
    kept = [span for span in spans if span.start_ms < end_ms and span.end_ms > 0]
    rows = []
    for queue in [queue for queue in QUEUES if any(span.queue == queue for span in kept)]:
        bars = join_bars([span for span in kept if span.queue == queue], end_ms)
        shapes = "".join(
            f'<rect class="f-{bar.style}" x="{bar.start_ms / end_ms * WIDTH:.2f}" '
            f'width="{max((bar.end_ms - bar.start_ms) / end_ms, LEAST_WIDTH) * WIDTH:.2f}" y="0" height="20">'
            f"<title>{escape(bar.title)}</title></rect>"
            for bar in bars
        )
        rows.append(
            f'<div class="queue"><span>{escape(queue.replace("_", " "))}</span>'
            f'<svg viewBox="0 0 {WIDTH} 20" preserveAspectRatio="none">{shapes}</svg></div>'
        )
    if not rows:
        return f'<h3>{escape(title)}</h3><p class="none">Not recorded.</p>'
    marks, _ = ticks(0.0, end_ms)
    labels = "".join(f'<span style="left:{t / end_ms * 100:.2f}%">{short(t)}</span>' for t in marks if t <= end_ms)
    axis = f'<div class="queue"><span></span><div class="x">{labels}</div></div>'
    return f'<h3>{escape(title)}</h3><div class="timeline">{"".join(rows)}{axis}</div>'


def timeline_legend(spans: Iterable[AnySpan]) -> str:
    """Return what the colours of timelines mean."""
    return _legend([(name, f"f-{name}") for name in sorted({color_key(s.name) for s in spans} & set(COLORS))])


def share_bar(parts: Mapping[str, float]) -> str:
    """Return one bar divided as the parts are; the classes are part-0, part-1 ... in their order."""
    total, left, shapes = sum(parts.values()) or 1.0, 0.0, []
    for index, (name, value) in enumerate(parts.items()):
        width = value / total * WIDTH
        shapes.append(
            f'<rect class="part-{index}" x="{left:.2f}" width="{width:.2f}" y="0" height="20">'
            f"<title>{escape(name)}: {value / total:.1%}</title></rect>"
        )
        left += width
    return f'<svg class="shares" viewBox="0 0 {WIDTH} 20" preserveAspectRatio="none">{"".join(shapes)}</svg>'


def join_bars(spans: Sequence[AnySpan], end_ms: float) -> list[Bar]:
    """Return bars of one queue; neighbours of one kind, with no gap that one could see, become one."""
    bars: list[Bar] = []
    for span in sorted(spans, key=lambda span: span.start_ms):
        start, end = max(0.0, span.start_ms), min(span.end_ms, end_ms)
        key = color_key(span.name)
        style = key if key in COLORS else "other"
        last = bars[-1] if bars else None
        if last is not None and last.style == style and start - last.end_ms < THINNEST * end_ms:
            title = f"{last.title.split(' ...')[0]} ... {span.name} {span.unit}"
            bars[-1] = Bar(last.start_ms, max(last.end_ms, end), style, title)
        else:
            bars.append(Bar(start, end, style, f"{span.name} {span.unit}: {start:.2f} to {end:.2f} ms"))
    return bars


def thin(points: Points, count: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `count` points: the means of equal stretches of them."""
    if len(points) <= count:
        return list(points)
    made = []
    for index in range(count):
        piece = points[index * len(points) // count : (index + 1) * len(points) // count]
        made.append((sum(x for x, _ in piece) / len(piece), sum(y for _, y in piece) / len(piece)))
    return made


def smooth(points: Points, span: int) -> list[tuple[float, float]]:
    """Return the mean of up to `span` points on either side of each point, fewer near the ends."""
    sums = [0.0, *accumulate(y for _, y in points)]
    made = []
    for index, (x, _) in enumerate(points):
        reach = min(span, index, len(points) - 1 - index)
        made.append((x, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return made


def ticks(low: float, high: float, *, whole: bool = False) -> tuple[list[float], tuple[float, float]]:
    """Return round values that cover [low, high], and the first and last of the axis.

    Args:
        whole: whole numbers only, and the axis ends where the values do.
    """
    size = max(abs(low), abs(high))
    if high - low <= max(TINY, FLAT * size):
        half = size / 2 if size > TINY else 0.5
        low, high = low - half, high + half
    raw = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    if whole:
        return [v for v in values if low <= v <= high], (low, high)
    return values, (values[0], values[-1])


def log_ticks(low: float, high: float) -> tuple[list[float], tuple[float, float]]:
    """Return values of 1, 2 or 5 times a power of ten within [low, high], and the axis' ends.

    Where that is too many, powers of ten alone, or every second or third of them.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, -(-(last - first) // (2 * NUM_TICKS)))
    powers = [10.0**i for i in range(first, last + 1, every)]
    factors = (1, 2, 5) if last - first <= NUM_TICKS - 2 else (1,)
    return [v for power in powers for m in factors if low <= (v := m * power) <= high], (low, high)


def short(value: float) -> str:
    """Return a number in a few characters: 1.2k, 35, 0.05."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _extent(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = (f'<span><i class="{style}"></i>{escape(name)}</span>' for name, style in entries)
    return f'<div class="legend">{"".join(items)}</div>'
